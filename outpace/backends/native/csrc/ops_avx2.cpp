#if defined(__x86_64__)
#define OUTPACE_OPS ops_avx2
#include "ops_impl.h"
#endif
