"""Machines that nobody here has: a 70B model sharded over 2, 4 or 8 H200, derived from what was measured on one.

A rank's share of a step is the measured step of the 8B, times the ratio of the parameters that a rank reads. Attention
reads the rank's share of the cache. To this come two sums over the ranks per layer, whose times were published.
`docs/scale.md` has the derivation.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from outpace.bench.simulation.machines import DRAFTS, MACHINES, StepLaw

# Seconds of an all-reduce by bytes, of vLLM's kernel on H100 with NVLink, for 2, 4 and 8 GPUs: as measured in
# https://github.com/sgl-project/sglang/pull/2904. H200 has the same links.
_SUM_BYTES = (512, 4096, 32768, 262144, 524288, 1048576)
_SUM_SECONDS = {
    2: (9.5e-6, 8.8e-6, 8.7e-6, 12.9e-6, 17.7e-6, 26.6e-6),
    4: (9.1e-6, 8.5e-6, 9.2e-6, 20.6e-6, 26.9e-6, 40.2e-6),
    8: (10.1e-6, 9.3e-6, 11.8e-6, 24.1e-6, 30.4e-6, 45.0e-6),
}
_BANDWIDTH = 4.8e12  # bytes a second, of an H200's memory
_REACHED = 0.88  # of it, by the 8B's step: 3.45 ms for reading alone over 3.93 ms (benchmarks/results/gpu_h200.txt)
_MEASURED_PARAMETERS = 8.03e9  # of the model of the machine "h200"


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What a step's time depends on."""

    num_layers: int
    width: int
    kv_size: int  # elements of a token's keys in one layer
    num_parameters: float  # that a step reads

    @property
    def cache_bytes(self) -> int:
        """Of one token, in bfloat16."""
        return 2 * 2 * self.num_layers * self.kv_size


LLAMA_70B = ModelShape(80, 8192, 1024, 69.5e9)
LLAMA_1B = ModelShape(16, 2048, 512, 1.24e9)


def sum_seconds(num_gpus: int, num_bytes: float) -> float:
    """One all-reduce; above a megabyte it grows by the last slope."""
    if num_gpus == 1:
        return 0.0
    seconds = _SUM_SECONDS[num_gpus]
    slope = (seconds[-1] - seconds[-2]) / (_SUM_BYTES[-1] - _SUM_BYTES[-2])
    return float(np.interp(num_bytes, _SUM_BYTES, seconds)) + slope * max(num_bytes - _SUM_BYTES[-1], 0.0)


def communication_seconds(shape: ModelShape, num_gpus: int, num_tokens: int) -> float:
    """All sums of a step: after attention and after the MLP of every layer, over [tokens, width] in bfloat16."""
    return 2 * shape.num_layers * sum_seconds(num_gpus, 2.0 * num_tokens * shape.width)


def sharded_law(shape: ModelShape, num_gpus: int) -> StepLaw:
    measured = MACHINES["h200"]
    ratio = shape.num_parameters / _MEASURED_PARAMETERS / num_gpus
    computed = [ratio * seconds for seconds in measured.seconds]
    summed = [communication_seconds(shape, num_gpus, size) for size in measured.sizes]
    return StepLaw(
        measured.sizes,
        tuple(a + b for a, b in zip(computed, summed, strict=True)),
        row_seconds=measured.row_seconds,
        row_context_seconds=shape.cache_bytes / num_gpus / (_BANDWIDTH * _REACHED),
    )


SHARDED: dict[str, StepLaw] = {f"70b-{n}xh200": sharded_law(LLAMA_70B, n) for n in (2, 4, 8)}
# The draft is a 1B, whole on the first GPU, as measured there. The others wait for it.
SHARDED_DRAFTS: dict[str, StepLaw] = dict.fromkeys(SHARDED, DRAFTS["h200"])


def sharded_draft_seconds(num_gpus: int) -> float:
    """One token of the 1B if it were sharded too, at one request."""
    return DRAFTS["h200"].of(1, 1) / num_gpus + communication_seconds(LLAMA_1B, num_gpus, 1)
