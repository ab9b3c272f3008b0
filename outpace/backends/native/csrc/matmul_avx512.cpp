// The product with AVX-512 and its byte dot products (VNNI): a tile's 16 rows are the 16 lanes of a vector, and
// `dpbusd` sums four products of unsigned codes and signed activations in 32 bits, so nothing can overflow.

#include "kernels_inline.h"

#if defined(__x86_64__)

// GCC 12's own headers warn about the "undefined" operand of every unmasked intrinsic.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#include <immintrin.h>

namespace outpace {
namespace {

inline __m512i load64(const uint8_t* p) { return _mm512_loadu_si512(p); }
inline __m256i load32(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline __m512 load_half16(const uint8_t* p) { return _mm512_cvtph_ps(load32(p)); }
inline __m512 load_u8x16(const uint8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
inline __m512i four_of(const int8_t* q) {
    int32_t v;
    memcpy(&v, q, 4);
    return _mm512_set1_epi32(v);
}

// Vector j of a block's codes, one unsigned code per byte, offset not subtracted (signed bytes get an offset of 128).
template <int kBits>
inline __m512i load_codes(const uint8_t* planes, int j) {
    if constexpr (kBits == 8) return _mm512_xor_si512(load64(planes + kVector * j), _mm512_set1_epi8(-128));
    const __m512i nibbles = load64(planes + kVector * (j % 4));
    const __m512i low = _mm512_and_si512(j < 4 ? nibbles : _mm512_srli_epi16(nibbles, 4), _mm512_set1_epi8(15));
    if constexpr (kBits == 4) return low;
    constexpr int kUpper = kBits - 4;  // bits of the upper plane per code
    const __m512i plane = load64(planes + kUpperAt + (kBits == 6 ? kVector * (j / 4) : 0));
    const int at = kBits == 5 ? j : 2 * (j % 4);
    const __m512i moved = at < 4 ? _mm512_slli_epi16(plane, 4 - at) : _mm512_srli_epi16(plane, at - 4);
    return _mm512_or_si512(low, _mm512_and_si512(moved, _mm512_set1_epi8(((1 << kUpper) - 1) << 4)));
}

struct BlockScales {
    __m512 scale, min;
    __m512i pair;  // Super16: int16 scales of the block's halves, side by side per row
};

template <GgmlType Q>
inline BlockScales load_scales(const uint8_t* super, int b, __m512 d, __m512 dmin) {
    constexpr Form f = form_of(Q);
    BlockScales out{d, dmin, _mm512_setzero_si512()};
    if constexpr (f.scales == Scales::SuperMin) {
        out.scale = _mm512_mul_ps(d, load_u8x16(super + kSuperScaleAt + b * kRows));
        out.min = _mm512_mul_ps(dmin, _mm512_xor_ps(load_u8x16(super + kSuperMinAt + b * kRows), _mm512_set1_ps(-0.0f)));
    }
    if constexpr (f.scales == Scales::Super16) out.pair = _mm512_cvtepi8_epi16(load32(super + kSuper16ScaleAt + b * kRows * 2));
    return out;
}

// Adds four vectors' products of G tokens to their sums. A token's sum is a chain of dependent instructions, so the
// tokens are interleaved in the written order; GCC would otherwise process one token after the other.
template <int G>
inline void add_four_vectors(const __m512i* codes, const ActBlock* act, int k, __m512i (&sums)[G]) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
#pragma GCC unroll 8
        for (int i = 0; i < G; ++i) {
            sums[i] = _mm512_dpbusd_epi32(sums[i], codes[j], four_of(act[i].q + k + 4 * j));
            asm("" : "+v"(sums[i]));
        }
    }
}

// A Q6_K block's exact sum from its halves, one row per lane.
inline __m512i join_halves(__m512i first, __m512i second, __m512i pair, const ActBlock& act) {
    int32_t halves;
    memcpy(&halves, act.half, 4);
    const __m512i scale0 = _mm512_srai_epi32(_mm512_slli_epi32(pair, 16), 16), scale1 = _mm512_srai_epi32(pair, 16);
    const __m512i offset = _mm512_slli_epi32(_mm512_madd_epi16(pair, _mm512_set1_epi32(halves)), 5);
    return _mm512_sub_epi32(_mm512_add_epi32(_mm512_mullo_epi32(first, scale0), _mm512_mullo_epi32(second, scale1)), offset);
}

template <GgmlType Q>
inline __m512i subtract_offset(__m512i dots, const ActBlock& act) {
    constexpr int kOffset = form_of(Q).bits == 8 ? 128 : form_of(Q).offset;
    constexpr int kShift = kOffset == 8 ? 3 : kOffset == 16 ? 4 : 7;
    if constexpr (kOffset == 0) return dots;
    return _mm512_sub_epi32(dots, _mm512_slli_epi32(_mm512_set1_epi32(act.sum), kShift));
}

// The block's exact sums for G tokens, one row per lane.
template <GgmlType Q, int G>
inline void block_dots(const __m512i* codes, __m512i pair, const ActBlock* act, __m512i (&dots)[G]) {
    constexpr Form f = form_of(Q);
#pragma GCC unroll 8
    for (int i = 0; i < G; ++i) dots[i] = _mm512_setzero_si512();
    add_four_vectors<G>(codes, act, 0, dots);
    if constexpr (f.scales == Scales::Super16) {
        __m512i second[G];
#pragma GCC unroll 8
        for (int i = 0; i < G; ++i) second[i] = _mm512_setzero_si512();
        add_four_vectors<G>(codes + 4, act, 16, second);
#pragma GCC unroll 8
        for (int i = 0; i < G; ++i) dots[i] = join_halves(dots[i], second[i], pair, act[i]);
    } else {
        add_four_vectors<G>(codes + 4, act, 16, dots);
#pragma GCC unroll 8
        for (int i = 0; i < G; ++i) dots[i] = subtract_offset<Q>(dots[i], act[i]);
    }
}

// The same for one token and codes of 4 bits. With one token, unpacking takes as long as multiplying: upper nibbles are
// multiplied where they are, and their sum is shifted, which is exact.
template <GgmlType Q>
inline __m512i nibble_dots(const uint8_t* planes, const ActBlock& act) {
    __m512i low = _mm512_setzero_si512(), high = low;
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
        __m512i both = load64(planes + kVector * j);
        asm("" : "+v"(both));  // GCC would load it twice
        low = _mm512_dpbusd_epi32(low, _mm512_and_si512(both, _mm512_set1_epi8(15)), four_of(act.q + 4 * j));
        high = _mm512_dpbusd_epi32(high, _mm512_and_si512(both, _mm512_set1_epi8(-16)), four_of(act.q + 16 + 4 * j));
    }
    return subtract_offset<Q>(_mm512_add_epi32(low, _mm512_srai_epi32(high, 4)), act);
}

struct Avx512 {
    using Sizes = std::integer_sequence<int, 1, 2, 3, 4, 5, 6, 7, 8, kTokenGroup>;
    static int num_parts(int count) { return count > 8 && count < kTokenGroup ? 2 : 1; }

    template <GgmlType Q, int T>
    __attribute__((noinline)) static void multiply(const uint8_t* super, bool fetch, const ActBlock* act, int64_t block_stride, int64_t blocks,
                                                   float* out, int64_t out_stride) {
        constexpr Form f = form_of(Q);
        constexpr int kBlocks = blocks_per_super(f), kTogether = T <= 8 ? T : 4;
        constexpr bool kNibbles = T == 1 && f.bits == 4;
        __m512 acc[T];
        for (int t = 0; t < T; ++t) acc[t] = _mm512_setzero_ps();
        for (int64_t block = 0; block < blocks; block += kBlocks, super += super_bytes(f)) {
            const __m512 d = load_half16(super);
            const __m512 dmin = has_min(f) ? load_half16(super + kMinAt) : d;
            for (int b = 0; b < kBlocks; ++b, act += block_stride) {
                if (fetch) fetch_ahead<code_bytes(f)>(super + b * code_bytes(f));
                const BlockScales scales = load_scales<Q>(super, b, d, dmin);
                const uint8_t* planes = super + header_bytes(f) + b * code_bytes(f);
                __m512i codes[8];
                if constexpr (!kNibbles) {
#pragma GCC unroll 8
                    for (int j = 0; j < 8; ++j) codes[j] = load_codes<f.bits>(planes, j);
                }
#pragma GCC unroll 4
                for (int first = 0; first < T; first += kTogether) {
                    __m512i dots[kTogether];
                    if constexpr (kNibbles) dots[0] = nibble_dots<Q>(planes, *act);
                    else block_dots<Q, kTogether>(codes, scales.pair, act + first, dots);
#pragma GCC unroll 8
                    for (int i = 0; i < kTogether; ++i) {
                        const int t = first + i;
                        const __m512 scale = _mm512_mul_ps(scales.scale, _mm512_set1_ps(act[t].d));
                        acc[t] = _mm512_fmadd_ps(scale, _mm512_cvtepi32_ps(dots[i]), acc[t]);
                        if constexpr (has_min(f)) acc[t] = _mm512_fmadd_ps(scales.min, _mm512_set1_ps(act[t].d_sum), acc[t]);
                    }
                }
            }
        }
        for (int t = 0; t < T; ++t) _mm512_storeu_ps(out + t * out_stride, acc[t]);
    }
};

template <GgmlType Q>
using QuantKernel = QuantisedKernel<Avx512, Q>;

// ---- float matrices ------------------------------------------------------------------------------------------------

template <GgmlType Q>
inline __m512 load_floats(const uint8_t* p) {
    if constexpr (Q == GgmlType::F32) return _mm512_castsi512_ps(load64(p));
    if constexpr (Q == GgmlType::F16) return load_half16(p);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load32(p)), 16));
}

template <GgmlType Q, int T>
void float_tile_times_tokens(const uint8_t* tile, const float* x, int64_t cols, float* out, int64_t out_stride) {
    constexpr int kStep = kRows * form_of(Q).bits / 8;
    __m512 chain[4][T];
    for (int c = 0; c < 4; ++c) {
        for (int t = 0; t < T; ++t) chain[c][t] = _mm512_setzero_ps();
    }
    int64_t k = 0;
    for (; k + 4 <= cols; k += 4) {
#pragma GCC unroll 4
        for (int c = 0; c < 4; ++c) {
            const __m512 values = load_floats<Q>(tile + (k + c) * kStep);
#pragma GCC unroll 6
            for (int t = 0; t < T; ++t) chain[c][t] = _mm512_fmadd_ps(values, _mm512_set1_ps(x[t * cols + k + c]), chain[c][t]);
        }
    }
#pragma GCC unroll 4
    for (int c = 0; c < 3; ++c) {
        if (k + c >= cols) break;
        const __m512 values = load_floats<Q>(tile + (k + c) * kStep);
        for (int t = 0; t < T; ++t) chain[c][t] = _mm512_fmadd_ps(values, _mm512_set1_ps(x[t * cols + k + c]), chain[c][t]);
    }
    for (int t = 0; t < T; ++t) {
        const __m512 sum = _mm512_add_ps(_mm512_add_ps(chain[0][t], chain[1][t]), _mm512_add_ps(chain[2][t], chain[3][t]));
        _mm512_storeu_ps(out + t * out_stride, sum);
    }
}

template <GgmlType Q>
struct FloatKernel {
    const Activations& x;

    void run(const uint8_t* tile, int64_t token, int count, float* out, int64_t out_stride) const {
        for (int done = 0, left; (left = count - done) > 0;) {
            const float* own = x.floats + (token + done) * x.cols;
            float* to = out + done * out_stride;
            if (left >= 5) float_tile_times_tokens<Q, 5>(tile, own, x.cols, to, out_stride), done += 5;
            else if (left == 4) float_tile_times_tokens<Q, 4>(tile, own, x.cols, to, out_stride), done += 4;
            else if (left == 3) float_tile_times_tokens<Q, 3>(tile, own, x.cols, to, out_stride), done += 3;
            else if (left == 2) float_tile_times_tokens<Q, 2>(tile, own, x.cols, to, out_stride), done += 2;
            else float_tile_times_tokens<Q, 1>(tile, own, x.cols, to, out_stride), done += 1;
        }
    }
};

}  // namespace

void matmul_avx512(const Packed& w, const Activations& x, float* y, int64_t y_stride, int64_t row_begin, int64_t row_end) {
    with_type(w.source, MatmulFrame<QuantKernel, FloatKernel>{w, x, y, y_stride, row_begin, row_end});
}

}  // namespace outpace

#endif
