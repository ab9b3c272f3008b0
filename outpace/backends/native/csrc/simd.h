// Eight floats at a time, in the compiler's vector types: the same source becomes AVX2, NEON or plain loops,
// depending on the flags its file is compiled with. With AVX-512 there are also sixteen.
//
// Included only by the *_impl.h files, each of which is compiled once per instruction set. Everything here has internal
// linkage, so that the linker can never give one instruction set's function to another.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>
#define OUTPACE_SIMD_AVX2 1
#elif defined(__aarch64__)
#include <arm_neon.h>
#define OUTPACE_SIMD_NEON 1
#endif

namespace outpace {
namespace {

typedef float f32x8 __attribute__((vector_size(32)));
typedef int32_t i32x8 __attribute__((vector_size(32)));
constexpr int kLanes = 8;

inline f32x8 splat(float x) { return f32x8{x, x, x, x, x, x, x, x}; }
template <typename Vector>
inline Vector splat_to(float x);
template <>
inline f32x8 splat_to<f32x8>(float x) { return splat(x); }

inline f32x8 load(const float* p) {
    f32x8 v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

inline void store(float* p, f32x8 v) { std::memcpy(p, &v, sizeof v); }

// a * b + c, with one rounding if the instruction set has fma.
inline f32x8 fma(f32x8 a, f32x8 b, f32x8 c) {
#if defined(OUTPACE_SIMD_AVX2)
    return (f32x8)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

inline f32x8 max(f32x8 a, f32x8 b) { return a > b ? a : b; }

// Adds the lanes in a fixed order, as a tree.
inline float sum(f32x8 v) { return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7])); }

inline float largest(f32x8 v) {
    float m = v[0];
    for (int i = 1; i < kLanes; i++) m = v[i] > m ? v[i] : m;
    return m;
}

// Whether a comparison holds in any lane.
inline bool any(i32x8 lanes) {
#if defined(OUTPACE_SIMD_AVX2)
    return _mm256_movemask_ps((__m256)lanes) != 0;
#else
    int32_t all = 0;
    for (int i = 0; i < kLanes; i++) all |= lanes[i];
    return all != 0;
#endif
}

inline float half_to_float(uint16_t h) {
    const uint32_t sign = uint32_t(h & 0x8000u) << 16, magnitude = h & 0x7fffu;
    uint32_t bits;
    float f;
    if (magnitude >= 0x7c00u) {
        bits = sign | 0x7f800000u | (magnitude & 0x3ffu) << 13;
    } else if (magnitude >= 0x400u) {
        bits = sign | ((magnitude << 13) + 0x38000000u);
    } else {  // subnormal: magnitude * 2^-24 is exact
        f = float(magnitude) * 5.9604644775390625e-8f;
        std::memcpy(&bits, &f, 4);
        bits |= sign;
    }
    std::memcpy(&f, &bits, 4);
    return f;
}

// Round to nearest, ties to even; too large becomes infinity.
inline uint16_t float_to_half(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    const uint32_t sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return uint16_t(sign | 0x7e00u);
    if (magnitude >= 0x477ff000u) return uint16_t(sign | 0x7c00u);
    if (magnitude < 0x38800000u) {  // subnormal or zero: adding 0.5 lets the hardware round at 2^-24
        float f;
        std::memcpy(&f, &magnitude, 4);
        f += 0.5f;
        uint32_t rounded;
        std::memcpy(&rounded, &f, 4);
        return uint16_t(sign | (rounded - 0x3f000000u));
    }
    const uint32_t odd = magnitude >> 13 & 1u;
    return uint16_t(sign | ((magnitude - 0x38000000u + 0xfffu + odd) >> 13));
}

inline f32x8 load(const uint16_t* p) {  // eight halves; every half is exactly a float
#if defined(OUTPACE_SIMD_AVX2)
    return (f32x8)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#elif defined(OUTPACE_SIMD_NEON)
    const float16x8_t h = vreinterpretq_f16_u16(vld1q_u16(p));
    const float32x4_t low = vcvt_f32_f16(vget_low_f16(h)), high = vcvt_f32_f16(vget_high_f16(h));
    return f32x8{low[0], low[1], low[2], low[3], high[0], high[1], high[2], high[3]};
#else
    f32x8 v;
    for (int i = 0; i < kLanes; i++) v[i] = half_to_float(p[i]);
    return v;
#endif
}

inline void store(uint16_t* p, f32x8 v) {  // rounded to eight halves
#if defined(OUTPACE_SIMD_AVX2)
    _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
#else
    for (int i = 0; i < kLanes; i++) p[i] = float_to_half(v[i]);
#endif
}

#if defined(OUTPACE_SIMD_AVX2) && defined(__AVX512F__)
#define OUTPACE_SIMD_AVX512 1
typedef float f32x16 __attribute__((vector_size(64)));

template <>
inline f32x16 splat_to<f32x16>(float x) { return (f32x16)_mm512_set1_ps(x); }
inline f32x16 fma(f32x16 a, f32x16 b, f32x16 c) { return (f32x16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
inline f32x16 max(f32x16 a, f32x16 b) { return a > b ? a : b; }
#endif

// As many floats as the file's instruction set has in a register, from floats or halves.
template <typename Vector, typename Element>
inline Vector load_to(const Element* p) {
#if defined(OUTPACE_SIMD_AVX512)
    if constexpr (sizeof(Vector) == 64) {
        if constexpr (sizeof(Element) == 4) return (Vector)_mm512_loadu_ps(p);
        else return (Vector)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
    } else
#endif
    return load(p);
}

template <typename Vector>
inline void store_from(float* p, Vector v) { std::memcpy(p, &v, sizeof v); }

// e^x to about one unit in the last place: 2^n times a polynomial on [-ln2/2, ln2/2]. Results
// are limited to the smallest normal float and the largest power of two; e^0 is 1.
template <typename Vector>
inline Vector exp(Vector x) {
    typedef decltype(x < x) Integers;
    const auto splat = splat_to<Vector>;
    const Vector low = splat(-87.3365402f), high = splat(88.3762589f);
    x = x < low ? low : x;
    x = x > high ? high : x;
    const Vector magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    const Vector shifted = fma(x, splat(1.44269504f), magic);
    const Vector n = shifted - magic;
    Vector r = fma(n, splat(-0.693359375f), x);
    r = fma(n, splat(2.12194440e-4f), r);
    Vector p = splat(1.9875691500e-4f);
    p = fma(p, r, splat(1.3981999507e-3f));
    p = fma(p, r, splat(8.3334519073e-3f));
    p = fma(p, r, splat(4.1665795894e-2f));
    p = fma(p, r, splat(1.6666665459e-1f));
    p = fma(p, r, splat(5.0000001201e-1f));
    p = fma(p, r * r, r + splat(1.0f));
    Integers bits;
    std::memcpy(&bits, &shifted, sizeof bits);
    const Integers exponent = (bits + (127 - 0x4b400000)) << 23;
    Vector scale;
    std::memcpy(&scale, &exponent, sizeof scale);
    return p * scale;
}

}  // namespace
}  // namespace outpace
