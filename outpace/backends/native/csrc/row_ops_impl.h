// row_ops.h in eight lanes. Each including file defines one accessor and is compiled for one instruction set.
#include "numerics.h"
#include "row_ops.h"
#include "simd.h"

namespace outpace {
namespace {

constexpr int kBlock = 8 * kLanes;  // tested as a whole first, then number by number if it contains a match

// The largest of a block per lane, that is over every eighth number.
inline f32x8 largest_of_block(const float* x) {
    f32x8 m = load(x);
    for (int i = kLanes; i < kBlock; i += kLanes) m = max(load(x + i), m);
    return m;
}

inline bool has_nan(const float* x) {
    i32x8 lanes = load(x) != load(x);
    for (int i = kLanes; i < kBlock; i += kLanes) lanes |= load(x + i) != load(x + i);
    return any(lanes);
}

int64_t argmax(const float* x, int64_t n) {
    float best = -__builtin_inff();
    int64_t at = 0, i = 0;
    for (; i + kBlock <= n; i += kBlock) {
        if (has_nan(x + i)) break;
        const f32x8 here = largest_of_block(x + i);
        if (any(here > splat(best))) {
            best = largest(here);
            at = i;
        }
    }
    for (; i < n; i++) {
        if (x[i] != x[i]) return i;
        if (x[i] > best) {
            best = x[i];
            at = i;
        }
    }
    while (at < n - 1 && x[at] != best) at++;
    return at;
}

inline f32x8 powers_of(f32x8 x, f32x8 largest, f32x8 sharpness) {
    x = max((x - largest) * sharpness, splat(kSmallestPower));
    const f32x8 shifted = x + splat(kPowerRounder);
    x -= shifted - splat(kPowerRounder);
    f32x8 power = x * splat(kPowerCoefficients[4]);
    for (int i = 3; i >= 0; i--) power = (power + splat(kPowerCoefficients[i])) * x;
    power += splat(kPowerShift);
    i32x8 exponents;
    std::memcpy(&exponents, &shifted, sizeof exponents);
    exponents <<= 23;
    f32x8 scale;
    std::memcpy(&scale, &exponents, sizeof scale);
    return power * scale;
}

void powers(const float* x, int64_t n, float largest, float sharpness, float* out) {
    const f32x8 top = splat(largest), factor = splat(sharpness);
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) store(out + i, powers_of(load(x + i), top, factor));
    if (i < n) {
        float rest[kLanes] = {};
        std::memcpy(rest, x + i, size_t(n - i) * sizeof(float));
        store(rest, powers_of(load(rest), top, factor));
        std::memcpy(out + i, rest, size_t(n - i) * sizeof(float));
    }
}

float total_of_row(const float* x, int64_t n, float* sums) { return total(x, n, sums); }

void divide(float* x, int64_t n, float divisor) {
    for (int64_t i = 0; i < n; i++) x[i] /= divisor;
}

int64_t collect(const float* x, int64_t n, float bound, int32_t* places) {
    int64_t count = 0, i = 0;
    for (; i + kBlock <= n; i += kBlock) {
        if (!any(largest_of_block(x + i) >= splat(bound))) continue;
        for (int64_t j = i; j < i + kBlock; j++) {
            places[count] = int32_t(j);
            count += x[j] >= bound;
        }
    }
    for (; i < n; i++) {
        places[count] = int32_t(i);
        count += x[i] >= bound;
    }
    return count;
}

bool residual(float weight, const float* target, const float* draft, int64_t n, float* out) {
    for (int64_t i = 0; i < n; i++) {
        const float left = weight * target[i] - draft[i];
        out[i] = left > 0.0f ? left : 0.0f;
    }
    return out[argmax(out, n)] > 0.0f;
}

}  // namespace

const RowOps& OUTPACE_ROW_OPS() {
    static const RowOps table{argmax, powers, total_of_row, divide, collect, residual};
    return table;
}

}  // namespace outpace
