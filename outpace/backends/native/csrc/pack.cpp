// Converts a matrix from GGUF's layout to tiles of 16 rows, and back to floats. Only the order changes: every code,
// scale and minimum of the file keeps its value.

#include "kernels_inline.h"

namespace outpace {
namespace {

// A super-block of one row, decoded from the file.
struct RowSuper {
    uint8_t codes[kSuperBlocks][kBlock];
    uint16_t d, min;                              // f16
    uint8_t scale[kSuperBlocks][2], minimum[kSuperBlocks];  // of SuperMin ([b][0] only) and Super16
};

constexpr size_t source_super_bytes(GgmlType type) {
    switch (type) {
        case GgmlType::Q4_0: return 18;
        case GgmlType::Q4_1: return 20;
        case GgmlType::Q5_0: return 22;
        case GgmlType::Q5_1: return 24;
        case GgmlType::Q8_0: return 34;
        case GgmlType::Q4_K: return 144;
        case GgmlType::Q5_K: return 176;
        case GgmlType::Q6_K: return 210;
        default: return 0;
    }
}

// Q4_0, Q4_1, Q5_0, Q5_1: scale, minimum if any, fifth bits if any, nibbles of k and k + 16 in one byte.
void read_small(Form f, const uint8_t* p, RowSuper& out) {
    out.d = load_u16(p);
    p += 2;
    if (has_min(f)) {
        out.min = load_u16(p);
        p += 2;
    }
    uint32_t fifth = 0;
    if (f.bits == 5) {
        memcpy(&fifth, p, 4);
        p += 4;
    }
    for (int i = 0; i < 16; ++i) {
        out.codes[0][i] = uint8_t((p[i] & 15) | ((fifth >> i & 1) << 4));
        out.codes[0][i + 16] = uint8_t((p[i] >> 4) | ((fifth >> (i + 16) & 1) << 4));
    }
}

void read_q8_0(const uint8_t* p, RowSuper& out) {
    out.d = load_u16(p);
    memcpy(out.codes[0], p + 2, kBlock);
}

// Q4_K, Q5_K: d, dmin, 8 six-bit scales and minima in 12 bytes, fifth bits if any, nibbles of two blocks in one byte.
void read_super_min(Form f, const uint8_t* p, RowSuper& out) {
    out.d = load_u16(p);
    out.min = load_u16(p + 2);
    const uint8_t* six = p + 4;
    for (int b = 0; b < 4; ++b) {
        out.scale[b][0] = six[b] & 63;
        out.minimum[b] = six[b + 4] & 63;
        out.scale[b + 4][0] = uint8_t((six[b + 8] & 15) | (six[b] >> 6 << 4));
        out.minimum[b + 4] = uint8_t((six[b + 8] >> 4) | (six[b + 4] >> 6 << 4));
    }
    const uint8_t* fifth = p + 16;
    const uint8_t* nibbles = f.bits == 5 ? p + 48 : p + 16;
    for (int b = 0; b < kSuperBlocks; ++b) {
        for (int i = 0; i < kBlock; ++i) {
            int code = nibbles[b / 2 * kBlock + i] >> (b % 2 * 4) & 15;
            if (f.bits == 5) code |= (fifth[i] >> b & 1) << 4;
            out.codes[b][i] = uint8_t(code);
        }
    }
}

// Q6_K: nibbles, upper two bits, 16 signed scales, d. Each half of 128 values interleaves its four blocks.
void read_q6_k(const uint8_t* p, RowSuper& out) {
    for (int b = 0; b < kSuperBlocks; ++b) {
        const int half = b / 4, quarter = b % 4;
        const uint8_t* nibbles = p + half * 64 + quarter % 2 * 32;
        const uint8_t* upper = p + 128 + half * 32;
        for (int i = 0; i < kBlock; ++i) {
            const int low = nibbles[i] >> (quarter / 2 * 4) & 15;
            out.codes[b][i] = uint8_t(low | (upper[i] >> (quarter * 2) & 3) << 4);
        }
        memcpy(out.scale[b], p + 192 + 2 * b, 2);
    }
    out.d = load_u16(p + 208);
}

void read_super(GgmlType type, const uint8_t* p, RowSuper& out) {
    const Form f = form_of(type);
    if (f.scales == Scales::Super16) read_q6_k(p, out);
    else if (f.scales == Scales::SuperMin) read_super_min(f, p, out);
    else if (f.bits == 8) read_q8_0(p, out);
    else read_small(f, p, out);
}

// Writes the codes of one row's block to its tile. Every byte belongs to one row, so threads may pack different rows of
// the same tile.
void write_codes(Form f, const uint8_t* codes, int row, uint8_t* planes) {
    uint8_t* own = planes + 4 * row;
    if (f.bits == 8) {
        for (int j = 0; j < 8; ++j) memcpy(own + kVector * j, codes + 4 * j, 4);
        return;
    }
    for (int i = 0; i < 4; ++i) {
        for (int c = 0; c < 4; ++c) {
            own[kVector * i + c] = uint8_t((codes[4 * i + c] & 15) | (codes[16 + 4 * i + c] & 15) << 4);
        }
    }
    const int bits_above = f.bits - 4;
    const int vectors_per_byte = bits_above == 1 ? 8 : 4;
    for (int first = 0; bits_above > 0 && first < 8; first += vectors_per_byte) {
        for (int c = 0; c < 4; ++c) {
            int byte = 0;
            for (int j = 0; j < vectors_per_byte; ++j) byte |= codes[4 * (first + j) + c] >> 4 << (j * bits_above);
            own[kUpperAt + first / vectors_per_byte * kVector + c] = uint8_t(byte);
        }
    }
}

void write_super(Form f, const RowSuper& in, int row, uint8_t* out) {
    memcpy(out + 2 * row, &in.d, 2);
    if (has_min(f)) memcpy(out + kMinAt + 2 * row, &in.min, 2);
    for (int b = 0; b < blocks_per_super(f); ++b) {
        if (f.scales == Scales::SuperMin) {
            out[kSuperScaleAt + b * kRows + row] = in.scale[b][0];
            out[kSuperMinAt + b * kRows + row] = in.minimum[b];
        }
        if (f.scales == Scales::Super16) memcpy(out + kSuper16ScaleAt + (b * kRows + row) * 2, in.scale[b], 2);
        write_codes(f, in.codes[b], row, out + header_bytes(f) + b * code_bytes(f));
    }
}

void read_codes(Form f, const uint8_t* planes, int row, int* codes) {
    for (int k = 0; k < kBlock; ++k) {
        const int j = k / 4, at = 4 * row + k % 4;
        if (f.bits == 8) {
            codes[k] = int8_t(planes[kVector * j + at]);
            continue;
        }
        int code = planes[kVector * (j % 4) + at] >> (j / 4 * 4) & 15;
        if (f.bits == 5) code |= (planes[kUpperAt + at] >> j & 1) << 4;
        if (f.bits == 6) code |= (planes[kUpperAt + kVector * (j / 4) + at] >> (2 * (j % 4)) & 3) << 4;
        codes[k] = code - f.offset;
    }
}

void unpack_super(Form f, const uint8_t* super, int row, float* out) {
    const float d = half_to_float(load_u16(super + 2 * row));
    const float min = has_min(f) ? half_to_float(load_u16(super + kMinAt + 2 * row)) : 0.0f;
    for (int b = 0; b < blocks_per_super(f); ++b) {
        int codes[kBlock];
        read_codes(f, super + header_bytes(f) + b * code_bytes(f), row, codes);
        const int at = b * kRows + row;
        for (int k = 0; k < kBlock; ++k) {
            float& value = out[b * kBlock + k];
            switch (f.scales) {  // each product is exact in a float; each sum is rounded once
                case Scales::HalfMin: value = d * float(codes[k]) + min; break;
                case Scales::SuperMin:
                    value = d * float(super[kSuperScaleAt + at]) * float(codes[k]) - min * float(super[kSuperMinAt + at]);
                    break;
                case Scales::Super16:
                    value = d * float(int8_t(super[kSuper16ScaleAt + 2 * at + k / 16])) * float(codes[k]);
                    break;
                default: value = d * float(codes[k]);
            }
        }
    }
}

bool is_float(GgmlType type) { return type == GgmlType::F32 || type == GgmlType::F16 || type == GgmlType::BF16; }

void pack_float_row(size_t value_bytes, const uint8_t* source, int64_t cols, int row, uint8_t* tile) {
    for (int64_t k = 0; k < cols; ++k) memcpy(tile + size_t(k * kRows + row) * value_bytes, source + size_t(k) * value_bytes, value_bytes);
}

void clear_float_row(size_t value_bytes, int64_t cols, int row, uint8_t* tile) {
    for (int64_t k = 0; k < cols; ++k) memset(tile + size_t(k * kRows + row) * value_bytes, 0, value_bytes);
}

}  // namespace

bool matmul_supports(GgmlType type, int64_t rows, int64_t cols) {
    const Form f = form_of(type);
    if (f.bits == 0 || rows < 1 || cols < 1) return false;
    return is_float(type) || cols % (kBlock * blocks_per_super(f)) == 0;
}

size_t packed_bytes(GgmlType type, int64_t rows, int64_t cols) {
    return size_t((rows + kRows - 1) / kRows) * tile_bytes(form_of(type), cols);
}

size_t tile_size(const Packed& w) { return tile_bytes(form_of(w.source), w.cols); }

void pack_rows(GgmlType type, const void* source, int64_t rows, int64_t cols, uint8_t* packed, int64_t row_begin, int64_t row_end) {
    const Form f = form_of(type);
    const size_t tile_out = tile_bytes(f, cols);
    const uint8_t* bytes = static_cast<const uint8_t*>(source);
    const size_t super_in = source_super_bytes(type), super_out = size_t(super_bytes(f));
    const int64_t supers = is_float(type) ? 0 : cols / (kBlock * blocks_per_super(f));
    const size_t row_bytes = is_float(type) ? size_t(cols) * f.bits / 8 : size_t(supers) * super_in;

    // The loop over super-blocks is outside the loop over rows, so that a tile is written sequentially.
    const int64_t end = row_end < rows ? row_end : (rows + kRows - 1) / kRows * kRows;  // with padding
    for (int64_t begin = row_begin; begin < end; begin += kRows) {
        uint8_t* tile = packed + size_t(begin / kRows) * tile_out;
        const int64_t stop = begin + kRows;
        if (is_float(type)) {
            for (int64_t row = begin; row < stop; ++row) {
                if (row < rows) pack_float_row(size_t(f.bits / 8), bytes + size_t(row) * row_bytes, cols, int(row % kRows), tile);
                else clear_float_row(size_t(f.bits / 8), cols, int(row % kRows), tile);
            }
            continue;
        }
        const RowSuper nothing{};
        RowSuper super{};
        for (int64_t s = 0; s < supers; ++s) {
            for (int64_t row = begin; row < stop; ++row) {
                if (row < rows) read_super(type, bytes + size_t(row) * row_bytes + size_t(s) * super_in, super);
                write_super(f, row < rows ? super : nothing, int(row % kRows), tile + size_t(s) * super_out);
            }
        }
    }
}

void unpack_row(const Packed& w, int64_t row, float* out) {
    const Form f = form_of(w.source);
    const uint8_t* tile = w.data + size_t(row / kRows) * tile_bytes(f, w.cols);
    const int own = int(row % kRows);
    if (is_float(w.source)) {
        for (int64_t k = 0; k < w.cols; ++k) {
            const uint8_t* p = tile + size_t(k * kRows + own) * f.bits / 8;
            if (w.source == GgmlType::F32) out[k] = load_float<GgmlType::F32>(p);
            else if (w.source == GgmlType::F16) out[k] = load_float<GgmlType::F16>(p);
            else out[k] = load_float<GgmlType::BF16>(p);
        }
        return;
    }
    const int64_t values = kBlock * blocks_per_super(f);
    for (int64_t s = 0; s * values < w.cols; ++s) unpack_super(f, tile + size_t(s) * super_bytes(f), own, out + s * values);
}

}  // namespace outpace
