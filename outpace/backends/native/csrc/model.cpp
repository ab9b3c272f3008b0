#include "model.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>

namespace outpace {
namespace {

constexpr int64_t kChunkTokens = 16;  // tokens of a row that walk the cache together
constexpr int64_t kFoldedTokens = 4;  // up to so many, work on whole tokens is not worth handing round
constexpr int kSmallPieces = 2;       // per thread, at the end of a product

void add_optional(float* x, const float* bias, int64_t n) {
    if (bias) ops().add(x, bias, n);
}

}  // namespace

Model::Model(Shape shape, int num_threads)
    : shape_(std::move(shape)), pool_(ThreadPool::shared(num_threads)), layers_(size_t(shape_.num_layers + 1)) {}

void Model::lay_out(int64_t index, MatrixName name, GgmlType type, int64_t rows, int64_t cols) {
    Matrix& matrix = layer(index).matrices[int(name)];
    const size_t num_bytes = packed_bytes(type, rows, cols);
    matrix.memory = Memory(num_bytes);
    matrix.packed = Packed{type, rows, cols, matrix.memory.as<uint8_t>()};
    packed_size_ += num_bytes;
}

void Model::pack(int64_t index, MatrixName name, const void* source, int64_t row_begin, int64_t row_end) {
    const Matrix& matrix = layer(index).matrices[int(name)];
    const Packed& w = matrix.packed;
    pool_->run([&](int thread) {
        const Range mine = split(row_end - row_begin, kTileRows, pool_->size(), thread);
        if (mine.begin < mine.end) {
            pack_rows(w.source, source, w.rows, w.cols, matrix.memory.as<uint8_t>(), row_begin + mine.begin, row_begin + mine.end);
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
    need(has(-1, MatrixName::kEmbedding), "embedding", -1);
    need(layer(-1)[VectorName::kFinalNorm] != nullptr, "final norm", -1);
    for (int64_t i = 0; i < shape_.num_layers; i++) {
        for (int name = int(MatrixName::kQuery); name < int(MatrixName::kCount); name++) {
            need(has(i, MatrixName(name)), "matrix", i);
        }
        need(layer(i)[VectorName::kAttentionNorm] && layer(i)[VectorName::kFeedForwardNorm], "norm", i);
    }
    num_pages_ = num_pages;
    max_step_tokens_ = max_step_tokens;
    page_halves_ = 2 * shape_.num_kv_heads * kPageTokens * shape_.head_dim;
    cache_ = Memory(size_t(shape_.num_layers * num_pages * page_halves_) * sizeof(uint16_t));

    const auto floats = [&](int64_t per_token) { return Memory(size_t(max_step_tokens * per_token) * sizeof(float)); };
    const int64_t q_width = shape_.num_heads * shape_.head_dim, kv_width = shape_.num_kv_heads * shape_.head_dim;
    const int64_t widest = std::max({shape_.width, q_width, shape_.hidden});
    x_ = floats(shape_.width), normed_ = floats(shape_.width), quantised_ = Memory(activation_bytes(max_step_tokens, widest));
    q_ = floats(q_width), k_ = floats(kv_width), v_ = floats(kv_width), attended_ = floats(q_width);
    gate_ = floats(shape_.hidden), up_ = floats(shape_.hidden), y_ = floats(shape_.width);
    cosines_ = floats(shape_.num_rotated / 2), sines_ = floats(shape_.num_rotated / 2);
    last_ = floats(shape_.width), last_quantised_ = Memory(activation_bytes(max_step_tokens, shape_.width));
    for (int thread = 0; thread < pool_->size(); thread++) {
        const int64_t group = shape_.num_heads / shape_.num_kv_heads;
        attention_scratch_.emplace_back(attention_scratch_floats(kChunkTokens * group, shape_.head_dim) * sizeof(float));
        queries_.emplace_back().reserve(size_t(kChunkTokens * group));
    }
    phases_ = std::vector<Phase>(size_t(num_phases()));
}

Model::~Model() { pool_->leave(this); }

size_t Model::bytes_per_step() const {
    const bool has_head = has(-1, MatrixName::kHead);
    return packed_size_ - (has_head ? layer(-1).matrices[int(MatrixName::kEmbedding)].memory.size() : 0);
}

uint16_t* Model::keys(int64_t index, int64_t page, int64_t kv_head) const {
    return cache_.as<uint16_t>() + (index * num_pages_ + page) * page_halves_ + kv_head * kPageTokens * shape_.head_dim;
}

void Model::copy_page(int64_t source, int64_t target) {
    for (int64_t i = 0; i < shape_.num_layers; i++) {
        std::memcpy(keys(i, target, 0), keys(i, source, 0), size_t(page_halves_) * sizeof(uint16_t));
    }
}

const Packed& Model::head() const { return layer(-1)[has(-1, MatrixName::kHead) ? MatrixName::kHead : MatrixName::kEmbedding]; }

Activations Model::activations(int64_t cols, const float* floats) const {
    return {int64_t(tokens_.size()), cols, quantised_.as<uint8_t>(), floats};
}

Model::Kind Model::kind_of(int64_t phase) const {
    if (phase == 0) return kBegin;
    const int64_t after_layers = phase - 1 - shape_.num_layers * kPerLayer;
    return after_layers >= 0 ? Kind(kNormLast + after_layers) : Kind(kProjectQkv + (phase - 1) % kPerLayer);
}

void Model::plan(const std::vector<Row>& rows) {
    rows_ = rows;
    tokens_.clear();
    wanted_.clear();
    for (size_t r = 0; r < rows.size(); r++) {
        for (int64_t i = 0; i < rows[r].count; i++) {
            if (rows[r].count - i <= rows[r].num_logits) wanted_.push_back(int64_t(tokens_.size()));
            tokens_.push_back({int64_t(r), rows[r].tokens[i], rows[r].start + i});
        }
    }
    const size_t logit_bytes = wanted_.size() * size_t(shape_.vocab_size) * sizeof(float);
    if (logits_.size() < logit_bytes) logits_ = Memory(logit_bytes);
    plan_attention();
    plan_cuts();
}

// Walking a page serves all the query heads of its key/value head, so coarse items read least; where there are too few of
// them to keep the threads equally busy, every query head becomes an item.
void Model::plan_attention() {
    int64_t num_chunks = 0;
    for (const Row& row : rows_) num_chunks += (row.count + kChunkTokens - 1) / kChunkTokens;
    const int threads = pool_->size();
    const int64_t num_coarse = num_chunks * shape_.num_kv_heads, group = shape_.num_heads / shape_.num_kv_heads;
    const int64_t heads_together = num_coarse % threads == 0 || num_coarse >= 4 * threads ? group : 1;
    items_.clear();
    int64_t first = 0;
    for (size_t r = 0; r < rows_.size(); r++) {
        for (int64_t at = 0; at < rows_[r].count; at += kChunkTokens) {
            const int64_t end = std::min(at + kChunkTokens, rows_[r].count);
            for (int64_t head = 0; head < shape_.num_heads; head += heads_together) {
                items_.push_back({int64_t(r), first + at, first + end, head / group, head, head + heads_together});
            }
        }
        first += rows_[r].count;
    }
}

void Model::plan_cuts() {
    const int threads = pool_->size();
    const int64_t n = int64_t(tokens_.size()), wanted = int64_t(wanted_.size());
    const auto tiles = [](int64_t rows) { return (rows + kTileRows - 1) / kTileRows; };
    const auto product = [&](int64_t num_tiles) {
        if (threads == 1 || num_tiles < 4 * threads) return Cut{num_tiles, num_tiles ? 1 : 0, false, false};
        return Cut{num_tiles, threads + kSmallPieces * threads, false, true};
    };
    const auto small = [&](int64_t units, bool is_folded) {
        const int64_t pieces = std::min<int64_t>(units, threads == 1 ? 1 : 2 * threads);
        return is_folded ? Cut{units, 0, true, false} : Cut{units, int(pieces), false, false};
    };
    const bool is_short = threads == 1 || n <= kFoldedTokens;
    const int64_t kv_width = shape_.num_kv_heads * shape_.head_dim;
    cuts_[kBegin] = small(n, is_short);
    cuts_[kProjectQkv] = product(tiles(shape_.num_heads * shape_.head_dim) + 2 * tiles(kv_width));
    cuts_[kRotate] = small(n * shape_.num_kv_heads, threads == 1 || n == 1);
    const int64_t num_items = int64_t(items_.size());
    cuts_[kAttend] = Cut{num_items, int(std::min<int64_t>(num_items, threads == 1 ? 1 : 16 * threads)), false, false};
    cuts_[kProjectOut] = cuts_[kDown] = product(tiles(shape_.width));
    cuts_[kQuantiseAttended] = cuts_[kBetween] = cuts_[kQuantiseHidden] = cuts_[kAfter] = small(n, is_short);
    cuts_[kGated] = product(tiles(shape_.hidden));
    cuts_[kNormLast] = small(wanted, threads == 1 || wanted <= kFoldedTokens);
    cuts_[kLogits] = wanted ? product(tiles(shape_.vocab_size)) : Cut{};
}

Range Model::piece(const Cut& cut, int index) const {
    if (!cut.is_guided) return split(cut.num_units, 1, cut.num_pieces, index);
    // Large pieces keep threads streaming; small ones at the end let them finish together.
    const int threads = pool_->size();
    const int64_t large = cut.num_units * 3 / 4;
    if (index < threads) return split(large, 1, threads, index);
    const Range rest = split(cut.num_units - large, 1, cut.num_pieces - threads, index - threads);
    return {large + rest.begin, large + rest.end};
}

const float* Model::forward(const std::vector<Row>& rows) {
    plan(rows);
    tag_++;
    for (int64_t phase = 0; phase < num_phases(); phase++) phases_[size_t(phase)].begin(tag_, cuts_[kind_of(phase)].num_pieces);
    if (cuts_[kBegin].is_folded) work_on(0, {0, cuts_[kBegin].num_units}, 0);
    pool_->post(*this, tag_);
    return logits_.as<float>();
}

void Model::operator()(int thread, uint32_t tag) {
    for (int64_t phase = 0; phase < num_phases(); phase++) {
        Phase& now = phases_[size_t(phase)];
        for (int index; (index = now.take(tag)) >= 0;) {
            work_on(phase, piece(cuts_[kind_of(phase)], index), thread);
            if (!now.finish()) continue;
            for (int64_t next = phase + 1; next < num_phases() && cuts_[kind_of(next)].is_folded; next++) {
                work_on(next, {0, cuts_[kind_of(next)].num_units}, thread);
            }
            now.end();
        }
        if (!now.wait(tag)) return;
    }
}

void Model::work_on(int64_t phase, Range units, int thread) {
    if (units.begin >= units.end) return;
    const int64_t index = layer_of(phase);
    const Kind kind = kind_of(phase);
    if (kind == kBegin) return begin(units);
    if (kind == kNormLast) return norm_last(units);
    if (kind == kLogits) {
        const Activations last{int64_t(wanted_.size()), shape_.width, last_quantised_.as<uint8_t>(), last_.as<float>()};
        const Product logits[] = {{&head(), logits_.as<float>()}};
        return multiply(last, logits, 1, units);
    }
    const Layer& weights = layer(index);
    const Activations from_width = activations(shape_.width, normed_.as<float>());
    const Activations from_attention = activations(shape_.num_heads * shape_.head_dim, attended_.as<float>());
    const Activations from_hidden = activations(shape_.hidden, gate_.as<float>());
    const Product qkv[] = {{&weights[MatrixName::kQuery], q_.as<float>()},
                           {&weights[MatrixName::kKey], k_.as<float>()},
                           {&weights[MatrixName::kValue], v_.as<float>()}};
    const Product out[] = {{&weights[MatrixName::kOutput], y_.as<float>()}};
    const Product down[] = {{&weights[MatrixName::kDown], y_.as<float>()}};
    switch (kind) {
        case kProjectQkv: return multiply(from_width, qkv, 3, units);
        case kRotate: return rotate_and_store(weights, index, units);
        case kAttend: return attend(index, units, thread);
        case kQuantiseAttended: return quantise_tokens(from_attention, units);
        case kProjectOut: return multiply(from_attention, out, 1, units);
        case kBetween:
            add_to_residual(weights[VectorName::kOutputBias], units);
            return norm(weights[VectorName::kFeedForwardNorm], units);
        case kGated: return multiply_gated(weights, from_width, units);
        case kQuantiseHidden: return quantise_tokens(from_hidden, units);
        case kDown: return multiply(from_hidden, down, 1, units);
        default:  // kAfter
            add_to_residual(nullptr, units);
            if (index + 1 < shape_.num_layers) norm(layer(index + 1)[VectorName::kAttentionNorm], units);
    }
}

void Model::begin(Range tokens) {
    const int64_t width = shape_.width, half = shape_.num_rotated / 2;
    for (int64_t t = tokens.begin; t < tokens.end; t++) {
        unpack_row(layer(-1)[MatrixName::kEmbedding], tokens_[size_t(t)].id, x_.as<float>() + t * width);
        rope_angles(tokens_[size_t(t)].position, shape_.rope_frequencies.data(), half, shape_.rope_scale,
                    cosines_.as<float>() + t * half, sines_.as<float>() + t * half);
    }
    norm(layer(0)[VectorName::kAttentionNorm], tokens);
}

void Model::norm(const float* weight, Range tokens) {
    const int64_t width = shape_.width;
    for (int64_t t = tokens.begin; t < tokens.end; t++) {
        ops().rms_norm(x_.as<float>() + t * width, weight, shape_.epsilon, width, normed_.as<float>() + t * width);
    }
    quantise_tokens(activations(width, normed_.as<float>()), tokens);
}

void Model::add_to_residual(const float* bias, Range tokens) {
    const int64_t width = shape_.width;
    for (int64_t t = tokens.begin; t < tokens.end; t++) {
        ops().add(x_.as<float>() + t * width, y_.as<float>() + t * width, width);
        add_optional(x_.as<float>() + t * width, bias, width);
    }
}

// Only tokens whose logits are wanted go through the head.
void Model::norm_last(Range wanted) {
    const int64_t width = shape_.width;
    for (int64_t i = wanted.begin; i < wanted.end; i++) {
        const float* x = x_.as<float>() + wanted_[size_t(i)] * width;
        ops().rms_norm(x, layer(-1)[VectorName::kFinalNorm], shape_.epsilon, width, last_.as<float>() + i * width);
    }
    quantise_tokens({int64_t(wanted_.size()), width, last_quantised_.as<uint8_t>(), last_.as<float>()}, wanted);
}

void Model::quantise_tokens(Activations x, Range tokens) const {
    // Quantised matrices have whole blocks of columns; others are float, and read the floats.
    if (x.cols % 32 == 0 && tokens.begin < tokens.end) quantise(x.floats, tokens.begin, tokens.end, x);
}

// Several matrices over the same activations: their tiles are counted as if they were one.
void Model::multiply(const Activations& x, const Product* products, int num_products, Range tiles) const {
    int64_t first = 0;
    for (int i = 0; i < num_products; i++) {
        const Packed& w = *products[i].w;
        const int64_t count = (w.rows + kTileRows - 1) / kTileRows;
        const int64_t begin = std::max<int64_t>(tiles.begin - first, 0), end = std::min(tiles.end - first, count);
        if (begin < end) matmul(w, x, products[i].y, w.rows, begin * kTileRows, std::min(end * kTileRows, w.rows));
        first += count;
    }
}

// Gate and up are cut alike, so that each piece can combine what it has just computed itself.
void Model::multiply_gated(const Layer& weights, const Activations& x, Range tiles) {
    const int64_t hidden = shape_.hidden, begin = tiles.begin * kTileRows, end = std::min(tiles.end * kTileRows, hidden);
    float *gate = gate_.as<float>(), *up = up_.as<float>();
    matmul(weights[MatrixName::kGate], x, gate, hidden, begin, end);
    matmul(weights[MatrixName::kUp], x, up, hidden, begin, end);
    for (int64_t t = 0; t < x.n; t++) ops().swiglu(gate + t * hidden + begin, up + t * hidden + begin, end - begin);
}

void Model::rotate_and_store(const Layer& weights, int64_t index, Range items) {
    const Ops& op = ops();
    const int64_t dim = shape_.head_dim, num_kv = shape_.num_kv_heads, group = shape_.num_heads / num_kv, half = shape_.num_rotated / 2;
    const float scale = 1.0f / std::sqrt(float(dim));
    for (int64_t item = items.begin; item < items.end; item++) {
        const int64_t t = item / num_kv, kv_head = item % num_kv;
        const Token& token = tokens_[size_t(t)];
        const auto prepare = [&](float* head, const float* bias, const float* norm) {
            add_optional(head, bias, dim);
            if (norm) op.rms_norm(head, norm, shape_.epsilon, dim, head);
            op.rope(head, cosines_.as<float>() + t * half, sines_.as<float>() + t * half, shape_.num_rotated, shape_.rope_style);
        };
        const auto part = [&](VectorName name, int64_t head) {
            const float* vector = weights[name];
            return vector ? vector + head * dim : nullptr;
        };
        for (int64_t h = kv_head * group; h < (kv_head + 1) * group; h++) {
            float* q = q_.as<float>() + (t * shape_.num_heads + h) * dim;
            prepare(q, part(VectorName::kQueryBias, h), weights[VectorName::kQueryNorm]);
            for (int64_t d = 0; d < dim; d++) q[d] *= scale;
        }
        float* k = k_.as<float>() + (t * num_kv + kv_head) * dim;
        float* v = v_.as<float>() + (t * num_kv + kv_head) * dim;
        prepare(k, part(VectorName::kKeyBias, kv_head), weights[VectorName::kKeyNorm]);
        add_optional(v, part(VectorName::kValueBias, kv_head), dim);
        uint16_t* page_keys = keys(index, rows_[size_t(token.row)].pages[token.position / kPageTokens], kv_head);
        attention().write(k, v, dim, token.position % kPageTokens, page_keys, page_keys + page_halves_ / 2);
    }
}

void Model::attend(int64_t index, Range items, int thread) {
    const int64_t dim = shape_.head_dim;
    std::vector<Query>& queries = queries_[size_t(thread)];
    for (int64_t i = items.begin; i < items.end; i++) {
        const Item& item = items_[size_t(i)];
        queries.clear();
        for (int64_t t = item.token_begin; t < item.token_end; t++) {
            for (int64_t h = item.head_begin; h < item.head_end; h++) {
                const int64_t at = (t * shape_.num_heads + h) * dim;
                queries.push_back({q_.as<float>() + at, attended_.as<float>() + at, tokens_[size_t(t)].position + 1});
            }
        }
        const uint16_t* first = keys(index, 0, item.kv_head);
        const HeadPages pages{first, first + page_halves_ / 2, page_halves_, rows_[size_t(item.row)].pages, dim};
        attention().attend(queries.data(), int64_t(queries.size()), pages, attention_scratch_[size_t(thread)].as<float>());
    }
}

}  // namespace outpace
