// A row's largest number, found in parts: by several threads, each over what it has just computed, in whatever order.
#pragma once

#include <cstdint>
#include <limits>

namespace outpace {

// As numpy's argmax has it: a NaN is larger than any number.
inline bool exceeds(float a, float b) { return a > b || (a != a && b == b); }

struct Peak {
    float value = -std::numeric_limits<float>::infinity();
    int32_t at = std::numeric_limits<int32_t>::max();

    // The larger one, the first of equals: the order in which parts come in does not matter.
    void merge(Peak other) {
        if (exceeds(other.value, value) || (!exceeds(value, other.value) && other.at < at)) *this = other;
    }
};

}  // namespace outpace
