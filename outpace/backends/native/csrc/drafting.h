// Drafts with a head: all tokens of a step's drafts in one call.
//
// The first pass takes in the tokens that the head has not seen, with the target's taps. Every further pass takes in the
// token just drafted, with the head's own state in place of taps. Cache entries of drafted tokens are temporary: the next
// call overwrites them from true taps.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "model.h"
#include "sampling.h"

namespace outpace {

enum class Pick : int32_t { kLikeliest, kNoise, kDraw, kCount };

// A request to draft for. Its tokens are at positions start, start + 1, ...; the last is the latest of the text.
struct DraftRow {
    int64_t start, count, depth;
    const int32_t* tokens;
    const int32_t* pages;  // with room for `depth - 1` positions after the last token
    Pick pick;
    Shaping shaping;
    uint64_t seed;
    int64_t position;  // of the first drafted token, for its noise
    float* probs;      // for kDraw: receives the distributions, [depth][vocabulary of the target], where the head knows the token
};

// Called after each pass with the rows whose drafts it continued and the confidence of each: writes what becomes of them.
enum class Fate : int32_t { kStopped, kGoesOn, kLast };  // `kStopped`: without the pass's token; `kLast`: with it
using Decide = void (*)(int32_t num_rows, const int32_t* rows, const float* confidence, int32_t* fates);

class Drafting {
  public:
    // `ids` are the target's tokens of the head's vocabulary. Both models must have been started.
    Drafting(Model& head, int64_t target_vocab_size, std::vector<int32_t> ids, int num_threads);

    // Writes up to `depth` tokens of each row. Every row has `depth` places, one row after another, and its number of tokens
    // in `counts`. `decide`, if given, may end a draft. Then the head's confidence before each token was picked is written
    // too, also that of the token before which a draft stops: the probability of the likeliest token at temperature 1.
    void draft(const std::vector<DraftRow>& rows, int32_t* tokens, float* confidence, int32_t* counts, Decide decide = nullptr);

  private:
    // Of one thread, over the head's vocabulary.
    struct Scratch {
        explicit Scratch(int64_t num_ids);
        Sampler sampler;
        Memory probs, sums;
    };
    struct Drafted {
        const DraftRow* row;
        int32_t number;
        int32_t* tokens;
        float* confidence;
        int32_t* count;
        int32_t latest;
        bool is_over;
    };

    void catch_up(const std::vector<DraftRow>& rows);
    void ask(Decide decide, int64_t nth);
    void keep_last_states();
    void pick_all(const float* logits, int64_t nth);
    void pick(Drafted& drafted, const float* logits, int32_t likeliest, int64_t nth, Scratch& scratch) const;
    float largest_share(const float* logits, float largest, Scratch& scratch) const;

    Model& head_;
    std::vector<int32_t> ids_;
    int64_t vocab_size_;
    std::shared_ptr<ThreadPool> pool_;
    std::vector<std::unique_ptr<Scratch>> scratch_;  // per thread
    std::vector<float> states_;
    bool knows_confidence_ = false;  // of this draft: it takes time, and nobody else asks for it
    std::vector<int32_t> likeliest_;
    std::vector<Row> rows_;
    std::vector<Drafted> open_;  // rows whose drafts go on
    std::vector<int32_t> asked_;
    std::vector<float> confidence_;
    std::vector<int32_t> fates_;
};

}  // namespace outpace
