// Attention over a paged cache of half floats, one key/value head at a time.
//
// A page holds kPageTokens positions of one layer. For each key/value head, keys are transposed
// ([head_dim][kPageTokens], so that eight positions are eight lanes) and values are not ([kPageTokens][head_dim]).
//
// Each query processes its positions page by page, in order, with its own running maximum, sum and output. Its result
// depends only on its own vector, its own count and the pages; queries processed together only share page reads.
#pragma once

#include <cstddef>
#include <cstdint>

namespace outpace {

constexpr int kPageTokens = 32;

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
    // Write one position's key and value of one head into a page.
    void (*write)(const float* key, const float* value, int64_t head_dim, int64_t slot, uint16_t* keys, uint16_t* values);
};

inline size_t attention_scratch_floats(int64_t num_queries, int64_t head_dim) {
    // One page of keys and values as floats; per query a maximum, eight partial sums and padding.
    return size_t(2 * kPageTokens * head_dim + 16 * num_queries);
}

const Attention& attention();            // for this processor
const Attention& attention_reference();  // plain loops over whole score vectors, for tests

const Attention& attention_portable();
const Attention& attention_avx2();
const Attention& attention_avx512();  // the same bits as attention_avx2

}  // namespace outpace
