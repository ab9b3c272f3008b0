// Shared by packing, quantising and all kernels: the memory layout of packed tiles and quantised activations, and the
// order of the loops over tiles and tokens.
//
// Everything defined here has internal linkage on purpose: each including file is compiled with its own -m flags, and
// the linker must never use one file's code (such as AVX-512) in another.
//
// The arithmetic, the same for all instruction sets. For output (row r, token t), with blocks b of 32 in order of k:
//     dot = sum of (code - offset) * q                       exact, int32 (Q6_K: each half times its int8 scale)
//     acc = fma(scale[r][b] * d[t][b], float(dot), acc)
//     acc = fma(min[r][b], d_sum[t][b], acc)                 only for types with a minimum
// For float matrices, chain[k % 4] = fma(w[r][k], x[t][k], chain[k % 4]); y = (chain0 + chain1) + (chain2 + chain3).
#pragma once

#include "bfloat.h"
#include "matmul.h"

#include <cstring>
#include <utility>

namespace outpace {

// One matmul per instruction set. Only those of the build's target are defined and used in matmul.cpp.
using MatmulFunction = void(const Packed&, const Activations&, float*, int64_t, int64_t, int64_t);
MatmulFunction matmul_portable, matmul_avx2, matmul_avx512, matmul_neon;
using QuantiseFunction = void(const Activations&, int64_t, int64_t, int64_t, int64_t);
QuantiseFunction quantise_portable, quantise_avx2;

namespace {

constexpr int kRows = kTileRows;
constexpr int kTokenGroup = 16;   // tokens whose activations are interleaved, block by block
constexpr int kSuperBlocks = 8;   // blocks in a super-block of the K types

// ---- packed weights ------------------------------------------------------------------------------------------------
//
// A tile is 16 rows. Its super-blocks (of one block, or of 8 for the K types) are stored in order of k. Each has a
// header with the scales of 16 rows, then the codes of its blocks, so a kernel reads memory sequentially. Vector j
// (0..7) of a block's codes is 64 bytes: byte 4 * row + c is the code of k = 4 * j + c. Planes below 8 bits:
//     nibbles   4 x 64 bytes: vector i holds j = i in the low nibbles, j = i + 4 in the high ones
//     bits=5    1 x 64 bytes: bit j is the fifth bit of vector j
//     bits=6    2 x 64 bytes: bits 2 * (j % 4) and the next, of vector j / 4, are the upper bits of vector j

enum class Scales {
    None,      // a float matrix
    Half,      // f16 scale[rows]
    HalfMin,   // f16 scale[rows], f16 min[rows]
    SuperMin,  // f16 d[rows], f16 dmin[rows], u8 scale[blocks][rows], u8 min[blocks][rows]
    Super16,   // f16 d[rows], i8 scale[blocks][rows][2 halves]
};

struct Form {
    int bits;    // per code; 8 means signed
    int offset;  // the value of a code is code - offset
    Scales scales;
};

constexpr Form form_of(GgmlType type) {
    switch (type) {
        case GgmlType::Q4_0: return {4, 8, Scales::Half};
        case GgmlType::Q4_1: return {4, 0, Scales::HalfMin};
        case GgmlType::Q5_0: return {5, 16, Scales::Half};
        case GgmlType::Q5_1: return {5, 0, Scales::HalfMin};
        case GgmlType::Q8_0: return {8, 0, Scales::Half};
        case GgmlType::Q4_K: return {4, 0, Scales::SuperMin};
        case GgmlType::Q5_K: return {5, 0, Scales::SuperMin};
        case GgmlType::Q6_K: return {6, 32, Scales::Super16};
        case GgmlType::F32: return {32, 0, Scales::None};
        case GgmlType::F16:
        case GgmlType::BF16: return {16, 0, Scales::None};
    }
    return {0, 0, Scales::None};
}

constexpr bool has_min(Form f) { return f.scales == Scales::HalfMin || f.scales == Scales::SuperMin; }
constexpr int blocks_per_super(Form f) { return f.scales == Scales::SuperMin || f.scales == Scales::Super16 ? kSuperBlocks : 1; }
constexpr int kVector = 4 * kRows;        // bytes per vector of codes
constexpr int kUpperAt = 4 * kVector;     // where the planes above the nibbles begin
constexpr int kMinAt = 2 * kRows;         // where the f16 minima begin in a header
constexpr int code_bytes(Form f) { return f.bits * kVector; }
constexpr int header_bytes(Form f) {
    switch (f.scales) {
        case Scales::Half: return 2 * kRows;
        case Scales::HalfMin: return 4 * kRows;
        case Scales::SuperMin: return 4 * kRows + 2 * kSuperBlocks * kRows;
        case Scales::Super16: return 2 * kRows + 2 * kSuperBlocks * kRows;
        case Scales::None: break;
    }
    return 0;
}
constexpr int super_bytes(Form f) { return header_bytes(f) + blocks_per_super(f) * code_bytes(f); }

// Offsets of a block's scales in the header of its super-block.
constexpr int kSuperScaleAt = 4 * kRows, kSuperMinAt = kSuperScaleAt + kSuperBlocks * kRows, kSuper16ScaleAt = 2 * kRows;

// Float matrices: for each k, the values of the tile's rows.
inline size_t tile_bytes(Form f, int64_t cols) {
    if (f.scales == Scales::None) return size_t(cols) * kRows * f.bits / 8;
    return size_t(cols / (kBlock * blocks_per_super(f))) * super_bytes(f);
}

// ---- quantised activations -----------------------------------------------------------------------------------------

struct ActBlock {
    int8_t q[kBlock];
    float d;          // x is about d * q
    float d_sum;      // d * sum, multiplied with a minimum
    int32_t sum;      // of q, multiplied with an offset
    int16_t half[2];  // sum of q[0..15], q[16..31]
};
static_assert(sizeof(ActBlock) == 48, "kernels step through activations by this size");

// Tokens are stored in groups of 16 (the last may be smaller), in a group block by block, in a block token by token.
// The tokens of a kernel are adjacent, at compile-time offsets.
struct ActGroup {
    ActBlock* first;      // block 0 of the group's first token
    int64_t block_stride;  // from a block to the next, in ActBlocks: the group's number of tokens
};

inline ActGroup act_group(const Activations& x, int64_t token) {
    const int64_t group_begin = token / kTokenGroup * kTokenGroup;
    const int64_t left = x.n - group_begin;
    const int64_t size = left < kTokenGroup ? left : kTokenGroup;
    return {reinterpret_cast<ActBlock*>(x.buffer) + group_begin * (x.cols / kBlock) + (token - group_begin), size};
}

// ---- small floats --------------------------------------------------------------------------------------------------

inline float float_from_bits(uint32_t bits) {
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

inline uint16_t load_u16(const void* p) {
    uint16_t v;
    memcpy(&v, p, 2);
    return v;
}

inline float half_to_float(uint16_t h) {
    const uint32_t sign = uint32_t(h & 0x8000u) << 16;
    const uint32_t rest = h & 0x7fffu;
    if (rest >= 0x7c00u) return float_from_bits(sign | 0x7f800000u | (rest & 0x3ffu) << 13);  // infinity, NaN
    if (rest >= 0x0400u) return float_from_bits(sign | ((rest << 13) + 0x38000000u));
    const float tiny = float(rest) * 0x1p-24f;  // zero and subnormal: exact
    return sign ? -tiny : tiny;
}


template <GgmlType Q>
inline float load_float(const uint8_t* p) {
    if constexpr (Q == GgmlType::F32) {
        float f;
        memcpy(&f, p, 4);
        return f;
    } else if constexpr (Q == GgmlType::F16) {
        return half_to_float(load_u16(p));
    } else {
        return bfloat_to_float(load_u16(p));
    }
}

// ---- quantising ----------------------------------------------------------------------------------------------------

// 1.5 * 2^23: adding it to a small float leaves the float, rounded to the nearest even integer, in the low bits.
constexpr float kRoundingAid = 12582912.0f;
constexpr int32_t kRoundingBits = 0x4b400000;

struct BlockScale {
    float d, inverse;
    bool is_usable;  // else all codes are zero
};

// From the bits of the block's largest magnitude: they order like magnitudes, with infinities and NaNs on top. A block
// with one of those gets a NaN as scale, so that the error is visible in every output that uses it.
inline BlockScale block_scale(uint32_t top) {
    const bool finite = top < 0x7f800000u;
    const float magnitude = float_from_bits(top);
    // Below this the inverse overflows; activations are never so small.
    if (!finite || magnitude < 1e-36f) return {finite ? 0.0f : float_from_bits(0x7fc00000u), 0.0f, false};
    return {magnitude / 127.0f, 127.0f / magnitude, true};
}

inline void finish_block(const BlockScale& scale, int first_half, int second_half, ActBlock& out) {
    out.half[0] = int16_t(first_half);
    out.half[1] = int16_t(second_half);
    out.sum = first_half + second_half;
    out.d = scale.d;
    out.d_sum = scale.d * float(out.sum);
}

template <class QuantiseBlock>
inline void quantise_blocks(QuantiseBlock&& quantise_block, const Activations& x, int64_t token_begin, int64_t token_end,
                            int64_t block_begin, int64_t block_end) {
    for (int64_t token = token_begin; token < token_end; ++token) {
        const ActGroup group = act_group(x, token);
        for (int64_t b = block_begin; b < block_end; ++b) {
            quantise_block(x.floats + token * x.cols + b * kBlock, group.first[b * group.block_stride]);
        }
    }
}

// ---- the loop over tiles and tokens --------------------------------------------------------------------------------

// Activations that stay in a core's L2 cache while it processes all its tiles.
constexpr int64_t kResidentBytes = 384 << 10;

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// Prefetches the weights at a fixed distance after a block of kBytes. With few tokens per tile, the reads themselves
// keep memory busy; with more computation between two reads, a prefetch is needed.
template <int kBytes>
inline void fetch_ahead(const uint8_t* block) {
    constexpr uintptr_t kDistance = 3072;
    for (int i = 0; i < kBytes; i += 64) __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(block) + kDistance + uintptr_t(i)));
}

// Calls kernel.run(tile, token, count, out, out_stride) for rows [row_begin, row_end) and every token; out is
// [count][out_stride] with 16 floats per token. Weights are read once per chunk of resident activations; a tile is
// multiplied with all tokens of the chunk while it is in the L1 cache. Padding rows of the last tile are dropped.
template <class Kernel>
inline void walk(const Kernel& kernel, const Packed& w, const Activations& x, int64_t bytes_per_token, float* y,
                 int64_t y_stride, int64_t row_begin, int64_t row_end) {
    const size_t tile_size = tile_bytes(form_of(w.source), w.cols);
    int64_t chunk = kResidentBytes / bytes_per_token / kTokenGroup * kTokenGroup;
    if (chunk < kTokenGroup) chunk = kTokenGroup;

    for (int64_t chunk_begin = 0; chunk_begin < x.n; chunk_begin += chunk) {
        const int64_t chunk_end = smaller(chunk_begin + chunk, x.n);
        for (int64_t row = row_begin; row < row_end; row += kRows) {
            const uint8_t* tile = w.data + size_t(row / kRows) * tile_size;
            const int64_t kept = smaller(kRows, row_end - row);
            for (int64_t token = chunk_begin; token < chunk_end; token += kTokenGroup) {
                const int count = int(smaller(kTokenGroup, chunk_end - token));
                float* out = y + token * y_stride + row;
                if (kept == kRows) {
                    kernel.run(tile, token, count, out, y_stride);
                } else {
                    float whole[kTokenGroup * kRows];
                    kernel.run(tile, token, count, whole, kRows);
                    for (int t = 0; t < count; ++t) memcpy(out + t * y_stride, whole + t * kRows, size_t(kept) * sizeof(float));
                }
            }
        }
    }
}

// Multiplies a tile of a quantised matrix with tokens, in parts that fit in the registers of Isa. Isa::Sizes are the
// possible numbers of tokens per part, Isa::num_parts(count) is the number of parts for `count` tokens, as equal as
// possible (9 is 3, 3 and 3), and Isa::multiply<Q, T> computes one part.
template <class Isa, GgmlType Q>
struct QuantisedKernel {
    const Activations& x;

    void run(const uint8_t* tile, int64_t token, int count, float* out, int64_t out_stride) const {
        const int parts = Isa::num_parts(count);
        const bool fetch = count > 1;
        for (int i = 0, done = 0; i < parts; ++i) {
            const int size = (count - done + parts - i - 1) / (parts - i);
            run_part(typename Isa::Sizes{}, size, tile, fetch, token + done, out + done * out_stride, out_stride);
            done += size;
        }
    }

    template <int... kSizes>
    void run_part(std::integer_sequence<int, kSizes...>, int size, const uint8_t* tile, bool fetch, int64_t token, float* out, int64_t out_stride) const {
        const ActGroup group = act_group(x, token);
        const int64_t blocks = x.cols / kBlock;
        (void)((size == kSizes && (Isa::template multiply<Q, kSizes>(tile, fetch, group.first, group.block_stride, blocks, out, out_stride), true)) || ...);
    }
};

// Calls Visitor::visit<T>() for the type of a packed matrix.
template <class Visitor>
inline void with_type(GgmlType type, const Visitor& v) {
    switch (type) {
        case GgmlType::Q4_0: return v.template visit<GgmlType::Q4_0>();
        case GgmlType::Q4_1: return v.template visit<GgmlType::Q4_1>();
        case GgmlType::Q5_0: return v.template visit<GgmlType::Q5_0>();
        case GgmlType::Q5_1: return v.template visit<GgmlType::Q5_1>();
        case GgmlType::Q8_0: return v.template visit<GgmlType::Q8_0>();
        case GgmlType::Q4_K: return v.template visit<GgmlType::Q4_K>();
        case GgmlType::Q5_K: return v.template visit<GgmlType::Q5_K>();
        case GgmlType::Q6_K: return v.template visit<GgmlType::Q6_K>();
        case GgmlType::F32: return v.template visit<GgmlType::F32>();
        case GgmlType::F16: return v.template visit<GgmlType::F16>();
        case GgmlType::BF16: return v.template visit<GgmlType::BF16>();
    }
}

// The common part of every matmul: selects the kernel for w's type and runs the loop. Each instruction set defines its
// own QuantKernel<Q> and FloatKernel<Q>.
template <template <GgmlType> class QuantKernel, template <GgmlType> class FloatKernel>
struct MatmulFrame {
    const Packed& w;
    const Activations& x;
    float* y;
    int64_t y_stride, row_begin, row_end;

    template <GgmlType Q>
    void visit() const {
        if constexpr (form_of(Q).scales == Scales::None) {
            walk(FloatKernel<Q>{x}, w, x, w.cols * int64_t(sizeof(float)), y, y_stride, row_begin, row_end);
        } else {
            walk(QuantKernel<Q>{x}, w, x, w.cols / kBlock * int64_t(sizeof(ActBlock)), y, y_stride, row_begin, row_end);
        }
    }
};

}  // namespace
}  // namespace outpace
