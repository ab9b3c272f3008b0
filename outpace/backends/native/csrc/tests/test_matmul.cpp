// Tests of packing, quantising and every kernel this machine can run, and (with `bench`) their times.

#include "../cpu_features.h"
#include "../kernels_inline.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <time.h>
#include <vector>

using namespace outpace;

namespace {

int failures = 0;

#define CHECK(condition, ...)                       \
    do {                                            \
        if (!(condition)) {                         \
            ++failures;                             \
            std::printf("FAILED %s: ", #condition); \
            std::printf(__VA_ARGS__);               \
            std::printf("\n");                      \
        }                                           \
    } while (0)

struct TypeInfo {
    GgmlType type;
    const char* name;
    int64_t block, bytes;  // as in the file
};
const TypeInfo kTypes[] = {
    {GgmlType::F32, "F32", 1, 4},       {GgmlType::F16, "F16", 1, 2},       {GgmlType::BF16, "BF16", 1, 2},
    {GgmlType::Q4_0, "Q4_0", 32, 18},   {GgmlType::Q4_1, "Q4_1", 32, 20},   {GgmlType::Q5_0, "Q5_0", 32, 22},
    {GgmlType::Q5_1, "Q5_1", 32, 24},   {GgmlType::Q8_0, "Q8_0", 32, 34},   {GgmlType::Q4_K, "Q4_K", 256, 144},
    {GgmlType::Q5_K, "Q5_K", 256, 176}, {GgmlType::Q6_K, "Q6_K", 256, 210},
};

const TypeInfo& info_of(GgmlType type) {
    return *std::find_if(std::begin(kTypes), std::end(kTypes), [&](const TypeInfo& i) { return i.type == type; });
}

struct IsaUnderTest {
    const char* name;
    MatmulFunction* matmul;
    QuantiseFunction* quantise;
};

std::vector<IsaUnderTest> usable_isas() {
    std::vector<IsaUnderTest> out{{"portable", matmul_portable, quantise_portable}};
#if defined(__x86_64__)
    const CpuFeatures cpu = features_of(read_cpu());
    if (cpu.runs_avx2_files()) out.push_back({"avx2", matmul_avx2, quantise_avx2});
    if (cpu.runs_avx512_files()) out.push_back({"avx512vnni", matmul_avx512, quantise_avx2});
#elif defined(__aarch64__)
    out.push_back({"neon", matmul_neon, quantise_portable});
#endif
    return out;
}

// 64-byte aligned and not a byte longer than asked for where the size allows, so that a sanitiser sees reads beyond.
struct Buffer {
    explicit Buffer(size_t bytes) : data(nullptr) {
        void* p = nullptr;
        if (posix_memalign(&p, 64, std::max<size_t>(bytes, 1)) != 0) std::abort();
        data = static_cast<uint8_t*>(p);
    }
    ~Buffer() { std::free(data); }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    uint8_t* data;
};

using Random = std::mt19937;

// ---- an independent reading of the file's formats --------------------------------------------------------------------

uint16_t u16(const uint8_t* p) { return uint16_t(p[0] | p[1] << 8); }

float f16(const uint8_t* p) {
    const int bits = u16(p), exponent = bits >> 10 & 31, fraction = bits & 1023;
    const double magnitude = exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024 + fraction, exponent - 25);
    return float(bits & 0x8000 ? -magnitude : magnitude);
}

void k_scale(const uint8_t* six, int b, int* scale, int* min) {
    if (b < 4) {
        *scale = six[b] % 64;
        *min = six[b + 4] % 64;
    } else {
        *scale = six[b + 4] % 16 + 16 * (six[b - 4] / 64);
        *min = six[b + 4] / 16 + 16 * (six[b] / 64);
    }
}

// Value k of a file's block at p.
float file_value(GgmlType type, const uint8_t* p, int k) {
    switch (type) {
        case GgmlType::F32: { float f; std::memcpy(&f, p, 4); return f; }
        case GgmlType::F16: return f16(p);
        case GgmlType::BF16: { const uint32_t bits = uint32_t(u16(p)) << 16; float f; std::memcpy(&f, &bits, 4); return f; }
        case GgmlType::Q4_0: return f16(p) * float((k < 16 ? p[2 + k] % 16 : p[2 + k - 16] / 16) - 8);
        case GgmlType::Q4_1: return f16(p) * float(k < 16 ? p[4 + k] % 16 : p[4 + k - 16] / 16) + f16(p + 2);
        case GgmlType::Q5_0: return f16(p) * float((k < 16 ? p[6 + k] % 16 : p[6 + k - 16] / 16) + 16 * (p[2 + k / 8] >> k % 8 & 1) - 16);
        case GgmlType::Q5_1: return f16(p) * float((k < 16 ? p[8 + k] % 16 : p[8 + k - 16] / 16) + 16 * (p[4 + k / 8] >> k % 8 & 1)) + f16(p + 2);
        case GgmlType::Q8_0: return f16(p) * float(int8_t(p[2 + k]));
        case GgmlType::Q4_K:
        case GgmlType::Q5_K: {
            int scale, min;
            k_scale(p + 4, k / 32, &scale, &min);
            const uint8_t* nibbles = p + (type == GgmlType::Q4_K ? 16 : 48);
            const uint8_t byte = nibbles[k / 64 * 32 + k % 32];
            int code = k / 32 % 2 == 0 ? byte % 16 : byte / 16;
            if (type == GgmlType::Q5_K) code += 16 * (p[16 + k % 32] >> k / 32 & 1);
            return f16(p) * float(scale) * float(code) - f16(p + 2) * float(min);
        }
        case GgmlType::Q6_K: {
            const int half = k / 128, in = k % 128, lane = in % 32, quarter = in / 32;
            const uint8_t byte = p[64 * half + 32 * (quarter % 2) + lane];
            const int low = quarter < 2 ? byte % 16 : byte / 16, high = p[128 + 32 * half + lane] >> 2 * quarter & 3;
            return f16(p + 208) * float(int8_t(p[192 + k / 16])) * float(low + 16 * high - 32);
        }
    }
    return 0;
}

// ---- random matrices and activations ---------------------------------------------------------------------------------

void put_half(uint8_t* p, Random& random) {  // of either sign, 2^-14 .. 2^-5, now and then zero or subnormal
    const unsigned draw = random();
    unsigned bits = (draw & 0x83ff) | (1 + draw / 65536 % 10) << 10;
    if (draw % 97 == 0) bits = draw & 0x800f;
    p[0] = uint8_t(bits);
    p[1] = uint8_t(bits >> 8);
}

std::vector<uint8_t> random_source(const TypeInfo& info, int64_t rows, int64_t cols, Random& random, bool extreme) {
    const int64_t blocks = rows * cols / info.block;
    std::vector<uint8_t> out(size_t(blocks * info.bytes));
    for (auto& byte : out) byte = extreme ? (random() % 2 ? 0xff : 0x80) : uint8_t(random());
    for (int64_t b = 0; b < blocks; ++b) {
        uint8_t* p = out.data() + b * info.bytes;
        switch (info.type) {
            case GgmlType::F32: {
                const float f = std::normal_distribution<float>(0, 0.05f)(random);
                std::memcpy(p, &f, 4);
                break;
            }
            case GgmlType::BF16: {
                const float f = std::normal_distribution<float>(0, 0.05f)(random);
                std::memcpy(p, reinterpret_cast<const uint8_t*>(&f) + 2, 2);
                break;
            }
            case GgmlType::Q4_1:
            case GgmlType::Q5_1:
            case GgmlType::Q4_K:
            case GgmlType::Q5_K: put_half(p + 2, random); [[fallthrough]];
            case GgmlType::F16:
            case GgmlType::Q4_0:
            case GgmlType::Q5_0:
            case GgmlType::Q8_0: put_half(p, random); break;
            case GgmlType::Q6_K: put_half(p + 208, random); break;
        }
    }
    return out;
}

struct Matrix {
    Matrix(const TypeInfo& info, int64_t rows, int64_t cols, Random& random, bool extreme = false)
        : source(random_source(info, rows, cols, random, extreme)), store(packed_bytes(info.type, rows, cols)) {
        pack_rows(info.type, source.data(), rows, cols, store.data, 0, rows);
        packed = {info.type, rows, cols, store.data};
    }
    std::vector<uint8_t> source;
    Buffer store;
    Packed packed;
};

struct Tokens {
    Tokens(int64_t n, int64_t cols, std::vector<float> values)
        : values(std::move(values)), store(activation_bytes(n, cols)), quantised{n, cols, store.data, this->values.data()} {
        quantise(quantised, 0, n, 0, cols / kBlock);
    }
    std::vector<float> values;
    Buffer store;
    Activations quantised;
};

std::vector<float> random_values(int64_t count, Random& random, bool extreme = false) {
    std::vector<float> out(static_cast<size_t>(count));
    std::normal_distribution<float> normal(0, 1);
    for (auto& v : out) v = extreme ? (random() % 4 ? 1.0f : -1.0f) : normal(random) * (random() % 50 == 0 ? 20.0f : 1.0f);
    return out;
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) { return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * 4) == 0; }

// ---- tests -----------------------------------------------------------------------------------------------------------

void test_packing(Random& random) {
    for (const auto& info : kTypes) {
        for (const int64_t rows : {1, 8, 13, 40}) {
            const int64_t cols = info.block == 1 ? 37 : 3 * info.block;
            Matrix m(info, rows, cols, random);
            CHECK(matmul_supports(info.type, rows, cols), "%s", info.name);
            Buffer in_two(packed_bytes(info.type, rows, cols));
            const int64_t split = std::min<int64_t>(kTileRows, rows);
            pack_rows(info.type, m.source.data(), rows, cols, in_two.data, 0, split);
            if (split < rows) pack_rows(info.type, m.source.data(), rows, cols, in_two.data, split, rows);
            CHECK(std::memcmp(in_two.data, m.packed.data, packed_bytes(info.type, rows, cols)) == 0, "%s in two parts", info.name);
            std::vector<float> got(static_cast<size_t>(cols)), want(static_cast<size_t>(cols));
            for (int64_t r = 0; r < rows; ++r) {
                unpack_row(m.packed, r, got.data());
                for (int64_t k = 0; k < cols; ++k) {
                    const uint8_t* block = m.source.data() + (r * cols + k) / info.block * info.bytes;
                    want[size_t(k)] = file_value(info.type, block, int(k % info.block));
                }
                CHECK(same_bits(got, want), "%s row %d of %d", info.name, int(r), int(rows));
            }
        }
        CHECK(!matmul_supports(info.type, 0, 256), "%s", info.name);
        if (info.block > 1) CHECK(!matmul_supports(info.type, 8, info.block + 16), "%s", info.name);
    }
    CHECK(!matmul_supports(GgmlType(9), 8, 256), "unknown type");
}

void test_quantising(Random& random) {
    const int64_t n = 37, cols = 96;
    auto values = random_values(n * cols, random);
    for (int k = 0; k < 32; ++k) values[size_t(k)] = 0;
    values[40] = 1e-42f;
    Tokens tokens(n, cols, values);
    for (int64_t t = 0; t < n; ++t) {
        const ActGroup group = act_group(tokens.quantised, t);
        for (int64_t b = 0; b < cols / 32; ++b) {
            const ActBlock& block = group.first[b * group.block_stride];
            const float* x = values.data() + t * cols + b * 32;
            float top = 0;
            int sum = 0;
            for (int k = 0; k < 32; ++k) top = std::max(top, std::fabs(x[k]));
            CHECK(block.d == top / 127.0f, "scale of token %d", int(t));
            for (int k = 0; k < 32; ++k) {
                sum += block.q[k];
                const float want = top > 0 ? std::nearbyint(x[k] * (127.0f / top)) : 0.0f;
                CHECK(float(block.q[k]) == want, "token %d value %d", int(t), k);
            }
            CHECK(sum == block.sum && sum == block.half[0] + block.half[1] && block.d_sum == block.d * float(sum), "sums of token %d", int(t));
        }
    }
    std::vector<ActBlock> one(n * cols / 32), other(one.size());
    const Activations plain{n, cols, reinterpret_cast<uint8_t*>(one.data()), values.data()};
    for (const auto& isa : usable_isas()) {  // in two parts, each of them the plain loops' bits
        const Activations own{n, cols, reinterpret_cast<uint8_t*>(other.data()), values.data()};
        quantise_portable(plain, 0, n, 0, cols / 32);
        isa.quantise(own, 0, n, 1, cols / 32);
        isa.quantise(own, 0, n, 0, 1);
        CHECK(std::memcmp(one.data(), other.data(), one.size() * sizeof(ActBlock)) == 0, "%s: not the plain codes", isa.name);
    }
    for (const float odd : {INFINITY, -INFINITY, NAN}) {
        auto wrong = values;
        wrong[cols + 5] = odd;
        Tokens with(n, cols, wrong);
        Matrix m(info_of(GgmlType::Q4_1), 16, cols, random);
        for (const auto& isa : usable_isas()) {
            std::vector<float> y(n * 16);
            isa.matmul(m.packed, with.quantised, y.data(), 16, 0, 16);
            CHECK(std::isnan(y[16]) && !std::isnan(y[0]) && !std::isnan(y[32]), "%s: a bad token shows, and only it", isa.name);
        }
    }
}

// Against float64 on the values themselves: the oracle has an oracle.
void test_reference_is_right(Random& random) {
    for (const auto& info : kTypes) {
        const int64_t rows = 9, cols = info.block == 1 ? 37 : 512, n = 3;
        Matrix m(info, rows, cols, random);
        Tokens x(n, cols, random_values(n * cols, random));
        std::vector<float> y(n * rows), row(static_cast<size_t>(cols));
        matmul_reference(m.packed, x.quantised, y.data(), rows, 0, rows);
        for (int64_t t = 0; t < n; ++t) {
            for (int64_t r = 0; r < rows; ++r) {
                unpack_row(m.packed, r, row.data());
                double sum = 0, size = 0;
                for (int64_t k = 0; k < cols; ++k) {
                    double value = x.values[size_t(t * cols + k)];
                    if (info.block > 1) {
                        const ActGroup group = act_group(x.quantised, t);
                        const ActBlock& block = group.first[k / 32 * group.block_stride];
                        value = double(block.d) * block.q[k % 32];
                    }
                    sum += value * row[size_t(k)];
                    size += std::fabs(value * row[size_t(k)]);
                }
                CHECK(std::fabs(y[size_t(t * rows + r)] - sum) <= 3e-6 * size, "%s: %g, not %g", info.name, y[size_t(t * rows + r)], sum);
            }
        }
    }
}

// Every instruction set gives the oracle's bits, for any number of tokens and any split of the rows, and writes nothing
// but its rows.
void test_kernels(Random& random, bool quick) {
    const float untouched = 12345.0f;
    for (const auto& info : kTypes) {
        std::vector<int64_t> row_counts{8, 13, 16, 72}, token_counts{1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 15, 16, 17, 31, 33};
        if (!quick) token_counts.insert(token_counts.end(), {64, 130, 512});
        for (const int64_t rows : row_counts) {
            const bool extreme = rows == 16 && info.block > 1;
            const int64_t cols = info.block == 1 ? (rows == 13 ? 67 : 64) : rows == 72 ? 5 * info.block : 2 * info.block;
            Matrix m(info, rows, cols, random, extreme);
            const int64_t most = token_counts.back();
            const auto values = random_values(most * cols, random, extreme);
            const int64_t stride = rows + 3;
            Tokens all(most, cols, values);
            std::vector<float> want(static_cast<size_t>(most * stride), untouched);
            matmul_reference(m.packed, all.quantised, want.data(), stride, 0, rows);
            for (const auto& isa : usable_isas()) {
                for (const int64_t n : token_counts) {
                    const int64_t shift = n == most ? 0 : int64_t(random() % unsigned(most - n));  // which tokens share the step
                    Tokens some(n, cols, {values.begin() + shift * cols, values.begin() + (shift + n) * cols});
                    const std::vector<float> expected(want.begin() + shift * stride, want.begin() + (shift + n) * stride);
                    std::vector<float> y(static_cast<size_t>(n * stride), untouched);
                    const int64_t split = std::min<int64_t>(rows, int64_t(random() % unsigned(rows / kTileRows + 1)) * kTileRows);
                    isa.matmul(m.packed, some.quantised, y.data(), stride, split, rows);
                    isa.matmul(m.packed, some.quantised, y.data(), stride, 0, split);
                    CHECK(same_bits(y, expected), "%s %s, %d x %d, %d tokens", isa.name, info.name, int(rows), int(cols), int(n));
                }
            }
        }
    }
}

void test_wide_rows(Random& random) {  // so long that the walk must cut tokens into chunks
    for (const auto type : {GgmlType::Q4_K, GgmlType::Q6_K, GgmlType::F16}) {
        const int64_t rows = 24, cols = 8960, n = 75;
        Matrix m(info_of(type), rows, cols, random);
        Tokens x(n, cols, random_values(n * cols, random));
        std::vector<float> want(n * rows);
        matmul_reference(m.packed, x.quantised, want.data(), rows, 0, rows);
        for (const auto& isa : usable_isas()) {
            std::vector<float> y(n * rows);
            isa.matmul(m.packed, x.quantised, y.data(), rows, 0, rows);
            CHECK(same_bits(y, want), "%s %s", isa.name, info_of(type).name);
        }
    }
}

// ---- times -------------------------------------------------------------------------------------------------------------

// Threads that wait for work by spinning, as the engine's do, but give way once another process wants the core.
class Crew {
public:
    explicit Crew(int size) : size(size) {
        for (int i = 1; i < size; ++i) threads_.emplace_back([this, i] { serve(i); });
    }
    ~Crew() {
        stop_ = true;
        round_.fetch_add(1);
        for (auto& t : threads_) t.join();
    }
    template <class Work>
    void run(const Work& work) {
        call_ = [](const void* w, int thread) { (*static_cast<const Work*>(w))(thread); };
        work_ = &work;
        left_.store(size - 1);
        round_.fetch_add(1);
        work(0);
        for (int spins = 0; left_.load() != 0;) pause(spins);
    }

    const int size;

private:
    static void pause(int& spins) {
        if (++spins > 20000) std::this_thread::yield();
    }
    void serve(int own) {
        for (int seen = 0;;) {
            for (int spins = 0; round_.load() == seen;) pause(spins);
            ++seen;
            if (stop_) return;
            call_(work_, own);
            left_.fetch_sub(1);
        }
    }
    std::vector<std::thread> threads_;
    std::atomic<int> round_{0}, left_{0};
    std::atomic<bool> stop_{false};
    void (*call_)(const void*, int) = nullptr;
    const void* work_ = nullptr;
};

// Wall time; for a single thread its processor time, which other processes disturb less.
double now_ms(int threads) {
    timespec t;
    clock_gettime(threads == 1 ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC, &t);
    return double(t.tv_sec) * 1e3 + double(t.tv_nsec) * 1e-6;
}

double median(std::vector<double> v) {
    std::sort(v.begin(), v.end());
    return v[v.size() / 2];
}

struct Shape {
    GgmlType type;
    int64_t rows, cols, count;
};

struct Model {
    const char* name;
    std::vector<Shape> shapes;  // of one token's matrix products
};

void bench(const Model& model, const std::string& only, int rounds, int threads, Random& random) {
    std::vector<std::unique_ptr<Matrix>> matrices;
    double bytes = 0, source_bytes = 0;
    int64_t most_rows = 0;
    const int64_t most_tokens = 128;
    std::vector<std::vector<float>> inputs;
    for (const auto& s : model.shapes) {
        for (int64_t i = 0; i < s.count; ++i) matrices.push_back(std::make_unique<Matrix>(info_of(s.type), s.rows, s.cols, random));
        for (int64_t i = 0; i < s.count; ++i) matrices[matrices.size() - size_t(i) - 1]->source = {};
        bytes += double(packed_bytes(s.type, s.rows, s.cols)) * double(s.count);
        source_bytes += double(s.rows * s.cols / info_of(s.type).block * info_of(s.type).bytes) * double(s.count);
        most_rows = std::max(most_rows, s.rows);
    }
    Crew crew(threads);
    std::vector<double> reads;
    std::atomic<uint64_t> sink{0};
    for (int round = 0; round < 9; ++round) {
        const double begin = now_ms(threads);
        crew.run([&](int thread) {
            uint64_t sum[8] = {};
            for (const auto& m : matrices) {
                const size_t words = packed_bytes(m->packed.source, m->packed.rows, m->packed.cols) / 64 / size_t(threads);
                const uint64_t* p = reinterpret_cast<const uint64_t*>(m->packed.data) + size_t(thread) * words * 8;
                for (size_t i = 0; i < words; ++i) {
                    for (int j = 0; j < 8; ++j) sum[j] += p[8 * i + size_t(j)];
                }
            }
            for (int j = 0; j < 8; ++j) sink += sum[j];
        });
        reads.push_back(now_ms(threads) - begin);
    }
    const double floor_ms = median(reads);
    std::printf("%s: packed %.1f MB, %.3f of the file's; floor %.2f ms (plain reads, %.1f GB/s)\n", model.name, bytes / 1e6,
                bytes / source_bytes, floor_ms, bytes / floor_ms / 1e6);

    std::vector<float> y(static_cast<size_t>(most_tokens * most_rows));
    for (const auto& isa : usable_isas()) {
        if (!only.empty() && only != isa.name) continue;
        double one = 0;
        for (const int64_t n : {1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 32, 128}) {
            if (std::string(isa.name) == "portable" && n > 8) continue;
            std::vector<std::unique_ptr<Tokens>> x;
            for (const auto& m : matrices) {
                const bool reuse = !x.empty() && x.back()->quantised.cols == m->packed.cols;
                x.push_back(reuse ? nullptr : std::make_unique<Tokens>(n, m->packed.cols, random_values(n * m->packed.cols, random)));
                if (reuse) std::swap(x.back(), x[x.size() - 2]);
            }
            std::vector<const Tokens*> input(matrices.size());
            const Tokens* later = nullptr;
            for (size_t i = matrices.size(); i-- > 0;) input[i] = later = x[i] ? x[i].get() : later;
            std::vector<double> times;
            for (int round = 0; round < std::max(3, n > 16 ? rounds / 6 : rounds); ++round) {
                const double begin = now_ms(threads);
                for (size_t i = 0; i < matrices.size(); ++i) {
                    const Packed& w = matrices[i]->packed;
                    crew.run([&](int thread) {
                        const int64_t share = (w.rows / kTileRows + threads) / threads * kTileRows;
                        isa.matmul(w, input[i]->quantised, y.data(), w.rows, std::min(share * thread, w.rows), std::min(share * (thread + 1), w.rows));
                    });
                }
                times.push_back(now_ms(threads) - begin);
            }
            const double ms = median(times), least = *std::min_element(times.begin(), times.end());
            if (n == 1) one = ms;
            std::printf("  %-10s n=%-3d %8.2f ms  (least %8.2f)  %5.2fx of one, %5.2fx of the floor, %7.1f tokens/s\n", isa.name, int(n), ms,
                        least, ms / one, ms / floor_ms, double(n) / ms * 1e3);
            std::fflush(stdout);
        }
    }
}

int run_bench(int argc, char** argv) {
    const Model models[] = {
        {"smol",  // SmolLM2 135M Q4_1
         {{GgmlType::Q4_1, 576, 576, 60}, {GgmlType::Q4_1, 192, 576, 60}, {GgmlType::Q4_1, 1536, 576, 60}, {GgmlType::Q4_1, 576, 1536, 30},
          {GgmlType::Q8_0, 49152, 576, 1}}},
        {"qwen-seventh",  // Qwen2.5-Coder 1.5B Q4_K_M, a seventh of its layers and of its head
         {{GgmlType::Q4_K, 1536, 1536, 8}, {GgmlType::Q4_K, 256, 1536, 6}, {GgmlType::Q6_K, 256, 1536, 2}, {GgmlType::Q4_K, 8960, 1536, 8},
          {GgmlType::Q4_K, 1536, 8960, 2}, {GgmlType::Q6_K, 1536, 8960, 2}, {GgmlType::Q6_K, 21704, 1536, 1}}},
        {"small-q5_0", {{GgmlType::Q5_0, 4864, 896, 24}}},
        {"small-f16", {{GgmlType::F16, 4864, 896, 12}}},
    };
    const std::string model = argc > 2 ? argv[2] : "smol", isa = argc > 3 ? argv[3] : "";
    const int rounds = argc > 4 ? std::atoi(argv[4]) : 30, threads = argc > 5 ? std::atoi(argv[5]) : 2;
    Random random(1);
    for (const auto& m : models) {
        if (model == m.name || model == "all") bench(m, isa, rounds, threads, random);
    }
    return 0;
}

}  // namespace

// test_matmul [quick]                                 the tests
// test_matmul bench [model] [isa] [rounds] [threads]  the times
int main(int argc, char** argv) {
    if (argc > 1 && std::string(argv[1]) == "bench") return run_bench(argc, argv);
    const bool quick = argc > 1 && std::string(argv[1]) == "quick";
    Random random(7);
    test_packing(random);
    test_quantising(random);
    test_reference_is_right(random);
    test_kernels(random, quick);
    test_wide_rows(random);
    for (const auto& isa : usable_isas()) std::printf("tested %s\n", isa.name);
    std::printf("matmul() uses %s; %d failures\n", matmul_isa(), failures);
    return failures != 0;
}
