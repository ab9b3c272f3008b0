// The product with NEON's dot products (`sdot`): a tile has two sides of 8 rows, each in the lanes of two vectors;
// codes are signed bytes.

#include "kernels_inline.h"

#if defined(__aarch64__)

#include <arm_neon.h>

namespace outpace {
namespace {

struct Rows8i {
    int32x4_t low, high;
};
struct Rows8f {
    float32x4_t low, high;
};

inline Rows8f load_half8(const uint8_t* p) {
    const uint16x8_t bits = vreinterpretq_u16_u8(vld1q_u8(p));
    return {vcvt_f32_f16(vreinterpret_f16_u16(vget_low_u16(bits))), vcvt_f32_f16(vreinterpret_f16_u16(vget_high_u16(bits)))};
}
inline Rows8f load_u8x8(const uint8_t* p) {
    const uint16x8_t wide = vmovl_u8(vld1_u8(p));
    return {vcvtq_f32_u32(vmovl_u16(vget_low_u16(wide))), vcvtq_f32_u32(vmovl_u16(vget_high_u16(wide)))};
}

// 16 bytes (4 rows) of vector j of a block's codes, offset subtracted.
template <GgmlType Q>
inline int8x16_t load_codes(const uint8_t* planes, int j, int at) {
    constexpr Form f = form_of(Q);
    if constexpr (f.bits == 8) {
        return vreinterpretq_s8_u8(vld1q_u8(planes + kVector * j + at));
    } else {
        const uint8x16_t nibbles = vld1q_u8(planes + kVector * (j % 4) + at);
        uint8x16_t code = j < 4 ? vandq_u8(nibbles, vdupq_n_u8(15)) : vshrq_n_u8(nibbles, 4);
        if constexpr (f.bits > 4) {
            const uint8x16_t plane = vld1q_u8(planes + kUpperAt + (f.bits == 6 ? kVector * (j / 4) : 0) + at);
            const int first_bit = f.bits == 5 ? j : 2 * (j % 4);
            const uint8x16_t moved = vshlq_u8(plane, vdupq_n_s8(int8_t(4 - first_bit)));
            code = vorrq_u8(code, vandq_u8(moved, vdupq_n_u8(((1 << (f.bits - 4)) - 1) << 4)));
        }
        return vsubq_s8(vreinterpretq_s8_u8(code), vdupq_n_s8(f.offset));
    }
}

struct BlockScales {
    Rows8f scale, min;
    Rows8i half[2];  // Super16
};

template <GgmlType Q>
inline BlockScales load_scales(const uint8_t* super, int b, int side) {
    constexpr Form f = form_of(Q);
    const int at = b * kRows + 8 * side;
    BlockScales out{load_half8(super + 16 * side), {}, {}};
    if constexpr (has_min(f)) out.min = load_half8(super + kMinAt + 16 * side);
    if constexpr (f.scales == Scales::SuperMin) {
        const Rows8f scale = load_u8x8(super + kSuperScaleAt + at), min = load_u8x8(super + kSuperMinAt + at);
        out.scale = {vmulq_f32(out.scale.low, scale.low), vmulq_f32(out.scale.high, scale.high)};
        out.min = {vmulq_f32(out.min.low, vnegq_f32(min.low)), vmulq_f32(out.min.high, vnegq_f32(min.high))};
    }
    if constexpr (f.scales == Scales::Super16) {
        const int8x8x2_t halves = vld2_s8(reinterpret_cast<const int8_t*>(super + kSuper16ScaleAt + 2 * at));
        for (int h = 0; h < 2; ++h) {
            const int16x8_t wide = vmovl_s8(halves.val[h]);
            out.half[h] = {vmovl_s16(vget_low_s16(wide)), vmovl_s16(vget_high_s16(wide))};
        }
    }
    return out;
}

// The sum of four vectors' products with 16 activations.
inline Rows8i four_vectors(Rows8i sum, const int8x16_t (*codes)[2], const int8_t* q) {
    const int8x16_t act = vld1q_s8(q);
    sum.low = vdotq_laneq_s32(sum.low, codes[0][0], act, 0);
    sum.high = vdotq_laneq_s32(sum.high, codes[0][1], act, 0);
    sum.low = vdotq_laneq_s32(sum.low, codes[1][0], act, 1);
    sum.high = vdotq_laneq_s32(sum.high, codes[1][1], act, 1);
    sum.low = vdotq_laneq_s32(sum.low, codes[2][0], act, 2);
    sum.high = vdotq_laneq_s32(sum.high, codes[2][1], act, 2);
    sum.low = vdotq_laneq_s32(sum.low, codes[3][0], act, 3);
    sum.high = vdotq_laneq_s32(sum.high, codes[3][1], act, 3);
    return sum;
}

template <GgmlType Q>
inline Rows8i block_dot(const int8x16_t (*codes)[2], const BlockScales& scales, const ActBlock& act) {
    const Rows8i zero{vdupq_n_s32(0), vdupq_n_s32(0)};
    const Rows8i first = four_vectors(zero, codes, act.q);
    if constexpr (form_of(Q).scales == Scales::Super16) {
        const Rows8i second = four_vectors(zero, codes + 4, act.q + 16);
        return {vmlaq_s32(vmulq_s32(first.low, scales.half[0].low), second.low, scales.half[1].low),
                vmlaq_s32(vmulq_s32(first.high, scales.half[0].high), second.high, scales.half[1].high)};
    } else {
        return four_vectors(first, codes + 4, act.q + 16);
    }
}

inline float32x4_t add_block(float32x4_t acc, float32x4_t scale, float d, int32x4_t dot) {
    return vfmaq_f32(acc, vmulq_n_f32(scale, d), vcvtq_f32_s32(dot));
}

// One side of a tile: 8 rows.
template <GgmlType Q, int T>
void side_times_tokens(const uint8_t* super, int side, const ActBlock* act, int64_t block_stride, int64_t blocks, float* out, int64_t out_stride) {
    constexpr Form f = form_of(Q);
    constexpr int kBlocks = blocks_per_super(f);
    Rows8f acc[T];
    for (int t = 0; t < T; ++t) acc[t] = {vdupq_n_f32(0), vdupq_n_f32(0)};
    for (int64_t block = 0; block < blocks; block += kBlocks, super += super_bytes(f)) {
        for (int b = 0; b < kBlocks; ++b, act += block_stride) {
            const BlockScales scales = load_scales<Q>(super, b, side);
            const uint8_t* planes = super + header_bytes(f) + b * code_bytes(f) + 32 * side;
            int8x16_t codes[8][2];
            for (int j = 0; j < 8; ++j) {
                for (int i = 0; i < 2; ++i) codes[j][i] = load_codes<Q>(planes, j, 16 * i);
            }
            for (int t = 0; t < T; ++t) {
                const Rows8i dot = block_dot<Q>(codes, scales, act[t]);
                acc[t].low = add_block(acc[t].low, scales.scale.low, act[t].d, dot.low);
                acc[t].high = add_block(acc[t].high, scales.scale.high, act[t].d, dot.high);
                if constexpr (has_min(f)) {
                    acc[t].low = vfmaq_n_f32(acc[t].low, scales.min.low, act[t].d_sum);
                    acc[t].high = vfmaq_n_f32(acc[t].high, scales.min.high, act[t].d_sum);
                }
            }
        }
    }
    for (int t = 0; t < T; ++t) {
        vst1q_f32(out + t * out_stride, acc[t].low);
        vst1q_f32(out + t * out_stride + 4, acc[t].high);
    }
}

struct Neon {
    using Sizes = std::integer_sequence<int, 1, 2, 3, 4>;
    static int num_parts(int count) { return (count + 3) / 4; }

    template <GgmlType Q, int T>
    static void multiply(const uint8_t* tile, bool, const ActBlock* act, int64_t block_stride, int64_t blocks, float* out, int64_t out_stride) {
        for (int side = 0; side < 2; ++side) side_times_tokens<Q, T>(tile, side, act, block_stride, blocks, out + 8 * side, out_stride);
    }
};

template <GgmlType Q>
using QuantKernel = QuantisedKernel<Neon, Q>;

// ---- float matrices ------------------------------------------------------------------------------------------------

template <GgmlType Q>
inline Rows8f load_floats(const uint8_t* p) {
    if constexpr (Q == GgmlType::F32) {
        return {vreinterpretq_f32_u8(vld1q_u8(p)), vreinterpretq_f32_u8(vld1q_u8(p + 16))};
    } else if constexpr (Q == GgmlType::F16) {
        return load_half8(p);
    } else {
        const uint16x8_t bits = vreinterpretq_u16_u8(vld1q_u8(p));
        return {vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(bits), 16)), vreinterpretq_f32_u32(vshll_n_u16(vget_high_u16(bits), 16))};
    }
}

template <GgmlType Q, int T>
void float_side_times_tokens(const uint8_t* side, const float* x, int64_t cols, float* out, int64_t out_stride) {
    constexpr int kStep = kRows * form_of(Q).bits / 8;
    Rows8f chain[4][T];
    for (int c = 0; c < 4; ++c) {
        for (int t = 0; t < T; ++t) chain[c][t] = {vdupq_n_f32(0), vdupq_n_f32(0)};
    }
    const auto step = [&](int64_t k, int c) {
        const Rows8f values = load_floats<Q>(side + k * kStep);
        for (int t = 0; t < T; ++t) {
            chain[c][t].low = vfmaq_n_f32(chain[c][t].low, values.low, x[t * cols + k]);
            chain[c][t].high = vfmaq_n_f32(chain[c][t].high, values.high, x[t * cols + k]);
        }
    };
    int64_t k = 0;
    for (; k + 4 <= cols; k += 4) {
        for (int c = 0; c < 4; ++c) step(k + c, c);
    }
    for (int c = 0; k + c < cols; ++c) step(k + c, c);
    for (int t = 0; t < T; ++t) {
        const auto sum = [&](float32x4_t Rows8f::*part) {
            return vaddq_f32(vaddq_f32(chain[0][t].*part, chain[1][t].*part), vaddq_f32(chain[2][t].*part, chain[3][t].*part));
        };
        vst1q_f32(out + t * out_stride, sum(&Rows8f::low));
        vst1q_f32(out + t * out_stride + 4, sum(&Rows8f::high));
    }
}

template <GgmlType Q>
struct FloatKernel {
    const Activations& x;

    template <int T>
    int part(const uint8_t* tile, int64_t token, float* out, int64_t out_stride) const {
        const float* own = x.floats + token * x.cols;
        float_side_times_tokens<Q, T>(tile, own, x.cols, out, out_stride);
        float_side_times_tokens<Q, T>(tile + form_of(Q).bits, own, x.cols, out + 8, out_stride);
        return T;
    }

    void run(const uint8_t* tile, int64_t token, int count, float* out, int64_t out_stride) const {
        for (int done = 0; done < count;) {
            float* to = out + done * out_stride;
            if (count - done >= 2) done += part<2>(tile, token + done, to, out_stride);
            else done += part<1>(tile, token + done, to, out_stride);
        }
    }
};

}  // namespace

void matmul_neon(const Packed& w, const Activations& x, float* y, int64_t y_stride, int64_t row_begin, int64_t row_end) {
    with_type(w.source, MatmulFrame<QuantKernel, FloatKernel>{w, x, y, y_stride, row_begin, row_end});
}

}  // namespace outpace

#endif
