#define OUTPACE_ROW_OPS row_ops_portable
#include "row_ops_impl.h"
