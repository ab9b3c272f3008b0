// outpace/decoding/sampling.py in C++: logits to probabilities, and the token that noise picks from them.
//
// Every decision is the same as there, because every number it compares is: see numerics.h. Where that module looks at all
// tokens, this one looks at those that can matter, which a bound a little below the exact one finds; the exact comparison
// then decides. A NaN among the logits is outside of this.
#pragma once

#include <cstdint>

#include "memory.h"
#include "row_ops.h"

namespace outpace {

struct Shaping {
    float sharpness;  // what logits are multiplied with to be powers of two
    int32_t top_k;    // 0: all tokens
    double top_p;     // 1: all tokens
    double min_p;     // 0: all tokens
};

// Token i has probability values[i] / divisor; `peak` is the largest.
struct Distribution {
    const float* values;
    float divisor, peak;

    float operator[](int64_t i) const { return values[i] / divisor; }
};

// Works on one row at a time, in its own memory.
class Sampler {
  public:
    explicit Sampler(int64_t vocab_size);

    int64_t greedy(const float* logits) const { return ops_.argmax(logits, n_); }
    // Valid until the next call.
    Distribution shape(const float* logits, const Shaping& shaping);
    // The same, written out.
    void probs(const float* logits, const Shaping& shaping, float* out);
    int64_t choose(const Distribution& probs, uint64_t seed, int64_t position);

  private:
    void keep_top_k(int64_t k);
    int64_t keep_top_p(float sum, double top_p);
    void keep_only(int64_t count, const float* values);
    int64_t choose_from_tail(const Distribution& probs, float cut, uint64_t key, int64_t otherwise) const;

    const RowOps& ops_;
    int64_t n_;
    Memory values_, sums_, places_, kept_, doubles_;
};

// The token at which the running sum of the weights exceeds share `u` of their total; never one of weight zero.
int64_t draw_weighted(const float* weights, int64_t n, double u);

}  // namespace outpace
