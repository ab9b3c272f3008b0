// attention.h in eight lanes. Each including file defines one accessor and is compiled for one instruction set.
#include "attention.h"
#include "simd.h"

namespace outpace {
namespace {

constexpr int kVectors = kPageTokens / kLanes;  // vectors per page of scores
// From this many queries on, convert a page to floats first. Never where one instruction loads halves as floats.
#if defined(OUTPACE_SIMD_AVX2)
constexpr int64_t kShareFrom = INT64_MAX;
#else
constexpr int64_t kShareFrom = 3;
#endif

// Queries that share a page, and output vectors accumulated at a time for `num` queries: as many as fit in registers.
#if defined(__AVX512VL__)
constexpr int kTogether = 3;
constexpr int gathered(int) { return 8; }
#else
constexpr int kTogether = 2;
constexpr int gathered(int num) { return num == 1 ? 8 : 4; }
#endif

// A query's state from page to page, besides its output, which is not yet divided by the sum.
struct Running {
    float top;
    float sums[kLanes];
};

// Scores of a page's first positions for `num` queries. Every lane is a position, summed over d in order.
template <int num, int vectors, typename Element>
inline void score(const Query* const* queries, const Element* keys, int64_t head_dim, f32x8 (*scores)[kVectors]) {
    f32x8 sums[num][vectors];
    for (int q = 0; q < num; q++)
        for (int v = 0; v < vectors; v++) sums[q][v] = splat(0);
    for (int64_t d = 0; d < head_dim; d++) {
        f32x8 key[vectors];
        for (int v = 0; v < vectors; v++) key[v] = load(keys + d * kPageTokens + v * kLanes);
        for (int q = 0; q < num; q++) {
            const f32x8 x = splat(queries[q]->vector[d]);
            for (int v = 0; v < vectors; v++) sums[q][v] = fma(x, key[v], sums[q][v]);
        }
    }
    for (int q = 0; q < num; q++)
        for (int v = 0; v < vectors; v++) scores[q][v] = sums[q][v];
}

// Turns the scores [begin, count) of a page into weights and updates the query's maximum and sums. Returns the factor
// that rescales the output so far.
inline float weigh(Running& running, const f32x8* scores, int64_t begin, int64_t count, float* weights) {
    const i32x8 lanes{0, 1, 2, 3, 4, 5, 6, 7};
    const f32x8 lowest = splat(-__builtin_inff());
    const int vectors = int(count + kLanes - 1) / kLanes;
    const auto is_seen = [&](int v) { return (lanes + v * kLanes < int32_t(count)) & (lanes + v * kLanes >= int32_t(begin)); };
    f32x8 top = splat(running.top);
    for (int v = 0; v < vectors; v++) {
        const i32x8 seen = is_seen(v);
        top = max(top, seen ? scores[v] : lowest);
    }
    const float new_top = largest(top);
    const f32x8 rescale = exp(splat(running.top - new_top));
    f32x8 sums = load(running.sums) * rescale;
    for (int v = 0; v < vectors; v++) {
        const i32x8 seen = is_seen(v);
        const f32x8 weight = seen ? exp(scores[v] - splat(new_top)) : splat(0);
        sums = sums + weight;
        store(weights + v * kLanes, weight);
    }
    store(running.sums, sums);
    running.top = new_top;
    return rescale[0];
}

// Rescale `vectors` output vectors of `num` queries and add the weighted positions [begin, end) to them, in order.
template <int num, int vectors, typename Element>
inline void gather(const Query* const* queries, int64_t d, const float (*weights)[kPageTokens], const float* rescale, int64_t begin,
                   int64_t end, const Element* values, int64_t head_dim) {
    f32x8 sums[num][vectors];
    for (int q = 0; q < num; q++)
        for (int v = 0; v < vectors; v++) sums[q][v] = load(queries[q]->out + d + v * kLanes) * splat(rescale[q]);
    for (int64_t at = begin; at < end; at++) {
        for (int v = 0; v < vectors; v++) {
            const f32x8 value = load(values + at * head_dim + d + v * kLanes);
            for (int q = 0; q < num; q++) sums[q][v] = fma(splat(weights[q][at]), value, sums[q][v]);
        }
    }
    for (int q = 0; q < num; q++)
        for (int v = 0; v < vectors; v++) store(queries[q]->out + d + v * kLanes, sums[q][v]);
}

template <int num, typename Element>
inline void gather_all(const Query* const* queries, const float (*weights)[kPageTokens], const float* rescale, int64_t begin, int64_t end,
                       const Element* values, int64_t head_dim) {
    constexpr int kGathered = gathered(num);
    int64_t d = 0;
    for (; d + kGathered * kLanes <= head_dim; d += kGathered * kLanes) {
        gather<num, kGathered>(queries, d, weights, rescale, begin, end, values, head_dim);
    }
    for (; d < head_dim; d += kLanes) gather<num, 1>(queries, d, weights, rescale, begin, end, values, head_dim);
}

// One page for `num` queries with at least one position in it. Positions that only some of them use are added last.
template <int num, typename Element>
void absorb(const Query* const* queries, Running* const* running, int64_t begin, const int64_t* counts, const Element* keys,
            const Element* values, int64_t head_dim) {
    f32x8 scores[num][kVectors];
    float weights[num][kPageTokens], rescale[num];
    int64_t most = 0, common = kPageTokens;
    for (int q = 0; q < num; q++) {
        most = counts[q] > most ? counts[q] : most;
        common = counts[q] < common ? counts[q] : common;
    }
    if (most <= kPageTokens / 2) score<num, kVectors / 2>(queries, keys, head_dim, scores);
    else score<num, kVectors>(queries, keys, head_dim, scores);
    for (int q = 0; q < num; q++) rescale[q] = weigh(*running[q], scores[q], begin, counts[q], weights[q]);
    gather_all<num>(queries, weights, rescale, begin, common, values, head_dim);
    const float as_it_is = 1.0f;
    for (int q = 0; q < num; q++) {
        if (counts[q] > common) gather_all<1>(queries + q, weights + q, &as_it_is, common, counts[q], values, head_dim);
    }
}

template <typename Element>
void absorb_page(const Query* queries, int64_t n, Running* running, int64_t first, const HeadPages& pages, const Element* keys,
                 const Element* values) {
    const int64_t head_dim = pages.head_dim, begin = first ? 0 : pages.first;
    const Query* together[kTogether];
    Running* their[kTogether];
    int64_t counts[kTogether];
    int waiting = 0;
    for (int64_t i = 0; i < n; i++) {
        const int64_t left = queries[i].count - first;
        if (left <= 0) continue;
        together[waiting] = &queries[i];
        their[waiting] = &running[i];
        counts[waiting++] = left < kPageTokens ? left : int64_t(kPageTokens);
        if (waiting < kTogether) continue;
        absorb<kTogether>(together, their, begin, counts, keys, values, head_dim);
        waiting = 0;
    }
    if (kTogether > 2 && waiting == 2) absorb<2>(together, their, begin, counts, keys, values, head_dim);
    else if (waiting) absorb<1>(together, their, begin, counts, keys, values, head_dim);
}

// Prefetch the next page: without it, each page would begin with a wait for its first cache lines.
inline void fetch_page(const HeadPages& pages, int64_t page) {
    constexpr int64_t kLineHalves = 32;
    const uint16_t *keys = pages.keys + page * pages.page_stride, *values = pages.values + page * pages.page_stride;
    for (int64_t i = 0; i < kPageTokens * pages.head_dim; i += kLineHalves) {
        __builtin_prefetch(keys + i);
        __builtin_prefetch(values + i);
    }
}

void attend(const Query* queries, int64_t n, const HeadPages& pages, float* scratch) {
    const int64_t head_dim = pages.head_dim, page_size = kPageTokens * head_dim;
    float* const keys = scratch;
    float* const values = scratch + page_size;
    Running* const running = reinterpret_cast<Running*>(scratch + 2 * page_size);
    int64_t longest = 0;
    for (int64_t i = 0; i < n; i++) {
        running[i] = Running{-3.0e38f, {}};
        std::memset(queries[i].out, 0, size_t(head_dim) * sizeof(float));
        longest = queries[i].count > longest ? queries[i].count : longest;
    }
    for (int64_t first = 0; first < longest; first += kPageTokens) {
        const int64_t offset = pages.table[first / kPageTokens] * pages.page_stride;
        const uint16_t *half_keys = pages.keys + offset, *half_values = pages.values + offset;
        if (first + kPageTokens < longest) fetch_page(pages, pages.table[first / kPageTokens + 1]);
        if (n < kShareFrom) {
            absorb_page(queries, n, running, first, pages, half_keys, half_values);
            continue;
        }
        for (int64_t i = 0; i < page_size; i += kLanes) {
            store(keys + i, load(half_keys + i));
            store(values + i, load(half_values + i));
        }
        absorb_page(queries, n, running, first, pages, keys, values);
    }
    for (int64_t i = 0; i < n; i++) {
        const f32x8 inverse = splat(1.0f / sum(load(running[i].sums)));
        for (int64_t d = 0; d < head_dim; d += kLanes) store(queries[i].out + d, load(queries[i].out + d) * inverse);
    }
}

void write(const float* key, const float* value, int64_t head_dim, int64_t slot, uint16_t* keys, uint16_t* values) {
    for (int64_t d = 0; d < head_dim; d += kLanes) {
        uint16_t halves[kLanes];
        store(halves, load(key + d));
        for (int i = 0; i < kLanes; i++) keys[(d + i) * kPageTokens + slot] = halves[i];
        store(values + slot * head_dim + d, load(value + d));
    }
}

}  // namespace

const Attention& OUTPACE_ATTENTION() {
    static const Attention table{attend, write};
    return table;
}

}  // namespace outpace
