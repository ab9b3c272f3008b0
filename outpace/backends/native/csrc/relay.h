// Work stealing over the phases of a step. Phases run one after the other; threads share the units of each phase.
//
// A phase has units 0..n-1. Every thread has a fixed share of them and takes units from its front (so it can prefetch
// their data before the phase opens). A thread whose share is empty steals from the back of another share. In the
// common case a thread touches no memory of other threads. A thread that is descheduled, or never starts, delays the
// others only while it holds units. The thread that finishes the last units opens the next phase.
//
// Phase numbers continue from step to step. A share stores the number of the phase that it was last opened for, and a
// phase ends only after every share was opened for it. A late thread that still works on an old phase can therefore
// never take units.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "range.h"
#include "spin.h"

namespace outpace {

class Relay {
  public:
    static constexpr int64_t kMostUnits = 0xffff;

    Relay(int num_threads, int64_t num_phases);

    // Start a step; `units` per phase, at most kMostUnits each. Returns the number of its first phase, not yet open.
    uint64_t begin(const std::vector<int64_t>& units);
    void open(uint64_t number) { now_.store(number, std::memory_order_release); }
    uint64_t now() const { return now_.load(std::memory_order_acquire); }

    // Take units of an open phase; empty if all are taken or the phase is over. Units taken before must be done.
    Range take(uint64_t number, int thread);
    // Call when take() returns nothing. True: this thread's units were the last, and it must open the next phase.
    bool finish(uint64_t number, int thread);

    // Wait until another phase is open. Calls meanwhile() repeatedly, as long as it returns true.
    template <typename Meanwhile>
    void wait(uint64_t number, Meanwhile&& meanwhile) const {
        for (int idle = 0; now() == number;) {
            if (!meanwhile()) relax(idle++);
        }
    }

  private:
    struct alignas(64) Share {
        std::atomic<uint64_t> word{0};  // phase number (32 bits), begin and end of the units left (16 each)
        int64_t brought = 0;            // units taken and shares opened by this thread in this phase
    };
    Range take_from(uint64_t number, int owner, int thread);

    const int num_threads_;
    const uint64_t num_phases_;
    std::vector<std::atomic<uint32_t>> units_;  // atomic, because late threads may read them
    std::vector<uint64_t> targets_;             // value of done_ at which each phase is over
    std::vector<Share> shares_;
    alignas(64) std::atomic<uint64_t> done_{0};
    alignas(64) std::atomic<uint64_t> now_;
};

}  // namespace outpace
