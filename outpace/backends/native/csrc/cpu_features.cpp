#include "cpu_features.h"

#if defined(__x86_64__)

#include <cpuid.h>

namespace outpace {
namespace {

constexpr uint64_t kVectorStates = 0x06;  // XMM and YMM
constexpr uint64_t kAvx512States = 0xe0;  // masks, the upper halves of ZMM0 to 15, and ZMM16 to 31
constexpr int kSavesStates = 27;  // the bit OSXSAVE of leaf 1: XGETBV may be used

bool bit(uint32_t word, int at) { return (word >> at & 1u) != 0; }

// By its assembly name: the intrinsic _xgetbv needs a compiler flag that would also allow other instructions.
uint64_t read_saved_states() {
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return uint64_t(high) << 32 | low;
}

}  // namespace

CpuWords read_cpu() {
    CpuWords words;
    uint32_t a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return words;
    words.leaf1_ecx = c;
    if (bit(c, kSavesStates)) words.saved_states = read_saved_states();
#if defined(__APPLE__)
    // macOS saves AVX-512 registers from their first use on, and does not list them before.
    if ((words.saved_states & kVectorStates) == kVectorStates) words.saved_states |= kAvx512States;
#endif
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d)) {
        words.leaf7_ebx = b;
        words.leaf7_ecx = c;
    }
    return words;
}

CpuFeatures features_of(const CpuWords& words) {
    CpuFeatures found;
    if ((words.saved_states & kVectorStates) != kVectorStates) return found;
    found.fma = bit(words.leaf1_ecx, 12);
    found.f16c = bit(words.leaf1_ecx, 29);
    found.avx2 = bit(words.leaf7_ebx, 5);
    if ((words.saved_states & kAvx512States) != kAvx512States) return found;
    found.avx512f = bit(words.leaf7_ebx, 16);
    found.avx512dq = bit(words.leaf7_ebx, 17);
    found.avx512bw = bit(words.leaf7_ebx, 30);
    found.avx512vl = bit(words.leaf7_ebx, 31);
    found.avx512vnni = bit(words.leaf7_ecx, 11);
    return found;
}

}  // namespace outpace

#endif
