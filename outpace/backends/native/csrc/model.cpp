#include "model.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

namespace outpace {

Model::Model(Shape shape, int num_threads)
    : shape_(std::move(shape)), pool_(ThreadPool::shared(num_threads)), layers_(size_t(shape_.num_layers + 1)) {}

void Model::lay_out(int64_t index, MatrixName name, GgmlType type, int64_t rows, int64_t cols) {
    Matrix& matrix = layer(index).matrices[int(name)];
    const size_t num_bytes = packed_bytes(type, rows, cols);
    matrix.data = static_cast<uint8_t*>(weights_.take(num_bytes));
    matrix.packed = Packed{type, rows, cols, matrix.data};
    packed_size_ += num_bytes;
}

void Model::pack(int64_t index, MatrixName name, const void* source, int64_t row_begin, int64_t row_end) {
    const Matrix& matrix = layer(index).matrices[int(name)];
    const Packed& w = matrix.packed;
    pool_->run([&](int thread) {
        const Range mine = split(row_end - row_begin, kTileRows, pool_->size(), thread);
        if (mine.begin < mine.end) {
            pack_rows(w.source, source, w.rows, w.cols, matrix.data, row_begin + mine.begin, row_begin + mine.end);
        }
    });
}

void Model::set_vector(int64_t index, VectorName name, const float* values, int64_t n) {
    layer(index).vectors[int(name)].assign(values, values + n);
    packed_size_ += size_t(n) * sizeof(float);
}

void Model::start(int64_t num_pages, int64_t max_step_tokens) {
    const auto need = [](bool present, const char* what, int64_t index) {
        if (!present) throw std::invalid_argument(std::string("the model has no ") + what + " in layer " + std::to_string(index));
    };
    if (shape_.is_head()) {
        need(target_ != nullptr && target_->shape_.width == shape_.width && int64_t(target_->tapped_.size()) == shape_.num_taps, "target", -1);
        need(has(-1, MatrixName::kHead) && has(-1, MatrixName::kFuse) && layer(-1)[VectorName::kTapNorm], "matrix", -1);
        need(layer(0)[VectorName::kTokenNorm] != nullptr, "norm", 0);
        fused_ = Memory(size_t(max_step_tokens * shape_.num_taps * shape_.width) * sizeof(float));
        fused_quantised_ = Memory(activation_bytes(max_step_tokens, shape_.num_taps * shape_.width));
    } else {
        need(has(-1, MatrixName::kEmbedding), "embedding", -1);
    }
    need(layer(-1)[VectorName::kFinalNorm] != nullptr, "final norm", -1);
    for (int64_t i = 0; i < shape_.num_layers; i++) {
        for (int name = int(MatrixName::kQuery); name <= int(MatrixName::kDown); name++) {
            need(has(i, MatrixName(name)), "matrix", i);
        }
        need(layer(i)[VectorName::kAttentionNorm] && layer(i)[VectorName::kFeedForwardNorm], "norm", i);
    }
    num_pages_ = num_pages;
    max_step_tokens_ = max_step_tokens;
    page_halves_ = 2 * shape_.num_kv_heads * kPageTokens * shape_.head_dim;
    cache_ = Memory(size_t(shape_.num_layers * num_pages * page_halves_) * sizeof(uint16_t));
    taps_ = Memory(size_t(num_pages * kPageTokens * tap_width()) * sizeof(uint16_t));

    const auto floats = [&](int64_t per_token) { return Memory(size_t(max_step_tokens * per_token) * sizeof(float)); };
    const int64_t q_width = shape_.num_heads * shape_.head_dim, kv_width = shape_.num_kv_heads * shape_.head_dim;
    const int64_t widest = std::max(shape_.input_width(), q_width);
    x_ = floats(shape_.width), normed_ = floats(shape_.input_width()), quantised_ = Memory(activation_bytes(max_step_tokens, widest));
    hidden_quantised_ = Memory(activation_bytes(max_step_tokens, shape_.hidden));
    q_ = floats(q_width), k_ = floats(kv_width), v_ = floats(kv_width), attended_ = floats(q_width);
    gate_ = floats(shape_.hidden), up_ = floats(shape_.hidden), y_ = floats(shape_.width);
    cosines_ = floats(shape_.num_rotated / 2), sines_ = floats(shape_.num_rotated / 2);
    last_ = floats(shape_.width), last_quantised_ = Memory(activation_bytes(max_step_tokens, shape_.width));
    for (int thread = 0; thread < pool_->size(); thread++) {
        const int64_t group = shape_.num_heads / shape_.num_kv_heads;
        attention_scratch_.emplace_back(attention_scratch_floats(kChunkTokens * group, shape_.head_dim) * sizeof(float));
        queries_.emplace_back().reserve(size_t(kChunkTokens * group));
        peaks_.emplace_back(size_t(max_step_tokens) * sizeof(Peak));
    }
    attention_parts_ = Memory(size_t(kMostSharedParts * part_floats(shape_.head_dim)) * sizeof(float));
    segments_left_ = std::vector<std::atomic<int64_t>>(size_t(kItemsPerThread * pool_->size()));
    relay_ = std::make_unique<Relay>(pool_->size(), num_phases());
    units_.resize(size_t(num_phases()));
}

Model::~Model() { pool_->leave(this); }

size_t Model::bytes_per_step() const {
    if (shape_.is_head()) return packed_size_;
    const Packed& embedding = layer(-1)[MatrixName::kEmbedding];
    return packed_size_ - (has(-1, MatrixName::kHead) ? packed_bytes(embedding.source, embedding.rows, embedding.cols) : 0);
}

uint16_t* Model::keys(int64_t index, int64_t page, int64_t kv_head) const {
    return cache_.as<uint16_t>() + (index * num_pages_ + page) * page_halves_ + kv_head * kPageTokens * shape_.head_dim;
}

void Model::copy_page(int64_t source, int64_t target) {
    for (int64_t i = 0; i < shape_.num_layers; i++) {
        std::memcpy(keys(i, target, 0), keys(i, source, 0), size_t(page_halves_) * sizeof(uint16_t));
    }
    std::memcpy(taps(target, 0), taps(source, 0), size_t(kPageTokens * tap_width()) * sizeof(uint16_t));
}

}  // namespace outpace
