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

// --- rows of which some tokens are forbidden: in blocks of 64 tokens, which is two words of the mask --------------------

static_assert(kBlock == 64, "a block has two words of a mask");

// The bits of the tokens from `i` to the end of their block; i is a multiple of kBlock.
inline uint64_t bits_at(const uint32_t* allowed, int64_t i, int64_t n) {
    const uint64_t low = allowed[i / 32];
    return i + 32 < n ? low | uint64_t(allowed[i / 32 + 1]) << 32 : low;
}

// Eight numbers, with minus infinity where the lowest eight bits are not set.
inline f32x8 only_allowed(f32x8 x, uint64_t bits) {
    const int32_t byte = int32_t(bits & 0xff);
    const i32x8 set = i32x8{byte, byte, byte, byte, byte, byte, byte, byte} & i32x8{1, 2, 4, 8, 16, 32, 64, 128};
    return set != 0 ? x : splat(-__builtin_inff());
}

// Copies a block and replaces forbidden numbers, and those after the row's end, by minus infinity.
inline void copy_block(const float* x, int64_t count, uint64_t bits, float* out) {
    if (count >= kBlock) {
        for (int j = 0; j < kBlock; j += kLanes) store(out + j, only_allowed(load(x + j), bits >> j));
    } else {
        for (int j = 0; j < kBlock; j++) out[j] = j < count && bits >> j & 1 ? x[j] : -__builtin_inff();
    }
}

int64_t argmax_allowed(const float* x, const uint32_t* allowed, int64_t n) {
    float best = -__builtin_inff(), block[kBlock];
    int64_t at = 0;
    for (int64_t i = 0; i < n; i += kBlock) {
        const uint64_t bits = bits_at(allowed, i, n);
        if (!bits) continue;
        copy_block(x + i, n - i, bits, block);
        if (has_nan(block) || any(largest_of_block(block) > splat(best))) {
            const int64_t here = argmax(block, kBlock);
            if (block[here] != block[here]) return i + here;
            best = block[here];
            at = i + here;
        }
    }
    return at;
}

void powers_allowed(const float* x, const uint32_t* allowed, int64_t n, float largest, float sharpness, float* out) {
    const f32x8 top = splat(largest), factor = splat(sharpness);
    for (int64_t i = 0; i < n; i += kBlock) {
        const int64_t count = n - i < kBlock ? n - i : kBlock;
        const uint64_t bits = bits_at(allowed, i, n);
        if (!bits) {
            std::memset(out + i, 0, size_t(count) * sizeof(float));
        } else if (count == kBlock) {
            for (int j = 0; j < kBlock; j += kLanes) store(out + i + j, powers_of(only_allowed(load(x + i + j), bits >> j), top, factor));
        } else {
            float block[kBlock];
            copy_block(x + i, count, bits, block);
            powers(block, count, largest, sharpness, out + i);
        }
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
    static const RowOps table{argmax, powers, argmax_allowed, powers_allowed, total_of_row, divide, collect, residual};
    return table;
}

}  // namespace outpace
