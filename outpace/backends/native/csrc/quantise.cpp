// Activations to int8 in blocks of 32, in plain loops: for machines without a specific version, and for tests.

#include "kernels_inline.h"

namespace outpace {
namespace {

void quantise_block(const float* x, ActBlock& out) {
    uint32_t top = 0;
    for (int k = 0; k < kBlock; ++k) {
        uint32_t bits;
        memcpy(&bits, x + k, 4);
        bits &= 0x7fffffffu;
        top = bits > top ? bits : top;
    }
    const BlockScale scale = block_scale(top);
    for (int k = 0; k < kBlock; ++k) {
        const float shifted = x[k] * scale.inverse + kRoundingAid;
        int32_t bits;
        memcpy(&bits, &shifted, 4);
        out.q[k] = int8_t(scale.is_usable ? bits - kRoundingBits : 0);
    }
    int half[2] = {0, 0};
    for (int k = 0; k < 16; ++k) {
        half[0] += out.q[k];
        half[1] += out.q[k + 16];
    }
    finish_block(scale, half[0], half[1], out);
}

}  // namespace

size_t activation_bytes(int64_t n, int64_t cols) { return size_t(n) * size_t(cols / kBlock) * sizeof(ActBlock); }

void quantise_portable(const Activations& x, int64_t token_begin, int64_t token_end, int64_t block_begin, int64_t block_end) {
    quantise_blocks(quantise_block, x, token_begin, token_end, block_begin, block_end);
}

}  // namespace outpace
