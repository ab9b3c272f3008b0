#define OUTPACE_OPS ops_portable
#include "ops_impl.h"
