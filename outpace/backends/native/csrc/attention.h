// Attention over a paged cache of half floats, one key/value head at a time.
//
// A page holds kPageTokens positions of one layer. For each key/value head, keys are transposed
// ([head_dim][kPageTokens], so that eight positions are eight lanes) and values are not ([kPageTokens][head_dim]).
//
// Positions are divided into segments of a fixed size. The part of a query in a segment is the maximum of its scores, the
// sum of its weights and its weighted values; the parts of a query are added in order. A result thus depends only on the
// query's own vector, its own count and the pages. Queries processed together share what is read, and threads may share
// the segments.
#pragma once

#include <cstddef>
#include <cstdint>

namespace outpace {

constexpr int kPageTokens = 32;
constexpr int kSegmentPages = 4, kSegmentTokens = kSegmentPages * kPageTokens;
constexpr int kPartHeader = 32;  // floats: the maximum, padding, and sixteen partial sums

inline int64_t num_segments(int64_t count) { return (count + kSegmentTokens - 1) / kSegmentTokens; }
inline int64_t part_floats(int64_t head_dim) { return kPartHeader + head_dim; }

struct Query {
    const float* vector;  // [head_dim], already scaled
    float* out;           // [head_dim]
    int64_t count;        // attends to positions 0 .. count - 1
};

// One layer's cache for one key/value head.
struct HeadPages {
    const uint16_t* keys;    // this head's keys in page 0
    const uint16_t* values;  // this head's values in page 0
    int64_t page_stride;     // halves from one page to the next, for both
    const int32_t* table;    // page numbers of the sequence, in order of position
    int64_t head_dim;        // a multiple of 8
    int64_t first = 0;       // positions before it are not attended to; it lies in the first page
};

struct Attention {
    // Query counts may come in any order. `scratch` is scratch_floats(n, head_dim) long.
    void (*attend)(const Query* queries, int64_t n, const HeadPages& pages, float* scratch);
    // The same in two steps; the reference has only the whole. First the parts of one segment, [n][part_floats(head_dim)],
    // of the queries with positions in it. Then, from [number of segments][n] parts, which are overwritten, the results.
    void (*attend_segment)(const Query* queries, int64_t n, const HeadPages& pages, int64_t segment, float* parts, float* scratch);
    void (*join)(const Query* queries, int64_t n, int64_t head_dim, float* parts);
    // Write one position's key and value of one head into a page.
    void (*write)(const float* key, const float* value, int64_t head_dim, int64_t slot, uint16_t* keys, uint16_t* values);
};

inline size_t attention_scratch_floats(int64_t num_queries, int64_t head_dim) {
    // A segment of keys and values as floats; two parts per query.
    return size_t(2 * kSegmentTokens * head_dim + 2 * num_queries * part_floats(head_dim));
}

const Attention& attention();            // for this processor
const Attention& attention_reference();  // plain loops over whole score vectors, for tests

const Attention& attention_portable();
const Attention& attention_avx2();
const Attention& attention_avx512();  // the same bits as attention_avx2

}  // namespace outpace
