// One forward pass: how a step is divided into units, and what its phases compute.

#include <algorithm>
#include <cmath>

#include "bfloat.h"
#include "model.h"
#include "row_ops.h"

namespace outpace {
namespace {

constexpr int64_t kFoldedTokens = 3;       // up to this many tokens, per-token phases are not shared between threads
constexpr size_t kFetchBytes = 64 << 10;  // weights that a waiting thread prefetches, limited by its cache
constexpr int64_t kFetchedPages = 2;       // first pages prefetched per row and head, besides the last page
constexpr int64_t kNearLogits = 16 << 10;       // logits that stay in a thread's cache until its argmax pass
constexpr int64_t kFetchedBytes = 512 << 10;  // prefetched pages that fit in a thread's cache next to the weights

void add_optional(float* x, const float* bias, int64_t n) {
    if (bias) ops().add(x, bias, n);
}

int64_t num_tiles(int64_t rows) { return (rows + kTileRows - 1) / kTileRows; }
Range rows_of(Range tiles, int64_t rows) { return {tiles.begin * kTileRows, std::min(tiles.end * kTileRows, rows)}; }

}  // namespace

const Packed& Model::head() const { return layer(-1)[has(-1, MatrixName::kHead) ? MatrixName::kHead : MatrixName::kEmbedding]; }

Model::Kind Model::kind_of(int64_t phase) const {
    if (phase < kBefore) return Kind(phase);
    const int64_t after_layers = phase - kBefore - shape_.num_layers * kPerLayer;
    return after_layers >= 0 ? Kind(kNormLast + after_layers) : Kind(kProjectQkv + (phase - kBefore) % kPerLayer);
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
    for (Memory& peaks : peaks_) std::fill_n(peaks.as<Peak>(), wanted_.size(), Peak());
    items_.clear();
    if (!only_adds_entries()) plan_attention();
    plan_cuts();
}

// One read of a page serves all query heads of its key/value head and all tokens of a row, so large items read least. If
// there are too few of them to balance the threads, their segments are shared between threads. A short text has only one
// segment: then a row's tokens are split, and for a single token its query heads.
void Model::plan_attention() {
    const int64_t threads = pool_->size(), num_kv = shape_.num_kv_heads, group = shape_.num_heads / num_kv;
    const auto num_coarse = [&](int64_t chunk) {
        int64_t count = 0;
        for (const Row& row : rows_) count += (row.count + chunk - 1) / chunk * num_kv;
        return count;
    };
    const auto is_even = [&](int64_t count) { return count % threads == 0 || count >= kItemsPerThread * threads; };
    if (threads > 1 && num_coarse(kChunkTokens) < kItemsPerThread * threads && share_segments()) return;
    int64_t chunk = kChunkTokens;
    if (!is_even(num_coarse(chunk)) && rows_.size() == 1) chunk = std::min(chunk, (rows_[0].count + threads - 1) / threads);
    const int64_t heads_together = is_even(num_coarse(chunk)) ? group : 1;
    int64_t first = 0;
    for (size_t r = 0; r < rows_.size(); r++) {
        for (int64_t at = 0; at < rows_[r].count; at += chunk) {
            const int64_t end = std::min(at + chunk, rows_[r].count);
            for (int64_t head = 0; head < shape_.num_heads; head += heads_together) {
                items_.push_back({int64_t(r), first + at, first + end, head / group, head, head + heads_together});
            }
        }
        first += rows_[r].count;
    }
}

// An item for every segment. False if that is no gain, or if the parts do not fit in their memory.
bool Model::share_segments() {
    const int64_t num_kv = shape_.num_kv_heads, group = shape_.num_heads / num_kv;
    int64_t first = 0, shared = 0, num_parts = 0, longest = 0;
    for (size_t r = 0; r < rows_.size(); r++) {
        for (int64_t at = 0; at < rows_[r].count; at += kChunkTokens) {
            const int64_t end = std::min(at + kChunkTokens, rows_[r].count), segments = num_segments(rows_[r].start + end);
            longest = std::max(longest, segments);
            for (int64_t kv_head = 0; kv_head < num_kv; kv_head++, shared++) {
                for (int64_t segment = 0; segment < segments; segment++) {
                    const Range heads{kv_head * group, (kv_head + 1) * group};
                    items_.push_back({int64_t(r), first + at, first + end, kv_head, heads.begin, heads.end, segment, segments, shared, num_parts});
                }
                num_parts += (end - at) * group * segments;
                segments_left_[size_t(shared)].store(segments, std::memory_order_relaxed);
            }
        }
        first += rows_[r].count;
    }
    if (longest > 1 && num_parts <= kMostSharedParts) return true;
    items_.clear();
    return false;
}

void Model::plan_cuts() {
    const int64_t n = int64_t(tokens_.size()), wanted = int64_t(wanted_.size());
    const bool is_alone = pool_->size() == 1, is_short = is_alone || n <= kFoldedTokens;
    const int64_t q_width = shape_.num_heads * shape_.head_dim, kv_width = shape_.num_kv_heads * shape_.head_dim;
    // Units are as small as possible, but at most Relay::kMostUnits.
    const auto shared = [](int64_t count, int64_t grain = 1) {
        return Cut{count, (count / grain / Relay::kMostUnits + 1) * grain, false};
    };
    const auto by_token = [&](int64_t count, bool is_folded) { return is_folded ? Cut{count, 1, true} : shared(count); };
    const bool reads_taps = shape_.is_head() && !states_;
    cuts_[kReadTaps] = reads_taps ? by_token(n, is_short) : Cut{};
    cuts_[kFuseTaps] = reads_taps ? shared(num_tiles(shape_.width)) : Cut{};
    cuts_[kBegin] = cuts_[kFeedForwardNorm] = cuts_[kNextNorm] = by_token(n, is_short);
    cuts_[kProjectQkv] = shared(num_tiles(q_width) + 2 * num_tiles(kv_width));
    cuts_[kRotate] = by_token(n * shape_.num_kv_heads, is_alone || n == 1);
    cuts_[kAttend] = shared(int64_t(items_.size()));
    cuts_[kQuantiseAttended] = has_whole_blocks_per_head() ? Cut{} : by_token(n, is_short);
    cuts_[kProjectOut] = cuts_[kDown] = shared(num_tiles(shape_.width));
    cuts_[kGated] = shared(num_tiles(shape_.hidden), kBlock / kTileRows);
    cuts_[kNormLast] = by_token(wanted, is_alone || wanted <= kFoldedTokens);
    cuts_[kLogits] = wanted ? shared(num_tiles(shape_.vocab_size)) : Cut{};
    if (only_adds_entries()) {
        cuts_[kProjectQkv] = shared(2 * num_tiles(kv_width));
        std::fill(cuts_ + kAttend, cuts_ + kKinds, Cut{});
    }
    for (int64_t phase = 0; phase < num_phases(); phase++) units_[size_t(phase)] = cuts_[kind_of(phase)].num_units();
}

const float* Model::forward(const std::vector<Row>& rows, int32_t* likeliest, const float* states) {
    states_ = states;
    plan(rows);
    const uint64_t first = relay_->begin(units_);
    open_from(first, 0, 0);
    pool_->post(*this, first);
    merge_peaks(likeliest);
    return logits_.as<float>();
}

void Model::operator()(int thread, uint64_t first_phase) {
    for (uint64_t number; (number = relay_->now()) < first_phase + uint64_t(num_phases());) {
        const int64_t phase = int64_t(number - first_phase);
        for (Range units; (units = relay_->take(number, thread)).begin < units.end;) {
            const Cut& cut = cuts_[kind_of(phase)];
            work_on(phase, {units.begin * cut.per_unit, std::min(units.end * cut.per_unit, cut.count)}, thread);
        }
        if (relay_->finish(number, thread)) open_from(first_phase, phase + 1, thread);
        else relay_->wait(number, [fetch = fetch_after(phase, thread)]() mutable { return fetch.go_on(); });
    }
}

// The first weights of a thread's share of the next product.
Fetch Model::fetch_after(int64_t phase, int thread) const {
    const auto from = [&](const Packed& w, int64_t tile) { return Fetch(w, tile, kFetchBytes); };
    const auto share = [&](int64_t tiles, int64_t grain = 1) { return split(tiles, grain, pool_->size(), thread).begin; };
    const int64_t index = layer_of(phase);
    const Kind kind = kind_of(phase);
    if (kind == kReadTaps) return from(layer(-1)[MatrixName::kFuse], share(num_tiles(shape_.width)));
    if (kind >= kProjectQkv && kind < kProjectOut) return from(layer(index)[MatrixName::kOutput], share(num_tiles(shape_.width)));
    if (kind >= kProjectOut && kind < kGated) return from(layer(index)[MatrixName::kGate], share(num_tiles(shape_.hidden), 2));
    if (kind == kGated) return from(layer(index)[MatrixName::kDown], share(num_tiles(shape_.width)));
    if (kind >= kLogits) return Fetch();
    if (kind >= kDown && index + 1 >= shape_.num_layers) return from(head(), share(num_tiles(shape_.vocab_size)));
    const Layer& next = layer(kind < kProjectQkv ? 0 : index + 1);
    int64_t tile = share(num_tiles(next[MatrixName::kQuery].rows) + 2 * num_tiles(next[MatrixName::kKey].rows));
    for (MatrixName name : {MatrixName::kQuery, MatrixName::kKey}) {
        const int64_t count = num_tiles(next[name].rows);
        if (tile < count) return from(next[name], tile);
        tile -= count;
    }
    return from(next[MatrixName::kValue], tile);
}

// Opens the next shared phase, after running the folded phases before it.
void Model::open_from(uint64_t first_phase, int64_t phase, int thread) {
    for (; phase < num_phases() && units_[size_t(phase)] == 0; phase++) work_on(phase, {0, cuts_[kind_of(phase)].count}, thread);
    relay_->open(first_phase + uint64_t(phase));
}

void Model::work_on(int64_t phase, Range things, int thread) {
    if (things.begin >= things.end) return;
    const int64_t index = layer_of(phase);
    const Kind kind = kind_of(phase);
    if (kind == kReadTaps) return read_taps(things);
    if (kind == kFuseTaps) {
        const Range rows = rows_of(things, shape_.width);
        return matmul(layer(-1)[MatrixName::kFuse], from_taps(), x_.as<float>(), shape_.width, rows.begin, rows.end);
    }
    if (kind == kBegin) return begin(things);
    if (kind == kNormLast) return norm_last(things);
    if (kind == kLogits) return multiply_head(things, thread);
    const Layer& weights = layer(index);
    switch (kind) {
        case kProjectQkv:
            if (only_adds_entries()) {
                const int64_t skipped = num_tiles(weights[MatrixName::kQuery].rows);
                return multiply_qkv(weights, from_input(), {skipped + things.begin, skipped + things.end});
            }
            // The pages of one sequence are few and stay in the CPU cache.
            if (rows_.size() == 1) return multiply_qkv(weights, from_input(), things);
            for (int64_t tile = things.begin; tile < things.end; tile++) {
                fetch_cache(index, tile);
                multiply_qkv(weights, from_input(), {tile, tile + 1});
            }
            return;
        case kRotate: return rotate_and_store(weights, index, things);
        case kAttend: return attend(index, things, thread);
        case kQuantiseAttended: return quantise_whole(from_attention(), things);
        case kProjectOut: return add_product(weights[MatrixName::kOutput], from_attention(), weights[VectorName::kOutputBias], things);
        case kFeedForwardNorm: return norm(weights[VectorName::kFeedForwardNorm], things);
        case kGated: return multiply_gated(weights, from_width(), things);
        case kDown: return add_product(weights[MatrixName::kDown], from_hidden(), nullptr, things);
        default:  // kNextNorm
            store_taps(index + 1, things);
            if (index + 1 < shape_.num_layers) norm(layer(index + 1)[VectorName::kAttentionNorm], things);
    }
}

// The taps of the position before each token, as the target stored them: each is normed on its own.
void Model::read_taps(Range tokens) {
    const int64_t width = shape_.width, count = shape_.num_taps;
    for (int64_t t = tokens.begin; t < tokens.end; t++) {
        const int64_t at = tokens_[size_t(t)].position - 1;
        const uint16_t* stored = target_->taps(rows_[size_t(tokens_[size_t(t)].row)].pages[at / kPageTokens], at % kPageTokens);
        float* out = fused_.as<float>() + t * count * width;
        for (int64_t i = 0; i < count * width; i++) out[i] = bfloat_to_float(stored[i]);
        for (int64_t tap = 0; tap < count; tap++) {
            ops().rms_norm(out + tap * width, layer(-1)[VectorName::kTapNorm] + tap * width, shape_.epsilon, width, out + tap * width);
        }
    }
    quantise_whole(from_taps(), tokens);
}

// Rejected draft tokens leave taps behind; the next tokens at their positions overwrite them.
void Model::store_taps(int64_t num_layers, Range tokens) {
    const int64_t width = shape_.width;
    for (size_t tap = 0; tap < tapped_.size(); tap++) {
        if (tapped_[tap] != num_layers) continue;
        for (int64_t t = tokens.begin; t < tokens.end; t++) {
            const Token& token = tokens_[size_t(t)];
            const float* x = x_.as<float>() + t * width;
            uint16_t* out = taps(rows_[size_t(token.row)].pages[token.position / kPageTokens], token.position % kPageTokens) + int64_t(tap) * width;
            for (int64_t i = 0; i < width; i++) out[i] = float_to_bfloat(x[i]);
        }
    }
}

void Model::begin(Range tokens) {
    const int64_t width = shape_.width, half = shape_.num_rotated / 2;
    for (int64_t t = tokens.begin; t < tokens.end; t++) {
        // A head's entry has the position of its taps, one before its token.
        const int64_t position = tokens_[size_t(t)].position - shape_.is_head();
        rope_angles(position, shape_.rope_frequencies.data(), half, shape_.rope_scale, cosines_.as<float>() + t * half, sines_.as<float>() + t * half);
        if (!shape_.is_head()) unpack_row(layer(-1)[MatrixName::kEmbedding], tokens_[size_t(t)].id, x_.as<float>() + t * width);
    }
    if (shape_.is_head()) join_token_and_state(tokens);
    else norm(layer(0)[VectorName::kAttentionNorm], tokens);
}

// The input of a head's attention: the embedding of the token and the state, each normed on its own.
void Model::join_token_and_state(Range tokens) {
    const int64_t width = shape_.width;
    for (int64_t t = tokens.begin; t < tokens.end; t++) {
        float *x = x_.as<float>() + t * width, *token = normed_.as<float>() + t * 2 * width;
        if (states_) std::copy_n(states_ + t * width, width, x);
        unpack_row(target_->layer(-1)[MatrixName::kEmbedding], tokens_[size_t(t)].id, token);
        ops().rms_norm(token, layer(0)[VectorName::kTokenNorm], shape_.epsilon, width, token);
        ops().rms_norm(x, layer(0)[VectorName::kAttentionNorm], shape_.epsilon, width, token + width);
    }
    quantise_whole(from_input(), tokens);
}

void Model::norm(const float* weight, Range tokens) {
    const int64_t width = shape_.width;
    for (int64_t t = tokens.begin; t < tokens.end; t++) {
        ops().rms_norm(x_.as<float>() + t * width, weight, shape_.epsilon, width, normed_.as<float>() + t * width);
    }
    quantise_whole(from_width(), tokens);
}

// Only tokens that need logits go through the head.
void Model::norm_last(Range wanted) {
    const int64_t width = shape_.width;
    for (int64_t i = wanted.begin; i < wanted.end; i++) {
        const float* x = x_.as<float>() + wanted_[size_t(i)] * width;
        ops().rms_norm(x, layer(-1)[VectorName::kFinalNorm], shape_.epsilon, width, last_.as<float>() + i * width);
    }
    quantise_whole({int64_t(wanted_.size()), width, last_quantised_.as<uint8_t>(), last_.as<float>()}, wanted);
}

// Quantised matrices have whole blocks of columns; float matrices read the floats.
void Model::quantise_whole(Activations x, Range tokens) const {
    if (x.cols % kBlock == 0) quantise(x, tokens.begin, tokens.end, 0, x.cols / kBlock);
}

// Prefetches the pages that attention uses next; the weights of the step have evicted them from the caches. A piece is
// the keys or values of one page and head, and each tile prefetches its part of the pieces: all together they would
// stall the product. Attention is divided between threads in the same way, so most pieces are in the right thread's
// cache.
void Model::fetch_cache(int64_t index, int64_t tile) const {
    constexpr int64_t kPerWalk = 2 * (kFetchedPages + 1), kLineHalves = 32;
    const int64_t num_kv = shape_.num_kv_heads, dim = shape_.head_dim, all_tiles = cuts_[kProjectQkv].count;
    const int64_t num_pieces = int64_t(rows_.size()) * num_kv * kPerWalk;
    if (num_pieces * kPageTokens * dim * int64_t(sizeof(uint16_t)) > kFetchedBytes * pool_->size()) return;
    for (int64_t piece = tile * num_pieces / all_tiles; piece < (tile + 1) * num_pieces / all_tiles; piece++) {
        const int64_t walk = piece / kPerWalk, nth = piece % kPerWalk / 2;
        const Row& row = rows_[size_t(walk / num_kv)];
        const int64_t end = row.start + row.count, last = (end - 1) / kPageTokens;
        const bool is_last = nth == kFetchedPages, is_values = piece % 2 == 1;
        if (!is_last && nth >= last) continue;
        const HeadPages pages = pages_of(index, walk / num_kv, walk % num_kv);
        const uint16_t* at = (is_values ? pages.values : pages.keys) + row.pages[is_last ? last : nth] * page_halves_;
        const int64_t num_halves = (is_last && is_values ? end - last * kPageTokens : int64_t(kPageTokens)) * dim;
        for (int64_t i = 0; i < num_halves; i += kLineHalves) __builtin_prefetch(at + i, 0, 2);
    }
}

// Three matrices with the same activations; their tiles are numbered as one matrix.
void Model::multiply_qkv(const Layer& weights, const Activations& x, Range tiles) {
    const std::pair<MatrixName, float*> products[] = {
        {MatrixName::kQuery, q_.as<float>()}, {MatrixName::kKey, k_.as<float>()}, {MatrixName::kValue, v_.as<float>()}};
    for (const auto& [name, y] : products) {
        const Packed& w = weights[name];
        const int64_t count = num_tiles(w.rows);
        const Range rows = rows_of({std::max<int64_t>(tiles.begin, 0), std::min(tiles.end, count)}, w.rows);
        if (rows.begin < rows.end) matmul(w, x, y, w.rows, rows.begin, rows.end);
        tiles = {tiles.begin - count, tiles.end - count};
    }
}

// Gate and up are split the same way, at block borders, so that each part can combine and quantise its own results.
void Model::multiply_gated(const Layer& weights, const Activations& x, Range tiles) {
    const int64_t hidden = shape_.hidden;
    const Range rows = rows_of(tiles, hidden);
    float *gate = gate_.as<float>(), *up = up_.as<float>();
    matmul(weights[MatrixName::kGate], x, gate, hidden, rows.begin, rows.end);
    matmul(weights[MatrixName::kUp], x, up, hidden, rows.begin, rows.end);
    for (int64_t t = 0; t < x.n; t++) ops().swiglu(gate + t * hidden + rows.begin, up + t * hidden + rows.begin, rows.end - rows.begin);
    if (hidden % kBlock == 0) quantise(from_hidden(), 0, x.n, rows.begin / kBlock, rows.end / kBlock);
}

// x += w * activations + bias, for some rows.
void Model::add_product(const Packed& w, const Activations& x, const float* bias, Range tiles) {
    const Range rows = rows_of(tiles, w.rows);
    matmul(w, x, y_.as<float>(), w.rows, rows.begin, rows.end);
    for (int64_t t = 0; t < x.n; t++) {
        const int64_t at = t * w.rows + rows.begin;
        ops().add(x_.as<float>() + at, y_.as<float>() + at, rows.end - rows.begin);
        add_optional(x_.as<float>() + at, bias ? bias + rows.begin : nullptr, rows.end - rows.begin);
    }
}

void Model::rotate_and_store(const Layer& weights, int64_t index, Range items) {
    const Ops& op = ops();
    const int64_t dim = shape_.head_dim, num_kv = shape_.num_kv_heads, group = shape_.num_heads / num_kv, half = shape_.num_rotated / 2;
    const float scale = 1.0f / std::sqrt(float(dim));
    for (int64_t item = items.begin; item < items.end; item++) {
        // A row's items are ordered by head, then token: tokens of a page share cache lines, so one thread writes them.
        const Token& any = tokens_[size_t(item / num_kv)];
        const Row& row = rows_[size_t(any.row)];
        const int64_t first = item / num_kv - (any.position - row.start), nth = item - first * num_kv;
        const int64_t t = first + nth % row.count, kv_head = nth / row.count;
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
        for (int64_t h = kv_head * group; h < (kv_head + 1) * group && !only_adds_entries(); h++) {
            float* q = q_.as<float>() + (t * shape_.num_heads + h) * dim;
            prepare(q, part(VectorName::kQueryBias, h), weights[VectorName::kQueryNorm]);
            for (int64_t d = 0; d < dim; d++) q[d] *= scale;
        }
        float* k = k_.as<float>() + (t * num_kv + kv_head) * dim;
        float* v = v_.as<float>() + (t * num_kv + kv_head) * dim;
        prepare(k, part(VectorName::kKeyBias, kv_head), weights[VectorName::kKeyNorm]);
        add_optional(v, part(VectorName::kValueBias, kv_head), dim);
        uint16_t* page_keys = keys(index, row.pages[token.position / kPageTokens], kv_head);
        attention().write(k, v, dim, token.position % kPageTokens, page_keys, page_keys + page_halves_ / 2);
    }
}

HeadPages Model::pages_of(int64_t index, int64_t row, int64_t kv_head) const {
    const uint16_t* first = keys(index, 0, kv_head);
    return {first, first + page_halves_ / 2, page_halves_, rows_[size_t(row)].pages, shape_.head_dim, int64_t(shape_.is_head())};
}

float* Model::parts_of(const Item& item, int64_t segment) const {
    const int64_t group = item.head_end - item.head_begin, queries = (item.token_end - item.token_begin) * group;
    return attention_parts_.as<float>() + (item.first_part + segment * queries) * part_floats(shape_.head_dim);
}

void Model::attend(int64_t index, Range items, int thread) {
    const int64_t dim = shape_.head_dim;
    std::vector<Query>& queries = queries_[size_t(thread)];
    float* const scratch = attention_scratch_[size_t(thread)].as<float>();
    for (int64_t i = items.begin; i < items.end; i++) {
        const Item& item = items_[size_t(i)];
        queries.clear();
        for (int64_t t = item.token_begin; t < item.token_end; t++) {
            for (int64_t h = item.head_begin; h < item.head_end; h++) {
                const int64_t at = (t * shape_.num_heads + h) * dim;
                queries.push_back({q_.as<float>() + at, attended_.as<float>() + at, tokens_[size_t(t)].position + 1});
            }
        }
        const int64_t n = int64_t(queries.size());
        const HeadPages pages = pages_of(index, item.row, item.kv_head);
        if (item.shared < 0) {
            attention().attend(queries.data(), n, pages, scratch);
        } else {
            attention().attend_segment(queries.data(), n, pages, item.segment, parts_of(item, item.segment), scratch);
            std::atomic<int64_t>& left = segments_left_[size_t(item.shared)];
            if (left.fetch_sub(1, std::memory_order_acq_rel) > 1) continue;
            left.store(item.num_segments, std::memory_order_relaxed);
            attention().join(queries.data(), n, dim, parts_of(item, 0));
        }
        if (has_whole_blocks_per_head()) {
            const int64_t per_head = dim / kBlock;
            quantise(from_attention(), item.token_begin, item.token_end, item.head_begin * per_head, item.head_end * per_head);
        }
    }
}

// The thread that computes logits also searches them for the argmax, while they are in its cache.
void Model::multiply_head(Range tiles, int thread) {
    const Activations last{int64_t(wanted_.size()), shape_.width, last_quantised_.as<uint8_t>(), last_.as<float>()};
    const int64_t tiles_near = std::max<int64_t>(1, kNearLogits / kTileRows / last.n);
    Peak* const peaks = peaks_[size_t(thread)].as<Peak>();
    for (int64_t tile = tiles.begin; tile < tiles.end; tile += tiles_near) {
        const Range rows = rows_of({tile, std::min(tile + tiles_near, tiles.end)}, shape_.vocab_size);
        matmul(head(), last, logits_.as<float>(), shape_.vocab_size, rows.begin, rows.end);
        for (int64_t i = 0; i < last.n; i++) {
            const float* part = logits_.as<float>() + i * shape_.vocab_size + rows.begin;
            const int64_t at = row_ops().argmax(part, rows.end - rows.begin);
            peaks[i].merge({part[at], int32_t(rows.begin + at)});
        }
    }
}

void Model::merge_peaks(int32_t* likeliest) const {
    for (size_t i = 0; i < wanted_.size(); i++) {
        Peak whole;
        for (const Memory& peaks : peaks_) whole.merge(peaks.as<Peak>()[i]);
        likeliest[i] = whole.at;
    }
}

}  // namespace outpace
