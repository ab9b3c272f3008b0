#include "drafting.h"

#include <algorithm>

#include "noise.h"

namespace outpace {
namespace {

constexpr float kLog2E = 1.44269504f;
// With so many tokens to take in before the last ones of the rows, a pass of their own pays: it computes a third of what a
// draft's pass does for each token, and has a part of the weights to read again.
constexpr int64_t kWorthAPass = 8;

}  // namespace

Drafting::Scratch::Scratch(int64_t num_ids)
    : sampler(num_ids), probs(size_t(num_ids) * sizeof(float)), sums(size_t(num_ids / 2 + 1) * sizeof(float)) {}

Drafting::Drafting(Model& head, int64_t target_vocab_size, std::vector<int32_t> ids, int num_threads)
    : head_(head), ids_(std::move(ids)), vocab_size_(target_vocab_size), pool_(ThreadPool::shared(num_threads)),
      likeliest_(size_t(head.max_step_tokens())) {
    for (int i = 0; i < pool_->size(); i++) scratch_.push_back(std::make_unique<Scratch>(int64_t(ids_.size())));
}

void Drafting::draft(const std::vector<DraftRow>& rows, int32_t* tokens, float* confidence, int32_t* counts, Decide decide) {
    knows_confidence_ = decide != nullptr;
    open_.clear();
    for (const DraftRow& row : rows) {
        open_.push_back({&row, int32_t(open_.size()), tokens, confidence, counts++, 0, false});
        tokens += row.depth;
        confidence += row.depth;
    }
    catch_up(rows);
    const float* logits = head_.forward(rows_, likeliest_.data());
    for (int64_t nth = 0;;) {
        pick_all(logits, nth++);
        for (Drafted& drafted : open_) {
            *drafted.count = int32_t(nth);
            drafted.is_over = drafted.row->depth <= nth;
        }
        if (decide) ask(decide, nth);
        keep_last_states();
        open_.erase(std::remove_if(open_.begin(), open_.end(), [](const Drafted& drafted) { return drafted.is_over; }), open_.end());
        if (open_.empty()) return;
        rows_.clear();
        for (const Drafted& drafted : open_) {
            const DraftRow& row = *drafted.row;
            rows_.push_back({row.start + row.count + nth - 1, 1, 1, &drafted.latest, row.pages});
        }
        logits = head_.forward(rows_, likeliest_.data(), states_.data());
    }
}

// Takes in tokens without logits until few are left and fit one pass; every row keeps at least its last token. Leaves the
// rest in rows_.
void Drafting::catch_up(const std::vector<DraftRow>& rows) {
    rows_.clear();
    int64_t num_left = 0;
    for (const DraftRow& row : rows) {
        rows_.push_back({row.start, row.count, 1, row.tokens, row.pages});
        num_left += row.count;
    }
    const int64_t room = head_.max_step_tokens();
    const auto is_worth_a_pass = [&] { return num_left > room || num_left - int64_t(rows.size()) >= kWorthAPass; };
    for (std::vector<Row> part; is_worth_a_pass(); part.clear()) {
        int64_t left = room;
        for (Row& row : rows_) {
            const int64_t count = std::min(row.count - 1, left);
            if (count == 0) continue;
            part.push_back({row.start, count, 0, row.tokens, row.pages});
            row = {row.start + count, row.count - count, 1, row.tokens + count, row.pages};
            left -= count;
        }
        num_left -= room - left;
        head_.forward(part, likeliest_.data());
    }
}

void Drafting::ask(Decide decide, int64_t nth) {
    asked_.clear();
    confidence_.clear();
    for (const Drafted& drafted : open_) {
        asked_.push_back(drafted.number);
        confidence_.push_back(drafted.confidence[nth - 1]);
    }
    fates_.assign(open_.size(), int32_t(Fate::kStopped));
    decide(int32_t(open_.size()), asked_.data(), confidence_.data(), fates_.data());
    for (size_t i = 0; i < open_.size(); i++) {
        if (Fate(fates_[i]) == Fate::kStopped) *open_[i].count = int32_t(nth - 1);
        open_[i].is_over |= Fate(fates_[i]) != Fate::kGoesOn;
    }
}

// The state after the last token of each row whose draft goes on; the next pass begins with it.
void Drafting::keep_last_states() {
    const int64_t width = head_.shape().width;
    states_.clear();
    int64_t end = 0;
    for (size_t i = 0; i < rows_.size(); i++) {
        end += rows_[i].count;
        if (open_[i].is_over) continue;
        const float* state = head_.residual() + (end - 1) * width;
        states_.insert(states_.end(), state, state + width);
    }
}

void Drafting::pick_all(const float* logits, int64_t nth) {
    const int64_t num_ids = int64_t(ids_.size());
    const auto pick_one = [&](size_t i, Scratch& scratch) { pick(open_[i], logits + int64_t(i) * num_ids, likeliest_[i], nth, scratch); };
    if (open_.size() == 1) return pick_one(0, *scratch_[0]);  // of several, even the confidence alone is worth sharing
    pool_->run([&](int thread) {
        for (size_t i = size_t(thread); i < open_.size(); i += size_t(pool_->size())) pick_one(i, *scratch_[size_t(thread)]);
    });
}

void Drafting::pick(Drafted& drafted, const float* logits, int32_t likeliest, int64_t nth, Scratch& scratch) const {
    const DraftRow& row = *drafted.row;
    if (knows_confidence_) drafted.confidence[nth] = largest_share(logits, logits[likeliest], scratch);
    int64_t picked = likeliest;
    if (row.pick == Pick::kNoise) {
        picked = scratch.sampler.choose(scratch.sampler.shape({logits}, row.shaping), row.seed, row.position + nth, ids_.data());
    } else if (row.pick == Pick::kDraw) {
        const int64_t n = int64_t(ids_.size());
        float *probs = scratch.probs.as<float>(), *all = row.probs + nth * vocab_size_;
        scratch.sampler.probs({logits}, row.shaping, probs);
        for (int64_t i = 0; i < n; i++) all[ids_[size_t(i)]] = probs[i];
        const uint64_t key = noise_key(row.seed, Purpose::kDraft, {uint64_t(row.position), uint64_t(nth)});
        picked = draw_weighted(probs, n, uniform(key, 0));
    }
    drafted.tokens[nth] = drafted.latest = ids_[size_t(picked)];
}

float Drafting::largest_share(const float* logits, float largest, Scratch& scratch) const {
    const int64_t n = int64_t(ids_.size());
    row_ops().powers(logits, n, largest, kLog2E, scratch.probs.as<float>());
    return 1.0f / row_ops().total(scratch.probs.as<float>(), n, scratch.sums.as<float>());
}

}  // namespace outpace
