// Norms, RoPE, SwiGLU, attention and the thread pool against their plain loops, on random shapes, for every instruction
// set this processor has. Run by `python -m outpace.backends.native.build --test [--sanitize]`.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "attention.h"
#include "ops.h"
#include "range.h"
#include "relay.h"
#include "thread_pool.h"

using namespace outpace;

namespace {

int num_failures = 0;
std::mt19937 rng(1);

#define CHECK(condition, ...)                                  \
    do {                                                       \
        if (!(condition)) {                                    \
            num_failures++;                                    \
            std::printf("%s:%d: %s ", __FILE__, __LINE__, #condition); \
            std::printf(__VA_ARGS__);                          \
            std::printf("\n");                                 \
        }                                                      \
    } while (0)

int64_t random_int(int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(rng); }

std::vector<float> random_floats(int64_t n, float scale = 1.0f) {
    std::normal_distribution<float> normal(0, scale);
    std::vector<float> values(static_cast<size_t>(n));
    for (float& value : values) value = normal(rng);
    return values;
}

// The largest difference, relative to the largest reference value.
double distance(const std::vector<float>& found, const std::vector<float>& expected) {
    double worst = 0, largest = 1e-9;
    for (size_t i = 0; i < found.size(); i++) {
        worst = std::fmax(worst, std::fabs(double(found[i]) - expected[i]));
        largest = std::fmax(largest, std::fabs(double(expected[i])));
        if (std::isnan(found[i])) return INFINITY;
    }
    return worst / largest;
}

void test_ops(const Ops& op, const char* name) {
    const Ops& reference = ops_reference();
    for (int round = 0; round < 200; round++) {
        const int64_t n = 8 * random_int(1, 300);
        const auto x = random_floats(n, std::exp2(float(random_int(-10, 10)))), weight = random_floats(n);
        std::vector<float> found(x.size()), expected(x.size());
        op.rms_norm(x.data(), weight.data(), 1e-5f, n, found.data());
        reference.rms_norm(x.data(), weight.data(), 1e-5f, n, expected.data());
        CHECK(distance(found, expected) < 1e-5, "rms_norm %s n=%ld", name, long(n));
        found = x;
        op.rms_norm(found.data(), weight.data(), 1e-5f, n, found.data());
        CHECK(distance(found, expected) < 1e-5, "rms_norm in place %s n=%ld", name, long(n));
    }
    for (int round = 0; round < 200; round++) {
        const int64_t n = random_int(1, 500);
        const auto gate = random_floats(n, 20.0f), up = random_floats(n);
        auto found = gate, expected = gate;
        op.swiglu(found.data(), up.data(), n);
        reference.swiglu(expected.data(), up.data(), n);
        CHECK(distance(found, expected) < 1e-5, "swiglu %s n=%ld", name, long(n));
        // Bits may not depend on where a range begins: threads split rows differently.
        const int64_t cut = random_int(0, n);
        auto parts = gate;
        op.swiglu(parts.data(), up.data(), cut);
        op.swiglu(parts.data() + cut, up.data() + cut, n - cut);
        CHECK(parts == found, "swiglu in parts %s n=%ld cut=%ld", name, long(n), long(cut));
        found = gate, expected = gate;
        op.add(found.data(), up.data(), n);
        reference.add(expected.data(), up.data(), n);
        CHECK(found == expected, "add %s n=%ld", name, long(n));
    }
    for (int round = 0; round < 200; round++) {
        const int64_t half = random_int(1, 64), position = random_int(0, 100000);
        const auto style = RopeStyle(random_int(0, 1));
        std::vector<double> frequencies;
        for (int64_t i = 0; i < half; i++) frequencies.push_back(std::pow(10000.0, -double(i) / double(half)));
        std::vector<float> cosines(static_cast<size_t>(half)), sines(static_cast<size_t>(half));
        rope_angles(position, frequencies.data(), half, 1.0f, cosines.data(), sines.data());
        const auto head = random_floats(2 * half);
        auto found = head, expected = head;
        op.rope(found.data(), cosines.data(), sines.data(), 2 * half, style);
        reference.rope(expected.data(), cosines.data(), sines.data(), 2 * half, style);
        CHECK(distance(found, expected) < 1e-6, "rope %s half=%ld", name, long(half));
    }
}

// A cache of one key/value head, filled through write().
struct Cache {
    int64_t head_dim, num_tokens;
    std::vector<int32_t> table;
    std::vector<uint16_t> halves;

    Cache(const Attention& attention, int64_t dim, int64_t n) : head_dim(dim), num_tokens(n) {
        const int64_t num_pages = (n + kPageTokens - 1) / kPageTokens;
        for (int64_t i = 0; i < num_pages; i++) table.push_back(int32_t(i));
        std::shuffle(table.begin(), table.end(), rng);
        // What was never written may hold anything, even not-a-number.
        halves.assign(size_t(num_pages * 2 * kPageTokens * dim), 0x7e00);
        for (int64_t at = 0; at < n; at++) {
            const auto key = random_floats(dim), value = random_floats(dim);
            uint16_t* page = halves.data() + table[size_t(at / kPageTokens)] * page_stride();
            attention.write(key.data(), value.data(), dim, at % kPageTokens, page, page + kPageTokens * dim);
        }
    }
    int64_t page_stride() const { return 2 * kPageTokens * head_dim; }
    HeadPages pages() const { return {halves.data(), halves.data() + kPageTokens * head_dim, page_stride(), table.data(), head_dim}; }
};

std::vector<Query> queries_of(const Cache& cache, const std::vector<float>& vectors, const std::vector<int64_t>& counts, std::vector<float>& out) {
    std::vector<Query> queries;
    for (size_t i = 0; i < counts.size(); i++) {
        queries.push_back({vectors.data() + int64_t(i) * cache.head_dim, out.data() + int64_t(i) * cache.head_dim, counts[i]});
    }
    return queries;
}

// Each segment on its own, in random order, as threads do it.
std::vector<float> attend_in_segments(const Attention& attention, const Cache& cache, const std::vector<float>& vectors, const std::vector<int64_t>& counts) {
    std::vector<float> out(vectors.size(), NAN);
    const auto queries = queries_of(cache, vectors, counts, out);
    const int64_t n = int64_t(queries.size()), size = n * part_floats(cache.head_dim);
    std::vector<int64_t> segments(size_t(num_segments(*std::max_element(counts.begin(), counts.end()))));
    std::iota(segments.begin(), segments.end(), 0);
    std::shuffle(segments.begin(), segments.end(), rng);
    std::vector<float> parts(segments.size() * size_t(size), NAN), scratch(attention_scratch_floats(n, cache.head_dim));
    for (int64_t segment : segments) attention.attend_segment(queries.data(), n, cache.pages(), segment, parts.data() + segment * size, scratch.data());
    attention.join(queries.data(), n, cache.head_dim, parts.data());
    return out;
}

std::vector<float> attend(const Attention& attention, const Cache& cache, const std::vector<float>& vectors, const std::vector<int64_t>& counts) {
    std::vector<float> out(vectors.size(), NAN);
    const auto queries = queries_of(cache, vectors, counts, out);
    std::vector<float> scratch(attention_scratch_floats(int64_t(queries.size()), cache.head_dim));
    attention.attend(queries.data(), int64_t(queries.size()), cache.pages(), scratch.data());
    return out;
}

void test_attention(const Attention& attention, const char* name) {
    for (int round = 0; round < 120; round++) {
        const Cache cache(attention, 8 * random_int(1, 20), random_int(1, 200));
        const int64_t n = random_int(1, 12);
        std::vector<int64_t> counts;
        for (int64_t i = 0; i < n; i++) counts.push_back(random_int(1, cache.num_tokens));
        const auto vectors = random_floats(n * cache.head_dim, 0.5f);
        const auto found = attend(attention, cache, vectors, counts);
        CHECK(distance(found, attend(attention_reference(), cache, vectors, counts)) < 1e-4, "attend %s dim=%ld n=%ld", name, long(cache.head_dim), long(n));
        for (int64_t i = 0; i < n; i++) {  // alone: the same bits
            const auto begin = vectors.begin() + i * cache.head_dim;
            const auto alone = attend(attention, cache, std::vector<float>(begin, begin + cache.head_dim), {counts[size_t(i)]});
            CHECK(std::memcmp(alone.data(), found.data() + i * cache.head_dim, alone.size() * sizeof(float)) == 0, "attend alone %s", name);
        }
    }
    // Segments of any order, joined, are the whole.
    for (int round = 0; round < 40; round++) {
        const Cache cache(attention, 8 * random_int(1, 20), random_int(1, 700));
        std::vector<int64_t> counts;
        for (int64_t i = random_int(1, 12); i > 0; i--) counts.push_back(random_int(1, cache.num_tokens));
        const auto vectors = random_floats(int64_t(counts.size()) * cache.head_dim, 0.5f);
        const auto joined = attend_in_segments(attention, cache, vectors, counts);
        const auto whole = attend(attention, cache, vectors, counts);
        CHECK(std::memcmp(joined.data(), whole.data(), whole.size() * sizeof(float)) == 0, "segments %s", name);
    }
    // Scores far apart: weights underflow instead of overflowing.
    const Cache cache(attention, 64, 100);
    const auto vector = random_floats(64, 100.0f);
    CHECK(distance(attend(attention, cache, vector, {100}), attend(attention_reference(), cache, vector, {100})) < 1e-3, "sharp attend %s", name);
}

// Wider registers change how much is computed at once, and nothing else.
void test_attention_has_the_same_bits(const Attention& one, const Attention& other, const char* names) {
    for (int round = 0; round < 60; round++) {
        const Cache cache(one, 8 * random_int(1, 20), random_int(1, 400));
        std::vector<int64_t> counts;
        for (int64_t i = random_int(1, 12); i > 0; i--) counts.push_back(random_int(1, cache.num_tokens));
        const auto vectors = random_floats(int64_t(counts.size()) * cache.head_dim, 0.5f);
        const auto found = attend(one, cache, vectors, counts), expected = attend(other, cache, vectors, counts);
        CHECK(std::memcmp(found.data(), expected.data(), found.size() * sizeof(float)) == 0, "attend %s", names);
    }
}

void test_halves_survive_a_round_trip() {
    // Every half is written back as it was; between halves, the nearest is taken.
    const Attention& attention = attention_portable();
    for (uint32_t bits = 0; bits < 0x7c00; bits++) {
        std::vector<uint16_t> keys(8 * kPageTokens), values(8 * kPageTokens);
        const float exact = bits < 0x400 ? std::ldexp(float(bits), -24) : std::ldexp(1.0f + float(bits & 0x3ff) / 1024, int(bits >> 10) - 15);
        const float ulp = std::nextafterf(exact, INFINITY);
        const float in[8] = {exact, -exact, ulp, exact, exact, exact, exact, exact};
        attention.write(in, in, 8, 3, keys.data(), values.data());
        CHECK(values[24] == bits && values[25] == (bits | 0x8000) && values[26] == bits && keys[3] == bits, "half %x", bits);
    }
}

void test_split_covers_everything_once() {
    for (int round = 0; round < 2000; round++) {
        const int64_t total = random_int(0, 1000), grain = random_int(1, 16);
        const int parts = int(random_int(1, 9));
        int64_t at = 0;
        for (int i = 0; i < parts; i++) {
            const Range range = split(total, grain, parts, i);
            CHECK(range.begin == at && range.end >= at && (range.end % grain == 0 || range.end == total), "split %ld", long(total));
            at = range.end;
        }
        CHECK(at == total, "split ends at %ld of %ld", long(at), long(total));
    }
}

void test_pool() {
    for (int threads : {1, 2, 5}) {
        ThreadPool pool(threads);
        std::vector<int> values(static_cast<size_t>(threads));
        std::atomic<int> num_wrong{0};
        for (int round = 0; round < 300; round++) {
            if (round % 100 == 99) std::this_thread::sleep_for(std::chrono::milliseconds(20));  // long enough to fall asleep
            pool.run([&](int thread) {
                for (int phase = 0; phase < 10; phase++) {
                    values[size_t(thread)] = round * 10 + phase;
                    pool.barrier();
                    for (int value : values) num_wrong += value != round * 10 + phase;
                    pool.barrier();
                }
            });
        }
        CHECK(num_wrong == 0, "%d values seen out of step with %d threads", num_wrong.load(), threads);
    }
    // Two callers take turns.
    const auto pool = ThreadPool::shared(2);
    std::atomic<int> inside{0}, most{0}, total{0};
    const auto call = [&] {
        for (int i = 0; i < 200; i++) {
            pool->run([&](int thread) {
                if (thread == 0) most = std::max(most.load(), ++inside);
                total++;
                pool->barrier();
                if (thread == 0) --inside;
            });
        }
    };
    std::thread other(call);
    call();
    other.join();
    CHECK(most == 1 && total == 800, "at most %d at once, %d in all", most.load(), total.load());
}

// Each phase needs all of the one before; the caller goes on to the next step while others may still be late.
struct Counting {
    static constexpr int kPhases = 20;
    Relay relay;
    std::vector<int64_t> units = std::vector<int64_t>(kPhases);
    std::atomic<int64_t> counts[kPhases] = {};
    std::atomic<int> num_wrong{0};

    explicit Counting(int threads) : relay(threads, kPhases) {}

    void open_from(uint64_t first, size_t phase) {
        while (phase < units.size() && units[phase] == 0) phase++;
        relay.open(first + phase);
    }

    void operator()(int thread, uint64_t first) {
        for (uint64_t number; (number = relay.now()) < first + kPhases;) {
            const size_t phase = size_t(number - first);
            for (Range range; (range = relay.take(number, thread)).begin < range.end;) {
                for (size_t before = 0; before < phase; before++) num_wrong += counts[before] != units[before] * (units[before] - 1) / 2;
                for (int64_t unit = range.begin; unit < range.end; unit++) counts[phase] += unit;
            }
            if (relay.finish(number, thread)) open_from(first, phase + 1);
            else relay.wait(number, [calls = 0]() mutable { return ++calls < 3; });
        }
    }
};

void test_relay() {
    for (int threads : {1, 2, 5}) {
        ThreadPool pool(threads);
        Counting work(threads);
        for (int step = 0; step < 500; step++) {
            for (auto& count : work.counts) count = 0;
            for (auto& units : work.units) units = random_int(0, 3) ? random_int(0, 30) : 0;
            if (step % 100 == 0) work.units[3] = Relay::kMostUnits;
            const uint64_t first = work.relay.begin(work.units);
            work.open_from(first, 0);
            pool.post(work, first);
            for (size_t i = 0; i < work.units.size(); i++) {
                const int64_t expected = work.units[i] * (work.units[i] - 1) / 2;
                CHECK(work.counts[i] == expected, "step %d with %d threads: %ld, not %ld", step, threads, long(work.counts[i]), long(expected));
            }
        }
        pool.leave(&work);
        CHECK(work.num_wrong == 0, "%d units came too early", work.num_wrong.load());
        int num_ran = 0;
        std::mutex mutex;
        pool.run([&](int) {
            std::lock_guard<std::mutex> lock(mutex);
            num_ran++;
        });
        CHECK(num_ran == threads, "%d of %d threads ran", num_ran, threads);
    }
}

}  // namespace

int main() {
    test_ops(ops_portable(), "portable");
    test_attention(attention_portable(), "portable");
    if (uses_avx2()) {
        test_ops(ops_avx2(), "avx2");
        test_attention(attention_avx2(), "avx2");
    }
    if (uses_avx512()) {
        test_attention(attention_avx512(), "avx512");
        test_attention_has_the_same_bits(attention_avx512(), attention_avx2(), "avx512 and avx2");
    }
    test_halves_survive_a_round_trip();
    test_split_covers_everything_once();
    test_pool();
    test_relay();
    std::printf(num_failures ? "%d failures\n" : "all passed\n", num_failures);
    return num_failures != 0;
}
