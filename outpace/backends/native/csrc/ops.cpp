#include "ops.h"

#include <cmath>
#include <cstring>

#include "matmul.h"

namespace outpace {
namespace {

void rms_norm(const float* x, const float* weight, float epsilon, int64_t n, float* out) {
    double squares = 0;
    for (int64_t i = 0; i < n; i++) squares += double(x[i]) * x[i];
    const double scale = 1.0 / std::sqrt(squares / double(n) + epsilon);
    for (int64_t i = 0; i < n; i++) out[i] = float(x[i] * scale * weight[i]);
}

void swiglu(float* gate, const float* up, int64_t n) {
    for (int64_t i = 0; i < n; i++) gate[i] = float(double(gate[i]) / (1.0 + std::exp(-double(gate[i]))) * up[i]);
}

void add(float* x, const float* y, int64_t n) {
    for (int64_t i = 0; i < n; i++) x[i] += y[i];
}

void rope(float* head, const float* cosines, const float* sines, int64_t num_rotated, RopeStyle style) {
    const int64_t half = num_rotated / 2;
    for (int64_t i = 0; i < half; i++) {
        float& a = style == RopeStyle::kInterleaved ? head[2 * i] : head[i];
        float& b = style == RopeStyle::kInterleaved ? head[2 * i + 1] : head[half + i];
        const double x = a, y = b;
        a = float(x * cosines[i] - y * sines[i]);
        b = float(x * sines[i] + y * cosines[i]);
    }
}

}  // namespace

const Ops& ops_reference() {
    static const Ops reference{rms_norm, swiglu, add, rope};
    return reference;
}

bool has_avx2_files() {
#if defined(__x86_64__)
    return true;
#else
    return false;
#endif
}

bool uses_avx2() {
    static const bool uses = has_avx2_files() && std::strncmp(matmul_isa(), "avx", 3) == 0;
    return uses;
}

bool uses_avx512() {
    static const bool uses = uses_avx2() && std::strncmp(matmul_isa(), "avx512", 6) == 0;
    return uses;
}

#if !defined(__x86_64__)
const Ops& ops_avx2() { return ops_portable(); }
#endif

const Ops& ops() {
    static const Ops& chosen = uses_avx2() ? ops_avx2() : ops_portable();
    return chosen;
}

void rope_angles(int64_t position, const double* frequencies, int64_t n, float scale, float* cosines, float* sines) {
    for (int64_t i = 0; i < n; i++) {
        const double angle = double(position) * frequencies[i];
        cosines[i] = float(std::cos(angle)) * scale;
        sines[i] = float(std::sin(angle)) * scale;
    }
}

}  // namespace outpace
