// outpace/decoding/acceptance.py in C++, for all requests of a step: the accepted draft tokens, and the next token.
//
// The rules are those of that module and of verification.py, with the same bits. The threads of the pool share requests
// and rows; a verdict does not depend on the other requests.
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

// One request: a draft, and the target's logits before its first token and after each token.
struct Case {
    Rule rule;
    int32_t num_drafted;
    const LogitRow* rows;             // [num_drafted + 1]
    const int32_t* drafted;           // [num_drafted]
    const float* const* draft_probs;  // [num_drafted]; only for rejection and block verification
    Shaping shaping;
    uint64_t seed;
    int64_t position;  // of the first token to emit
    Picked* picks;       // [num_drafted + 1], or null: with a match rule, of each row without a mask up to the verdict's
};

struct Verdict {
    int32_t num_accepted;
    int32_t token;  // the target's own token, after the accepted ones
};

class Verifier {
  public:
    Verifier(int64_t vocab_size, int num_threads);
    ~Verifier();
    Verifier(const Verifier&) = delete;
    Verifier& operator=(const Verifier&) = delete;

    int64_t vocab_size() const { return n_; }
    // Writes verdicts[i] for cases[i]. The caller has checked the cases.
    void verify(const std::vector<Case>& cases, Verdict* verdicts);

    void operator()(int thread, uint64_t phase);  // called by the pool

  private:
    // With a match rule every row is a unit; with other rules the rows depend on each other, so the case is one unit. Where
    // that leaves threads idle, they first compute the distributions of a block's rows, which are units then.
    struct Unit {
        int32_t index, row;
    };
    struct Scratch {
        explicit Scratch(int64_t n);
        Sampler sampler;
        Memory target, left_over, residual, sums;
    };

    void share_units();
    void prepare_rows(const std::vector<Case>& cases);
    void work_on(const Unit& unit, Scratch& scratch);
    static int64_t own_token(const Case& one, int32_t row, Sampler& sampler);
    void match_row(const Unit& unit, Scratch& scratch);
    Verdict reject(const Case& one, Scratch& scratch) const;
    Verdict verify_block(const Case& one, Scratch& scratch) const;
    const float* target_probs(const Case& one, int32_t row, Scratch& scratch) const;

    int64_t n_;
    const RowOps& ops_;
    std::shared_ptr<ThreadPool> pool_;
    std::vector<std::unique_ptr<Scratch>> scratch_;  // per thread

    // The current step.
    Relay relay_;  // one phase with all units
    const std::vector<Case>* cases_ = nullptr;
    Verdict* verdicts_ = nullptr;
    std::vector<Unit> units_;
    Memory prepared_;           // distributions of the rows of the first case
    bool is_preparing_ = false, is_prepared_ = false;
    std::vector<std::atomic<int64_t>> firsts_;  // per case: (row, own token) of the earliest rejecting row so far
};

}  // namespace outpace
