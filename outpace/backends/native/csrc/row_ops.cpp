#include "row_ops.h"

#include <limits>

#include "numerics.h"
#include "ops.h"
#include "peak.h"

namespace outpace {
namespace {

int64_t argmax(const float* x, int64_t n) {
    int64_t at = 0;
    for (int64_t i = 1; i < n; i++) at = exceeds(x[i], x[at]) ? i : at;
    return at;
}

void powers(const float* x, int64_t n, float largest, float sharpness, float* out) {
    for (int64_t i = 0; i < n; i++) {
        float f = (x[i] - largest) * sharpness;
        if (!(f > kSmallestPower)) f = kSmallestPower;
        const float shifted = f + kPowerRounder;
        f -= shifted - kPowerRounder;
        float power = f * kPowerCoefficients[4];
        for (int j = 3; j >= 0; j--) power = (power + kPowerCoefficients[j]) * f;
        power += kPowerShift;
        uint32_t exponent;
        std::memcpy(&exponent, &shifted, 4);
        exponent <<= 23;
        float scale;
        std::memcpy(&scale, &exponent, 4);
        out[i] = power * scale;
    }
}

float allowed_or_lowest(const float* x, const uint32_t* allowed, int64_t i) {
    return allowed[i / 32] >> (i % 32) & 1 ? x[i] : -std::numeric_limits<float>::infinity();
}

int64_t argmax_allowed(const float* x, const uint32_t* allowed, int64_t n) {
    int64_t at = 0;
    for (int64_t i = 1; i < n; i++) at = exceeds(allowed_or_lowest(x, allowed, i), allowed_or_lowest(x, allowed, at)) ? i : at;
    return at;
}

void powers_allowed(const float* x, const uint32_t* allowed, int64_t n, float largest, float sharpness, float* out) {
    for (int64_t i = 0; i < n; i++) {
        const float one = allowed_or_lowest(x, allowed, i);
        powers(&one, 1, largest, sharpness, out + i);
    }
}

float total_of_row(const float* x, int64_t n, float* sums) { return total(x, n, sums); }

void divide(float* x, int64_t n, float divisor) {
    for (int64_t i = 0; i < n; i++) x[i] /= divisor;
}

int64_t collect(const float* x, int64_t n, float bound, int32_t* places) {
    int64_t count = 0;
    for (int64_t i = 0; i < n; i++) {
        if (x[i] >= bound) places[count++] = int32_t(i);
    }
    return count;
}

bool residual(float weight, const float* target, const float* draft, int64_t n, float* out) {
    bool is_left = false;
    for (int64_t i = 0; i < n; i++) {
        const float left = weight * target[i] - draft[i];
        out[i] = left > 0.0f ? left : 0.0f;
        is_left = is_left || left > 0.0f;
    }
    return is_left;
}

}  // namespace

const RowOps& row_ops_reference() {
    static const RowOps reference{argmax, powers, argmax_allowed, powers_allowed, total_of_row, divide, collect, residual};
    return reference;
}

#if !defined(__x86_64__)
const RowOps& row_ops_avx2() { return row_ops_portable(); }
#endif

const RowOps& row_ops() {
    static const RowOps& chosen = uses_avx2() ? row_ops_avx2() : row_ops_portable();
    return chosen;
}

}  // namespace outpace
