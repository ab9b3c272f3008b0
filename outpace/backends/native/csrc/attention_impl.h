// attention.h in the widest vectors of an instruction set. Each including file defines one accessor and is compiled for
// one instruction set. Widths change how many lanes are computed at once, and no result.
#include "attention.h"
#include "simd.h"

namespace outpace {
namespace {

// From this many queries on, convert pages to floats first. Never where one instruction loads halves as floats.
#if defined(OUTPACE_SIMD_AVX2)
constexpr int64_t kShareFrom = INT64_MAX;
#else
constexpr int64_t kShareFrom = 3;
#endif

// Queries that share what is read, and output vectors accumulated at a time for `num` queries: as many as fit in registers.
#if defined(OUTPACE_SIMD_AVX512)
typedef f32x16 Wide;
constexpr int kTogether = 6;
constexpr int gathered(int num) { return num == 1 ? 8 : 4; }
#else
typedef f32x8 Wide;
constexpr int kTogether = 2;
constexpr int gathered(int num) { return num == 1 ? 8 : 4; }
#endif
constexpr int kWide = sizeof(Wide) / sizeof(float);

// What a part holds, besides its output, which is not divided by the sum.
constexpr int kSumsAt = 16, kOutAt = kSumsAt + 16, kSumLanes = 16;
static_assert(kOutAt == kPartHeader, "a part begins with its maximum and its sums");

// The positions of one segment: its pages, as halves or as floats.
template <typename Element>
struct Segment {
    const Element* keys[kSegmentPages];
    const Element* values[kSegmentPages];
    const uint16_t *half_values[kSegmentPages], *next_keys[kSegmentPages];  // to prefetch
    int64_t begin, head_dim;
};

// Scores of a page's first positions for `num` queries. Every lane is a position, summed over d in order. Each step of d
// prefetches one line of the values of this page and of the next keys: a page has as many lines of each.
template <int num, int vectors, bool fetches, typename Element>
inline void score(const Query* const* queries, const Element* keys, const uint16_t* next_keys, const uint16_t* values, int64_t head_dim,
                  float (*scores)[kSegmentTokens], int64_t at) {
    Wide sums[num][vectors];
    for (int q = 0; q < num; q++)
        for (int v = 0; v < vectors; v++) sums[q][v] = splat_to<Wide>(0);
    for (int64_t d = 0; d < head_dim; d++) {
        if (fetches) {
            __builtin_prefetch(values + d * kPageTokens);
            __builtin_prefetch(next_keys + d * kPageTokens);
        }
        Wide key[vectors];
        for (int v = 0; v < vectors; v++) key[v] = load_to<Wide>(keys + d * kPageTokens + v * kWide);
        for (int q = 0; q < num; q++) {
            const Wide x = splat_to<Wide>(queries[q]->vector[d]);
            for (int v = 0; v < vectors; v++) sums[q][v] = fma(x, key[v], sums[q][v]);
        }
    }
    for (int q = 0; q < num; q++)
        for (int v = 0; v < vectors; v++) store_from(scores[q] + at + v * kWide, sums[q][v]);
}

// Turns the scores [begin, count) of a segment into weights; the part gets their maximum and sums.
inline void weigh(float* scores, int64_t begin, int64_t count, float* part) {
    const int64_t end = (count + kSumLanes - 1) / kSumLanes * kSumLanes;
    const auto fill_unseen = [&](float value) {
        for (int64_t i = 0; i < begin; i++) scores[i] = value;
        for (int64_t i = count; i < end; i++) scores[i] = value;
    };
    fill_unseen(-3.0e38f);
    Wide top = load_to<Wide>(scores);
    for (int64_t i = kWide; i < end; i += kWide) top = max(top, load_to<Wide>(scores + i));
    float lanes[kWide];
    store_from(lanes, top);
    f32x8 half = load(lanes);
    for (int i = kLanes; i < kWide; i += kLanes) half = max(half, load(lanes + i));
    const float largest_score = largest(half);
    for (int64_t i = 0; i < end; i += kWide) store_from(scores + i, exp(load_to<Wide>(scores + i) - splat_to<Wide>(largest_score)));
    fill_unseen(0);
    Wide sums[kSumLanes / kWide];
    for (int v = 0; v < kSumLanes / kWide; v++) sums[v] = splat_to<Wide>(0);
    for (int64_t i = 0; i < end; i += kSumLanes)
        for (int v = 0; v < kSumLanes / kWide; v++) sums[v] = sums[v] + load_to<Wide>(scores + i + v * kWide);
    for (int v = 0; v < kSumLanes / kWide; v++) store_from(part + kSumsAt + v * kWide, sums[v]);
    part[0] = largest_score;
}

// Add the weighted positions [begin, end) of a segment to `vectors` output vectors of `num` queries, in order. The first
// positions of a query begin with zero.
template <typename Vector, int num, int vectors, typename Element>
inline void gather(float* const* outs, int64_t d, const float (*weights)[kSegmentTokens], bool begins, int64_t begin, int64_t end,
                   const Segment<Element>& segment) {
    constexpr int kWidth = sizeof(Vector) / sizeof(float);
    Vector sums[num][vectors];
    for (int q = 0; q < num; q++)
        for (int v = 0; v < vectors; v++) sums[q][v] = begins ? splat_to<Vector>(0) : load_to<Vector>(outs[q] + d + v * kWidth);
    for (int64_t first = begin; first < end;) {
        const int64_t page_end = (first / kPageTokens + 1) * kPageTokens, stop = page_end < end ? page_end : end;
        const Element* values = segment.values[first / kPageTokens] + d - first / kPageTokens * kPageTokens * segment.head_dim;
        for (int64_t at = first; at < stop; at++) {
            for (int v = 0; v < vectors; v++) {
                const Vector value = load_to<Vector>(values + at * segment.head_dim + v * kWidth);
                for (int q = 0; q < num; q++) sums[q][v] = fma(splat_to<Vector>(weights[q][at]), value, sums[q][v]);
            }
        }
        first = stop;
    }
    for (int q = 0; q < num; q++)
        for (int v = 0; v < vectors; v++) store_from(outs[q] + d + v * kWidth, sums[q][v]);
}

template <int num, typename Element>
inline void gather_all(float* const* outs, const float (*weights)[kSegmentTokens], bool begins, int64_t begin, int64_t end,
                       const Segment<Element>& segment) {
    constexpr int kGathered = gathered(num);
    int64_t d = 0;
    for (; d + kGathered * kWide <= segment.head_dim; d += kGathered * kWide) gather<Wide, num, kGathered>(outs, d, weights, begins, begin, end, segment);
    if (kGathered > 4 && d + 4 * kWide <= segment.head_dim) {
        gather<Wide, num, 4>(outs, d, weights, begins, begin, end, segment);
        d += 4 * kWide;
    }
    for (; d + kWide <= segment.head_dim; d += kWide) gather<Wide, num, 1>(outs, d, weights, begins, begin, end, segment);
    for (; d < segment.head_dim; d += kLanes) gather<f32x8, num, 1>(outs, d, weights, begins, begin, end, segment);
}

// One segment for `num` queries with at least one position in it. Positions that only some of them use are added last.
template <int num, bool fetches, typename Element>
void absorb(const Query* const* queries, float* const* parts, const int64_t* counts, const Segment<Element>& segment) {
    alignas(64) float weights[num][kSegmentTokens];
    float* outs[num];
    int64_t most = 0, common = kSegmentTokens;
    for (int q = 0; q < num; q++) {
        most = counts[q] > most ? counts[q] : most;
        common = counts[q] < common ? counts[q] : common;
        outs[q] = parts[q] + kOutAt;
    }
    constexpr int kVectors = kPageTokens / kWide;
    for (int64_t page = 0; page * kPageTokens < most; page++) {
        const auto scored = most - page * kPageTokens <= kPageTokens / 2 ? score<num, kVectors / 2, fetches, Element> : score<num, kVectors, fetches, Element>;
        scored(queries, segment.keys[page], segment.next_keys[page], segment.half_values[page], segment.head_dim, weights, page * kPageTokens);
    }
    for (int q = 0; q < num; q++) weigh(weights[q], segment.begin, counts[q], parts[q]);
    gather_all<num>(outs, weights, true, segment.begin, common, segment);
    for (int q = 0; q < num; q++) {
        if (counts[q] > common) gather_all<1>(outs + q, weights + q, false, common, counts[q], segment);
    }
}

template <int num, typename Element>
void absorb_up_to(int waiting, bool fetches, const Query* const* queries, float* const* parts, const int64_t* counts, const Segment<Element>& segment) {
    if constexpr (num > 0) {
        if (waiting < num) return absorb_up_to<num - 1>(waiting, fetches, queries, parts, counts, segment);
        if (fetches) return absorb<num, true>(queries, parts, counts, segment);
        absorb<num, false>(queries, parts, counts, segment);
    }
}

template <typename Element>
void absorb_segment(const Query* queries, int64_t n, int64_t first, float* parts, const Segment<Element>& segment) {
    const Query* together[kTogether];
    float* their[kTogether];
    int64_t counts[kTogether];
    int waiting = 0;
    bool fetches = sizeof(Element) == sizeof(uint16_t);
    for (int64_t i = 0; i < n; i++) {
        const int64_t left = queries[i].count - first;
        if (left <= 0) continue;
        together[waiting] = &queries[i];
        their[waiting] = parts + i * part_floats(segment.head_dim);
        counts[waiting++] = left < kSegmentTokens ? left : int64_t(kSegmentTokens);
        if (waiting < kTogether) continue;
        absorb_up_to<kTogether>(waiting, fetches, together, their, counts, segment);
        waiting = 0;
        fetches = false;
    }
    absorb_up_to<kTogether>(waiting, fetches, together, their, counts, segment);
}

void attend_segment(const Query* queries, int64_t n, const HeadPages& pages, int64_t number, float* parts, float* scratch) {
    const int64_t head_dim = pages.head_dim, first = number * kSegmentTokens;
    int64_t longest = 0;
    for (int64_t i = 0; i < n; i++) longest = queries[i].count > longest ? queries[i].count : longest;
    const int64_t last_page = (longest - 1) / kPageTokens, begin = number ? 0 : pages.first;
    const auto at = [&](const uint16_t* base, int64_t page) { return base + pages.table[page < last_page ? page : last_page] * pages.page_stride; };
    Segment<uint16_t> halves{};
    for (int64_t i = 0; i < kSegmentPages; i++) {
        const int64_t page = number * kSegmentPages + i;
        halves.keys[i] = at(pages.keys, page);
        halves.values[i] = halves.half_values[i] = at(pages.values, page);
        halves.next_keys[i] = at(pages.keys, page + 1);
    }
    halves.begin = begin, halves.head_dim = head_dim;
    if (n < kShareFrom) return absorb_segment(queries, n, first, parts, halves);
    Segment<float> floats{};
    floats.begin = begin, floats.head_dim = head_dim;
    const int64_t page_size = kPageTokens * head_dim;
    for (int64_t i = 0; i < kSegmentPages && number * kSegmentPages + i <= last_page; i++) {
        float *keys = scratch + 2 * i * page_size, *values = keys + page_size;
        for (int64_t j = 0; j < page_size; j += kLanes) {
            store(keys + j, load(halves.keys[i] + j));
            store(values + j, load(halves.values[i] + j));
        }
        floats.keys[i] = keys, floats.values[i] = values;
    }
    absorb_segment(queries, n, first, parts, floats);
}

// Adds a later part to a part.
void fold(float* part, const float* later, int64_t head_dim) {
    const float top = part[0] > later[0] ? part[0] : later[0];
    const f32x8 rescale = exp(splat(part[0] - top)), weight = exp(splat(later[0] - top));
    part[0] = top;
    for (int64_t i = kSumsAt; i < kOutAt + head_dim; i += kLanes) store(part + i, fma(load(later + i), weight, load(part + i) * rescale));
}

void finish(const float* part, int64_t head_dim, float* out) {
    const f32x8 inverse = splat(1.0f / sum(load(part + kSumsAt) + load(part + kSumsAt + kLanes)));
    for (int64_t d = 0; d < head_dim; d += kLanes) store(out + d, load(part + kOutAt + d) * inverse);
}

void attend(const Query* queries, int64_t n, const HeadPages& pages, float* scratch) {
    const int64_t size = part_floats(pages.head_dim);
    float *const parts = scratch + 2 * kSegmentTokens * pages.head_dim, *const later = parts + n * size;
    int64_t longest = 0;
    for (int64_t i = 0; i < n; i++) longest = queries[i].count > longest ? queries[i].count : longest;
    attend_segment(queries, n, pages, 0, parts, scratch);
    for (int64_t segment = 1; segment < num_segments(longest); segment++) {
        attend_segment(queries, n, pages, segment, later, scratch);
        for (int64_t i = 0; i < n; i++) {
            if (segment < num_segments(queries[i].count)) fold(parts + i * size, later + i * size, pages.head_dim);
        }
    }
    for (int64_t i = 0; i < n; i++) finish(parts + i * size, pages.head_dim, queries[i].out);
}

void join(const Query* queries, int64_t n, int64_t head_dim, float* parts) {
    const int64_t size = part_floats(head_dim);
    for (int64_t i = 0; i < n; i++) {
        float* const part = parts + i * size;
        for (int64_t segment = 1; segment < num_segments(queries[i].count); segment++) fold(part, part + segment * n * size, head_dim);
        finish(part, head_dim, queries[i].out);
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
    static const Attention table{attend, attend_segment, join, write};
    return table;
}

}  // namespace outpace
