// Large aligned zeroed memory. Pages are allocated on first access.
#pragma once

#include <cstddef>
#include <new>
#include <utility>
#include <vector>

#include <sys/mman.h>

namespace outpace {

class Memory {
  public:
    Memory() = default;
    explicit Memory(size_t num_bytes) : size_(num_bytes) {
        if (num_bytes == 0) return;
        data_ = mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (data_ == MAP_FAILED) {
            data_ = nullptr;
            throw std::bad_alloc();
        }
#if defined(MADV_HUGEPAGE)
        madvise(data_, num_bytes, MADV_HUGEPAGE);  // a hint: with small pages, streaming weights causes TLB misses
#endif
    }
    ~Memory() {
        if (data_) munmap(data_, size_);
    }
    Memory(Memory&& other) noexcept { *this = std::move(other); }
    Memory& operator=(Memory&& other) noexcept {
        std::swap(data_, other.data_);
        std::swap(size_, other.size_);
        return *this;
    }

    template <typename T>
    T* as() const {
        return static_cast<T*>(data_);
    }
    size_t size() const { return size_; }

  private:
    void* data_ = nullptr;
    size_t size_ = 0;
};

// Many adjacent pieces of memory, freed together. Separate pieces would rarely align with huge pages and would get
// small pages.
class Arena {
  public:
    void* take(size_t num_bytes) {
        constexpr size_t kAlignment = 64, kChunkBytes = size_t(256) << 20;
        const size_t size = (num_bytes + kAlignment - 1) / kAlignment * kAlignment;
        if (chunks_.empty() || chunks_.back().size() - used_ < size) {
            chunks_.emplace_back(size > kChunkBytes ? size : kChunkBytes);
            used_ = 0;
        }
        void* const piece = chunks_.back().as<char>() + used_;
        used_ += size;
        return piece;
    }

  private:
    std::vector<Memory> chunks_;
    size_t used_ = 0;  // of the last chunk
};

}  // namespace outpace
