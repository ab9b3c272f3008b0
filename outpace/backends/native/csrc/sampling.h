// outpace/decoding/sampling.py in C++: turns logits into probabilities and picks a token with noise.
//
// Every decision is the same, because every compared number has the same bits: see numerics.h. Where that module
// processes all tokens, this one processes only candidates above a bound slightly below the exact one; the exact
// comparison then decides. Logits that contain a NaN are the only exception.
#pragma once

#include <cstdint>

#include "memory.h"
#include "row_ops.h"

namespace outpace {

// The target's output at one position. Tokens without a bit in `allowed` (the lowest bit is the first token) have
// probability zero. If `only` is a token, no other is allowed and the logits are not read.
struct LogitRow {
    const float* logits;
    const uint32_t* allowed = nullptr;  // null: all tokens are allowed
    int64_t only = -1;
};

struct Shaping {
    float sharpness;  // factor that turns logits into exponents of two
    int32_t top_k;    // 0: all tokens
    double top_p;     // 1: all tokens
    double min_p;     // 0: all tokens

    bool filters(int64_t n) const { return (top_k > 0 && top_k < n) || top_p < 1.0 || min_p > 0.0; }
};

// Token i has probability values[i] / divisor; `peak` is the largest.
struct Distribution {
    const float* values;
    float divisor, peak;

    float operator[](int64_t i) const { return values[i] / divisor; }
};

// A token, the likeliest token of its row, and whether the same token would be picked under every mask that allows both.
struct Picked {
    int32_t token, likeliest, is_stable;
};

// Processes one row at a time, in its own memory.
class Sampler {
  public:
    explicit Sampler(int64_t vocab_size);

    int64_t greedy(const LogitRow& row) const;
    // Valid until the next call. `row.only` is not looked at.
    Distribution shape(const LogitRow& row, const Shaping& shaping);
    // The same, written to `out`.
    void probs(const LogitRow& row, const Shaping& shaping, float* out);
    // With `ids`, token i has the noise of token ids[i]; the result is i. `is_stable`: see Picked, if nothing is filtered.
    int64_t choose(const Distribution& probs, uint64_t seed, int64_t position, const int32_t* ids = nullptr, bool* is_stable = nullptr);
    // The token that (seed, position) picks from a row of logits without a mask.
    Picked pick(const float* logits, const Shaping& shaping, uint64_t seed, int64_t position);

  private:
    void keep_top_k(int64_t k);
    int64_t keep_top_p(float sum, double top_p);
    void keep_only(int64_t count, const float* values);
    int64_t choose_from_tail(const Distribution& probs, float cut, uint64_t key, int64_t otherwise, const int32_t* ids) const;

    const RowOps& ops_;
    int64_t n_, likeliest_ = 0;  // of the latest row
    Memory values_, sums_, places_, kept_, doubles_;
};

// The first token at which the running sum of weights exceeds u * total; never a token of weight zero.
int64_t draw_weighted(const float* weights, int64_t n, double u);

}  // namespace outpace
