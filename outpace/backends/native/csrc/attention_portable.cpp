#define OUTPACE_ATTENTION attention_portable
#include "attention_impl.h"
