#include "capi.h"

#include <exception>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include "bandwidth.h"
#include "drafting.h"
#include "verifier.h"
#include "model.h"

struct OutpaceModel {
    outpace::Model model;
    std::vector<outpace::Row> rows;
    int num_threads = 1;
    bool is_started = false;
    // Of a draft head.
    const outpace::Model* target = nullptr;
    std::vector<int32_t> ids;
    std::unique_ptr<outpace::Drafting> drafting;
    std::vector<outpace::DraftRow> draft_rows;
};

struct OutpaceVerifier {
    outpace::Verifier verifier;
    outpace::Sampler sampler;
    std::vector<outpace::Case> cases;
    std::vector<outpace::LogitRow> rows;
    std::vector<outpace::Picked> picks;
    std::vector<outpace::Verdict> verdicts;
};

namespace {

using namespace outpace;

thread_local std::string last_error;

void check(bool ok, const std::string& sentence) {
    if (!ok) throw std::invalid_argument(sentence);
}

// Turns exceptions into error codes: none may reach the C caller.
template <typename Body>
int32_t guarded(Body&& body) {
    try {
        body();
        return OUTPACE_OK;
    } catch (const std::bad_alloc&) {
        last_error = "there is not enough memory";
        return OUTPACE_NO_MEMORY;
    } catch (const std::invalid_argument& error) {
        last_error = error.what();
        return OUTPACE_BAD_ARGUMENT;
    } catch (const std::exception& error) {
        last_error = error.what();
        return OUTPACE_FAULT;
    }
}

void check_shape(const OutpaceShape& s) {
    constexpr int32_t kLarge = 1 << 24;
    for (int32_t n : {s.num_layers, s.width, s.hidden, s.num_heads, s.num_kv_heads, s.head_dim, s.vocab_size}) {
        check(n > 0 && n <= kLarge, "a size of the model is " + std::to_string(n));
    }
    check(s.width % 8 == 0 && s.hidden % 8 == 0 && s.head_dim % 8 == 0, "widths must be multiples of 8");
    check(s.num_heads % s.num_kv_heads == 0, "query heads must divide evenly among key/value heads");
    check(s.num_rotated >= 0 && s.num_rotated <= s.head_dim && s.num_rotated % 2 == 0, "RoPE must rotate pairs within a head");
    check(s.rope_style == 0 || s.rope_style == 1, "the RoPE style must be 0 or 1");
    check(s.num_taps >= 0 && s.num_taps <= 64 && (s.num_taps == 0 || s.num_layers == 1), "a draft head has one layer and at most 64 taps");
}

struct Expected {
    int64_t rows, cols;
};

Expected matrix_shape(const Shape& s, MatrixName name) {
    const int64_t q = s.num_heads * s.head_dim, kv = s.num_kv_heads * s.head_dim;
    switch (name) {
        case MatrixName::kEmbedding:
        case MatrixName::kHead: return {s.vocab_size, s.width};
        case MatrixName::kQuery: return {q, s.input_width()};
        case MatrixName::kKey:
        case MatrixName::kValue: return {kv, s.input_width()};
        case MatrixName::kOutput: return {s.width, q};
        case MatrixName::kGate:
        case MatrixName::kUp: return {s.hidden, s.width};
        case MatrixName::kFuse: return {s.width, s.num_taps * s.width};
        default: return {s.width, s.hidden};
    }
}

int64_t vector_size(const Shape& s, VectorName name) {
    switch (name) {
        case VectorName::kQueryBias: return s.num_heads * s.head_dim;
        case VectorName::kKeyBias:
        case VectorName::kValueBias: return s.num_kv_heads * s.head_dim;
        case VectorName::kQueryNorm:
        case VectorName::kKeyNorm: return s.head_dim;
        case VectorName::kTapNorm: return s.num_taps * s.width;
        default: return s.width;
    }
}

void check_layer(const Model& model, int32_t layer, bool is_outside) {
    check(is_outside ? layer == -1 : layer >= 0 && layer < model.shape().num_layers, "there is no layer " + std::to_string(layer) + " for this tensor");
}

MatrixName matrix_name(const Model& model, int32_t layer, int32_t name) {
    check(name >= 0 && name < int32_t(MatrixName::kCount), "there is no matrix number " + std::to_string(name));
    check_layer(model, layer, name <= int32_t(MatrixName::kHead) || name == int32_t(MatrixName::kFuse));
    return MatrixName(name);
}

VectorName vector_name(const Model& model, int32_t layer, int32_t name) {
    check(name >= 0 && name < int32_t(VectorName::kCount), "there is no vector number " + std::to_string(name));
    check_layer(model, layer, name == int32_t(VectorName::kFinalNorm) || name == int32_t(VectorName::kTapNorm));
    return VectorName(name);
}

void check_row(const Model& model, const OutpaceRow& row, const int32_t* tokens, const int32_t* pages, int64_t table_stride) {
    check(row.count > 0 && row.start >= 0 && row.num_logits >= 0 && row.num_logits <= row.count, "a row's counts do not fit together");
    for (int32_t i = 0; i < row.count; i++) {
        check(tokens[i] >= 0 && tokens[i] < model.shape().vocab_size, "token " + std::to_string(tokens[i]) + " is not in the vocabulary");
    }
    const int64_t num_pages = (int64_t(row.start) + row.count + kPageTokens - 1) / kPageTokens;
    check(num_pages <= table_stride, "a row is longer than its table of pages");
    for (int64_t i = 0; i < num_pages; i++) check(pages[i] >= 0 && pages[i] < model.num_pages(), "a table names a page that does not exist");
}

Shaping shaping_of(const OutpaceCase& one) { return {one.sharpness, one.top_k, one.top_p, one.min_p}; }

LogitRow checked_logits(const OutpaceLogitRow& row, int64_t vocab_size) {
    check(row.only >= -1 && row.only < vocab_size, "the only allowed token " + std::to_string(row.only) + " is not in the vocabulary");
    check(row.logits || row.only >= 0, "a row has neither logits nor an only token");
    return {row.logits, row.allowed, row.only};
}

// Without its rows and picks.
Case checked_case(const OutpaceCase& one, int64_t vocab_size, const int32_t* drafted, const float* const* draft_probs) {
    check(one.rule >= 0 && one.rule < int32_t(Rule::kCount), "there is no rule of acceptance number " + std::to_string(one.rule));
    check(one.num_drafted >= 0 && one.num_drafted < (1 << 20), "a draft has an impossible length");
    check(one.top_p > 0, "top_p leaves no token");
    for (int32_t i = 0; i < one.num_drafted; i++) {
        check(drafted[i] >= 0 && drafted[i] < vocab_size, "drafted token " + std::to_string(drafted[i]) + " is not in the vocabulary");
    }
    return {Rule(one.rule), one.num_drafted, nullptr, drafted, draft_probs, shaping_of(one), one.seed, one.position, nullptr};
}

}  // namespace

int32_t outpace_abi_version(void) { return OUTPACE_ABI_VERSION; }
int32_t outpace_page_tokens(void) { return kPageTokens; }
const char* outpace_isa(void) { return matmul_isa(); }
const char* outpace_last_error(void) { return last_error.c_str(); }

double outpace_read_bandwidth(int32_t num_threads, int64_t num_bytes) {
    double bandwidth = 0;
    guarded([&] { bandwidth = read_bandwidth(num_threads < 1 ? 1 : num_threads, size_t(num_bytes < 1 << 20 ? 1 << 20 : num_bytes)); });
    return bandwidth;
}

int32_t outpace_supports(int32_t ggml_type, int64_t rows, int64_t cols) {
    return rows > 0 && cols > 0 && cols % 8 == 0 && matmul_supports(GgmlType(ggml_type), rows, cols);
}

int64_t outpace_packed_bytes(int32_t ggml_type, int64_t rows, int64_t cols) {
    return outpace_supports(ggml_type, rows, cols) ? int64_t(packed_bytes(GgmlType(ggml_type), rows, cols)) : 0;
}

int32_t outpace_create(const OutpaceShape* s, int32_t num_threads, OutpaceModel** model) {
    return guarded([&] {
        check_shape(*s);
        check(num_threads >= 1 && num_threads <= 1024, "the number of threads must be between 1 and 1024");
        Shape shape{s->num_layers, s->width, s->hidden, s->num_heads, s->num_kv_heads, s->head_dim, s->num_rotated, s->vocab_size,
                    s->epsilon, RopeStyle(s->rope_style), s->rope_scale,
                    std::vector<double>(s->rope_frequencies, s->rope_frequencies + s->num_rotated / 2), s->num_taps};
        *model = new OutpaceModel{Model(std::move(shape), num_threads), {}, num_threads};
    });
}

void outpace_destroy(OutpaceModel* model) { delete model; }

int32_t outpace_lay_out(OutpaceModel* model, int32_t layer, int32_t name, int32_t ggml_type, int64_t rows, int64_t cols) {
    return guarded([&] {
        const MatrixName matrix = matrix_name(model->model, layer, name);
        const Expected expected = matrix_shape(model->model.shape(), matrix);
        check(rows == expected.rows && cols == expected.cols, "a matrix does not have the shape the model needs");
        check(outpace_supports(ggml_type, rows, cols), "matrices of this type and shape are not supported");
        check(!model->model.has(layer, matrix), "a matrix is laid out twice");
        model->model.lay_out(layer, matrix, GgmlType(ggml_type), rows, cols);
    });
}

int32_t outpace_pack(OutpaceModel* model, int32_t layer, int32_t name, const void* source, int64_t row_begin, int64_t row_end) {
    return guarded([&] {
        const MatrixName matrix = matrix_name(model->model, layer, name);
        check(model->model.has(layer, matrix), "a matrix is packed before it is laid out");
        const int64_t rows = matrix_shape(model->model.shape(), matrix).rows;
        check(row_begin >= 0 && row_begin < row_end && row_end <= rows && row_begin % kTileRows == 0 && (row_end % kTileRows == 0 || row_end == rows),
              "rows are packed in whole tiles");
        model->model.pack(layer, matrix, source, row_begin, row_end);
    });
}

int32_t outpace_set_vector(OutpaceModel* model, int32_t layer, int32_t name, const float* values, int64_t n) {
    return guarded([&] {
        const VectorName vector = vector_name(model->model, layer, name);
        check(n == vector_size(model->model.shape(), vector), "a vector does not have the length the model needs");
        model->model.set_vector(layer, vector, values, n);
    });
}

int32_t outpace_start(OutpaceModel* model, int64_t num_pages, int64_t max_step_tokens) {
    return guarded([&] {
        check(num_pages >= 1 && num_pages < INT32_MAX && max_step_tokens >= 1 && max_step_tokens < (1 << 20), "the cache or the step has an impossible size");
        check(!model->is_started, "the model has been started already");
        model->model.start(num_pages, max_step_tokens);
        model->is_started = true;
        if (!model->target) return;
        check(model->target->num_pages() == num_pages, "a head needs as many pages as its target, which starts first");
        model->drafting = std::make_unique<Drafting>(model->model, model->target->shape().vocab_size, model->ids, model->num_threads);
    });
}

int32_t outpace_keep_taps(OutpaceModel* model, const int32_t* layers, int32_t num_taps) {
    return guarded([&] {
        check(!model->is_started && !model->model.shape().is_head() && num_taps >= 1, "taps are chosen before a model starts");
        for (int32_t i = 0; i < num_taps; i++) {
            check(layers[i] > (i ? layers[i - 1] : 0) && layers[i] <= model->model.shape().num_layers, "taps must name layers of the model, in order");
        }
        model->model.keep_taps({layers, layers + num_taps});
    });
}

int32_t outpace_follow(OutpaceModel* head, const OutpaceModel* target, const int32_t* ids) {
    return guarded([&] {
        const Shape &mine = head->model.shape(), &theirs = target->model.shape();
        check(!head->is_started && mine.is_head() && !theirs.is_head() && mine.width == theirs.width, "this head does not fit this model");
        for (int64_t i = 0; i < mine.vocab_size; i++) check(ids[i] >= 0 && ids[i] < theirs.vocab_size, "a head's token is not in the target's vocabulary");
        head->model.follow(target->model);
        head->target = &target->model;
        head->ids.assign(ids, ids + mine.vocab_size);
    });
}

int64_t outpace_packed_size(const OutpaceModel* model) { return int64_t(model->model.packed_size()); }
int64_t outpace_bytes_per_step(const OutpaceModel* model) { return int64_t(model->model.bytes_per_step()); }

int32_t outpace_forward(OutpaceModel* model, const OutpaceRow* rows, int32_t num_rows, const int32_t* tokens, const int32_t* tables,
                        int64_t table_stride, const float** logits, int32_t* likeliest) {
    return guarded([&] {
        check(model->is_started && !model->target, "only a started model runs steps; a head drafts");
        model->rows.clear();
        int64_t first = 0;
        for (int32_t i = 0; i < num_rows; i++) {
            const int32_t* pages = tables + rows[i].table * table_stride;
            check_row(model->model, rows[i], tokens + first, pages, table_stride);
            model->rows.push_back({rows[i].start, rows[i].count, rows[i].num_logits, tokens + first, pages});
            first += rows[i].count;
        }
        check(first >= 1 && first <= model->model.max_step_tokens(), "a step of " + std::to_string(first) + " tokens is outside what was made room for");
        *logits = model->model.forward(model->rows, likeliest);
    });
}

const float* outpace_states(const OutpaceModel* model) { return model->model.states(); }

int32_t outpace_copy_page(OutpaceModel* model, int32_t source, int32_t target) {
    return guarded([&] {
        const auto exists = [&](int32_t page) { return page >= 0 && page < model->model.num_pages(); };
        check(model->is_started && exists(source) && exists(target), "there is no such page to copy");
        model->model.copy_page(source, target);
    });
}

int32_t outpace_draft(OutpaceModel* head, const OutpaceRow* rows, int32_t num_rows, const int32_t* tokens, const int32_t* tables,
                      int64_t table_stride, const OutpaceCase* cases, float* const* probs, int32_t* drafted, float* confidence, int32_t* counts,
                      OutpaceDecide decide) {
    return guarded([&] {
        check(head->drafting != nullptr, "only a started head drafts");
        check(num_rows >= 1 && num_rows <= head->model.max_step_tokens(), "there are too many drafts for one step");
        head->draft_rows.clear();
        for (int32_t i = 0; i < num_rows; i++) {
            const OutpaceRow& row = rows[i];
            const int32_t* pages = tables + row.table * table_stride;
            check(row.start >= 1 && row.num_logits >= 1 && row.num_logits < (1 << 10), "a draft has an impossible place or length");
            const OutpaceRow whole{row.table, row.start, row.count, 0};
            check_row(*head->target, whole, tokens, pages, table_stride);
            const int64_t num_pages = (int64_t(row.start) + row.count + row.num_logits - 1 + kPageTokens - 1) / kPageTokens;
            check(num_pages <= table_stride, "a draft is longer than its table of pages");
            for (int64_t p = 0; p < num_pages; p++) check(pages[p] >= 0 && pages[p] < head->model.num_pages(), "a table names a page that does not exist");
            const OutpaceCase& one = cases[i];
            check(one.rule >= 0 && one.rule < int32_t(Pick::kCount) && one.top_p > 0, "a draft cannot be picked in this way");
            check(Pick(one.rule) != Pick::kDraw || (probs && probs[i]), "a drawn draft has no place for its distributions");
            head->draft_rows.push_back({row.start, row.count, row.num_logits, tokens, pages, Pick(one.rule), shaping_of(one), one.seed, one.position,
                                        probs ? probs[i] : nullptr});
            tokens += row.count;
        }
        head->drafting->draft(head->draft_rows, drafted, confidence, counts, decide);
    });
}

int32_t outpace_verifier_create(int64_t vocab_size, int32_t num_threads, OutpaceVerifier** verifier) {
    return guarded([&] {
        check(vocab_size >= 1 && vocab_size <= 1 << 24, "the vocabulary has an impossible size");
        check(num_threads >= 1 && num_threads <= 1024, "the number of threads must be between 1 and 1024");
        *verifier = new OutpaceVerifier{{vocab_size, num_threads}, Sampler(vocab_size), {}, {}, {}, {}};
    });
}

void outpace_verifier_destroy(OutpaceVerifier* verifier) { delete verifier; }

int32_t outpace_verify(OutpaceVerifier* verifier, const OutpaceCase* cases, int32_t num_cases, const OutpaceLogitRow* rows, const int32_t* drafted,
                      const float* const* draft_probs, OutpaceVerdict* verdicts, OutpacePicked* picks) {
    return guarded([&] {
        const int64_t vocab_size = verifier->verifier.vocab_size();
        verifier->cases.clear();
        verifier->rows.clear();
        for (int32_t i = 0; i < num_cases; i++) {
            const Case one = checked_case(cases[i], vocab_size, drafted, draft_probs);
            verifier->cases.push_back(one);
            for (int32_t j = 0; j <= one.num_drafted; j++) verifier->rows.push_back(checked_logits(*rows++, vocab_size));
            drafted += one.num_drafted;
            if (one.rule > Rule::kMatch) draft_probs += one.num_drafted;
        }
        verifier->picks.resize(verifier->rows.size());
        size_t at = 0;  // the vectors do not grow from here on
        for (Case& one : verifier->cases) {
            one.rows = verifier->rows.data() + at;
            one.picks = picks ? verifier->picks.data() + at : nullptr;
            at += size_t(one.num_drafted) + 1;
        }
        verifier->verdicts.resize(verifier->cases.size());
        verifier->verifier.verify(verifier->cases, verifier->verdicts.data());
        for (size_t i = 0; i < verifier->verdicts.size(); i++) verdicts[i] = {verifier->verdicts[i].num_accepted, verifier->verdicts[i].token};
        for (size_t i = 0; picks && i < at; i++) picks[i] = {verifier->picks[i].token, verifier->picks[i].likeliest, verifier->picks[i].is_stable};
    });
}

int32_t outpace_probs(OutpaceVerifier* verifier, const OutpaceCase* shaping, const OutpaceLogitRow* row, float* probs) {
    return guarded([&] { verifier->sampler.probs(checked_logits(*row, verifier->verifier.vocab_size()), shaping_of(*shaping), probs); });
}
