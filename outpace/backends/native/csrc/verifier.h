// outpace/decoding/acceptance.py in C++, over all requests of a step: which draft tokens stand, and what the target says next.
//
// The rules are those of that module and of verification.py, number by number. Requests and rows are shared out among the
// threads of the pool; nobody's verdict depends on who else is judged.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "memory.h"
#include "relay.h"
#include "sampling.h"
#include "thread_pool.h"

namespace outpace {

enum class Rule : int32_t { kMatchGreedy, kMatch, kReject, kBlock, kCount };

// One request: a draft, and the target's logits after each of its tokens and before the first.
struct Case {
    Rule rule;
    int32_t num_drafted;
    const float* const* logits;       // [num_drafted + 1]
    const int32_t* drafted;           // [num_drafted]
    const float* const* draft_probs;  // [num_drafted]; only for rejection and block verification
    Shaping shaping;
    uint64_t seed;
    int64_t position;  // of the first token to be said
};

struct Verdict {
    int32_t num_accepted;
    int32_t token;  // the target's own, after the accepted ones
};

class Verifier {
  public:
    Verifier(int64_t vocab_size, int num_threads);
    ~Verifier();
    Verifier(const Verifier&) = delete;
    Verifier& operator=(const Verifier&) = delete;

    int64_t vocab_size() const { return n_; }
    // verdicts[i] for cases[i], which must have been checked.
    void verify(const std::vector<Case>& cases, Verdict* verdicts);

    void operator()(int thread, uint64_t phase);  // what the pool calls

  private:
    // Rows of a draft that is matched are looked at one by one; those of other rules depend on each other.
    struct Unit {
        int32_t index, row;
    };
    struct Scratch {
        explicit Scratch(int64_t n);
        Sampler sampler;
        Memory target, left_over, residual, sums;
    };

    void work_on(const Unit& unit, Scratch& scratch);
    void match_row(const Unit& unit, Scratch& scratch);
    Verdict reject(const Case& one, Scratch& scratch) const;
    Verdict verify_block(const Case& one, Scratch& scratch) const;

    int64_t n_;
    const RowOps& ops_;
    std::shared_ptr<ThreadPool> pool_;
    std::vector<std::unique_ptr<Scratch>> scratch_;  // per thread

    // The step being judged.
    Relay relay_;  // one phase: all units at once
    const std::vector<Case>* cases_ = nullptr;
    Verdict* verdicts_ = nullptr;
    std::vector<Unit> units_;
    std::vector<std::atomic<int64_t>> firsts_;  // per case, of rows that refuse: (row, own token), the earliest so far
};

}  // namespace outpace
