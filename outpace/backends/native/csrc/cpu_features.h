// Which instruction sets of x86-64 this machine has. Our own function and not __builtin_cpu_supports, because that one
// needs a table in the compiler's run-time library, which not every compiler brings.
#pragma once

#if defined(__x86_64__)

#include <cstdint>

namespace outpace {

// What the processor and the system say of themselves; see the manuals of CPUID and XGETBV.
struct CpuWords {
    uint32_t leaf1_ecx = 0, leaf7_ebx = 0, leaf7_ecx = 0;
    uint64_t saved_states = 0;  // the registers that the system saves when it switches threads
};

struct CpuFeatures {
    bool fma = false, f16c = false, avx2 = false;
    bool avx512f = false, avx512dq = false, avx512bw = false, avx512vl = false, avx512vnni = false;

    // All that the files *_avx2.cpp and *_avx512.cpp are compiled for.
    bool runs_avx2_files() const { return avx2 && fma && f16c; }
    bool runs_avx512_files() const { return runs_avx2_files() && avx512f && avx512dq && avx512bw && avx512vl && avx512vnni; }
};

CpuWords read_cpu();

// A feature counts only if the system saves the registers it uses.
CpuFeatures features_of(const CpuWords& words);

}  // namespace outpace

#endif
