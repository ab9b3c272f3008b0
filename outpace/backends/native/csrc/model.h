// A decoder of the Llama family, or a draft head of one layer: weights, a paged cache, and one forward pass over ragged
// rows.
//
// Model families differ only in data: the optional tensors (biases, norms of queries and keys, a separate output head),
// which elements RoPE pairs, and its frequencies. The model has pages, not sequences: the caller allocates the pages
// and passes the page table of each row.
//
// A draft head (EAGLE-3) continues the text of another model, its target, from the target's hidden states, its taps. The
// head's entry for position p combines the token at p with the target's taps at p - 1, so it depends on the tokens up to
// p alone, as the target's own cache does: both use the same page tables. Position 0 has no entry.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "attention.h"
#include "matmul.h"
#include "memory.h"
#include "ops.h"
#include "peak.h"
#include "relay.h"
#include "thread_pool.h"

namespace outpace {

struct Shape {
    int64_t num_layers, width, hidden, num_heads, num_kv_heads, head_dim, num_rotated, vocab_size;
    float epsilon;
    RopeStyle rope_style;
    float rope_scale;  // factor on cosines and sines
    std::vector<double> rope_frequencies;  // [num_rotated / 2]
    int64_t num_taps = 0;                  // of a draft head: hidden states that it reads; 0 for a model

    bool is_head() const { return num_taps > 0; }
    int64_t input_width() const { return is_head() ? 2 * width : width; }  // of the layer's attention: token and state
};

enum class MatrixName : int32_t { kEmbedding, kHead, kQuery, kKey, kValue, kOutput, kGate, kUp, kDown, kFuse, kCount };
enum class VectorName : int32_t {
    kFinalNorm, kAttentionNorm, kFeedForwardNorm, kQueryBias, kKeyBias, kValueBias, kOutputBias, kQueryNorm, kKeyNorm, kTapNorm, kTokenNorm, kCount
};

struct Matrix {
    uint8_t* data = nullptr;
    Packed packed{};
    bool is_present() const { return data != nullptr; }
};

constexpr int64_t kChunkTokens = 16;  // tokens of a row that share page reads in attention
constexpr int64_t kItemsPerThread = 4;        // with so many items of attention, threads are busy evenly enough
constexpr int64_t kMostSharedParts = 16 << 10;  // of queries and segments, in one step

struct Layer {
    Matrix matrices[int(MatrixName::kCount)];
    std::vector<float> vectors[int(VectorName::kCount)];

    const Packed& operator[](MatrixName name) const { return matrices[int(name)].packed; }
    const float* operator[](VectorName name) const {
        const auto& vector = vectors[int(name)];
        return vector.empty() ? nullptr : vector.data();
    }
};

// Consecutive tokens of one sequence, appended at `start`; the last num_logits of them need logits.
struct Row {
    int64_t start, count, num_logits;
    const int32_t* tokens;
    const int32_t* pages;
};

// Prefetches weights, a few cache lines at a time, while a thread waits.
class Fetch {
  public:
    Fetch() = default;
    Fetch(const Packed& w, int64_t tile, size_t most) {
        const size_t size = packed_bytes(w.source, w.rows, w.cols), first = size_t(tile) * tile_size(w);
        at_ = w.data + first;
        end_ = at_ + std::min(most, size - first);
    }
    bool go_on() {
        if (at_ >= end_) return false;
        for (int i = 0; i < 4; i++, at_ += 64) __builtin_prefetch(at_, 0, 2);
        return true;
    }

  private:
    const uint8_t *at_ = nullptr, *end_ = nullptr;
};

class Model {
  public:
    Model(Shape shape, int num_threads);

    const Shape& shape() const { return shape_; }

    // Weights; layer -1 holds the embedding, the head and the final norm. A matrix is laid out first and then packed in
    // ranges of rows, so that the file's pages can be released in between.
    bool has(int64_t index, MatrixName name) const { return layer(index).matrices[int(name)].is_present(); }
    void lay_out(int64_t layer, MatrixName name, GgmlType type, int64_t rows, int64_t cols);
    void pack(int64_t layer, MatrixName name, const void* source, int64_t row_begin, int64_t row_end);
    void set_vector(int64_t layer, VectorName name, const float* values, int64_t n);

    // Before start: keep the residual stream after these numbers of layers, for a draft head.
    void keep_taps(std::vector<int64_t> layers) { tapped_ = std::move(layers); }
    // Before start, of a draft head: the model whose embedding and taps it reads. It must outlive the head.
    void follow(const Model& target) { target_ = &target; }

    // Check that all required weights are present, and allocate the cache and buffers for steps of this size.
    void start(int64_t num_pages, int64_t max_step_tokens);

    int64_t num_pages() const { return num_pages_; }
    int64_t max_step_tokens() const { return max_step_tokens_; }
    size_t packed_size() const { return packed_size_; }
    size_t bytes_per_step() const;  // weights that a step of any size must read

    // Logits in row order, [number requested][vocab_size]; valid until the next call. The caller has checked the rows.
    // `likeliest` receives the argmax of each. A draft head begins with the target's taps or, if they are given, with
    // `states`, [number of tokens][width]. A head's pass without logits only adds entries to its cache: they depend on
    // nothing after the keys and values of its one layer.
    const float* forward(const std::vector<Row>& rows, int32_t* likeliest, const float* states = nullptr);
    // The residual stream of the latest step after its last layer, [number of tokens][width].
    const float* residual() const { return x_.as<float>(); }
    // The same after the final norm, of the tokens whose logits were requested, [number requested][width].
    const float* states() const { return last_.as<float>(); }
    void copy_page(int64_t source, int64_t target);

    ~Model();
    Model(const Model&) = delete;
    Model& operator=(const Model&) = delete;

    void operator()(int thread, uint64_t first_phase);  // called by the pool: one thread's part of the step

  private:
    // The phases of a step: those before the layers, those of each layer, and the last two. Only heads have taps.
    enum Kind {
        kReadTaps, kFuseTaps, kBegin, kProjectQkv, kRotate, kAttend, kQuantiseAttended, kProjectOut, kFeedForwardNorm, kGated, kDown, kNextNorm, kNormLast,
        kLogits, kKinds
    };
    static constexpr int kBefore = kBegin + 1, kPerLayer = kNextNorm - kProjectQkv + 1;

    struct Token {
        int64_t row, id, position;
    };
    // A unit of attention: query heads of some tokens of a row that share a key/value head, over all their positions or,
    // if threads share them, over those of one segment.
    struct Item {
        int64_t row, token_begin, token_end, kv_head, head_begin, head_end;
        int64_t segment = 0, num_segments = 1;
        int64_t shared = -1, first_part = 0;  // number among those whose segments are shared, and its place in their memory
    };
    // The work of a phase in this step, in tiles, tokens or items.
    struct Cut {
        int64_t count = 0;
        int64_t per_unit = 1;    // how many form one unit of work
        bool is_folded = false;  // too small to share: the thread that ends the previous phase does it
        int64_t num_units() const { return is_folded ? 0 : (count + per_unit - 1) / per_unit; }
    };

    Layer& layer(int64_t index) { return layers_[size_t(index + 1)]; }
    const Layer& layer(int64_t index) const { return layers_[size_t(index + 1)]; }
    int64_t num_phases() const { return kBefore + shape_.num_layers * kPerLayer + 2; }
    Kind kind_of(int64_t phase) const;
    int64_t layer_of(int64_t phase) const { return (phase - kBefore) / kPerLayer; }

    void plan(const std::vector<Row>& rows);
    void plan_attention();
    bool share_segments();
    void plan_cuts();
    Fetch fetch_after(int64_t phase, int thread) const;
    void open_from(uint64_t first_phase, int64_t phase, int thread);
    void work_on(int64_t phase, Range things, int thread);
    void read_taps(Range tokens);
    void begin(Range tokens);
    void join_token_and_state(Range tokens);
    void store_taps(int64_t num_layers, Range tokens);
    uint16_t* taps(int64_t page, int64_t slot) const { return taps_.as<uint16_t>() + (page * kPageTokens + slot) * tap_width(); }
    int64_t tap_width() const { return int64_t(tapped_.size()) * shape_.width; }
    void norm(const float* weight, Range tokens);
    void norm_last(Range wanted);
    void quantise_whole(Activations x, Range tokens) const;
    void fetch_cache(int64_t index, int64_t tile) const;
    void multiply_qkv(const Layer& layer, const Activations& x, Range tiles);
    void multiply_gated(const Layer& layer, const Activations& x, Range tiles);
    void add_product(const Packed& w, const Activations& x, const float* bias, Range tiles);
    void rotate_and_store(const Layer& layer, int64_t index, Range items);
    void attend(int64_t index, Range items, int thread);
    float* parts_of(const Item& item, int64_t segment) const;
    void multiply_head(Range tiles, int thread);
    void merge_peaks(int32_t* likeliest) const;
    uint16_t* keys(int64_t layer, int64_t page, int64_t kv_head) const;
    HeadPages pages_of(int64_t layer, int64_t row, int64_t kv_head) const;
    const Packed& head() const;
    Activations from_taps() const { return activations(shape_.num_taps * shape_.width, fused_, fused_quantised_); }
    Activations from_input() const { return activations(shape_.input_width(), normed_, quantised_); }
    Activations from_width() const { return activations(shape_.width, normed_, quantised_); }
    Activations from_attention() const { return activations(shape_.num_heads * shape_.head_dim, attended_, quantised_); }
    Activations from_hidden() const { return activations(shape_.hidden, gate_, hidden_quantised_); }
    Activations activations(int64_t cols, const Memory& floats, const Memory& quantised) const {
        return {int64_t(tokens_.size()), cols, quantised.as<uint8_t>(), floats.as<float>()};
    }
    bool only_adds_entries() const { return shape_.is_head() && wanted_.empty(); }
    bool has_whole_blocks_per_head() const { return shape_.head_dim % kBlock == 0; }

    Shape shape_;
    const Model* target_ = nullptr;  // of a draft head
    std::vector<int64_t> tapped_;    // numbers of layers, ascending
    std::shared_ptr<ThreadPool> pool_;
    Arena weights_;
    std::vector<Layer> layers_;  // [0] is layer -1
    size_t packed_size_ = 0;
    int64_t num_pages_ = 0, max_step_tokens_ = 0, page_halves_ = 0;
    Memory cache_;  // [layer][page]{keys [kv_head][head_dim][slot], values [kv_head][slot][head_dim]}
    Memory taps_;   // [page][slot][tap][width], bfloat16
    // Per token of a step. x is the residual stream; quantised is the output of norms, then of attention, for products.
    Memory x_, normed_, quantised_, hidden_quantised_, q_, k_, v_, attended_, gate_, up_, y_, cosines_, sines_, last_, last_quantised_, logits_;
    Memory fused_, fused_quantised_;  // of a draft head: taps of each token
    // Per thread, allocated before the step: nothing may fail during a step.
    std::vector<Memory> attention_scratch_;
    std::vector<std::vector<Query>> queries_;
    std::vector<Memory> peaks_;  // per row of logits, over the part that the thread computed
    Memory attention_parts_;     // of items whose segments are shared
    std::vector<std::atomic<int64_t>> segments_left_;  // of each such item, in this layer; at the end as at the beginning

    // The current step.
    const float* states_ = nullptr;
    std::unique_ptr<Relay> relay_;
    Cut cuts_[kKinds];
    std::vector<int64_t> units_;  // per phase
    std::vector<Row> rows_;
    std::vector<Token> tokens_;
    std::vector<int64_t> wanted_;
    std::vector<Item> items_;
};

}  // namespace outpace
