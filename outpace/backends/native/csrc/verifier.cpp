#include "verifier.h"

#include <algorithm>

#include "noise.h"

namespace outpace {
namespace {

// Costs in tokens of a plain argmax: of sampling, and of a step that is large enough to wake other threads.
constexpr int64_t kSampleCost = 6, kWorthSharing = 300000;

// The row that ends a matched draft and its token, packed so that earlier rows compare as smaller.
int64_t ending(int64_t row, int64_t token) { return row << 32 | token; }

double uniform_at(const Case& one, Purpose purpose, int64_t offset) {
    return uniform(noise_key(one.seed, purpose, {uint64_t(one.position), uint64_t(offset)}), 0);
}

bool happens(const Case& one, int64_t offset, double probability) {
    return uniform_at(one, Purpose::kAccept, offset) < probability;
}

int32_t draw(const Case& one, int64_t offset, const float* weights, int64_t n) {
    return int32_t(draw_weighted(weights, n, uniform_at(one, Purpose::kRecover, offset)));
}

}  // namespace

Verifier::Scratch::Scratch(int64_t n)
    : sampler(n), target(size_t(n) * sizeof(float)), left_over(size_t(n) * sizeof(float)), residual(size_t(n) * sizeof(float)),
      sums(size_t(n / 2 + 1) * sizeof(float)) {}

Verifier::Verifier(int64_t vocab_size, int num_threads) : n_(vocab_size), ops_(row_ops()), pool_(ThreadPool::shared(num_threads)), relay_(pool_->size(), 1) {
    for (int i = 0; i < pool_->size(); i++) scratch_.push_back(std::make_unique<Scratch>(n_));
}

Verifier::~Verifier() { pool_->leave(this); }

void Verifier::verify(const std::vector<Case>& cases, Verdict* verdicts) {
    cases_ = &cases;
    verdicts_ = verdicts;
    units_.clear();
    if (firsts_.size() < cases.size()) firsts_ = std::vector<std::atomic<int64_t>>(cases.size());
    int64_t cost = 0;
    for (size_t i = 0; i < cases.size(); i++) {
        const Case& one = cases[i];
        const bool is_matched = one.rule <= Rule::kMatch;
        firsts_[i].store(INT64_MAX, std::memory_order_relaxed);
        for (int32_t row = 0; row <= (is_matched ? one.num_drafted : 0); row++) units_.push_back({int32_t(i), row});
        const int64_t num_read = std::count_if(one.rows, one.rows + one.num_drafted + 1, [](const LogitRow& row) { return row.only < 0; });
        cost += num_read * n_ * (one.rule == Rule::kMatchGreedy ? 1 : kSampleCost);
    }
    const bool is_shared = pool_->size() > 1 && cost >= kWorthSharing;
    is_prepared_ = false;
    if (is_shared && cases.size() == 1 && cases[0].rule == Rule::kBlock && cases[0].num_drafted > 0) prepare_rows(cases);
    if (is_shared && units_.size() > 1 && units_.size() <= size_t(Relay::kMostUnits)) {
        share_units();
    } else {
        for (const Unit& unit : units_) work_on(unit, *scratch_[0]);
    }
    for (size_t i = 0; i < cases.size(); i++) {
        if (cases[i].rule > Rule::kMatch) continue;
        const int64_t first = firsts_[i].load(std::memory_order_relaxed);
        verdicts[i] = {int32_t(first >> 32), int32_t(first & 0x7fffffff)};
    }
}

void Verifier::share_units() {
    const uint64_t phase = relay_.begin({int64_t(units_.size())});
    relay_.open(phase);
    pool_->post(*this, phase);
}

// The distributions of the only case, by all threads.
void Verifier::prepare_rows(const std::vector<Case>& cases) {
    const size_t num_rows = size_t(cases[0].num_drafted) + 1, num_bytes = num_rows * size_t(n_) * sizeof(float);
    if (prepared_.size() < num_bytes) prepared_ = Memory(num_bytes);
    units_.clear();
    for (size_t row = 0; row < num_rows; row++) units_.push_back({0, int32_t(row)});
    is_preparing_ = true;
    share_units();
    is_preparing_ = false;
    is_prepared_ = true;
    units_.assign(1, {0, 0});
}

void Verifier::operator()(int thread, uint64_t phase) {
    for (Range mine; (mine = relay_.take(phase, thread)).begin < mine.end;) {
        for (int64_t i = mine.begin; i < mine.end; i++) work_on(units_[size_t(i)], *scratch_[size_t(thread)]);
    }
    if (relay_.finish(phase, thread)) relay_.open(phase + 1);
    else if (thread == 0) relay_.wait(phase, [] { return false; });
}

void Verifier::work_on(const Unit& unit, Scratch& scratch) {
    const Case& one = (*cases_)[size_t(unit.index)];
    if (is_preparing_) return scratch.sampler.probs(one.rows[unit.row], one.shaping, prepared_.as<float>() + unit.row * n_);
    switch (one.rule) {
        case Rule::kReject: verdicts_[unit.index] = reject(one, scratch); break;
        case Rule::kBlock: verdicts_[unit.index] = verify_block(one, scratch); break;
        default: match_row(unit, scratch);
    }
}

int64_t Verifier::own_token(const Case& one, int32_t i, Sampler& sampler) {
    const LogitRow& row = one.rows[i];
    if (row.only >= 0) return row.only;
    const bool is_greedy = one.rule == Rule::kMatchGreedy;
    if (!one.picks || row.allowed) return is_greedy ? sampler.greedy(row) : sampler.choose(sampler.shape(row, one.shaping), one.seed, one.position + i);
    const int32_t likeliest = is_greedy ? int32_t(sampler.greedy(row)) : 0;
    one.picks[i] = is_greedy ? Picked{likeliest, likeliest, true} : sampler.pick(row.logits, one.shaping, one.seed, one.position + i);
    return one.picks[i].token;
}

// Computes the target's own token for one row. Rows after a rejecting row are skipped: they are not needed.
void Verifier::match_row(const Unit& unit, Scratch& scratch) {
    std::atomic<int64_t>& first = firsts_[size_t(unit.index)];
    if (first.load(std::memory_order_relaxed) < ending(unit.row, 0)) return;
    const Case& one = (*cases_)[size_t(unit.index)];
    const int64_t own = own_token(one, unit.row, scratch.sampler);
    if (unit.row < one.num_drafted && own == one.drafted[unit.row]) return;
    int64_t earliest = first.load(std::memory_order_relaxed);
    const int64_t mine = ending(unit.row, own);
    while (mine < earliest && !first.compare_exchange_weak(earliest, mine, std::memory_order_relaxed)) {
    }
}

Verdict Verifier::reject(const Case& one, Scratch& scratch) const {
    float* target = scratch.target.as<float>();
    for (int32_t i = 0; i < one.num_drafted; i++) {
        scratch.sampler.probs(one.rows[i], one.shaping, target);
        const float* draft = one.draft_probs[i];
        const int32_t token = one.drafted[i];
        if (!happens(one, i, std::min(1.0, double(target[token]) / double(draft[token])))) {
            float* residual = scratch.residual.as<float>();
            const bool is_left = ops_.residual(1.0f, target, draft, n_, residual);
            return {i, draw(one, i, is_left ? residual : target, n_)};
        }
    }
    scratch.sampler.probs(one.rows[one.num_drafted], one.shaping, target);
    return {one.num_drafted, draw(one, one.num_drafted, target, n_)};
}

const float* Verifier::target_probs(const Case& one, int32_t row, Scratch& scratch) const {
    if (is_prepared_) return prepared_.as<float>() + row * n_;
    scratch.sampler.probs(one.rows[row], one.shaping, scratch.target.as<float>());
    return scratch.target.as<float>();
}

Verdict Verifier::verify_block(const Case& one, Scratch& scratch) const {
    float *left_over = scratch.left_over.as<float>(), *residual = scratch.residual.as<float>();
    const int32_t n = one.num_drafted;
    double weight = 1;
    int32_t num_accepted = 0;
    const float* target = target_probs(one, 0, scratch);
    bool is_left = n > 0 && ops_.residual(1.0f, target, one.draft_probs[0], n_, residual);
    for (int32_t i = 1; i <= n; i++) {
        const int32_t token = one.drafted[i - 1];
        weight = std::min(1.0, weight * double(target[token]) / double(one.draft_probs[i - 1][token]));
        target = target_probs(one, i, scratch);
        double kept = weight;
        bool is_left_over = true;
        if (i < n) {
            is_left_over = ops_.residual(float(weight), target, one.draft_probs[i], n_, left_over);
            const double mass = is_left_over ? double(ops_.total(left_over, n_, scratch.sums.as<float>())) : 0.0;
            kept = mass > 0 ? mass / (mass + (1 - weight)) : 0.0;
        }
        if (happens(one, i - 1, kept)) {
            num_accepted = i;
            is_left = is_left_over;
            if (i < n) std::swap(left_over, residual);
        }
        if (weight == 0) break;
    }
    if (num_accepted == n) return {n, draw(one, n, target, n_)};
    if (!is_left) target = target_probs(one, num_accepted, scratch);
    return {num_accepted, draw(one, num_accepted, is_left ? residual : target, n_)};
}

}  // namespace outpace
