// The instruction sets that we find are those that the kernel lists, and none counts whose registers are not saved.

#include "cpu_features.h"

#include <cstdio>

#if defined(__x86_64__)

#include <fstream>
#include <set>
#include <sstream>
#include <string>
#include <utility>

using namespace outpace;

namespace {

int num_failures = 0;

void check(bool ok, const char* what) {
    if (ok) return;
    num_failures++;
    std::printf("failed: %s\n", what);
}

std::set<std::string> flags_of_the_kernel() {
    std::ifstream file("/proc/cpuinfo");
    for (std::string line; std::getline(file, line);) {
        if (line.compare(0, 5, "flags") != 0) continue;
        std::istringstream words(line.substr(line.find(':') + 1));
        std::set<std::string> found;
        for (std::string word; words >> word;) found.insert(word);
        return found;
    }
    return {};
}

void test_features_are_those_of_the_kernel() {
    const auto listed = flags_of_the_kernel();
    if (listed.empty()) return;  // not Linux
    const CpuFeatures found = features_of(read_cpu());
    const std::pair<const char*, bool> all[] = {
        {"fma", found.fma},           {"f16c", found.f16c},         {"avx2", found.avx2},         {"avx512f", found.avx512f},
        {"avx512dq", found.avx512dq}, {"avx512bw", found.avx512bw}, {"avx512vl", found.avx512vl}, {"avx512_vnni", found.avx512vnni},
    };
    for (const auto& [name, is_found] : all) check((listed.count(name) > 0) == is_found, name);
}

void test_registers_must_be_saved() {
    CpuWords words;
    words.leaf1_ecx = words.leaf7_ebx = words.leaf7_ecx = ~0u;
    check(!features_of(words).fma && !features_of(words).runs_avx2_files(), "no register is saved");
    words.saved_states = 0x02;
    check(!features_of(words).runs_avx2_files(), "only XMM is saved");
    words.saved_states = 0x06;
    check(features_of(words).runs_avx2_files() && !features_of(words).avx512f, "ZMM is not saved");
    words.saved_states = 0xe6;
    check(features_of(words).runs_avx512_files(), "all is saved");
}

void test_each_feature_is_needed() {
    CpuWords all;
    all.leaf1_ecx = all.leaf7_ebx = all.leaf7_ecx = ~0u;
    all.saved_states = 0xe6;
    for (int at : {12, 29}) {
        CpuWords words = all;
        words.leaf1_ecx &= ~(1u << at);
        check(!features_of(words).runs_avx2_files() && !features_of(words).runs_avx512_files(), "FMA and F16C are needed");
    }
    for (int at : {5, 16, 17, 30, 31}) {
        CpuWords words = all;
        words.leaf7_ebx &= ~(1u << at);
        check(!features_of(words).runs_avx512_files(), "AVX2 and AVX-512 F, DQ, BW, VL are needed");
        check(features_of(words).runs_avx2_files() == (at != 5), "AVX2 needs no AVX-512");
    }
    all.leaf7_ecx &= ~(1u << 11);
    check(features_of(all).runs_avx2_files() && !features_of(all).runs_avx512_files(), "VNNI is needed");
}

}  // namespace

int main() {
    test_features_are_those_of_the_kernel();
    test_registers_must_be_saved();
    test_each_feature_is_needed();
    std::printf(num_failures ? "%d failures\n" : "all passed\n", num_failures);
    return num_failures != 0;
}

#else

int main() {
    std::printf("nothing to test on this processor\n");
    return 0;
}

#endif
