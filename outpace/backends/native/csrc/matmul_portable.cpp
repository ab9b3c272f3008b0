// The product in plain C++: for machines without a specific kernel, and a model for the other kernels.

#include "kernels_inline.h"

#include <cmath>

namespace outpace {
namespace {

// The codes of a block of 16 rows, one byte each, offset subtracted, in the order of the packed vectors.
template <GgmlType Q>
void load_codes(const uint8_t* planes, int8_t* codes) {
    constexpr Form f = form_of(Q);
    if constexpr (f.bits == 8) {
        memcpy(codes, planes, 8 * kVector);
    } else {
        for (int j = 0; j < 8; ++j) {
            for (int at = 0; at < kVector; ++at) {
                int code = planes[kVector * (j % 4) + at] >> (j / 4 * 4) & 15;
                if constexpr (f.bits == 5) code |= (planes[kUpperAt + at] >> j & 1) << 4;
                if constexpr (f.bits == 6) code |= (planes[kUpperAt + kVector * (j / 4) + at] >> (2 * (j % 4)) & 3) << 4;
                codes[kVector * j + at] = int8_t(code - f.offset);
            }
        }
    }
}

struct BlockScales {
    float scale[kRows], min[kRows];
    int half[2][kRows];  // Super16: the integer scales of the block's halves
};

template <GgmlType Q>
void load_scales(const uint8_t* super, int b, BlockScales& out) {
    constexpr Form f = form_of(Q);
    for (int r = 0; r < kRows; ++r) {
        const int at = b * kRows + r;
        out.scale[r] = half_to_float(load_u16(super + 2 * r));
        if constexpr (has_min(f)) out.min[r] = half_to_float(load_u16(super + kMinAt + 2 * r));
        if constexpr (f.scales == Scales::SuperMin) {
            out.scale[r] *= float(super[kSuperScaleAt + at]);
            out.min[r] *= -float(super[kSuperMinAt + at]);
        }
        if constexpr (f.scales == Scales::Super16) {
            for (int h = 0; h < 2; ++h) out.half[h][r] = int8_t(super[kSuper16ScaleAt + 2 * at + h]);
        }
    }
}

void dot_half(const int8_t* codes, const int8_t* q, int* dot) {
    for (int r = 0; r < kRows; ++r) dot[r] = 0;
    for (int j = 0; j < 4; ++j) {
        for (int r = 0; r < kRows; ++r) {
            for (int c = 0; c < 4; ++c) dot[r] += codes[kVector * j + 4 * r + c] * q[4 * j + c];
        }
    }
}

template <GgmlType Q>
struct QuantKernel {
    const Activations& x;

    void run(const uint8_t* tile, int64_t token, int count, float* out, int64_t out_stride) const {
        constexpr Form f = form_of(Q);
        constexpr int kBlocks = blocks_per_super(f);
        const ActGroup group = act_group(x, token);
        const ActBlock* act = group.first;
        float acc[kTokenGroup][kRows] = {};
        const uint8_t* super = tile;
        for (int64_t block = 0; block < x.cols / kBlock; block += kBlocks, super += super_bytes(f)) {
            for (int b = 0; b < kBlocks; ++b, act += group.block_stride) {
                int8_t codes[8 * kVector];
                BlockScales scales;
                load_codes<Q>(super + header_bytes(f) + b * code_bytes(f), codes);
                load_scales<Q>(super, b, scales);
                for (int t = 0; t < count; ++t) {
                    int dot[2][kRows];
                    dot_half(codes, act[t].q, dot[0]);
                    dot_half(codes + 4 * kVector, act[t].q + 16, dot[1]);
                    for (int r = 0; r < kRows; ++r) {
                        int whole = dot[0][r] + dot[1][r];
                        if constexpr (f.scales == Scales::Super16) {
                            whole = dot[0][r] * scales.half[0][r] + dot[1][r] * scales.half[1][r];
                        }
                        acc[t][r] = std::fma(scales.scale[r] * act[t].d, float(whole), acc[t][r]);
                        if constexpr (has_min(f)) acc[t][r] = std::fma(scales.min[r], act[t].d_sum, acc[t][r]);
                    }
                }
            }
        }
        for (int t = 0; t < count; ++t) memcpy(out + t * out_stride, acc[t], sizeof acc[t]);
    }
};

template <GgmlType Q>
struct FloatKernel {
    const Activations& x;

    void run(const uint8_t* tile, int64_t token, int count, float* out, int64_t out_stride) const {
        constexpr int kBytes = form_of(Q).bits / 8;
        float chain[kTokenGroup][4][kRows] = {};
        for (int64_t k = 0; k < x.cols; ++k) {
            float values[kRows];
            for (int r = 0; r < kRows; ++r) values[r] = load_float<Q>(tile + (k * kRows + r) * kBytes);
            for (int t = 0; t < count; ++t) {
                const float own = x.floats[(token + t) * x.cols + k];
                float* acc = chain[t][k % 4];
                for (int r = 0; r < kRows; ++r) acc[r] = std::fma(values[r], own, acc[r]);
            }
        }
        for (int t = 0; t < count; ++t) {
            const auto& c = chain[t];
            for (int r = 0; r < kRows; ++r) out[t * out_stride + r] = (c[0][r] + c[1][r]) + (c[2][r] + c[3][r]);
        }
    }
};

}  // namespace

void matmul_portable(const Packed& w, const Activations& x, float* y, int64_t y_stride, int64_t row_begin, int64_t row_end) {
    with_type(w.source, MatmulFrame<QuantKernel, FloatKernel>{w, x, y, y_stride, row_begin, row_end});
}

}  // namespace outpace
