"""Loads SmolLM2 and its draft head padded to an 8B and the head of an 8B, and compares both with the small ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.gpu_cells import Pair
from benchmarks.gpu_models import Letters, shape_config
from benchmarks.gpu_padding import padded, padded_head
from outpace.backends.base import Capacity, HeadTask, LoadedModel
from outpace.backends.torch.device import choose_device, choose_dtype
from outpace.backends.torch.kernels import ops_for
from outpace.backends.torch.model.head_loader import open_head
from outpace.backends.torch.model.head_weights import HeadWeights
from outpace.backends.torch.model.loader import load_weights, open_checkpoint
from outpace.backends.torch.model.model import Model
from outpace.backends.torch.model.weights import Weights
from outpace.backends.torch.runner import TorchRunner
from outpace.backends.torch.self_draft import num_matrix_bytes, quantised_copy
from outpace.backends.torch.storage.rounding import head_format, quantise
from outpace.config import DeviceName, SamplingParams
from outpace.core import MeasuredAcceptance, Request, Row, StepPlan
from outpace.engine.engine import Engine
from outpace.models.architecture import Architecture
from outpace.models.head_file import HeadConfig

SHAPE = "8B"
DRAFT_VOCABULARY = 32_000  # of EAGLE-3's head for Llama 3 8B


@dataclass(slots=True)
class Small:
    """The model and its head as they are in their files, in float32."""

    config: Architecture
    weights: Weights
    head: HeadConfig
    head_weights: HeadWeights
    measured: MeasuredAcceptance | None

    @classmethod
    def load(cls, model: Path, head: Path, device: torch.device) -> Small:
        checkpoint = open_checkpoint(model)
        config = checkpoint.config
        opened = open_head(head, model, config, checkpoint.name)
        weights = load_weights(checkpoint, torch.float32, device)
        return cls(config, weights, opened.config, opened.load(torch.float32, device), opened.measured)

    def runner(self, dtype: torch.dtype, room: Capacity) -> TorchRunner:
        return _runner(
            self.config,
            converted(self.weights, dtype),
            self.head,
            converted(self.head_weights, dtype),
            self.measured,
            room,
        )


@dataclass(slots=True)
class PaddedModel:
    small: Small
    dtype: torch.dtype
    pair: Pair
    head: HeadConfig  # the padded one
    head_weights: HeadWeights
    sizes: dict[str, int]  # number of parameters

    @classmethod
    def build(
        cls, model: Path, head: Path, device: DeviceName, max_sequences: int, context: int, max_step_tokens: int
    ) -> PaddedModel:
        on = choose_device(device)
        room = Capacity(max_sequences + 1, max_sequences * context * 3 // 4 + context, context, max_step_tokens)
        small = Small.load(model, head, on)
        return cls.start(small, choose_dtype("auto", on), shape_config(SHAPE), DRAFT_VOCABULARY, room)

    @classmethod
    def start(
        cls,
        small: Small,
        dtype: torch.dtype,
        shape: Architecture,
        draft_vocabulary: int,
        room: Capacity,
        quantization: str | None = None,
    ) -> PaddedModel:
        """`quantization`: round the padded model, as the setting of that name does; its head stays dense."""
        config, weights = padded(small.config, converted(small.weights, dtype), shape)
        if quantization is not None:
            output = quantise(weights.head, head_format(quantization))
            weights = replace(quantised_copy(weights, quantization), head=output)
            if output.device.type == "cuda":
                torch.cuda.empty_cache()  # others share the GPU
        head, head_weights = padded_head(small.head, small.head_weights, small.config, shape, draft_vocabulary, dtype)
        runner = _runner(config, weights, head, head_weights, small.measured, room)
        target = LoadedModel(
            runner, Letters(shape.vocab_size), "SmolLM2 as a large model", weights.num_parameters, weights.num_bytes
        )
        matrices = head_weights.num_bytes - head_weights.ids.nbytes
        sizes = {"target": weights.num_parameters, "head": matrices // dtype.itemsize}
        return cls(small, dtype, Pair(target), head, head_weights, sizes)

    def with_self_draft(self, kind: str) -> PaddedModel:
        """The same target with its own rounded copy as its draft model, as `--draft self:KIND` has it."""
        target = self.pair.target
        model, capacity = self.pair.runners[0].model, target.runner.capacity
        weights = quantised_copy(model.weights, kind)
        runner = TorchRunner(
            Model(model.config, weights, ops_for(weights.embedding.device), capacity.max_context), capacity
        )
        draft = LoadedModel(
            runner, target.tokenizer, f"self:{kind}", weights.num_parameters, num_matrix_bytes(weights.layers)
        )
        return replace(self, pair=Pair(target, draft))

    def compare(self, engine: Engine, prompts: Sequence[Sequence[int]], depth: int) -> dict[str, float]:
        """Errors of the padded and the small model, in the same dtype, against the small one in float32.

        Of logits: relative, and the share of equal best tokens. Of the head's greedy drafts: the share of equal tokens.
        """
        longest = max(map(len, prompts)) + depth
        room = Capacity(1, longest, longest, longest)
        exact, small = (self.small.runner(dtype, room) for dtype in (torch.float32, self.dtype))
        errors: dict[str, list[float]] = {"small": [], "padded": []}
        same, drafted = {"small": 0, "padded": 0}, {"small": 0, "padded": 0}
        for tokens in prompts:
            expected, draft = _logits(exact, tokens), _draft(exact, engine, tokens, depth)
            for name, runner in (("small", small), ("padded", self.pair.runners[0])):
                found = _logits(runner, tokens)[:, : expected.shape[1]]
                errors[name].append(float(np.linalg.norm(found - expected) / np.linalg.norm(expected)))
                same[name] += int((found.argmax(1) == expected.argmax(1)).sum())
                mine = _draft(runner, engine, tokens, depth)
                drafted[name] += sum(a == b for a, b in zip(mine, draft, strict=True))
        for runner in (exact, small):
            runner.close()
        num_tokens = sum(map(len, prompts))
        return {
            "tokens": num_tokens,
            "drafted": depth * len(prompts),
            **{f"{name}_error": max(each) for name, each in errors.items()},
            **{f"{name}_argmax": count / num_tokens for name, count in same.items()},
            **{f"{name}_drafts": count / (depth * len(prompts)) for name, count in drafted.items()},
        }

    def gap(self, text: Sequence[int], a: int, b: int) -> float:
        """Difference of the padded model's logits of tokens `a` and `b` after `text`."""
        logits = _logits(self.pair.runners[0], text, 1)[0]
        return abs(float(logits[a]) - float(logits[b]))


def converted(weights: Any, dtype: torch.dtype) -> Any:
    """The same weights, of a model or a head, in another dtype; what is tied stays tied."""
    done: dict[int, torch.Tensor] = {}

    def each(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return done.setdefault(id(value), value.to(dtype) if value.is_floating_point() else value)
        if isinstance(value, list):
            return [each(part) for part in value]
        return (
            value if value is None else replace(value, **{f.name: each(getattr(value, f.name)) for f in fields(value)})
        )

    return each(weights)


def _runner(
    config: Architecture,
    weights: Weights,
    head: HeadConfig,
    head_weights: HeadWeights,
    measured: MeasuredAcceptance | None,
    room: Capacity,
) -> TorchRunner:
    runner = TorchRunner(Model(config, weights, ops_for(weights.embedding.device), room.max_context), room)
    runner.attach(head, head_weights, measured)
    return runner


def _logits(runner: TorchRunner, tokens: Sequence[int], count: int | None = None) -> NDArray[np.float32]:
    try:
        return runner.forward(StepPlan([Row(0, 0, list(tokens), count or len(tokens))])).copy()
    finally:
        runner.free(0)


def _draft(runner: TorchRunner, engine: Engine, tokens: Sequence[int], depth: int) -> list[int]:
    """The head's greedy draft after a text. The engine makes the request and does not run it."""
    request: Request = engine.submit(tokens, SamplingParams(temperature=0.0))
    engine.abort(request)
    request.seq, request.num_computed = 0, len(tokens) - 1
    head = runner.capabilities.head
    assert head is not None
    try:
        runner.forward(StepPlan([Row(0, 0, list(tokens[:-1]), 0)]))
        [drafted] = head.draft([HeadTask(request, depth)])
        return list(drafted.tokens)
    finally:
        runner.free(0)
