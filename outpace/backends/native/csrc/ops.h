// The small operations around the matrix products: one token, or one head of one token, at a time.
//
// Each result is a fixed sequence of operations on its own inputs (sums use eight lanes and end in one tree), so it
// cannot depend on which tokens share the step.
#pragma once

#include <cstdint>

namespace outpace {

// Which elements of a head a rotation pairs: neighbours (Llama's files), or the two halves (Qwen's).
enum class RopeStyle : int32_t { kInterleaved = 0, kHalfSplit = 1 };

struct Ops {
    // out = x / sqrt(mean(x^2) + epsilon) * weight; may run in place. n is a multiple of 8.
    void (*rms_norm)(const float* x, const float* weight, float epsilon, int64_t n, float* out);
    // gate = silu(gate) * up. Any n.
    void (*swiglu)(float* gate, const float* up, int64_t n);
    // x += y. Any n.
    void (*add)(float* x, const float* y, int64_t n);
    // Rotate the first num_rotated elements of a head; cosines and sines hold num_rotated / 2 each.
    void (*rope)(float* head, const float* cosines, const float* sines, int64_t num_rotated, RopeStyle style);
};

const Ops& ops();            // for this processor
const Ops& ops_reference();  // plain loops, for tests

const Ops& ops_portable();
const Ops& ops_avx2();  // only if has_avx2_files()

// Whether this build contains files compiled for AVX2 (an x86 build).
bool has_avx2_files();
// Whether the matrix products use AVX2 or better; all other operations then do too.
bool uses_avx2();
bool uses_avx512();

// Cosines and sines of one position, scaled; computed in double, once per token and forward pass.
void rope_angles(int64_t position, const double* frequencies, int64_t n, float scale, float* cosines, float* sines);

}  // namespace outpace
