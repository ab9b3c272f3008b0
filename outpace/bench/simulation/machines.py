"""The machines of the simulator: seconds of a forward pass by rows, tokens and context.

Three are measured: two cores of an AMD EPYC with AVX-512 (`outpace costs --measure --json`, native backend;
SmolLM2-135M with its head, and the pair Qwen2.5-Coder 1.5B and 0.5B) and one H200 (an 8B with a 1B as draft, by
`benchmarks.gpu_speculation`). The others have cost curves that could mislead a policy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class StepLaw:
    """Seconds of a forward pass: linear in tokens between the points and after the last; in steps if `stair` is set.

    Rows and context add to it, as in `StepCosts`; `row_context_seconds` is per token of context and row.
    """

    sizes: tuple[int, ...]
    seconds: tuple[float, ...]
    stair: int = 0  # tokens are rounded up to a multiple of this
    row_seconds: float = 0.0  # per row beyond the first
    context_seconds: float = 0.0  # per token of the mean context
    row_context_seconds: float = 0.0
    token_context_seconds: float = 0.0
    mixed_seconds: float = 0.0  # more for a step that is neither plain nor drafted by a model for all rows alike

    def of(self, rows: int, tokens: int, context: float = 0.0) -> float:
        return float(self.by_tokens(rows, tokens, tokens, context)[0])

    def by_tokens(self, rows: int, least: int, most: int, context: float = 0.0) -> NDArray[np.float64]:
        """`of` for every number of tokens from least to most."""
        tokens = np.arange(least, most + 1)
        counted = -(-tokens // self.stair) * self.stair if self.stair else tokens
        last, before = self.sizes[-1], self.sizes[-2]
        slope = (self.seconds[-1] - self.seconds[-2]) / (last - before)
        base = np.interp(counted, self.sizes, self.seconds) + slope * np.maximum(counted - last, 0)
        for_context = self.context_seconds + rows * self.row_context_seconds + tokens * self.token_context_seconds
        seconds: NDArray[np.float64] = base + (rows - 1) * self.row_seconds + context * for_context
        return seconds

    def scaled(self, factor: float) -> StepLaw:
        """The same machine with a model of `factor` times the cost."""
        return replace(
            self,
            seconds=tuple(factor * each for each in self.seconds),
            row_seconds=factor * self.row_seconds,
            context_seconds=factor * self.context_seconds,
            row_context_seconds=factor * self.row_context_seconds,
            token_context_seconds=factor * self.token_context_seconds,
        )


def _law(milliseconds: Mapping[int, float], **extras: float) -> StepLaw:
    seconds = tuple(1e-3 * each for each in milliseconds.values())
    return StepLaw(tuple(milliseconds), seconds, **extras)  # type: ignore[arg-type]


MACHINES: dict[str, StepLaw] = {
    "cpu-native": _law(
        {1: 2.9, 2: 2.92, 4: 3.0, 5: 3.4, 6: 4.1, 8: 4.93, 10: 6.12, 16: 8.61, 32: 17.5, 64: 35.0, 128: 71.2},
        row_seconds=1.1e-5, row_context_seconds=1.17e-6, token_context_seconds=6.2e-7,
    ),
    "cpu-pair": _law(
        {1: 29.5, 2: 30.8, 4: 31.3, 5: 33.8, 6: 39.1, 8: 48.7, 16: 90.0, 64: 350.0},
        row_seconds=7.9e-4, row_context_seconds=1.7e-6, token_context_seconds=1.15e-6,
    ),
    "h200": _law(
        {1: 4.05, 2: 4.14, 4: 4.18, 8: 4.29, 16: 4.38, 24: 4.95, 32: 5.03, 64: 5.35, 96: 5.70, 128: 5.77, 192: 7.11,
         256: 7.53, 2048: 46.0},
        # A draft that is verified before the host has seen it hides the host's work; a looked-up one cannot.
        row_seconds=2.1e-8, context_seconds=2.8e-8, row_context_seconds=7.3e-9, mixed_seconds=1.5e-3,
    ),
    # Measured with an older version of llama.cpp on two cores, SmolLM2: a second token costs half a step.
    "cpu-llamacpp": _law({1: 9.0, 2: 14.0, 4: 25.0, 8: 42.0, 16: 70.0, 64: 250.0}),
    # A GPU whose kernels work on tiles of sixteen tokens.
    "gpu-stairs": _law({16: 4.0, 64: 4.4, 256: 8.0, 2048: 50.0}, stair=16),
    "compute-bound": _law({1: 1.0, 64: 60.0}),
    "stairs-of-8": _law({8: 5.0, 16: 9.0, 24: 13.0, 64: 33.0}, stair=8),
}  # fmt: skip

# Draft models measured together with their targets. On other machines a draft costs a share of its target.
DRAFTS: dict[str, StepLaw] = {
    "cpu-pair": _law(
        {1: 11.6, 2: 12.1, 4: 12.3, 6: 14.6, 8: 19.0, 16: 24.8, 64: 104.5},
        row_seconds=2.4e-4, row_context_seconds=4.3e-6,
    ),
    "h200": _law(
        {1: 0.91, 2: 1.06, 8: 1.15, 16: 1.28, 32: 1.59, 64: 1.75, 128: 2.0, 256: 2.5, 512: 3.5, 1024: 6.0},
        row_seconds=1.4e-6, context_seconds=3.3e-8, row_context_seconds=1.1e-9,
    ),
}  # fmt: skip

# The head of SmolLM2 on the CPU, and padded to that of an 8B on the H200 (measured at commit 969c206).
HEADS: dict[str, StepLaw] = {
    "cpu-native": _law({1: 0.22, 2: 0.25, 4: 0.30, 8: 0.60, 16: 1.00, 64: 3.00, 256: 12.0}),
    "h200": _law({1: 0.30, 16: 0.31, 64: 0.76, 256: 0.91, 512: 1.08, 1024: 1.73}),
}

GPUS = ("h200", "gpu-stairs")
CPUS = ("cpu-native", "cpu-pair", "cpu-llamacpp", "compute-bound", "stairs-of-8")
