#if defined(__x86_64__)

#include "kernels_inline.h"

#include <immintrin.h>

namespace outpace {
namespace {

inline __m256i bits_at(const float* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }

inline uint32_t largest(__m256i v) {
    __m128i top = _mm_max_epu32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    top = _mm_max_epu32(top, _mm_shuffle_epi32(top, 0x4e));
    return uint32_t(_mm_cvtsi128_si32(_mm_max_epu32(top, _mm_shuffle_epi32(top, 0xb1))));
}

// The sum of 16 signed bytes.
inline int sum_of(__m128i codes) {
    const __m128i pairs = _mm_maddubs_epi16(_mm_set1_epi8(1), codes);
    __m128i sums = _mm_madd_epi16(pairs, _mm_set1_epi16(1));
    sums = _mm_add_epi32(sums, _mm_shuffle_epi32(sums, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(sums, _mm_shuffle_epi32(sums, 0xb1)));
}

void quantise_block(const float* x, ActBlock& out) {
    __m256i magnitudes[4];
    for (int i = 0; i < 4; ++i) magnitudes[i] = _mm256_and_si256(bits_at(x + 8 * i), _mm256_set1_epi32(0x7fffffff));
    const uint32_t top = largest(_mm256_max_epu32(_mm256_max_epu32(magnitudes[0], magnitudes[1]), _mm256_max_epu32(magnitudes[2], magnitudes[3])));
    const BlockScale scale = block_scale(top);
    const __m256 inverse = _mm256_set1_ps(scale.inverse);
    __m256i whole[4];
    for (int i = 0; i < 4; ++i) {
        const __m256 shifted = _mm256_add_ps(_mm256_mul_ps(_mm256_loadu_ps(x + 8 * i), inverse), _mm256_set1_ps(kRoundingAid));
        whole[i] = _mm256_sub_epi32(_mm256_castps_si256(shifted), _mm256_set1_epi32(kRoundingBits));
    }
    const __m256i narrow = _mm256_packs_epi16(_mm256_packs_epi32(whole[0], whole[1]), _mm256_packs_epi32(whole[2], whole[3]));
    const __m256i in_order = _mm256_permutevar8x32_epi32(narrow, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    const __m256i codes = scale.is_usable ? in_order : _mm256_setzero_si256();
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out.q), codes);
    finish_block(scale, sum_of(_mm256_castsi256_si128(codes)), sum_of(_mm256_extracti128_si256(codes, 1)), out);
}

}  // namespace

void quantise_avx2(const Activations& x, int64_t token_begin, int64_t token_end, int64_t block_begin, int64_t block_end) {
    quantise_blocks(quantise_block, x, token_begin, token_end, block_begin, block_end);
}

}  // namespace outpace

#endif
