"""Divides a machine's memory: weights, draft, buffers, and what is left for the cache, per GPU.

A model is sharded as Megatron does it: attention heads, MLP columns and vocabulary are split over the GPUs. Heads of
the cache are split too, until each GPU has one; a latent cache is on every GPU. A draft is on the first GPU, or sharded
like the target. Every GPU holds the same tokens, so the fullest one decides how many there are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from outpace.config import MAX_DEPTH
from outpace.errors import UsageError
from outpace.plan.drafts import PlannedDraft
from outpace.plan.machines import Machine
from outpace.plan.models import PlannedModel
from outpace.plan.precision import cache_bytes
from outpace.plan.shapes import Shape

PAGE_TOKENS = 32  # of the torch backend
PAGES_PER_SEQUENCE = 3  # a partly used last page, a copied page, an early page: `num_pages` of the torch backend
_SCORING_BYTES = 64 << 20  # prompt log-probabilities in one step: `max_scored_tokens` of the backends
_SCALE_BYTES = 4  # for each head of a token, in a cache of 8 bits
_MAX_KEPT = 256
_MOST_GPUS = 64  # of one model, in the torch backend
_MOST_KEPT_PREFIXES = 128  # finished requests whose cache a backend keeps for reuse
# Rows of logits that captured graphs share, by sequences: `num_captured_tokens` of the torch backend.
CAPTURED_ROWS = {1: 24, 2: 48, 4: 96, 8: 160, 16: 384, 24: 512, 32: 768, 48: 1024}


@dataclass(frozen=True, slots=True)
class Deployment:
    """What is to run where."""

    machine: Machine
    gpus: int = 1
    utilization: float = 0.9
    draft_gpus: int = 1
    cache_precision: str = "bf16"
    context: int = 8192  # tokens of a sequence, prompt and output
    sequences: int = 16  # most that run at once; buffers are made for so many
    step_tokens: int = 512  # most in one forward pass
    nominal: bool = False  # articles' arithmetic: round sizes, whole memory, weights only

    def __post_init__(self) -> None:
        for name in ("gpus", "draft_gpus", "context", "sequences", "step_tokens"):
            value = getattr(self, name)
            if value < 1:
                raise UsageError(f"{name.replace('_', ' ')} must be at least 1; got {value}")
        if not 0 < self.utilization <= 1:
            raise UsageError(f"the utilization must be above 0 and at most 1; got {self.utilization:g}")
        cache_bytes(self.cache_precision)
        if self.gpus > 1 and not self.machine.is_gpu:
            raise UsageError(f"{self.machine.name} is not a GPU, and only GPUs share a model; leave out --gpus")
        if self.draft_gpus not in (1, self.gpus):
            raise UsageError(f"a draft runs on 1 GPU or on all {self.gpus}; got {self.draft_gpus}")

    @property
    def cache_element_bytes(self) -> float:
        return cache_bytes(self.cache_precision)


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """Bytes on one GPU, or of a machine without one."""

    total: float
    usable: float  # the utilization's share
    weights: float
    draft: float
    buffers: float
    cache: float  # what is left; below 0 nothing fits
    token: float  # one token of cache, of target and draft

    @property
    def tokens(self) -> int:
        """Tokens of cache that fit."""
        return max(0, math.floor(self.cache / self.token)) if self.token else 0


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    gpus: tuple[GpuMemory, ...]
    context: int
    sequence_tokens: float  # of a sequence at full length, in tokens that all layers keep
    nominal: bool

    @property
    def weights(self) -> float:
        return sum(gpu.weights + gpu.draft for gpu in self.gpus)

    @property
    def left(self) -> float:
        return sum(gpu.cache for gpu in self.gpus)

    @property
    def tightest(self) -> GpuMemory:
        return min(self.gpus, key=lambda gpu: gpu.tokens)

    @property
    def fits(self) -> bool:
        """Whether one sequence of the wanted length can run."""
        return all(gpu.cache > 0 for gpu in self.gpus) and self.cache_tokens >= self.sequence_tokens

    @property
    def cache_tokens(self) -> int:
        return self.tightest.tokens

    @property
    def sequences(self) -> int:
        """At full length, all at once."""
        return int(self.cache_tokens // self.sequence_tokens)


def divide(target: PlannedModel, draft: PlannedDraft | None, to: Deployment) -> MemoryPlan:
    _check_split(target, to)
    shape = target.shape
    token = _token_bytes(shape, to.gpus, to)
    draft_token = _draft_token_bytes(draft, to)
    target_bytes = (target.nominal_bytes() if to.nominal else target.weight_bytes) / to.gpus
    draft_bytes = _draft_bytes(draft, nominal=to.nominal) / to.draft_gpus
    found = []
    for rank in range(to.gpus):
        has_draft = draft is not None and rank < to.draft_gpus
        total = to.machine.nominal_bytes if to.nominal else to.machine.memory_bytes
        usable = total * to.utilization
        buffers = 0.0 if to.nominal else _buffers(target, draft if has_draft else None, to)
        draft_here = draft_bytes if has_draft else 0.0
        found.append(
            GpuMemory(
                total=total,
                usable=usable,
                weights=target_bytes,
                draft=draft_here,
                buffers=buffers,
                cache=usable - target_bytes - draft_here - buffers,
                token=token + (draft_token if has_draft else 0.0),
            )
        )
    context = min(to.context, shape.context)
    sequence = shape.cached_elements(context) / shape.cache_elements_per_token
    return MemoryPlan(tuple(found), context, sequence + PAGES_PER_SEQUENCE * PAGE_TOKENS, to.nominal)


def _check_split(target: PlannedModel, to: Deployment) -> None:
    heads = target.shape.heads
    if heads % to.gpus:
        fitting = [n for n in range(1, min(heads, _MOST_GPUS) + 1) if heads % n == 0]
        raise UsageError(
            f"{target.name} has {heads} attention heads, which do not divide over {to.gpus} GPUs; "
            f"use {', '.join(map(str, fitting))}"
        )


def _cache_share(shape: Shape, gpus: int) -> float:
    """The part of a token's cache that one GPU keeps."""
    if shape.latent is not None:
        return 1.0
    return math.ceil(shape.kv_heads / gpus) / shape.kv_heads


def _token_bytes(shape: Shape, gpus: int, to: Deployment) -> float:
    """Of a token's cache on one GPU. With 8 bits, keys and values of each head have a scale."""
    scales = _SCALE_BYTES / shape.head_dim if to.cache_element_bytes == 1 and not to.nominal else 0.0
    return _cache_share(shape, gpus) * shape.cache_elements_per_token * (to.cache_element_bytes + scales)


def _draft_token_bytes(draft: PlannedDraft | None, to: Deployment) -> float:
    if draft is None:
        return 0.0
    if draft.head is not None:  # its cache stays in 16 bits
        return draft.head.cache_elements_per_token / to.draft_gpus * max(to.cache_element_bytes, 2.0)
    if draft.model is None:
        return 0.0
    return _token_bytes(draft.model.shape, to.draft_gpus, to)


def _draft_bytes(draft: PlannedDraft | None, *, nominal: bool) -> float:
    if draft is None:
        return 0.0
    return draft.model.nominal_bytes() if nominal and draft.model is not None else draft.weight_bytes


def _buffers(target: PlannedModel, draft: PlannedDraft | None, to: Deployment) -> float:
    """Verify and graph buffers: activations of the largest step, logits, and what the driver takes."""
    total = _workspace(target.shape, to)
    if draft is not None and draft.model is not None:
        total += _workspace(draft.model.shape, to)
    return total + to.machine.kind.reserved_bytes


def _workspace(shape: Shape, to: Deployment) -> float:
    """The torch backend's `TorchModel.plan`. Rows of logits are whole on every GPU: the token is chosen there."""
    is_gpu = to.machine.is_gpu
    slots = to.sequences + min(to.sequences, _MOST_KEPT_PREFIXES)
    captured = captured_rows(slots) if is_gpu else 0
    scored = min(max(1, _SCORING_BYTES // (4 * shape.vocab_size)), to.step_tokens)
    activations = (2 if is_gpu else 1) * to.step_tokens * shape.widest * 2.0 / to.gpus
    kept = 5 * kept_rows(slots) if is_gpu else 0
    return activations + (slots + captured + scored + kept) * shape.vocab_size * 4.0


def kept_rows(sequences: int) -> int:
    """Distributions of one step's drafts: `max_kept` of the torch backend."""
    return min(_MAX_KEPT, MAX_DEPTH * sequences)


def captured_rows(sequences: int) -> int:
    return next((rows for most, rows in CAPTURED_ROWS.items() if most >= sequences), max(CAPTURED_ROWS.values()))
