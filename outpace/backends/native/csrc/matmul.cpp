// Selects the kernel, and contains the reference that tests compare all kernels with.
//
// Compiling: every file with -std=c++17 -O3 -ffp-contract=off (fused multiply-adds would change bits) and
//     *_avx2.cpp          -mavx2 -mfma -mf16c
//     *_avx512.cpp        -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni -mfma -mf16c
//     *_neon.cpp          -march=armv8.2-a+dotprod        (on AArch64; Apple's compiler needs no flag)
//     the rest            nothing more
// On other architectures these files compile to nothing and need no flags.

#include "cpu_features.h"
#include "kernels_inline.h"

#include <cmath>
#include <cstdlib>

#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace outpace {
namespace {

struct Isa {
    const char* name;
    MatmulFunction* matmul;
    QuantiseFunction* quantise;
    bool usable;
};

// The best first.
const Isa* isas(int* count) {
#if defined(__x86_64__)
    const CpuFeatures cpu = features_of(read_cpu());
#endif
    static const Isa table[] = {
#if defined(__x86_64__)
        {"avx512vnni", matmul_avx512, quantise_avx2, cpu.runs_avx512_files()},
        {"avx2", matmul_avx2, quantise_avx2, cpu.runs_avx2_files()},
#elif defined(__aarch64__) && defined(__linux__)
        {"neon", matmul_neon, quantise_portable, (getauxval(AT_HWCAP) & (1ul << 20)) != 0},  // HWCAP_ASIMDDP: dot products
#elif defined(__aarch64__) && defined(__APPLE__)
        {"neon", matmul_neon, quantise_portable, true},
#endif
        {"portable", matmul_portable, quantise_portable, true},
    };
    *count = int(sizeof table / sizeof table[0]);
    return table;
}

const Isa& chosen() {
    static const Isa& isa = []() -> const Isa& {
        int count;
        const Isa* table = isas(&count);
        const char* wanted = std::getenv("OUTPACE_NATIVE_ISA");
        for (int i = 0; wanted && i < count; ++i) {
            if (table[i].usable && std::strcmp(table[i].name, wanted) == 0) return table[i];
        }
        int best = 0;
        while (!table[best].usable) ++best;
        return table[best];
    }();
    return isa;
}

// Reads a row's block of 32 value by value.
struct RowBlock {
    int codes[kBlock];
    float scale, min;
    int half[2];
};

RowBlock read_block(GgmlType type, const uint8_t* tile, int row, int64_t block) {
    const Form f = form_of(type);
    const int blocks = blocks_per_super(f), b = int(block % blocks);
    const uint8_t* super = tile + size_t(block / blocks) * super_bytes(f);
    const uint8_t* planes = super + header_bytes(f) + b * code_bytes(f);
    RowBlock out{};
    for (int k = 0; k < kBlock; ++k) {
        const int j = k / 4, at = 4 * row + k % 4;
        if (f.bits == 8) out.codes[k] = int8_t(planes[kVector * j + at]);
        else out.codes[k] = (planes[kVector * (j % 4) + at] >> (j / 4 * 4) & 15) - f.offset;
        if (f.bits == 5) out.codes[k] += (planes[kUpperAt + at] >> j & 1) * 16;
        if (f.bits == 6) out.codes[k] += (planes[kUpperAt + kVector * (j / 4) + at] >> (2 * (j % 4)) & 3) * 16;
    }
    out.scale = half_to_float(load_u16(super + 2 * row));
    out.half[0] = out.half[1] = 1;
    if (has_min(f)) out.min = half_to_float(load_u16(super + kMinAt + 2 * row));
    if (f.scales == Scales::SuperMin) {
        out.scale *= float(super[kSuperScaleAt + b * kRows + row]);
        out.min *= -float(super[kSuperMinAt + b * kRows + row]);
    }
    if (f.scales == Scales::Super16) {
        for (int h = 0; h < 2; ++h) out.half[h] = int8_t(super[kSuper16ScaleAt + 2 * (b * kRows + row) + h]);
    }
    return out;
}

float reference_quantised(const Packed& w, const uint8_t* tile, int row, const Activations& x, int64_t token) {
    const ActGroup group = act_group(x, token);
    float acc = 0.0f;
    for (int64_t block = 0; block < w.cols / kBlock; ++block) {
        const RowBlock own = read_block(w.source, tile, row, block);
        const ActBlock& act = group.first[block * group.block_stride];
        int dot = 0;
        for (int k = 0; k < kBlock; ++k) dot += own.codes[k] * act.q[k] * own.half[k / 16];
        acc = std::fma(own.scale * act.d, float(dot), acc);
        if (has_min(form_of(w.source))) acc = std::fma(own.min, act.d_sum, acc);
    }
    return acc;
}

float reference_float(const Packed& w, const uint8_t* tile, int row, const Activations& x, int64_t token) {
    float chain[4] = {};
    for (int64_t k = 0; k < w.cols; ++k) {
        const uint8_t* p = tile + size_t(k * kRows + row) * form_of(w.source).bits / 8;
        float value = 0.0f;
        if (w.source == GgmlType::F32) value = load_float<GgmlType::F32>(p);
        if (w.source == GgmlType::F16) value = load_float<GgmlType::F16>(p);
        if (w.source == GgmlType::BF16) value = load_float<GgmlType::BF16>(p);
        chain[k % 4] = std::fma(value, x.floats[token * x.cols + k], chain[k % 4]);
    }
    return (chain[0] + chain[1]) + (chain[2] + chain[3]);
}

}  // namespace

void matmul(const Packed& w, const Activations& x, float* y, int64_t y_stride, int64_t row_begin, int64_t row_end) {
    chosen().matmul(w, x, y, y_stride, row_begin, row_end);
}

void quantise(const Activations& x, int64_t token_begin, int64_t token_end, int64_t block_begin, int64_t block_end) {
    chosen().quantise(x, token_begin, token_end, block_begin, block_end);
}

void matmul_reference(const Packed& w, const Activations& x, float* y, int64_t y_stride, int64_t row_begin, int64_t row_end) {
    const Form f = form_of(w.source);
    for (int64_t token = 0; token < x.n; ++token) {
        for (int64_t r = row_begin; r < row_end; ++r) {
            const uint8_t* tile = w.data + size_t(r / kRows) * tile_bytes(f, w.cols);
            const int row = int(r % kRows);
            y[token * y_stride + r] = f.scales == Scales::None ? reference_float(w, tile, row, x, token)
                                                               : reference_quantised(w, tile, row, x, token);
        }
    }
}

const char* matmul_isa() { return chosen().name; }

}  // namespace outpace
