// A decoder of the Llama family: weights, a paged cache, and one forward pass over ragged rows.
//
// What distinguishes the families is data: which optional tensors are there (biases, norms of queries and keys, a head
// of its own), which elements RoPE pairs, and its frequencies. The model knows pages, not sequences: the caller says which
// pages a row's positions lie in, and the bookkeeping of pages is the caller's.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "attention.h"
#include "matmul.h"
#include "memory.h"
#include "ops.h"
#include "thread_pool.h"

namespace outpace {

struct Shape {
    int64_t num_layers, width, hidden, num_heads, num_kv_heads, head_dim, num_rotated, vocab_size;
    float epsilon;
    RopeStyle rope_style;
    float rope_scale;  // of cosines and sines
    std::vector<double> rope_frequencies;  // [num_rotated / 2]
};

enum class MatrixName : int32_t { kEmbedding, kHead, kQuery, kKey, kValue, kOutput, kGate, kUp, kDown, kCount };
enum class VectorName : int32_t {
    kFinalNorm, kAttentionNorm, kFeedForwardNorm, kQueryBias, kKeyBias, kValueBias, kOutputBias, kQueryNorm, kKeyNorm, kCount
};

struct Matrix {
    Memory memory;
    Packed packed{};
    bool is_present() const { return packed.data != nullptr; }
};

struct Layer {
    Matrix matrices[int(MatrixName::kCount)];
    std::vector<float> vectors[int(VectorName::kCount)];

    const Packed& operator[](MatrixName name) const { return matrices[int(name)].packed; }
    const float* operator[](VectorName name) const {
        const auto& vector = vectors[int(name)];
        return vector.empty() ? nullptr : vector.data();
    }
};

// Consecutive tokens of one sequence, appended at `start`; the last num_logits of them want logits.
struct Row {
    int64_t start, count, num_logits;
    const int32_t* tokens;
    const int32_t* pages;
};

class Model {
  public:
    Model(Shape shape, int num_threads);

    const Shape& shape() const { return shape_; }

    // Weights; layer -1 holds the embedding, the head and the final norm. A matrix is laid out first and packed after, by
    // ranges of rows, so that the file's pages can be given back in between.
    bool has(int64_t index, MatrixName name) const { return layer(index).matrices[int(name)].is_present(); }
    void lay_out(int64_t layer, MatrixName name, GgmlType type, int64_t rows, int64_t cols);
    void pack(int64_t layer, MatrixName name, const void* source, int64_t row_begin, int64_t row_end);
    void set_vector(int64_t layer, VectorName name, const float* values, int64_t n);

    // Check that all that a forward pass needs is there, and make room for the cache and for steps of this size.
    void start(int64_t num_pages, int64_t max_step_tokens);

    int64_t num_pages() const { return num_pages_; }
    int64_t max_step_tokens() const { return max_step_tokens_; }
    size_t packed_size() const { return packed_size_; }
    size_t bytes_per_step() const;  // of weights, that a step of any size must read

    // Logits in row order, [number wanted][vocab_size]; valid until the next call. Rows must have been checked.
    const float* forward(const std::vector<Row>& rows);
    void copy_page(int64_t source, int64_t target);

    ~Model();
    Model(const Model&) = delete;
    Model& operator=(const Model&) = delete;

    void operator()(int thread, uint32_t tag);  // what the pool calls: one thread's part of the step

  private:
    // The phases of a step: kBegin, then a layer's again and again, then the last two.
    enum Kind {
        kBegin, kProjectQkv, kRotate, kAttend, kQuantiseAttended, kProjectOut, kBetween, kGated, kQuantiseHidden, kDown, kAfter,
        kNormLast, kLogits, kKinds
    };
    static constexpr int kPerLayer = kAfter - kProjectQkv + 1;

    struct Token {
        int64_t row, id, position;
    };
    // Query heads of some tokens of a row that share a key/value head.
    struct Item {
        int64_t row, token_begin, token_end, kv_head, head_begin, head_end;
    };
    // How a phase's units (tiles, tokens, items) are cut into pieces in this step.
    struct Cut {
        int64_t num_units = 0;
        int num_pieces = 0;
        bool is_folded = false;  // too small to share: whoever ends the phase before does it too
        bool is_guided = false;  // most of it in one large piece per thread, the rest in small ones
    };
    struct Product {
        const Packed* w;
        float* y;
    };

    Layer& layer(int64_t index) { return layers_[size_t(index + 1)]; }
    const Layer& layer(int64_t index) const { return layers_[size_t(index + 1)]; }
    int64_t num_phases() const { return 1 + shape_.num_layers * kPerLayer + 2; }
    Kind kind_of(int64_t phase) const;
    int64_t layer_of(int64_t phase) const { return (phase - 1) / kPerLayer; }

    void plan(const std::vector<Row>& rows);
    void plan_attention();
    void plan_cuts();
    Range piece(const Cut& cut, int index) const;
    void work_on(int64_t phase, Range units, int thread);
    void begin(Range tokens);
    void norm(const float* weight, Range tokens);
    void add_to_residual(const float* bias, Range tokens);
    void norm_last(Range wanted);
    void quantise_tokens(Activations x, Range tokens) const;
    void multiply(const Activations& x, const Product* products, int num_products, Range tiles) const;
    void multiply_gated(const Layer& layer, const Activations& x, Range tiles);
    void rotate_and_store(const Layer& layer, int64_t index, Range items);
    void attend(int64_t index, Range items, int thread);
    uint16_t* keys(int64_t layer, int64_t page, int64_t kv_head) const;
    const Packed& head() const;
    Activations activations(int64_t cols, const float* floats) const;

    Shape shape_;
    std::shared_ptr<ThreadPool> pool_;
    std::vector<Layer> layers_;  // [0] is layer -1
    size_t packed_size_ = 0;
    int64_t num_pages_ = 0, max_step_tokens_ = 0, page_halves_ = 0;
    Memory cache_;  // [layer][page]{keys [kv_head][head_dim][slot], values [kv_head][slot][head_dim]}
    // Of every token of a step. x is the residual stream; quantised is shared by all products, one after the other.
    Memory x_, normed_, quantised_, q_, k_, v_, attended_, gate_, up_, y_, cosines_, sines_, last_, last_quantised_, logits_;
    // Per thread, and made beforehand: nothing may fail in the middle of a step.
    std::vector<Memory> attention_scratch_;
    std::vector<std::vector<Query>> queries_;

    // The step being run.
    uint32_t tag_ = 0;
    std::vector<Phase> phases_;
    Cut cuts_[kKinds];
    std::vector<Row> rows_;
    std::vector<Token> tokens_;
    std::vector<int64_t> wanted_;
    std::vector<Item> items_;
};

}  // namespace outpace
