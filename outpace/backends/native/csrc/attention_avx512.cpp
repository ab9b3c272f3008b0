#if defined(__x86_64__)
#define OUTPACE_ATTENTION attention_avx512
#include "attention_impl.h"
#endif
