// Conversions between float and bfloat16, the upper half of a float.
#pragma once

#include <cstdint>
#include <cstring>

namespace outpace {

inline float bfloat_to_float(uint16_t b) {
    const uint32_t bits = uint32_t(b) << 16;
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

// Rounds to nearest, ties to even. A NaN stays a NaN or becomes an infinity, as the hidden state already was useless.
inline uint16_t float_to_bfloat(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return uint16_t((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

}  // namespace outpace
