// The product with AVX2: a tile's 16 rows are the lanes of two vectors, `maddubs` multiplies unsigned codes with signed
// activations, and 16-bit sums are widened before they can overflow.

#include "kernels_inline.h"

#if defined(__x86_64__)

#include <immintrin.h>

namespace outpace {
namespace {

constexpr int kSide = 32;  // bytes of a vector of codes that belong to 8 of the tile's rows

inline __m256i load32(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline __m256 load_half8(const uint8_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline __m256 load_u8x8(const uint8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
inline __m256i four_of(const int8_t* q) {
    int32_t v;
    memcpy(&v, q, 4);
    return _mm256_set1_epi32(v);
}

// Keeps a running sum in its register. Without this, GCC computes all products first, to add them in another order, and
// spills most of them.
inline void stay(__m256i& sum) { asm("" : "+x"(sum)); }

// Vector j of 8 rows' codes below 8 bits, one code per byte, offset not subtracted.
template <int kBits>
inline __m256i load_codes(const uint8_t* planes, int j) {
    const __m256i nibbles = load32(planes + kVector * (j % 4));
    const __m256i low = _mm256_and_si256(j < 4 ? nibbles : _mm256_srli_epi16(nibbles, 4), _mm256_set1_epi8(15));
    if constexpr (kBits == 4) return low;
    constexpr int kUpper = kBits - 4;  // bits of the upper plane per code
    const __m256i plane = load32(planes + kUpperAt + (kBits == 6 ? kVector * (j / 4) : 0));
    const int at = kBits == 5 ? j : 2 * (j % 4);
    const __m256i moved = at < 4 ? _mm256_slli_epi16(plane, 4 - at) : _mm256_srli_epi16(plane, at - 4);
    return _mm256_or_si256(low, _mm256_and_si256(moved, _mm256_set1_epi8(((1 << kUpper) - 1) << 4)));
}

struct BlockScales {
    __m256 scale, min;
    __m256i pair;  // Super16: int16 scales of the block's halves, side by side per row
};

template <GgmlType Q>
inline BlockScales load_scales(const uint8_t* super, int b, int side) {
    constexpr Form f = form_of(Q);
    const int at = b * kRows + 8 * side;
    BlockScales out{load_half8(super + 16 * side), _mm256_setzero_ps(), _mm256_setzero_si256()};
    if constexpr (has_min(f)) out.min = load_half8(super + kMinAt + 16 * side);
    if constexpr (f.scales == Scales::SuperMin) {
        out.scale = _mm256_mul_ps(out.scale, load_u8x8(super + kSuperScaleAt + at));
        out.min = _mm256_mul_ps(out.min, _mm256_xor_ps(load_u8x8(super + kSuperMinAt + at), _mm256_set1_ps(-0.0f)));
    }
    if constexpr (f.scales == Scales::Super16) {
        out.pair = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(super + kSuper16ScaleAt + 2 * at)));
    }
    return out;
}

// The factor that widens 16-bit sums of vector j: ones, or the int16 scales of the block half that contains j.
template <GgmlType Q>
inline __m256i widener(const BlockScales& scales, int j) {
    if constexpr (form_of(Q).scales != Scales::Super16) return _mm256_set1_epi16(1);
    return j < 4 ? _mm256_blend_epi16(scales.pair, _mm256_slli_epi32(scales.pair, 16), 0xaa)
                 : _mm256_blend_epi16(scales.pair, _mm256_srli_epi32(scales.pair, 16), 0x55);
}

// The block's exact sums for T tokens, one row per lane. A tile has two sides of 8 rows; both use an activation as soon
// as it is broadcast. 4 and 5 bits: the sum of 8 or 4 products, (2^bits - 1) * 127 * 2 each, fits in 16 bits, so the
// sums stay narrow.
template <GgmlType Q, int T>
inline void narrow_dots(const uint8_t* planes, const BlockScales* scales, const ActBlock* act, __m256i (&dot)[2][T]) {
    constexpr int kBits = form_of(Q).bits, kTogether = kBits == 4 ? 8 : 4;
#pragma GCC unroll 2
    for (int first = 0; first < 8; first += kTogether) {
        __m256i sum[2][T];
#pragma GCC unroll 8
        for (int j = first; j < first + kTogether; ++j) {
            const __m256i codes[2] = {load_codes<kBits>(planes, j), load_codes<kBits>(planes + kSide, j)};
#pragma GCC unroll 8
            for (int t = 0; t < T; ++t) {
                const __m256i four = four_of(act[t].q + 4 * j);
#pragma GCC unroll 2
                for (int side = 0; side < 2; ++side) {
                    const __m256i pairs = _mm256_maddubs_epi16(codes[side], four);
                    sum[side][t] = j == first ? pairs : _mm256_add_epi16(sum[side][t], pairs);
                    stay(sum[side][t]);
                }
            }
        }
#pragma GCC unroll 2
        for (int side = 0; side < 2; ++side) {
#pragma GCC unroll 8
            for (int t = 0; t < T; ++t) {
                const __m256i wide = _mm256_madd_epi16(sum[side][t], widener<Q>(scales[side], first));
                dot[side][t] = first == 0 ? wide : _mm256_add_epi32(dot[side][t], wide);
            }
        }
    }
}

// The same for 6 and 8 bits, where only two products (63 * 127 * 2 each) or one (128 * 127 * 2) fit. For signed codes,
// the sign is moved to the activations.
template <GgmlType Q, int T>
inline void wide_dots(const uint8_t* planes, const BlockScales* scales, const ActBlock* act, __m256i (&dot)[2][T]) {
    constexpr int kBits = form_of(Q).bits, kTogether = kBits == 6 ? 2 : 1;
#pragma GCC unroll 8
    for (int first = 0; first < 8; first += kTogether) {
        __m256i codes[2][kTogether], signs[2];
        for (int side = 0; side < 2; ++side) {
            if constexpr (kBits == 8) {
                signs[side] = load32(planes + kVector * first + kSide * side);
                codes[side][0] = _mm256_abs_epi8(signs[side]);
            } else {
                for (int i = 0; i < kTogether; ++i) codes[side][i] = load_codes<kBits>(planes + kSide * side, first + i);
            }
        }
#pragma GCC unroll 8
        for (int t = 0; t < T; ++t) {
#pragma GCC unroll 2
            for (int side = 0; side < 2; ++side) {
                const __m256i four = four_of(act[t].q + 4 * first);
                __m256i sum = _mm256_maddubs_epi16(codes[side][0], kBits == 8 ? _mm256_sign_epi8(four, signs[side]) : four);
                if constexpr (kTogether == 2) {
                    sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(codes[side][1], four_of(act[t].q + 4 * first + 4)));
                }
                const __m256i wide = _mm256_madd_epi16(sum, widener<Q>(scales[side], first));
                dot[side][t] = first == 0 ? wide : _mm256_add_epi32(dot[side][t], wide);
                stay(dot[side][t]);
            }
        }
    }
}

// A block's sum minus the contribution of the codes' offset.
template <GgmlType Q>
inline __m256i without_offset(__m256i dot, const BlockScales& scales, const ActBlock& act) {
    constexpr Form f = form_of(Q);
    if constexpr (f.scales == Scales::Super16) {
        int32_t halves;
        memcpy(&halves, act.half, 4);
        return _mm256_sub_epi32(dot, _mm256_slli_epi32(_mm256_madd_epi16(scales.pair, _mm256_set1_epi32(halves)), 5));
    } else if constexpr (f.offset != 0) {
        return _mm256_sub_epi32(dot, _mm256_slli_epi32(_mm256_set1_epi32(act.sum), f.offset == 8 ? 3 : 4));
    } else {
        return dot;
    }
}

struct Avx2 {
    using Sizes = std::integer_sequence<int, 1, 2, 3, 4, 5, 6>;
    static int num_parts(int count) { return count <= 6 ? 1 : (count + 3) / 4; }

    template <GgmlType Q, int T>
    __attribute__((noinline)) static void multiply(const uint8_t* super, bool fetch, const ActBlock* act, int64_t block_stride, int64_t blocks,
                                                   float* out, int64_t out_stride) {
        constexpr Form f = form_of(Q);
        constexpr int kBlocks = blocks_per_super(f);
        __m256 acc[2][T];
        for (int t = 0; t < T; ++t) acc[0][t] = acc[1][t] = _mm256_setzero_ps();
        for (int64_t block = 0; block < blocks; block += kBlocks, super += super_bytes(f)) {
            for (int b = 0; b < kBlocks; ++b, act += block_stride) {
                if (fetch) fetch_ahead<code_bytes(f)>(super + b * code_bytes(f));
                const BlockScales scales[2] = {load_scales<Q>(super, b, 0), load_scales<Q>(super, b, 1)};
                __m256i dot[2][T];
                const uint8_t* planes = super + header_bytes(f) + b * code_bytes(f);
                if constexpr (f.bits <= 5) narrow_dots<Q, T>(planes, scales, act, dot);
                else wide_dots<Q, T>(planes, scales, act, dot);
#pragma GCC unroll 2
                for (int side = 0; side < 2; ++side) {
#pragma GCC unroll 8
                    for (int t = 0; t < T; ++t) {
                        const __m256 sum = _mm256_cvtepi32_ps(without_offset<Q>(dot[side][t], scales[side], act[t]));
                        acc[side][t] = _mm256_fmadd_ps(_mm256_mul_ps(scales[side].scale, _mm256_set1_ps(act[t].d)), sum, acc[side][t]);
                        if constexpr (has_min(f)) acc[side][t] = _mm256_fmadd_ps(scales[side].min, _mm256_set1_ps(act[t].d_sum), acc[side][t]);
                    }
                }
            }
        }
        for (int t = 0; t < T; ++t) {
            _mm256_storeu_ps(out + t * out_stride, acc[0][t]);
            _mm256_storeu_ps(out + t * out_stride + 8, acc[1][t]);
        }
    }
};

template <GgmlType Q>
using QuantKernel = QuantisedKernel<Avx2, Q>;

// ---- float matrices ------------------------------------------------------------------------------------------------

template <GgmlType Q>
inline __m256 load_floats(const uint8_t* p) {
    if constexpr (Q == GgmlType::F32) return _mm256_loadu_ps(reinterpret_cast<const float*>(p));
    if constexpr (Q == GgmlType::F16) return load_half8(p);
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}

// kSides sides of a tile, from `tile` on.
template <GgmlType Q, int T, int kSides>
void float_sides_times_tokens(const uint8_t* tile, const float* x, int64_t cols, float* out, int64_t out_stride) {
    constexpr int kStep = kRows * form_of(Q).bits / 8;
    __m256 chain[4][kSides][T];
    for (auto& c : chain) {
        for (auto& side : c) {
            for (auto& acc : side) acc = _mm256_setzero_ps();
        }
    }
    const auto step = [&](int64_t k, int c) __attribute__((always_inline)) {
#pragma GCC unroll 2
        for (int side = 0; side < kSides; ++side) {
            const __m256 values = load_floats<Q>(tile + k * kStep + side * form_of(Q).bits);
#pragma GCC unroll 4
            for (int t = 0; t < T; ++t) chain[c][side][t] = _mm256_fmadd_ps(values, _mm256_set1_ps(x[t * cols + k]), chain[c][side][t]);
        }
    };
    int64_t k = 0;
    for (; k + 4 <= cols; k += 4) {
#pragma GCC unroll 4
        for (int c = 0; c < 4; ++c) step(k + c, c);
    }
#pragma GCC unroll 4
    for (int c = 0; c < 3; ++c) {
        if (k + c < cols) step(k + c, c);
    }
    for (int side = 0; side < kSides; ++side) {
        for (int t = 0; t < T; ++t) {
            const __m256 sum = _mm256_add_ps(_mm256_add_ps(chain[0][side][t], chain[1][side][t]), _mm256_add_ps(chain[2][side][t], chain[3][side][t]));
            _mm256_storeu_ps(out + t * out_stride + 8 * side, sum);
        }
    }
}

template <GgmlType Q>
struct FloatKernel {
    const Activations& x;

    template <int T>
    int part(const uint8_t* tile, int64_t token, float* out, int64_t out_stride) const {
        constexpr int kSides = T == 1 ? 2 : 1;  // as many as fit in registers
        for (int side = 0; side < 2; side += kSides) {
            float_sides_times_tokens<Q, T, kSides>(tile + side * form_of(Q).bits, x.floats + token * x.cols, x.cols, out + 8 * side, out_stride);
        }
        return T;
    }

    void run(const uint8_t* tile, int64_t token, int count, float* out, int64_t out_stride) const {
        for (int done = 0, left; (left = count - done) > 0;) {
            float* to = out + done * out_stride;
            if (left >= 3 && left != 4) done += part<3>(tile, token + done, to, out_stride);
            else if (left >= 2) done += part<2>(tile, token + done, to, out_stride);
            else done += part<1>(tile, token + done, to, out_stride);
        }
    }
};

}  // namespace

void matmul_avx2(const Packed& w, const Activations& x, float* y, int64_t y_stride, int64_t row_begin, int64_t row_end) {
    with_type(w.source, MatmulFrame<QuantKernel, FloatKernel>{w, x, y, y_stride, row_begin, row_end});
}

}  // namespace outpace

#endif
