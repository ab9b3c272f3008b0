#include "attention.h"

#include <cmath>
#include <vector>

#include "ops.h"
#include "simd.h"

namespace outpace {
namespace {

void attend(const Query* queries, int64_t n, const HeadPages& pages, float*) {
    for (int64_t i = 0; i < n; i++) {
        const Query& query = queries[i];
        std::vector<double> weights(size_t(query.count), 0.0);
        const int64_t first = pages.first;
        double top = -INFINITY, total = 0;
        for (int64_t at = first; at < query.count; at++) {
            const uint16_t* keys = pages.keys + pages.table[at / kPageTokens] * pages.page_stride;
            for (int64_t d = 0; d < pages.head_dim; d++) {
                weights[size_t(at)] += double(query.vector[d]) * half_to_float(keys[d * kPageTokens + at % kPageTokens]);
            }
            top = std::fmax(top, weights[size_t(at)]);
        }
        for (int64_t at = first; at < query.count; at++) total += weights[size_t(at)] = std::exp(weights[size_t(at)] - top);
        for (int64_t d = 0; d < pages.head_dim; d++) {
            double sum = 0;
            for (int64_t at = first; at < query.count; at++) {
                const uint16_t* values = pages.values + pages.table[at / kPageTokens] * pages.page_stride;
                sum += weights[size_t(at)] * half_to_float(values[at % kPageTokens * pages.head_dim + d]);
            }
            query.out[d] = float(sum / total);
        }
    }
}

void write(const float* key, const float* value, int64_t head_dim, int64_t slot, uint16_t* keys, uint16_t* values) {
    for (int64_t d = 0; d < head_dim; d++) {
        keys[d * kPageTokens + slot] = float_to_half(key[d]);
        values[slot * head_dim + d] = float_to_half(value[d]);
    }
}

}  // namespace

const Attention& attention_reference() {
    static const Attention reference{attend, nullptr, nullptr, write};
    return reference;
}

#if !defined(__x86_64__)
const Attention& attention_avx2() { return attention_portable(); }
const Attention& attention_avx512() { return attention_portable(); }
#endif

const Attention& attention() {
    static const Attention& chosen = uses_avx512() ? attention_avx512() : uses_avx2() ? attention_avx2() : attention_portable();
    return chosen;
}

}  // namespace outpace
