// attention.h in eight lanes. Each including file names the accessor to define and is compiled for one instruction set.
#include "attention.h"
#include "simd.h"

namespace outpace {
namespace {

constexpr int kVectors = kPageTokens / kLanes;  // a page's scores, in vectors
// So many queries repay turning a page into floats first; where one instruction loads halves as floats, none do.
#if defined(OUTPACE_SIMD_AVX2)
constexpr int64_t kShareFrom = INT64_MAX;
#else
constexpr int64_t kShareFrom = 3;
#endif

// What a query carries from page to page; its output, not yet divided by the sum, is the rest.
struct Running {
    float top;
    float sums[kLanes];
};

// Scores of all positions of a page, for `num` queries at once: every lane is a position, summed over d in order.
template <int num, typename Element>
inline void score(const Query* const* queries, const Element* keys, int64_t head_dim, f32x8 (*scores)[kVectors]) {
    f32x8 sums[num][kVectors];
    for (int q = 0; q < num; q++)
        for (int v = 0; v < kVectors; v++) sums[q][v] = splat(0);
    for (int64_t d = 0; d < head_dim; d++) {
        f32x8 key[kVectors];
        for (int v = 0; v < kVectors; v++) key[v] = load(keys + d * kPageTokens + v * kLanes);
        for (int q = 0; q < num; q++) {
            const f32x8 x = splat(queries[q]->vector[d]);
            for (int v = 0; v < kVectors; v++) sums[q][v] = fma(x, key[v], sums[q][v]);
        }
    }
    for (int q = 0; q < num; q++)
        for (int v = 0; v < kVectors; v++) scores[q][v] = sums[q][v];
}

// Add `vectors` vectors of the output, weighted over the page's positions in order.
template <int vectors, typename Element>
inline void gather(const float* weights, int64_t count, const Element* values, int64_t head_dim, f32x8 rescale, float* out) {
    f32x8 sums[vectors];
    for (int v = 0; v < vectors; v++) sums[v] = load(out + v * kLanes) * rescale;
    for (int64_t at = 0; at < count; at++) {
        const f32x8 weight = splat(weights[at]);
        for (int v = 0; v < vectors; v++) sums[v] = fma(weight, load(values + at * head_dim + v * kLanes), sums[v]);
    }
    for (int v = 0; v < vectors; v++) store(out + v * kLanes, sums[v]);
}

// One page of one query: `count` of its positions are seen, and at least one.
template <typename Element>
void absorb(const Query& query, Running& running, f32x8* scores, int64_t count, const Element* values, int64_t head_dim) {
    const i32x8 lanes{0, 1, 2, 3, 4, 5, 6, 7};
    const f32x8 lowest = splat(-__builtin_inff());
    f32x8 top = splat(running.top);
    for (int v = 0; v < kVectors; v++) {
        const i32x8 seen = lanes + v * kLanes < int32_t(count);
        scores[v] = seen ? scores[v] : lowest;
        top = max(top, scores[v]);
    }
    const float new_top = largest(top);
    const f32x8 rescale = exp(splat(running.top - new_top));
    f32x8 sums = load(running.sums) * rescale;
    float weights[kPageTokens];
    for (int v = 0; v < kVectors; v++) {
        const i32x8 seen = lanes + v * kLanes < int32_t(count);
        const f32x8 weight = seen ? exp(scores[v] - splat(new_top)) : splat(0);
        sums = sums + weight;
        store(weights + v * kLanes, weight);
    }
    store(running.sums, sums);
    running.top = new_top;
    int64_t d = 0;
    for (; d + 8 * kLanes <= head_dim; d += 8 * kLanes) gather<8>(weights, count, values + d, head_dim, rescale, query.out + d);
    for (; d < head_dim; d += kLanes) gather<1>(weights, count, values + d, head_dim, rescale, query.out + d);
}

template <typename Element>
void absorb_page(const Query* queries, int64_t n, Running* running, int64_t first, const Element* keys, const Element* values,
                 int64_t head_dim) {
    const auto seen = [&](const Query& query) {
        const int64_t left = query.count - first;
        return left < kPageTokens ? left : int64_t(kPageTokens);
    };
    f32x8 scores[2][kVectors];
    const Query* pair[2];
    int64_t number[2];
    int waiting = 0;
    for (int64_t i = 0; i < n; i++) {
        if (seen(queries[i]) <= 0) continue;
        pair[waiting] = &queries[i];
        number[waiting++] = i;
        if (waiting < 2) continue;
        score<2>(pair, keys, head_dim, scores);
        for (int q = 0; q < 2; q++) absorb(*pair[q], running[number[q]], scores[q], seen(*pair[q]), values, head_dim);
        waiting = 0;
    }
    if (waiting) {
        score<1>(pair, keys, head_dim, scores);
        absorb(*pair[0], running[number[0]], scores[0], seen(*pair[0]), values, head_dim);
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
        if (n < kShareFrom) {
            absorb_page(queries, n, running, first, half_keys, half_values, head_dim);
            continue;
        }
        for (int64_t i = 0; i < page_size; i += kLanes) {
            store(keys + i, load(half_keys + i));
            store(values + i, load(half_values + i));
        }
        absorb_page(queries, n, running, first, keys, values, head_dim);
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
