// outpace/decoding/numerics.py in C++: the same IEEE operations in the same order, and so the same bits.
//
// Nothing here may be fused, reassociated or replaced by a library function; the build uses -ffp-contract=off. Internal
// linkage, because files for several instruction sets include it.
#pragma once

#include <cstdint>
#include <cstring>

namespace outpace {
namespace {

constexpr float kSmallestPower = -100;
constexpr float kPowerRounder = 1.5f * (1 << 23) - kSmallestPower;
constexpr float kPowerShift = 1 << 27;  // 2^(kSmallestPower + 127)
constexpr float kPowerCoefficients[] = {
    0.6931470036506653f * kPowerShift, 0.24022242426872253f * kPowerShift, 0.05550733581185341f * kPowerShift,
    0.009671512991189957f * kPowerShift, 0.0013264723820611835f * kPowerShift,
};

constexpr double kLogCoefficients[] = {
    0.6666666666666697, 0.39999999999560126, 0.285714286766617, 0.2222221255789046, 0.1818226110953518,
    0.1537327485849474, 0.13502342634960693, 0.10322668476649235, 0.1687070225687526,
};
constexpr double kLn2 = 0.6931471805599453;
constexpr int64_t kFew = 32;  // this many numbers are added one by one

// -log(u) for normal 0 < u < 1.
inline double minus_log(double u) {
    uint64_t bits;
    std::memcpy(&bits, &u, 8);
    const double exponent = double(int64_t(bits >> 52) - 1022);
    bits = (bits & 0x000fffffffffffffu) | 0x3fe0000000000000u;
    double m;
    std::memcpy(&m, &bits, 8);
    const double t = (1.0 - m) / (m + 1.0), z = t * t;
    double r = z * kLogCoefficients[8];
    for (int i = 7; i >= 0; i--) r = (r + kLogCoefficients[i]) * z;
    return (r + 2.0) * t + exponent * -kLn2;
}

// The sum of n > 0 numbers: add the second half to the first until at most kFew are left, then add those one by one.
// `sums` has room for half of them.
template <typename Float>
inline Float total(const Float* x, int64_t n, Float* sums) {
    if (n > kFew) {
        int64_t half = (n + 1) / 2;
        for (int64_t i = 0; i < n - half; i++) sums[i] = x[i] + x[half + i];
        if (n % 2) sums[half - 1] = x[half - 1];
        for (n = half; n > kFew; n = half) {
            half = (n + 1) / 2;
            for (int64_t i = 0; i < n - half; i++) sums[i] += sums[half + i];
        }
        x = sums;
    }
    Float sum = x[0];
    for (int64_t i = 1; i < n; i++) sum += x[i];
    return sum;
}

}  // namespace
}  // namespace outpace
