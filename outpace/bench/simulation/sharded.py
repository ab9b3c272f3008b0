"""Machines that nobody here has: a 70B model sharded over 2, 4 or 8 H200, derived from what was measured on one.

A rank's share of a step is the measured step of the 8B, times the ratio of the parameters that a rank reads. Attention
reads the rank's share of the cache. To this come two sums over the ranks per layer (`costs/communication.py`).
`docs/scale.md` has the derivation.
"""

from __future__ import annotations

from dataclasses import dataclass

from outpace.bench.simulation.machines import DRAFTS, MACHINES, StepLaw
from outpace.speculation.costs.communication import all_reduce_seconds

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


def communication_seconds(shape: ModelShape, num_gpus: int, num_tokens: int) -> float:
    """All sums of a step: after attention and after the MLP of every layer, over [tokens, width] in bfloat16."""
    return 2 * shape.num_layers * all_reduce_seconds(num_gpus, 2.0 * num_tokens * shape.width)


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
