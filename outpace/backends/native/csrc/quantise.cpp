// Activations to int8 in blocks of 32: one scale per block and token, and the sums that offsets and minima need.

#include "kernels_inline.h"

namespace outpace {
namespace {

// 1.5 * 2^23: adding it to a small float leaves the float, rounded to the nearest even integer, in the low bits.
constexpr float kRoundingAid = 12582912.0f;

// Codes, scale and sums of 32 values. A block with an infinity or a NaN gets a NaN for a scale: what is wrong stays
// visible in every output it touches.
void quantise_block(const float* x, ActBlock& out) {
    uint32_t top = 0;  // the largest magnitude, as bits: these order like the magnitudes, infinities and NaNs on top
    for (int k = 0; k < kBlock; ++k) {
        uint32_t bits;
        memcpy(&bits, x + k, 4);
        bits &= 0x7fffffffu;
        top = bits > top ? bits : top;
    }
    const bool finite = top < 0x7f800000u;
    const float magnitude = float_from_bits(top);
    float d = magnitude / 127.0f, inverse = 127.0f / magnitude;
    if (!finite || magnitude < 1e-36f) {  // below that the inverse overflows; nothing a float model computes is so small
        d = finite ? 0.0f : float_from_bits(0x7fc00000u);
        memset(out.q, 0, sizeof out.q);
    } else {
        for (int k = 0; k < kBlock; ++k) {
            const float shifted = x[k] * inverse + kRoundingAid;
            int32_t bits;
            memcpy(&bits, &shifted, 4);
            out.q[k] = int8_t(bits - 0x4b400000);
        }
    }
    int half[2] = {0, 0};
    for (int k = 0; k < 16; ++k) {
        half[0] += out.q[k];
        half[1] += out.q[k + 16];
    }
    out.half[0] = int16_t(half[0]);
    out.half[1] = int16_t(half[1]);
    out.sum = half[0] + half[1];
    out.d = d;
    out.d_sum = d * float(out.sum);
}

}  // namespace

size_t activation_bytes(int64_t n, int64_t cols) { return size_t(n) * size_t(cols / kBlock) * sizeof(ActBlock); }

void quantise(const float* x, int64_t token_begin, int64_t token_end, Activations& out) {
    for (int64_t token = token_begin; token < token_end; ++token) {
        const ActGroup group = act_group(out, token);
        for (int64_t b = 0; b < out.cols / kBlock; ++b) {
            quantise_block(x + token * out.cols + b * kBlock, group.first[b * group.block_stride]);
        }
    }
}

}  // namespace outpace
