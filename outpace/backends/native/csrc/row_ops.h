// What sampling does to whole rows of logits or probabilities. Results are the same bits from every instruction set.
#pragma once

#include <cstdint>

namespace outpace {

struct RowOps {
    // The first of the largest; of NaNs, where there are any (see peak.h).
    int64_t (*argmax)(const float* x, int64_t n);
    // out = 2^((x - largest) * sharpness), as numerics.py has it.
    void (*powers)(const float* x, int64_t n, float largest, float sharpness, float* out);
    // The sum in the order of numerics.h; `sums` has room for half of the row.
    float (*total)(const float* x, int64_t n, float* sums);
    // x /= divisor.
    void (*divide)(float* x, int64_t n, float divisor);
    // The places of all that is at least `bound`, in order; returns how many.
    int64_t (*collect)(const float* x, int64_t n, float bound, int32_t* places);
    // out = max(weight * target - draft, 0). Returns whether anything is left.
    bool (*residual)(float weight, const float* target, const float* draft, int64_t n, float* out);
};

const RowOps& row_ops();            // for this processor
const RowOps& row_ops_reference();  // plain loops: the oracle

const RowOps& row_ops_portable();
const RowOps& row_ops_avx2();  // only where has_avx2_files()

}  // namespace outpace
