"""What it costs to sum a tensor over several GPUs: `outpace plan` and the simulated machines share this.

Two published ways, of which an engine takes the faster: a kernel in which every GPU reads the others' memory, for small
tensors over NVLink, and NCCL's ring, in which every GPU sends and receives 2 (n - 1) / n of the bytes.
"""

from __future__ import annotations

import numpy as np

# Seconds by bytes, of vLLM's kernel on H100, for 2, 4 and 8 GPUs: https://github.com/sgl-project/sglang/pull/2904.
_BYTES = (512, 4096, 32768, 262144, 524288, 1048576)
_SECONDS = {
    2: (9.5e-6, 8.8e-6, 8.7e-6, 12.9e-6, 17.7e-6, 26.6e-6),
    4: (9.1e-6, 8.5e-6, 9.2e-6, 20.6e-6, 26.9e-6, 40.2e-6),
    8: (10.1e-6, 9.3e-6, 11.8e-6, 24.1e-6, 30.4e-6, 45.0e-6),
}
# NCCL's ring takes 23 to 53 us for 0.5 to 4 MB on 6 H100 (https://github.com/vllm-project/vllm/pull/24111), and 19 to
# 84 us for 4 to 384 kB on 4 V100 over PCIe 3.0 (https://github.com/haohervchb/sglang-V100/pull/2). These two constants
# give all of these figures within 20%.
_RING_LATENCY = 20e-6
_RING_SHARE = 0.47  # of the link's bandwidth
NVLINK = 450e9  # bytes a second in one direction, of the H100 and H200


def all_reduce_seconds(num_gpus: int, num_bytes: float, link: float = NVLINK, *, is_nvlink: bool = True) -> float:
    """One sum over all GPUs, each of which reaches the others at `link` bytes a second in one direction."""
    if num_gpus == 1:
        return 0.0
    ring = _RING_LATENCY + 2.0 * (num_gpus - 1) / num_gpus * num_bytes / (_RING_SHARE * link)
    if not is_nvlink or num_gpus > max(_SECONDS):
        return ring
    return min(ring, _direct_seconds(num_gpus, num_bytes, link))


def _direct_seconds(num_gpus: int, num_bytes: float, link: float) -> float:
    """As published for the next larger number of GPUs; above a megabyte it grows by the last slope. A slower link makes
    what is above the latency slower."""
    seconds = _SECONDS[next(each for each in _SECONDS if each >= num_gpus)]
    slope = (seconds[-1] - seconds[-2]) / (_BYTES[-1] - _BYTES[-2])
    found = float(np.interp(num_bytes, _BYTES, seconds)) + slope * max(num_bytes - _BYTES[-1], 0.0)
    latency = min(seconds)
    return latency + max(0.0, found - latency) * NVLINK / link
