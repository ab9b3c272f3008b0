// How fast this machine's memory can be read: the floor under every decoding step.
#pragma once

#include <cstddef>

namespace outpace {

// Bytes per second that num_threads read from a buffer of num_bytes: the best of several passes, for a floor is what
// could be reached were nobody else there.
double read_bandwidth(int num_threads, size_t num_bytes);

}  // namespace outpace
