// Quantised matrix products whose results do not depend on the other tokens of the step.
//
// y[t][r] = sum over k of W[r][k] * x[t][k], for t in 0..n-1. Every y[t][r] is computed by one fixed sequence of
// operations that depends only on W's row r and x's row t: not on n, the thread's range of rows or the other tokens.
// Integer sums inside a block are exact; blocks are added in order of k.
#pragma once

#include <cstddef>
#include <cstdint>

namespace outpace {

// ggml's numbers for the tensor types a GGUF may hold.
enum class GgmlType : int32_t {
    F32 = 0, F16 = 1, Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q4_K = 12, Q5_K = 13, Q6_K = 14, BF16 = 30
};

// A packed matrix. Rows are padded to whole tiles; padding rows are zero.
struct Packed {
    GgmlType source;
    int64_t rows, cols;   // cols is a multiple of 32 for quantised types
    const uint8_t* data;  // 64-byte aligned, packed_bytes(source, rows, cols) long
};

// Activations of n tokens, quantised to int8 in blocks of 32 with one float scale each (and sums for the kernels). The
// caller owns the buffer: activation_bytes(n, cols) long, 64-byte aligned.
struct Activations {
    int64_t n, cols;
    uint8_t* buffer;
    const float* floats;  // the original [n][cols], for float matrices
};

constexpr int kTileRows = 16;  // packed together; row ranges begin and end at a tile border or at the end of the matrix
constexpr int kBlock = 32;     // values of k that share an activation scale

bool matmul_supports(GgmlType type, int64_t rows, int64_t cols);
size_t packed_bytes(GgmlType type, int64_t rows, int64_t cols);
size_t tile_size(const Packed& w);  // in bytes
// Pack rows [row_begin, row_end) (tile-aligned) from GGUF's layout; values do not change.
void pack_rows(GgmlType type, const void* source, int64_t rows, int64_t cols, uint8_t* packed, int64_t row_begin, int64_t row_end);
// The exact values of row r of a packed matrix, as floats: for tests and for the embedding lookup.
void unpack_row(const Packed& w, int64_t row, float* out);

size_t activation_bytes(int64_t n, int64_t cols);
// Quantise blocks [block_begin, block_end) of tokens [token_begin, token_end); blocks are independent.
void quantise(const Activations& x, int64_t token_begin, int64_t token_end, int64_t block_begin, int64_t block_end);

// y is [n][y_stride]; only rows [row_begin, row_end) of each token are written. Any n >= 1.
void matmul(const Packed& w, const Activations& x, float* y, int64_t y_stride, int64_t row_begin, int64_t row_end);

// The same in plain loops, for tests. Bit-identical to the portable kernel.
void matmul_reference(const Packed& w, const Activations& x, float* y, int64_t y_stride, int64_t row_begin, int64_t row_end);

// The instruction set the kernels above use: "avx512vnni", "avx2", "neon", "portable". OUTPACE_NATIVE_ISA forces one.
const char* matmul_isa();

}  // namespace outpace
