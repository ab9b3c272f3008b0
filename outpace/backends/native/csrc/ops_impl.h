// ops.h in eight lanes. Each including file defines one accessor and is compiled for one instruction set.
#include <cmath>

#include "ops.h"
#include "simd.h"

namespace outpace {
namespace {

void rms_norm(const float* x, const float* weight, float epsilon, int64_t n, float* out) {
    f32x8 squares = splat(0);
    for (int64_t i = 0; i < n; i += kLanes) squares = fma(load(x + i), load(x + i), squares);
    const f32x8 scale = splat(1.0f / __builtin_sqrtf(sum(squares) / float(n) + epsilon));
    for (int64_t i = 0; i < n; i += kLanes) store(out + i, load(x + i) * scale * load(weight + i));
}

inline f32x8 silu_times(f32x8 gate, f32x8 up) { return gate / (splat(1.0f) + exp(-gate)) * up; }

void swiglu(float* gate, const float* up, int64_t n) {
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) store(gate + i, silu_times(load(gate + i), load(up + i)));
    if (i < n) {
        float g[kLanes] = {}, u[kLanes] = {};
        std::memcpy(g, gate + i, size_t(n - i) * sizeof(float));
        std::memcpy(u, up + i, size_t(n - i) * sizeof(float));
        store(g, silu_times(load(g), load(u)));
        std::memcpy(gate + i, g, size_t(n - i) * sizeof(float));
    }
}

void add(float* x, const float* y, int64_t n) {
    for (int64_t i = 0; i < n; i++) x[i] += y[i];
}

void rope(float* head, const float* cosines, const float* sines, int64_t num_rotated, RopeStyle style) {
    const int64_t half = num_rotated / 2;
    if (style == RopeStyle::kInterleaved) {
        for (int64_t i = 0; i < half; i++) {
            const float a = head[2 * i], b = head[2 * i + 1];
            head[2 * i] = a * cosines[i] - b * sines[i];
            head[2 * i + 1] = a * sines[i] + b * cosines[i];
        }
    } else {
        for (int64_t i = 0; i < half; i++) {
            const float a = head[i], b = head[half + i];
            head[i] = a * cosines[i] - b * sines[i];
            head[half + i] = a * sines[i] + b * cosines[i];
        }
    }
}

}  // namespace

const Ops& OUTPACE_OPS() {
    static const Ops table{rms_norm, swiglu, add, rope};
    return table;
}

}  // namespace outpace
