// outpace/decoding/randomness.py in C++: counter-based noise, addressed by (seed, purpose, place).
#pragma once

#include <cstdint>
#include <initializer_list>

namespace outpace {

enum class Purpose : uint64_t { kToken = 1, kTail = 2, kAccept = 3, kRecover = 4, kDraft = 5 };

constexpr uint64_t kGolden = 0x9E3779B97F4A7C15u;

inline uint64_t mix(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

inline uint64_t noise_key(uint64_t seed, Purpose purpose, std::initializer_list<uint64_t> place) {
    uint64_t k = 0;
    const auto add = [&](uint64_t word) { k = mix((k ^ mix(word + kGolden)) + kGolden); };
    add(seed);
    add(uint64_t(purpose));
    for (uint64_t word : place) add(word);
    return k;
}

// The index-th number of a stream, strictly between 0 and 1.
inline double uniform(uint64_t key, int64_t index) {
    return (double(mix(key + (uint64_t(index) + 1) * kGolden) >> 12) + 0.5) * 0x1p-52;
}

}  // namespace outpace
