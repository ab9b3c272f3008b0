#include "sampling.h"

#include <algorithm>
#include <cstring>

#include "noise.h"
#include "numerics.h"

namespace outpace {
namespace {

constexpr float kHeadRatio = 1e-3f;
constexpr int64_t kTailIndex = -1;

// A lower bound for all values whose quotient by `divisor` can round to `probability` or more. It is zero for tiny
// values, where float32 loses relative precision.
float below(float probability, float divisor) {
    const float product = probability * divisor;
    return product > 1e-36f ? product * 0.999999f : 0.0f;
}

// Numbers that differ by less than this part of them may change places when the row is divided by another sum: probabilities
// are rounded to float32 and the sum of a row has a relative error of at most 4e-6 (numerics.h).
constexpr double kMargin = 1e-4;

// Picks the token with the largest p / exponential, the first among equals. The logarithm is only computed for a token
// that could win, or come within the margin of the winner: exponential = -log(u) is at least 1 - u.
struct Race {
    uint64_t key;
    double score = -1, second = -1;
    int64_t winner = -1;

    void enter(int64_t token, int64_t id, double p) {
        const double u = uniform(key, id);
        if (p < score * (1.0 - u) * (1 - kMargin)) return;
        const double mine = p / minus_log(u);
        if (mine > score) {
            second = score;
            score = mine;
            winner = token;
        } else if (mine > second) {
            second = mine;
        }
    }
    bool is_clearly_below_winner(double other) const { return other < score * (1 - kMargin); }
};

}  // namespace

Sampler::Sampler(int64_t vocab_size)
    : ops_(row_ops()), n_(vocab_size), values_(size_t(n_) * sizeof(float)), sums_(size_t(n_ / 2 + 1) * sizeof(float)),
      places_(size_t(n_ + 1) * sizeof(int32_t)), kept_(size_t(n_) * sizeof(float)), doubles_(size_t(n_) * 2 * sizeof(double)) {}

int64_t Sampler::greedy(const LogitRow& row) const {
    return row.allowed ? ops_.argmax_allowed(row.logits, row.allowed, n_) : ops_.argmax(row.logits, n_);
}

Distribution Sampler::shape(const LogitRow& row, const Shaping& shaping) {
    float* values = values_.as<float>();
    likeliest_ = greedy(row);
    if (row.allowed) ops_.powers_allowed(row.logits, row.allowed, n_, row.logits[likeliest_], shaping.sharpness, values);
    else ops_.powers(row.logits, n_, row.logits[likeliest_], shaping.sharpness, values);
    if (shaping.top_k > 0 && shaping.top_k < n_) keep_top_k(shaping.top_k);
    const float sum = ops_.total(values, n_, sums_.as<float>());
    const float peak = 1.0f / sum;  // the largest power is 1
    if (shaping.top_p >= 1.0 && shaping.min_p <= 0.0) return {values, sum, peak};

    const float smallest = peak * float(shaping.min_p);
    int32_t* places = places_.as<int32_t>();
    float* kept = kept_.as<float>();
    const int64_t num_found = shaping.top_p < 1.0 ? keep_top_p(sum, shaping.top_p) : ops_.collect(values, n_, below(smallest, sum), places);
    int64_t count = 0;
    for (int64_t i = 0; i < num_found; i++) {
        const float p = values[places[i]] / sum;
        places[count] = places[i];
        kept[count] = p;
        count += p >= smallest;
    }
    keep_only(count, kept);
    const float left = ops_.total(values, n_, sums_.as<float>());
    return {values, left, peak / left};
}

void Sampler::probs(const LogitRow& row, const Shaping& shaping, float* out) {
    if (row.only >= 0) {
        std::memset(out, 0, size_t(n_) * sizeof(float));
        out[row.only] = 1.0f;
        return;
    }
    const Distribution d = shape(row, shaping);
    std::memcpy(out, d.values, size_t(n_) * sizeof(float));
    ops_.divide(out, n_, d.divisor);
}

// Zero all values except those at the first `count` places.
void Sampler::keep_only(int64_t count, const float* kept) {
    float* values = values_.as<float>();
    const int32_t* places = places_.as<int32_t>();
    std::memset(values, 0, size_t(n_) * sizeof(float));
    for (int64_t i = 0; i < count; i++) values[places[i]] = kept[i];
}

// The k largest; among equals at the border the lower ids.
void Sampler::keep_top_k(int64_t k) {
    const float* values = values_.as<float>();
    int32_t* places = places_.as<int32_t>();
    float* kept = kept_.as<float>();
    int64_t num_found = 0;
    for (float bound = 0x1p-6f; (num_found = ops_.collect(values, n_, bound, places)) < k; bound *= 0x1p-6f) {
        if (bound < 0x1p-100f) return;  // fewer than k tokens have any probability
    }
    for (int64_t i = 0; i < num_found; i++) kept[i] = values[places[i]];
    std::nth_element(kept, kept + (k - 1), kept + num_found, [](float a, float b) { return a > b; });
    const float border = kept[k - 1];
    int64_t num_tied = k - std::count_if(kept, kept + num_found, [=](float p) { return p > border; });
    int64_t count = 0;
    for (int64_t i = 0; i < num_found; i++) {
        const float p = values[places[i]];
        if (p < border || (p == border && num_tied-- <= 0)) continue;
        places[count] = places[i];
        kept[count++] = p;
    }
    keep_only(count, kept);
}

// Finds the likeliest tokens whose mass reaches top_p; returns how many. It searches the likeliest few first: the order
// of the tokens above a bound does not depend on those below it.
int64_t Sampler::keep_top_p(float sum, double top_p) {
    const float* values = values_.as<float>();
    int32_t* places = places_.as<int32_t>();
    const float candidate = float((1.0 - top_p) / double(n_));  // nothing smaller is in the set; see sampling.py
    const float last_bound = below(candidate, sum);
    for (float bound = 0x1p-6f;; bound *= 0x1p-6f) {
        const bool is_last = bound <= last_bound;
        if (is_last) bound = last_bound;
        const int64_t num_found = ops_.collect(values, n_, bound, places);
        // Equal probabilities are ordered by id, even if they are rounded from different powers.
        std::sort(places, places + num_found, [=](int32_t a, int32_t b) {
            const float p = values[a] / sum, q = values[b] / sum;
            return p > q || (p == q && a < b);
        });
        const float outside = bound / sum;  // upper bound for tokens that were not collected
        double mass = 0;
        int64_t i = 0;
        for (; i < num_found; i++) {
            const float p = values[places[i]] / sum;
            if (is_last ? p < candidate : p <= outside) break;
            mass += p;
            if (mass >= top_p) return i + 1;
        }
        if (is_last) return i;
    }
}

int64_t Sampler::choose(const Distribution& probs, uint64_t seed, int64_t position, const int32_t* ids, bool* is_stable) {
    int32_t* places = places_.as<int32_t>();
    double* head = doubles_.as<double>();
    const float cut = probs.peak * kHeadRatio;
    const float low = cut * float(1 - kMargin), high = cut * float(1 + kMargin);  // a mask may move the cut between these
    const int64_t num_found = ops_.collect(probs.values, n_, below(is_stable ? low : cut, probs.divisor), places);
    bool is_near_cut = false;
    Race race{noise_key(seed, Purpose::kToken, {uint64_t(position)})};
    int64_t count = 0;
    for (int64_t i = 0; i < num_found; i++) {
        const float p = probs[places[i]];
        is_near_cut = is_near_cut || (p >= low && p <= high);
        if (p < cut) continue;
        head[count++] = p;
        race.enter(places[i], ids ? ids[places[i]] : places[i], p);
    }
    if (race.winner < 0) return 0;  // only if the logits contain a NaN
    const double tail_mass = 1.0 - total(head, count, head + n_), tail_noise = minus_log(uniform(race.key, kTailIndex));
    if (is_stable) {
        *is_stable = !is_near_cut && race.is_clearly_below_winner(race.second) && race.is_clearly_below_winner((tail_mass + kMargin) / tail_noise);
    }
    if (tail_mass / tail_noise > race.score) {
        return choose_from_tail(probs, cut, noise_key(seed, Purpose::kTail, {uint64_t(position)}), race.winner, ids);
    }
    return race.winner;
}

// Why a pick is stable: a mask that allows the likeliest token changes no power, only their sum, so all allowed tokens keep
// their scores up to a common factor and rounding. The tail's mass can only shrink. So a clear winner stays the winner.
Picked Sampler::pick(const float* logits, const Shaping& shaping, uint64_t seed, int64_t position) {
    bool is_stable = false;
    const int64_t token = choose(shape({logits}, shaping), seed, position, nullptr, &is_stable);
    return {int32_t(token), int32_t(likeliest_), is_stable && !shaping.filters(n_)};
}

int64_t Sampler::choose_from_tail(const Distribution& probs, float cut, uint64_t key, int64_t otherwise, const int32_t* ids) const {
    Race race{key};
    for (int64_t i = 0; i < n_; i++) {
        const float p = probs[i];
        if (p > 0.0f && p < cut) race.enter(i, ids ? ids[i] : i, p);
    }
    return race.winner < 0 ? otherwise : race.winner;
}

int64_t draw_weighted(const float* weights, int64_t n, double u) {
    int64_t last = n - 1;
    while (last > 0 && !(weights[last] > 0.0f)) last--;
    // The sum so far at the beginning of each of up to kMarks parts: the search begins at the last that is not too far.
    constexpr int64_t kMarks = 64;
    const int64_t part = last / kMarks + 1;
    double marks[kMarks], sum = 0;
    int64_t num_marks = 0;
    for (int64_t i = 0; i <= last; i++) {
        if (i == num_marks * part) marks[num_marks++] = sum;
        sum += weights[i];
    }
    const double share = u * sum;
    const int64_t nearest = std::max<int64_t>(0, std::upper_bound(marks, marks + num_marks, share) - marks - 1);
    double running = marks[nearest];
    for (int64_t i = nearest * part; i < last; i++) {
        running += weights[i];
        if (running > share) return i;
    }
    return last;
}

}  // namespace outpace
