// Memory read bandwidth, which limits the speed of every decode step.
#pragma once

#include <cstddef>

namespace outpace {

// Bytes per second that num_threads read from a buffer of num_bytes: the best of several passes, because other
// processes can only make a pass slower.
double read_bandwidth(int num_threads, size_t num_bytes);

}  // namespace outpace
