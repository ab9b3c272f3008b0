// A step's phases, one after the other, each shared out among whoever is there.
//
// A phase has units 0..n-1. Every thread has a share of them, always the same part of the whole, from whose front it takes
// (so that it may fetch from memory what it will need before the phase opens); a thread whose share is empty takes
// from the back of another's. The common case touches no memory of another thread's. A thread that was put aside, or
// never came, holds nobody up unless it has units in hand. Whoever brings in the last ones opens the next phase.
//
// Phases are numbered on and on, from step to step. A share carries the number of the phase it was last opened for, and
// a phase is over only when every share has been: so a thread that is late, and still thinks of a phase that is
// over, can never take anything, whatever it reads.
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

    // A new step, with so many units in each phase, at most kMostUnits; the number of its first phase. Nothing is open yet.
    uint64_t begin(const std::vector<int64_t>& units);
    void open(uint64_t number) { now_.store(number, std::memory_order_release); }
    uint64_t now() const { return now_.load(std::memory_order_acquire); }

    // Some units of an open phase, or none: all are taken, or the phase is over. Those taken before are done.
    Range take(uint64_t number, int thread);
    // Nothing was left to take. True: this thread's units were the last ones, and the next phase is to be opened.
    bool finish(uint64_t number, int thread);

    // Until another phase is open. meanwhile() is called again and again while it says that it has something to do.
    template <typename Meanwhile>
    void wait(uint64_t number, Meanwhile&& meanwhile) const {
        for (int idle = 0; now() == number;) {
            if (!meanwhile()) relax(idle++);
        }
    }

  private:
    struct alignas(64) Share {
        std::atomic<uint64_t> word{0};  // number of the phase (32 bits), begin and end of what is left (16 each)
        int64_t brought = 0;            // by this thread in this phase: units, and shares opened
    };
    Range take_from(uint64_t number, int owner, int thread);

    const int num_threads_;
    const uint64_t num_phases_;
    std::vector<std::atomic<uint32_t>> units_;  // late threads look at them, in vain
    std::vector<uint64_t> targets_;             // of done_, at which a phase is over
    std::vector<Share> shares_;
    alignas(64) std::atomic<uint64_t> done_{0};
    alignas(64) std::atomic<uint64_t> now_;
};

}  // namespace outpace
