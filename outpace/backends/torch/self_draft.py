"""A draft model made of its target: the target's own weights, rounded to fewer bits. It needs no file and no training.

Embedding, output head and norms are the target's tensors; the copy has its own matrices and its own cache, because its
keys and values differ from the target's.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from outpace.backends.base import Capacity, LoadedModel
from outpace.backends.torch.device import MemoryPlan, out_of_memory
from outpace.backends.torch.kernels import ops_for
from outpace.backends.torch.model.loader import check_device, check_experts, rounded
from outpace.backends.torch.model.model import Model
from outpace.backends.torch.model.weights import Layer, Weights, allocate
from outpace.backends.torch.runner import TorchModel, TorchRunner
from outpace.backends.torch.storage.rounding import KINDS, quantise
from outpace.errors import BackendError

_MATRICES = ("qkv", "out", "gate_up", "down")


def quantised_copy(weights: Weights, kind: str) -> Weights:
    """Layers with rounded matrices; everything else is shared."""
    layers = [
        replace(layer, **{name: quantise(getattr(layer, name), KINDS[kind]) for name in _MATRICES})  # type: ignore[arg-type]
        for layer in weights.layers
    ]
    return replace(weights, layers=layers)


def num_matrix_bytes(layers: list[Layer]) -> int:
    return sum(getattr(layer, name).nbytes for layer in layers for name in _MATRICES)


class SelfDraft:
    """Started after its target."""

    has_head = drafts_trees = False

    def __init__(self, target: TorchModel, kind: str) -> None:
        if target.options.tensor_parallel_size > 1:
            raise BackendError("draft 'self' needs the whole model on one device; name another draft")
        check_device(kind, target.dtype, target.device)
        check_experts(kind, target.config)
        self._target = target
        self._kind = kind
        self.device = target.device
        self.tokenizer = target.tokenizer
        self.train_context = target.train_context

    def plan(self, capacity: Capacity) -> MemoryPlan:
        t, meta = self._target, torch.device("meta")
        layers = allocate(t.config, tied=True, dtype=t.dtype, device=meta, formats=rounded(self._kind)).layers
        whole = t.plan(capacity)
        return replace(
            whole, name=self._described(whole.name), weights=num_matrix_bytes(layers), cache_token=t.cache_token_bytes
        )

    def start(self, capacity: Capacity, threads: int) -> LoadedModel:
        t, plan = self._target, self.plan(capacity)
        assert t.runner is not None, "the target starts first"
        plan.check(self.device, t.options.memory_utilization)
        try:
            weights = quantised_copy(t.runner.model.weights, self._kind)
            model = Model(t.config, weights, ops_for(self.device), capacity.max_context)
            runner = TorchRunner(model, capacity, t.cache_dtype)
        except torch.OutOfMemoryError as error:
            raise out_of_memory(error, plan, self.device) from error
        return LoadedModel(
            runner=runner,
            tokenizer=self.tokenizer,
            description=plan.name,
            num_parameters=weights.num_parameters,
            size_bytes=num_matrix_bytes(weights.layers),
        )

    def close(self) -> None:
        pass

    def _described(self, name: str) -> str:
        return f"{name}, rounded to {KINDS[self._kind].name}"
