// The C interface for Python: a version, error codes, and a message for the last error of the calling thread.
//
// All arguments are checked here; the code behind this file trusts sizes and indices.
#pragma once

#include <stdint.h>

#if defined(__cplusplus)
extern "C" {
#endif

#define OUTPACE_API __attribute__((visibility("default")))
#define OUTPACE_ABI_VERSION 7

typedef struct OutpaceModel OutpaceModel;
typedef struct OutpaceVerifier OutpaceVerifier;

typedef enum { OUTPACE_OK = 0, OUTPACE_BAD_ARGUMENT = 1, OUTPACE_NO_MEMORY = 2, OUTPACE_FAULT = 3 } OutpaceStatus;

typedef struct {
    int32_t num_layers, width, hidden, num_heads, num_kv_heads, head_dim, num_rotated, vocab_size;
    int32_t rope_style;  // 0: neighbours are paired, 1: halves
    float epsilon, rope_scale;
    const double* rope_frequencies;  // [num_rotated / 2]
    int32_t num_taps;                // of a draft head; 0 for a model
} OutpaceShape;

// Tokens of one sequence: `count` of them, at positions start, start + 1, ..., in pages tables[table * table_stride ...].
typedef struct {
    int32_t table, start, count, num_logits;
} OutpaceRow;

OUTPACE_API int32_t outpace_abi_version(void);
OUTPACE_API int32_t outpace_page_tokens(void);
OUTPACE_API const char* outpace_isa(void);
OUTPACE_API const char* outpace_last_error(void);
OUTPACE_API double outpace_read_bandwidth(int32_t num_threads, int64_t num_bytes);  // bytes per second; 0: no memory
OUTPACE_API int32_t outpace_supports(int32_t ggml_type, int64_t rows, int64_t cols);
OUTPACE_API int64_t outpace_packed_bytes(int32_t ggml_type, int64_t rows, int64_t cols);

OUTPACE_API int32_t outpace_create(const OutpaceShape* shape, int32_t num_threads, OutpaceModel** model);
OUTPACE_API void outpace_destroy(OutpaceModel* model);
// Matrices and vectors by number (MatrixName, VectorName in model.h); layer -1 holds those outside the layers.
OUTPACE_API int32_t outpace_lay_out(OutpaceModel* model, int32_t layer, int32_t name, int32_t ggml_type, int64_t rows, int64_t cols);
OUTPACE_API int32_t outpace_pack(OutpaceModel* model, int32_t layer, int32_t name, const void* source, int64_t row_begin, int64_t row_end);
OUTPACE_API int32_t outpace_set_vector(OutpaceModel* model, int32_t layer, int32_t name, const float* values, int64_t n);
// For draft heads (Model in model.h), before both are started: the target keeps its hidden states after these numbers of
// layers, and the head follows it. The target must be destroyed after the head. `ids` are the target's tokens of the
// head's vocabulary.
OUTPACE_API int32_t outpace_keep_taps(OutpaceModel* model, const int32_t* layers, int32_t num_taps);
OUTPACE_API int32_t outpace_follow(OutpaceModel* head, const OutpaceModel* target, const int32_t* ids);
OUTPACE_API int32_t outpace_start(OutpaceModel* model, int64_t num_pages, int64_t max_step_tokens);
OUTPACE_API int64_t outpace_packed_size(const OutpaceModel* model);
OUTPACE_API int64_t outpace_bytes_per_step(const OutpaceModel* model);

// Logits of all tokens that request them, [number requested][vocab_size], in the model's memory, valid until the next
// call; and the argmax of each, [number requested], in the caller's memory: the first of equals, or the first NaN.
OUTPACE_API int32_t outpace_forward(OutpaceModel* model, const OutpaceRow* rows, int32_t num_rows, const int32_t* tokens,
                                    const int32_t* tables, int64_t table_stride, const float** logits, int32_t* likeliest);
// Hidden states after the final norm of the tokens that requested logits in the latest step, [number requested][width].
OUTPACE_API const float* outpace_states(const OutpaceModel* model);
OUTPACE_API int32_t outpace_copy_page(OutpaceModel* model, int32_t source, int32_t target);

// A draft to verify (Case in verifier.h). The arrays hold all cases in order; each case has num_drafted + 1 rows of
// logits, num_drafted tokens and, if its rule uses them, num_drafted rows of draft probabilities.
typedef struct {
    uint64_t seed;
    int64_t position;
    double top_p, min_p;
    float sharpness;
    int32_t top_k, rule, num_drafted;
} OutpaceCase;

// LogitRow in sampling.h: `allowed` has a bit per token, or is null. If `only` is not -1, `logits` may be null.
typedef struct {
    const float* logits;
    const uint32_t* allowed;
    int64_t only;
} OutpaceLogitRow;

typedef struct {
    int32_t num_accepted, token;
} OutpaceVerdict;

typedef struct {
    int32_t token, likeliest, is_stable;
} OutpacePicked;

// Decide in drafting.h.
typedef void (*OutpaceDecide)(int32_t num_rows, const int32_t* rows, const float* confidence, int32_t* fates);

// Drafts up to row.num_logits tokens after the last of each row (DraftRow in drafting.h); row.start is the number of entries that
// the head's cache holds, at least 1. Of a case, `rule` says how tokens are picked. Writes the tokens of all rows, one after
// another, and how many each row has; `decide` may be null, and no confidence is written then. probs[i] is used only if row
// i draws: zeros, of which only those of known tokens change.
OUTPACE_API int32_t outpace_draft(OutpaceModel* head, const OutpaceRow* rows, int32_t num_rows, const int32_t* tokens, const int32_t* tables,
                                  int64_t table_stride, const OutpaceCase* cases, float* const* probs, int32_t* drafted, float* confidence,
                                  int32_t* counts, OutpaceDecide decide);

OUTPACE_API int32_t outpace_verifier_create(int64_t vocab_size, int32_t num_threads, OutpaceVerifier** verifier);
OUTPACE_API void outpace_verifier_destroy(OutpaceVerifier* verifier);
// `picks`, one per row, may be null (Case in verifier.h); those of other rows than it says are not written.
OUTPACE_API int32_t outpace_verify(OutpaceVerifier* verifier, const OutpaceCase* cases, int32_t num_cases, const OutpaceLogitRow* rows,
                                  const int32_t* drafted, const float* const* draft_probs, OutpaceVerdict* verdicts, OutpacePicked* picks);
// The distribution from which the token of a row of logits is drawn, [vocab_size].
OUTPACE_API int32_t outpace_probs(OutpaceVerifier* verifier, const OutpaceCase* shaping, const OutpaceLogitRow* row, float* probs);

#if defined(__cplusplus)
}
#endif
