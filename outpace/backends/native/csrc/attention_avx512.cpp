#if defined(__x86_64__)
// GCC 12's own headers warn about the "undefined" operand of every unmasked intrinsic.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#define OUTPACE_ATTENTION attention_avx512
#include "attention_impl.h"
#endif
