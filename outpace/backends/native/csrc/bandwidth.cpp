#include "bandwidth.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <vector>

#include "memory.h"
#include "range.h"
#include "thread_pool.h"

namespace outpace {

double read_bandwidth(int num_threads, size_t num_bytes) {
    constexpr int kPasses = 9;
    constexpr size_t kLine = 64;
    const auto pool = ThreadPool::shared(num_threads);
    const int64_t num_lines = int64_t(num_bytes / kLine);
    const Memory memory(size_t(num_lines) * kLine);
    std::atomic<uint64_t> total{0};  // so that the compiler cannot remove a read
    std::vector<double> seconds;
    for (int pass = -1; pass < kPasses; pass++) {  // the first pass touches the pages
        const auto begin = std::chrono::steady_clock::now();
        pool->run([&](int thread) {
            const Range mine = split(num_lines, 1, num_threads, thread);
            uint8_t* at = memory.as<uint8_t>() + size_t(mine.begin) * kLine;
            if (pass < 0) {
                std::memset(at, 1, size_t(mine.end - mine.begin) * kLine);
                return;
            }
            uint64_t sums[8] = {};
            for (int64_t line = mine.begin; line < mine.end; line++, at += kLine) {
                uint64_t words[8];
                std::memcpy(words, at, kLine);
                for (int i = 0; i < 8; i++) sums[i] += words[i];
            }
            for (uint64_t sum : sums) total.fetch_add(sum);
        });
        if (pass >= 0) seconds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
    }
    return double(num_lines) * kLine / *std::min_element(seconds.begin(), seconds.end());
}

}  // namespace outpace
