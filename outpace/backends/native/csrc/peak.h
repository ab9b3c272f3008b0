// The argmax of a row, merged from parts in any order: each thread searches the part that it has just computed.
#pragma once

#include <cstdint>
#include <limits>

namespace outpace {

// As in numpy's argmax, a NaN is larger than any number.
inline bool exceeds(float a, float b) { return a > b || (a != a && b == b); }

struct Peak {
    float value = -std::numeric_limits<float>::infinity();
    int32_t at = std::numeric_limits<int32_t>::max();

    // Keeps the larger one, the first of equals, so the order of merges does not matter.
    void merge(Peak other) {
        if (exceeds(other.value, value) || (!exceeds(value, other.value) && other.at < at)) *this = other;
    }
};

}  // namespace outpace
