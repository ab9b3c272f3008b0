// Waits for another thread: spins before it sleeps.
#pragma once

#include <chrono>
#include <thread>

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

namespace outpace {

// A pause is some 40 to 140 cycles on x86, so this many take some tens of microseconds.
constexpr int kSpins = 2000;
constexpr int kYields = 32;

inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Call when a thread has nothing to do for the i-th time in a row: spins first, then yields, then sleeps.
inline void relax(int i) {
    if (i < kSpins) {
        pause();
    } else if (i < kSpins + kYields) {
        std::this_thread::yield();  // the other thread may need this core
    } else {
        std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
}

}  // namespace outpace
