// Operations on whole rows of logits or probabilities, for sampling. All instruction sets give the same bits.
#pragma once

#include <cstdint>

namespace outpace {

struct RowOps {
    // Index of the largest, the first of equals; of the first NaN if there is one (see peak.h).
    int64_t (*argmax)(const float* x, int64_t n);
    // out = 2^((x - largest) * sharpness), computed as in numerics.py.
    void (*powers)(const float* x, int64_t n, float largest, float sharpness, float* out);
    // The same two for a row of which only the tokens with a set bit in `allowed` count; the others are minus infinity.
    // The lowest bit is the first token.
    int64_t (*argmax_allowed)(const float* x, const uint32_t* allowed, int64_t n);
    void (*powers_allowed)(const float* x, const uint32_t* allowed, int64_t n, float largest, float sharpness, float* out);
    // The sum in the order of numerics.h; `sums` has room for half of the row.
    float (*total)(const float* x, int64_t n, float* sums);
    // x /= divisor.
    void (*divide)(float* x, int64_t n, float divisor);
    // The indices of all values >= `bound`, in order; returns how many.
    int64_t (*collect)(const float* x, int64_t n, float bound, int32_t* places);
    // out = max(weight * target - draft, 0). Returns whether any value is not zero.
    bool (*residual)(float weight, const float* target, const float* draft, int64_t n, float* out);
};

const RowOps& row_ops();            // for this processor
const RowOps& row_ops_reference();  // plain loops, for tests

const RowOps& row_ops_portable();
const RowOps& row_ops_avx2();  // only if has_avx2_files()

}  // namespace outpace
