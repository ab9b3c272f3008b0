// Whole forward passes through the C interface, over small random models: the same bits in every way of computing a
// token, and an error code for everything a caller could get wrong. Meant to be run under the sanitizers too.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "capi.h"
#include "matmul.h"

namespace {

int num_failures = 0;
std::mt19937 rng(2);

#define CHECK(condition, ...)                                          \
    do {                                                               \
        if (!(condition)) {                                            \
            num_failures++;                                            \
            std::printf("%s:%d: %s ", __FILE__, __LINE__, #condition); \
            std::printf(__VA_ARGS__);                                  \
            std::printf(" (%s)\n", outpace_last_error());              \
        }                                                              \
    } while (0)

constexpr int kVocab = 100, kPages = 40, kStride = 8, kMaxTokens = 96;

struct Options {
    int type, num_heads, num_kv_heads, head_dim, style;
    bool has_biases, has_norms, has_head, has_few_logits = false;
};

// A matrix as a GGUF would hold it: F32, or Q8_0 (a half scale, then 32 codes).
std::vector<uint8_t> random_matrix(int type, int64_t rows, int64_t cols) {
    std::vector<uint8_t> bytes;
    std::normal_distribution<float> normal(0, 1.0f / std::sqrt(float(cols)));
    if (type == int(outpace::GgmlType::F32)) {
        bytes.resize(size_t(rows * cols) * 4);
        for (int64_t i = 0; i < rows * cols; i++) {
            const float value = normal(rng);
            std::memcpy(bytes.data() + i * 4, &value, 4);
        }
        return bytes;
    }
    for (int64_t block = 0; block < rows * cols / 32; block++) {
        const uint16_t scale = uint16_t(0x1000 + rng() % 0x200);  // about 2^-11
        bytes.push_back(uint8_t(scale & 255));
        bytes.push_back(uint8_t(scale >> 8));
        for (int i = 0; i < 32; i++) bytes.push_back(uint8_t(rng()));
    }
    return bytes;
}

// Rows that are small multiples of one: of the logits, many are equal, and all may be negative. F32.
std::vector<uint8_t> multiples_of_one_row(int64_t rows, int64_t cols) {
    const std::vector<uint8_t> one = random_matrix(int(outpace::GgmlType::F32), 1, cols);
    std::vector<float> values(size_t(rows * cols));
    for (int64_t row = 0; row < rows; row++) {
        float* const at = values.data() + row * cols;
        std::memcpy(at, one.data(), one.size());
        for (int64_t i = 0; i < cols; i++) at[i] *= float(1 << row % 3);
    }
    std::vector<uint8_t> bytes(values.size() * sizeof(float));
    std::memcpy(bytes.data(), values.data(), bytes.size());
    return bytes;
}

OutpaceModel* make_model(const Options& o, int threads) {
    rng.seed(3);
    const int width = 64, hidden = 96, layers = 2, q = o.num_heads * o.head_dim, kv = o.num_kv_heads * o.head_dim;
    std::vector<double> frequencies;
    for (int i = 0; i < o.head_dim / 2; i++) frequencies.push_back(std::pow(10000.0, -2.0 * i / o.head_dim));
    const OutpaceShape shape{layers, width, hidden, o.num_heads, o.num_kv_heads, o.head_dim, o.head_dim, kVocab, o.style, 1e-5f, 1.0f, frequencies.data()};
    OutpaceModel* model = nullptr;
    CHECK(outpace_create(&shape, threads, &model) == OUTPACE_OK, "create");
    const auto matrix = [&](int layer, int name, int64_t rows, int64_t cols) {
        const bool has_few = o.has_few_logits && layer == -1 && name == 1;
        const auto bytes = has_few ? multiples_of_one_row(rows, cols) : random_matrix(o.type, rows, cols);
        CHECK(outpace_lay_out(model, layer, name, o.type, rows, cols) == OUTPACE_OK, "lay out %d", name);
        const int64_t middle = rows / 32 * 16;  // in two slabs
        if (middle) CHECK(outpace_pack(model, layer, name, bytes.data(), 0, middle) == OUTPACE_OK, "pack");
        CHECK(outpace_pack(model, layer, name, bytes.data(), middle, rows) == OUTPACE_OK, "pack");
    };
    const auto vector = [&](int layer, int name, int64_t n, float centre) {
        std::normal_distribution<float> normal(centre, 0.1f);
        std::vector<float> values;
        for (int64_t i = 0; i < n; i++) values.push_back(normal(rng));
        CHECK(outpace_set_vector(model, layer, name, values.data(), n) == OUTPACE_OK, "vector %d", name);
    };
    matrix(-1, 0, kVocab, width);
    if (o.has_head) matrix(-1, 1, kVocab, width);
    vector(-1, 0, width, 1);
    for (int i = 0; i < layers; i++) {
        matrix(i, 2, q, width), matrix(i, 3, kv, width), matrix(i, 4, kv, width), matrix(i, 5, width, q);
        matrix(i, 6, hidden, width), matrix(i, 7, hidden, width), matrix(i, 8, width, hidden);
        vector(i, 1, width, 1), vector(i, 2, width, 1);
        if (o.has_biases) vector(i, 3, q, 0), vector(i, 4, kv, 0), vector(i, 5, kv, 0), vector(i, 6, width, 0);
        if (o.has_norms) vector(i, 7, o.head_dim, 1), vector(i, 8, o.head_dim, 1);
    }
    CHECK(outpace_start(model, kPages, kMaxTokens) == OUTPACE_OK, "start");
    return model;
}

struct Sequence {
    int table;
    std::vector<int32_t> tokens;
    int done = 0;
};

// One step over parts of several sequences; all logits, checked against `truth` where it has them.
void step(OutpaceModel* model, std::vector<Sequence*> sequences, const std::vector<int>& counts, const std::vector<int32_t>& tables,
          std::vector<float>* record, const std::vector<float>* truth) {
    std::vector<OutpaceRow> rows;
    std::vector<int32_t> tokens;
    for (size_t i = 0; i < sequences.size(); i++) {
        Sequence& s = *sequences[i];
        rows.push_back({s.table, s.done, counts[i], counts[i]});
        tokens.insert(tokens.end(), s.tokens.begin() + s.done, s.tokens.begin() + s.done + counts[i]);
    }
    const float* logits = nullptr;
    std::vector<int32_t> likeliest(tokens.size(), -1);
    CHECK(outpace_forward(model, rows.data(), int32_t(rows.size()), tokens.data(), tables.data(), kStride, &logits, likeliest.data()) == OUTPACE_OK, "forward");
    if (!logits) return;
    for (size_t i = 0; i < likeliest.size(); i++) {
        const float* row = logits + i * kVocab;
        CHECK(likeliest[i] == std::max_element(row, row + kVocab) - row, "likeliest of row %zu", i);
    }
    for (size_t i = 0; i < sequences.size(); i++) {
        Sequence& s = *sequences[i];
        const size_t size = size_t(counts[i]) * kVocab;
        if (record) record->insert(record->end(), logits, logits + size);
        if (truth) CHECK(std::memcmp(logits, truth->data() + size_t(s.done) * kVocab, size * sizeof(float)) == 0, "bits at %d + %d", s.done, counts[i]);
        logits += size;
        s.done += counts[i];
    }
}

void test_bits(const Options& options) {
    OutpaceModel* model = make_model(options, 2);
    std::vector<int32_t> pages(kPages);
    for (int i = 0; i < kPages; i++) pages[size_t(i)] = i;
    std::shuffle(pages.begin(), pages.end(), rng);
    const std::vector<int32_t> tables(pages.begin(), pages.begin() + 4 * kStride);  // 4 sequences
    std::vector<int32_t> text;
    for (int i = 0; i < 90; i++) text.push_back(int32_t(rng() % kVocab));
    std::vector<float> truth;
    Sequence alone{0, text};
    while (alone.done < int(text.size())) step(model, {&alone}, {1}, tables, &truth, nullptr);
    for (float value : truth) CHECK(std::isfinite(value), "logit");
    if (options.has_few_logits) {
        int num_negative = 0;
        for (size_t at = 0; at < truth.size(); at += kVocab) num_negative += *std::max_element(truth.begin() + long(at), truth.begin() + long(at) + kVocab) < 0;
        CHECK(num_negative > 0 && num_negative < int(text.size()), "%d negative rows", num_negative);
    }
    for (int threads : {2, 1, 3}) {
        OutpaceModel* other = threads == 2 ? model : make_model(options, threads);
        Sequence whole{1, text};
        step(other, {&whole}, {int(text.size())}, tables, nullptr, &truth);
        Sequence some[3] = {{1, text}, {2, text}, {3, text}};
        for (int round = 0; round < 60; round++) {
            std::vector<Sequence*> chosen;
            std::vector<int> counts;
            for (Sequence& s : some) {
                const int count = std::min(int(rng() % 20), int(text.size()) - s.done);
                if (count) chosen.push_back(&s), counts.push_back(count);
            }
            if (!chosen.empty()) step(other, chosen, counts, tables, nullptr, &truth);
            for (Sequence& s : some)  // rewind now and then
                if (rng() % 4 == 0) s.done = int(rng() % unsigned(s.done + 1));
        }
        // A page copied in the middle of a sequence carries on with the same bits.
        Sequence copied{2, text};
        step(other, {&copied}, {40}, tables, nullptr, &truth);
        auto moved = tables;
        moved[2 * kStride + 1] = pages[39];
        CHECK(outpace_copy_page(other, tables[2 * kStride + 1], pages[39]) == OUTPACE_OK, "copy");
        step(other, {&copied}, {50}, moved, nullptr, &truth);
        if (other != model) outpace_destroy(other);
    }
    outpace_destroy(model);
}

void test_errors() {
    const Options options{0, 4, 2, 16, 0, false, false, false};
    OutpaceModel* model = make_model(options, 2);
    std::vector<int32_t> tables(kStride, 0);
    const auto forward = [&](OutpaceRow row, std::vector<int32_t> tokens) {
        const float* logits = nullptr;
        int32_t likeliest[2];
        return outpace_forward(model, &row, 1, tokens.data(), tables.data(), kStride, &logits, likeliest);
    };
    CHECK(forward({0, 0, 1, 1}, {5}) == OUTPACE_OK, "a good row");
    CHECK(forward({0, 0, 1, 1}, {kVocab}) == OUTPACE_BAD_ARGUMENT, "a token too large");
    CHECK(forward({0, 0, 1, 1}, {-1}) == OUTPACE_BAD_ARGUMENT, "a negative token");
    CHECK(forward({0, -1, 1, 1}, {1}) == OUTPACE_BAD_ARGUMENT, "a negative position");
    CHECK(forward({0, 0, 0, 0}, {1}) == OUTPACE_BAD_ARGUMENT, "an empty row");
    CHECK(forward({0, 0, 1, 2}, {1}) == OUTPACE_BAD_ARGUMENT, "more logits than tokens");
    CHECK(forward({0, 32 * kStride, 1, 1}, {1}) == OUTPACE_BAD_ARGUMENT, "past the table");
    CHECK(forward({0, INT32_MAX, 1, 1}, {1}) == OUTPACE_BAD_ARGUMENT, "far past the table");
    CHECK(forward({0, 0, kMaxTokens + 1, 1}, std::vector<int32_t>(kMaxTokens + 1)) == OUTPACE_BAD_ARGUMENT, "too many tokens");
    tables[0] = kPages;
    CHECK(forward({0, 0, 1, 1}, {1}) == OUTPACE_BAD_ARGUMENT, "a page that does not exist");
    CHECK(outpace_copy_page(model, 0, kPages) == OUTPACE_BAD_ARGUMENT, "a copy to nowhere");
    CHECK(outpace_lay_out(model, 0, 2, 0, 64, 64) == OUTPACE_BAD_ARGUMENT, "a matrix twice");
    CHECK(outpace_lay_out(model, 5, 2, 0, 64, 64) == OUTPACE_BAD_ARGUMENT, "no such layer");
    CHECK(outpace_lay_out(model, 0, 99, 0, 64, 64) == OUTPACE_BAD_ARGUMENT, "no such matrix");
    CHECK(outpace_lay_out(model, -1, 1, 0, 64, 64) == OUTPACE_BAD_ARGUMENT, "a head of the wrong shape");
    CHECK(outpace_lay_out(model, -1, 1, 77, kVocab, 64) == OUTPACE_BAD_ARGUMENT, "no such type");
    CHECK(outpace_start(model, 1, 1) == OUTPACE_BAD_ARGUMENT, "started twice");
    outpace_destroy(model);
    const double frequencies[8] = {};
    OutpaceShape shape{1, 64, 64, 4, 3, 16, 16, 10, 0, 1e-5f, 1.0f, frequencies};
    CHECK(outpace_create(&shape, 1, &model) == OUTPACE_BAD_ARGUMENT, "heads that do not divide");
    shape.num_kv_heads = 2;
    CHECK(outpace_create(&shape, 1, &model) == OUTPACE_OK, "a good shape");
    CHECK(outpace_start(model, 10, 10) == OUTPACE_BAD_ARGUMENT, "no weights");
    CHECK(forward({0, 0, 1, 1}, {1}) == OUTPACE_BAD_ARGUMENT, "not started");
    outpace_destroy(model);
}

}  // namespace

int main() {
    for (int type : {int(outpace::GgmlType::F32), int(outpace::GgmlType::Q8_0)}) {
        test_bits({type, 4, 2, 16, 0, false, false, false});
        test_bits({type, 6, 2, 16, 1, true, false, true});
        test_bits({type, 2, 2, 64, 1, false, true, false});
    }
    test_bits({int(outpace::GgmlType::F32), 4, 2, 16, 0, false, false, true, true});
    test_errors();
    std::printf(num_failures ? "%d failures\n" : "all passed\n", num_failures);
    return num_failures != 0;
}
