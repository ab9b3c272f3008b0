#include "relay.h"

#include <utility>

namespace outpace {
namespace {

constexpr uint64_t packed(uint64_t number, Range left) { return number << 32 | uint64_t(left.begin) << 16 | uint64_t(left.end); }
constexpr Range left_in(uint64_t word) { return {int64_t(word >> 16 & 0xffff), int64_t(word & 0xffff)}; }

}  // namespace

// Numbers start with those of the second step, so that the initial word of a share belongs to an earlier phase.
Relay::Relay(int num_threads, int64_t num_phases)
    : num_threads_(num_threads), num_phases_(uint64_t(num_phases)), units_(size_t(num_phases)), targets_(size_t(num_phases)),
      shares_(size_t(num_threads)), now_(uint64_t(num_phases)) {}

uint64_t Relay::begin(const std::vector<int64_t>& units) {
    uint64_t target = done_.load(std::memory_order_relaxed);
    for (size_t phase = 0; phase < units_.size(); phase++) {
        units_[phase].store(uint32_t(units[phase]), std::memory_order_relaxed);
        if (units[phase]) target += uint64_t(units[phase] + num_threads_);
        targets_[phase] = target;
    }
    return now();
}

Range Relay::take(uint64_t number, int thread) {
    for (int i = 0; i < num_threads_; i++) {
        const Range found = take_from(number, (thread + i) % num_threads_, thread);
        if (found.begin < found.end) return found;
    }
    return {0, 0};
}

Range Relay::take_from(uint64_t number, int owner, int thread) {
    std::atomic<uint64_t>& share = shares_[size_t(owner)].word;
    const uint32_t own_number = uint32_t(number);
    for (uint64_t word = share.load(std::memory_order_acquire);;) {
        const int32_t ahead = int32_t(uint32_t(word >> 32) - own_number);
        const bool opens = ahead < 0;
        const Range left = opens ? split(units_[number % num_phases_].load(std::memory_order_relaxed), 1, num_threads_, owner) : left_in(word);
        const int64_t size = left.end - left.begin, taken = (size + 1) / 2;
        if (ahead > 0 || (size == 0 && !opens)) return {0, 0};
        const Range kept = owner == thread ? Range{left.begin + taken, left.end} : Range{left.begin, left.end - taken};
        if (!share.compare_exchange_weak(word, packed(own_number, kept), std::memory_order_acq_rel, std::memory_order_acquire)) continue;
        shares_[size_t(thread)].brought += taken + opens;
        return owner == thread ? Range{left.begin, kept.begin} : Range{kept.end, left.end};
    }
}

bool Relay::finish(uint64_t number, int thread) {
    const uint64_t brought = uint64_t(std::exchange(shares_[size_t(thread)].brought, 0));
    if (brought == 0) return false;
    const uint64_t target = targets_[number % num_phases_];  // read before fetch_add: the phase cannot be over yet
    return done_.fetch_add(brought, std::memory_order_acq_rel) + brought == target;
}

}  // namespace outpace
