// Half-open ranges, and their division among threads.
#pragma once

#include <cstdint>

namespace outpace {

struct Range {
    int64_t begin, end;
};

// The contiguous share of part `index` of `total` items, in whole grains.
inline Range split(int64_t total, int64_t grain, int parts, int index) {
    const int64_t grains = (total + grain - 1) / grain;
    const auto bound = [&](int64_t i) {
        const int64_t at = grains * i / parts * grain;
        return at < total ? at : total;
    };
    return {bound(index), bound(index + 1)};
}

}  // namespace outpace
