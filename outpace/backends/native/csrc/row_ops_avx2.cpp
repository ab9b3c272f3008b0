#if defined(__x86_64__)
#define OUTPACE_ROW_OPS row_ops_avx2
#include "row_ops_impl.h"
#endif
