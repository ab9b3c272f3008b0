// Sampling and acceptance: every instruction set gives the bits of the plain loops, verdicts do not depend on threads, and
// rows of any size and content stay within memory. That the tokens are those of the host reference is tested from Python
// (tests/test_native_sampling.py). Run by `python -m outpace.backends.native.build --test [--sanitize]`.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "noise.h"
#include "numerics.h"
#include "ops.h"
#include "peak.h"
#include "row_ops.h"
#include "sampling.h"
#include "verifier.h"

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

using Floats = std::vector<float>;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

int64_t random_int(int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(rng); }

// Rows with ties, masks and spreads of all sizes; never quite empty.
Floats random_logits(int64_t n) {
    const float spread = std::ldexp(1.0f, int(random_int(-10, 10)));
    const bool is_round = random_int(0, 2) == 0, is_masked = random_int(0, 2) == 0;
    std::normal_distribution<float> normal(0, spread);
    Floats row(static_cast<size_t>(n));
    for (float& x : row) {
        x = normal(rng);
        if (is_round) x = std::round(x);
        if (is_masked && random_int(0, 3)) x = -kInfinity;
    }
    row[size_t(random_int(0, n - 1))] = spread;
    return row;
}

using Bits = std::vector<uint32_t>;

// At least one token is allowed; often only a few are, or all of a block.
Bits random_mask(int64_t n) {
    Bits bits(size_t((n + 31) / 32));
    const int64_t kind = random_int(0, 2);
    for (uint32_t& word : bits) word = kind == 0 ? uint32_t(rng()) : random_int(0, 9) ? 0 : kind == 1 ? ~0u : 1u << random_int(0, 31);
    const int64_t token = random_int(0, n - 1);
    bits[size_t(token / 32)] |= 1u << (token % 32);
    return bits;
}

bool is_allowed(const Bits& bits, int64_t token) { return bits[size_t(token / 32)] >> (token % 32) & 1; }

Floats with_forbidden_removed(Floats row, const Bits& bits) {
    for (size_t i = 0; i < row.size(); i++)
        if (!is_allowed(bits, int64_t(i))) row[i] = -kInfinity;
    return row;
}

bool same_bits(const Floats& a, const Floats& b) { return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0; }

void test_row_ops(const RowOps& op, const char* name) {
    const RowOps& reference = row_ops_reference();
    for (int round = 0; round < 300; round++) {
        const int64_t n = random_int(1, round % 10 ? 300 : 5000);
        const Floats x = random_logits(n), draft = random_logits(n);
        const int64_t at = op.argmax(x.data(), n);
        CHECK(at == reference.argmax(x.data(), n), "argmax %s n=%ld", name, long(n));

        Floats found(x.size()), expected(x.size());
        const float sharpness = std::ldexp(1.0f, int(random_int(-12, 12)));
        op.powers(x.data(), n, x[size_t(at)], sharpness, found.data());
        reference.powers(x.data(), n, x[size_t(at)], sharpness, expected.data());
        CHECK(same_bits(found, expected), "powers %s n=%ld", name, long(n));

        const Bits bits = random_mask(n);
        const Floats masked = with_forbidden_removed(x, bits);
        const int64_t best = reference.argmax(masked.data(), n);
        reference.powers(masked.data(), n, masked[size_t(best)], sharpness, expected.data());
        for (const RowOps* each : {&op, &reference}) {
            CHECK(each->argmax_allowed(x.data(), bits.data(), n) == best, "argmax_allowed %s n=%ld", name, long(n));
            each->powers_allowed(x.data(), bits.data(), n, masked[size_t(best)], sharpness, found.data());
            CHECK(same_bits(found, expected), "powers_allowed %s n=%ld", name, long(n));
        }

        Floats sums(size_t(n / 2 + 1));
        const float sum = op.total(found.data(), n, sums.data());
        CHECK(sum == reference.total(expected.data(), n, sums.data()), "total %s n=%ld", name, long(n));

        std::vector<int32_t> places(size_t(n + 1)), expected_places(size_t(n + 1));
        const float bound = found[size_t(random_int(0, n - 1))];
        places.resize(size_t(op.collect(found.data(), n, bound, places.data())));
        expected_places.resize(size_t(reference.collect(expected.data(), n, bound, expected_places.data())));
        CHECK(places == expected_places, "collect %s n=%ld", name, long(n));

        op.divide(found.data(), n, sum);
        reference.divide(expected.data(), n, sum);
        CHECK(same_bits(found, expected), "divide %s n=%ld", name, long(n));

        Floats left(x.size()), expected_left(x.size());
        const float weight = std::ldexp(1.0f, int(random_int(-3, 0)));
        const bool is_left = op.residual(weight, found.data(), draft.data(), n, left.data());
        CHECK(is_left == reference.residual(weight, found.data(), draft.data(), n, expected_left.data()), "residual %s n=%ld", name, long(n));
        CHECK(same_bits(left, expected_left), "residual %s n=%ld", name, long(n));
    }
}

// A NaN is larger than any number, as it is to numpy.
void test_argmax_of_nans(const RowOps& op, const char* name) {
    for (int round = 0; round < 200; round++) {
        Floats x = random_logits(random_int(1, 400));
        const int64_t n = int64_t(x.size()), first = random_int(0, n - 1);
        x[size_t(first)] = std::copysign(std::nanf(""), round % 2 ? 1.0f : -1.0f);
        for (int64_t i = first + 1; i < n; i++)
            if (random_int(0, 9) == 0) x[size_t(i)] = std::nanf("");
        CHECK(op.argmax(x.data(), n) == first, "argmax %s n=%ld", name, long(n));
        const Bits bits = random_mask(n);
        const int64_t first_allowed = row_ops_reference().argmax(with_forbidden_removed(x, bits).data(), n);
        CHECK(op.argmax_allowed(x.data(), bits.data(), n) == first_allowed, "argmax_allowed %s n=%ld", name, long(n));
    }
}

// Whoever looks at which part, and in whatever order, it is the argmax of the whole.
void test_peaks_merge_to_the_argmax() {
    for (int round = 0; round < 1000; round++) {
        Floats x = random_logits(random_int(1, 200));
        const int64_t n = int64_t(x.size());
        if (round % 4 == 0) std::fill(x.begin(), x.end(), x[0]);
        if (round % 4 == 1)
            for (float& value : x) value = -std::fabs(value);
        if (round % 10 == 9) x[size_t(random_int(0, n - 1))] = x[size_t(random_int(0, n - 1))] = std::nanf("");
        std::vector<Range> parts;
        for (int64_t at = 0; at < n;) {
            const int64_t end = random_int(at + 1, n);
            parts.push_back({at, end});
            at = end;
        }
        std::shuffle(parts.begin(), parts.end(), rng);
        Peak threads[3];
        for (Range part : parts) {
            const int64_t at = part.begin + row_ops().argmax(x.data() + part.begin, part.end - part.begin);
            threads[random_int(0, 2)].merge({x[size_t(at)], int32_t(at)});
        }
        Peak whole;
        for (Peak own : threads) whole.merge(own);
        CHECK(whole.at == row_ops_reference().argmax(x.data(), n), "n=%ld in %zu parts", long(n), parts.size());
    }
}

Shaping random_shaping() {
    const double top_p[] = {1.0, 0.9, 0.5, 1e-9, 1 - 0x1p-53}, min_p[] = {0.0, 0.05, 1.0, 1e-45, 1e-190};
    return {std::ldexp(1.0f, int(random_int(-6, 6))), int32_t(random_int(0, 3) ? 0 : random_int(0, 100)), top_p[random_int(0, 4)], min_p[random_int(0, 4)]};
}

void test_probabilities_sum_to_one() {
    for (int round = 0; round < 500; round++) {
        const int64_t n = random_int(1, 400);
        Sampler sampler(n);
        const Floats logits = random_logits(n);
        const Shaping shaping = random_shaping();
        Floats probs(logits.size());
        sampler.probs({logits.data()}, shaping, probs.data());
        double sum = 0;
        int64_t count = 0;
        for (float p : probs) {
            sum += p;
            count += p > 0;
        }
        CHECK(std::fabs(sum - 1) < 1e-5, "sum %g n=%ld", sum, long(n));
        CHECK(shaping.top_k == 0 || count <= shaping.top_k, "%ld of top %d", long(count), shaping.top_k);
        const int64_t chosen = sampler.choose(sampler.shape({logits.data()}, shaping), uint64_t(round), round);
        CHECK(chosen >= 0 && chosen < n && probs[size_t(chosen)] > 0, "chose %ld of %ld", long(chosen), long(n));
    }
}

// A stable pick is the pick under any mask that allows it and the likeliest token.
void test_stable_picks_hold_under_masks() {
    int64_t num_stable = 0, num_others = 0, num_filtered = 0;
    for (int round = 0; round < 3000; round++) {
        const int64_t n = random_int(1, round % 3 ? 400 : 4000);
        Sampler sampler(n);
        const Floats logits = random_logits(n);
        const Shaping shaping = round % 5 ? Shaping{std::ldexp(1.0f, int(random_int(-6, 6))), 0, 1.0, 0.0} : random_shaping();
        const Picked pick = sampler.pick(logits.data(), shaping, uint64_t(round), round);
        CHECK(pick.token == sampler.choose(sampler.shape({logits.data()}, shaping), uint64_t(round), round), "n=%ld", long(n));
        CHECK(pick.likeliest == row_ops_reference().argmax(logits.data(), n), "n=%ld", long(n));
        num_filtered += pick.is_stable && shaping.filters(n);
        for (int i = 0; i < 4; i++) {
            Bits bits = random_mask(n);
            for (int32_t token : {pick.token, pick.likeliest}) bits[size_t(token / 32)] |= 1u << (token % 32);
            const int64_t token = sampler.choose(sampler.shape({logits.data(), bits.data()}, shaping), uint64_t(round), round);
            (pick.is_stable ? num_stable : num_others) += token == pick.token;
            CHECK(!pick.is_stable || token == pick.token, "%ld, not %d, n=%ld", long(token), pick.token, long(n));
        }
    }
    CHECK(num_stable > 3000 && num_others > 300 && num_filtered == 0, "%ld %ld %ld", long(num_stable), long(num_others), long(num_filtered));
}

// Rounding may decide between tokens this close, and it changes with the sum that a mask leaves.
void test_close_calls_are_not_stable() {
    const Shaping plain{1.0f, 0, 1.0, 0.0};  // logits are exponents of two
    int64_t num_ties = 0;
    for (int64_t position = 0; position < 200; position++) {
        const uint64_t key = noise_key(5, Purpose::kToken, {uint64_t(position)});
        const double noise[] = {minus_log(uniform(key, 0)), minus_log(uniform(key, 1))};
        if (std::fabs(std::log2(noise[0] / noise[1])) > 9) continue;  // one of them would be in the tail
        Sampler pair(2), row(40);
        const Floats tied = {float(std::log2(noise[0])), float(std::log2(noise[1]))};
        CHECK(!pair.pick(tied.data(), plain, 5, position).is_stable, "a tie at %ld", long(position));
        num_ties++;
        Floats at_cut(40, -80.0f);
        at_cut[3] = 0;
        CHECK(row.pick(at_cut.data(), plain, 5, position).is_stable, "one token at %ld", long(position));
        for (float factor : {0.99995f, 1.0f, 1.00005f}) {
            at_cut[9] = std::log2(1e-3f * factor);
            CHECK(!row.pick(at_cut.data(), plain, 5, position).is_stable, "at the cut, %ld", long(position));
        }
    }
    CHECK(num_ties > 100, "%ld ties", long(num_ties));
}

// The rows and drafts of a step, and cases that point into them.
struct Step {
    std::vector<Floats> rows, probs;
    std::vector<Bits> masks;
    std::vector<LogitRow> logits;
    std::vector<const float*> draft_probs;
    std::vector<int32_t> drafted;
    std::vector<Case> cases;
};

Step random_step(int64_t n) {
    Step step;
    const int64_t num_cases = random_int(1, 6);
    Sampler sampler(n);
    std::vector<int32_t> lengths;
    for (int64_t i = 0; i < num_cases; i++) {
        lengths.push_back(int32_t(random_int(0, 5)));
        step.cases.push_back({Rule(random_int(0, 3)), lengths.back(), nullptr, nullptr, nullptr, random_shaping(), uint64_t(random_int(0, INT64_MAX)), random_int(0, 5000), nullptr});
        for (int32_t j = 0; j <= lengths.back(); j++) step.rows.push_back(random_logits(n));
        for (int32_t j = 0; j < lengths.back(); j++) {
            Floats probs(static_cast<size_t>(n));
            sampler.probs({step.rows[step.rows.size() - size_t(j) - 1].data()}, step.cases.back().shaping, probs.data());
            step.drafted.push_back(int32_t(draw_weighted(probs.data(), n, uniform(uint64_t(random_int(0, INT64_MAX)), 0))));
            step.probs.push_back(std::move(probs));
        }
    }
    for (const Floats& row : step.rows) {
        step.masks.push_back(random_mask(n));
        const int64_t kind = random_int(0, 3);  // half of the rows have no mask
        step.logits.push_back({row.data(), kind == 0 ? step.masks.back().data() : nullptr, kind == 1 ? random_int(0, n - 1) : -1});
    }
    for (const Floats& row : step.probs) step.draft_probs.push_back(row.data());
    size_t row = 0, token = 0;
    for (Case& one : step.cases) {
        one.rows = step.logits.data() + row;
        one.drafted = step.drafted.data() + token;
        one.draft_probs = step.draft_probs.data() + token;
        row += size_t(one.num_drafted) + 1;
        token += size_t(one.num_drafted);
    }
    return step;
}

void test_verdicts_do_not_depend_on_threads() {
    // Large enough that the work is shared out, and small.
    for (int64_t n : {int64_t(1), int64_t(9), int64_t(333), int64_t(30011)}) {
        Verifier alone(n, 1), together(n, 3);
        for (int round = 0; round < (n > 1000 ? 20 : 200); round++) {
            const Step step = random_step(n);
            std::vector<Verdict> found(step.cases.size()), expected(step.cases.size());
            alone.verify(step.cases, expected.data());
            together.verify(step.cases, found.data());
            for (size_t i = 0; i < found.size(); i++) {
                const Case& one = step.cases[i];
                CHECK(found[i].num_accepted == expected[i].num_accepted && found[i].token == expected[i].token, "n=%ld rule=%d", long(n), int(one.rule));
                CHECK(found[i].num_accepted >= 0 && found[i].num_accepted <= one.num_drafted, "accepted %d of %d", found[i].num_accepted, one.num_drafted);
                CHECK(found[i].token >= 0 && found[i].token < n, "token %d of %ld", found[i].token, long(n));
            }
        }
    }
}

void test_rows_that_are_not_numbers_stay_within_memory() {
    const float nan = std::numeric_limits<float>::quiet_NaN();
    for (float value : {nan, kInfinity, -kInfinity}) {
        for (int64_t n : {int64_t(1), int64_t(100)}) {
            Sampler sampler(n);
            for (int round = 0; round < 100; round++) {
                Floats logits = random_logits(n);
                for (float& x : logits) x = round % 2 || random_int(0, 1) ? value : x;
                const int64_t chosen = sampler.choose(sampler.shape({logits.data()}, random_shaping()), 1, round);
                CHECK(chosen >= 0 && chosen < n, "chose %ld", long(chosen));
            }
        }
    }
}

void test_logarithms() {
    for (int i = 0; i < 100000; i++) {
        const double u = uniform(uint64_t(i) * kGolden, i);
        const double error = minus_log(u) / -std::log(u) - 1;
        CHECK(std::fabs(error) < 2e-15, "u=%g error=%g", u, error);
    }
}

}  // namespace

int main() {
    test_row_ops(row_ops_portable(), "portable");
    if (uses_avx2()) test_row_ops(row_ops_avx2(), "avx2");
    test_argmax_of_nans(row_ops_reference(), "reference");
    test_argmax_of_nans(row_ops_portable(), "portable");
    if (uses_avx2()) test_argmax_of_nans(row_ops_avx2(), "avx2");
    test_peaks_merge_to_the_argmax();
    test_probabilities_sum_to_one();
    test_stable_picks_hold_under_masks();
    test_close_calls_are_not_stable();
    test_verdicts_do_not_depend_on_threads();
    test_rows_that_are_not_numbers_stay_within_memory();
    test_logarithms();
    std::printf(num_failures ? "%d failures\n" : "all passed\n", num_failures);
    return num_failures != 0;
}
