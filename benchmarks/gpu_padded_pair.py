"""Loads SmolLM2 padded to an 8B as the target and rounded SmolLM2 padded to a 1B as the draft, and checks both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.gpu_assisted import as_transformers, generate
from benchmarks.gpu_cells import Pair
from benchmarks.gpu_models import Letters, shape_config
from benchmarks.gpu_padding import padded
from benchmarks.gpu_rounding import NUM_ANSWER_TOKENS, Rounding, agreement, rounded
from outpace.backends.base import Capacity, DraftTask, LoadedModel
from outpace.backends.torch.kernels import ops_for
from outpace.backends.torch.model.loader import load_weights, open_checkpoint
from outpace.backends.torch.model.model import Model
from outpace.backends.torch.model.weights import Weights
from outpace.backends.torch.runner import TorchRunner
from outpace.config import EngineConfig, SamplingParams, SpeculationParams
from outpace.core import Row, StepPlan
from outpace.engine.engine import Engine
from outpace.models.architecture import Architecture
from outpace.speculation.proposers.base import NoDraft

HELD_OUT = 16  # one text in 16 is not used for learning, but for measuring agreement


@dataclass(slots=True)
class PaddedPair:
    config: Architecture
    small: Weights  # in the dtype of the padded weights
    exact: Weights  # in float32
    pair: Pair
    agreement: dict[str, float]  # share of equal next tokens, rounded and exact model, on held-out texts

    @classmethod
    def build(
        cls,
        path: Path,
        rounding: Rounding,
        learn_from: Sequence[Sequence[int]],
        max_sequences: int,
        context: int,
        max_step_tokens: int,
    ) -> PaddedPair:
        """`learn_from`: prompts; the draft's rounding is learned from the target's answers to them."""
        device = torch.device("cuda")
        checkpoint = open_checkpoint(path)
        exact = load_weights(checkpoint, torch.float32, device)
        shapes = shape_config("8B"), shape_config("1B-deep")
        room = Capacity(max_sequences + 1, max_sequences * context * 3 // 4 + context, context, max_step_tokens)
        return cls.start(checkpoint.config, exact, torch.bfloat16, shapes, rounding, room, learn_from)

    @classmethod
    def start(
        cls,
        config: Architecture,
        exact: Weights,
        dtype: torch.dtype,
        shapes: tuple[Architecture, Architecture],
        rounding: Rounding,
        room: Capacity,
        learn_from: Sequence[Sequence[int]] = (),
    ) -> PaddedPair:
        device = exact.embedding.device
        small = converted(exact, dtype)
        texts = own_texts(config, small, learn_from) if rounding.steps else ()

        def started(name: str, weights: Weights, shape: Architecture) -> LoadedModel:
            larger, moved = padded(config, weights, shape)
            runner = TorchRunner(Model(larger, moved, ops_for(device), room.max_context), room)
            return LoadedModel(runner, Letters(shape.vocab_size), name, moved.num_parameters, moved.num_bytes)

        target = started("SmolLM2 as a large model", small, shapes[0])
        held_out, learned = texts[::HELD_OUT], [text for i, text in enumerate(texts) if i % HELD_OUT]
        few = rounded(config, small, rounding, learned)
        agreed = {}
        if texts:
            nearest = rounded(config, small, replace(rounding, steps=0))
            agreed = {
                name: agreement(config, small, each, held_out)
                for name, each in (("nearest", nearest), ("learned", few))
            }
        draft = started(f"SmolLM2 in {rounding.bits} bits as a small model", few, shapes[1])
        return cls(config, small, exact, Pair(target, draft), agreed)

    @property
    def sizes(self) -> dict[str, int]:
        """Number of parameters by model."""
        return {model.description: model.num_parameters for model in (self.pair.target, self.pair.draft)}

    def compare(self, prompts: Sequence[Sequence[int]]) -> dict[str, float]:
        """Errors of the logits of the padded and the small model, in the same dtype, against float32."""
        errors: dict[str, list[float]] = {"small": [], "padded": []}
        agreed = {"small": 0, "padded": 0}
        num_tokens = 0
        longest = max(map(len, prompts))
        room = Capacity(1, longest, longest, longest)
        in_float32, in_dtype = (
            TorchRunner(Model(self.config, weights, ops_for(weights.embedding.device), longest), room)
            for weights in (self.exact, self.small)
        )
        padded_runner = self.pair.runners[0]
        for tokens in prompts:
            expected = _logits(in_float32, tokens)
            for name, runner in (("small", in_dtype), ("padded", padded_runner)):
                found = _logits(runner, tokens)[:, : expected.shape[1]]
                errors[name].append(float(np.linalg.norm(found - expected) / np.linalg.norm(expected)))
                agreed[name] += int((found.argmax(1) == expected.argmax(1)).sum())
            num_tokens += len(tokens)
        return {
            "tokens": num_tokens,
            **{f"{name}_error": max(each) for name, each in errors.items()},
            **{f"{name}_argmax": count / num_tokens for name, count in agreed.items()},
        }

    def drafts_like_steps(self, engine: Engine, prompts: Sequence[Sequence[int]], depth: int) -> float:
        """Share of drafted tokens that equal those of single steps; a draft is several steps in one launch."""
        draft = self.pair.runners[1]
        same = 0
        for prompt in prompts:
            request = engine.submit(prompt, SamplingParams(temperature=0.0, speculation=SpeculationParams(mode="off")))
            engine.abort(request)
            draft.forward(StepPlan([Row(0, 0, prompt[:-1], 0)]))
            [drafted] = draft.draft([DraftTask(Row(0, len(prompt) - 1, prompt[-1:], 1), request, depth)])
            draft.free(0)
            draft.forward(StepPlan([Row(0, 0, prompt[:-1], 0)]))
            for i, token in enumerate([prompt[-1], *drafted[:-1]]):
                [logits] = draft.forward(StepPlan([Row(0, len(prompt) - 1 + i, [token], 1)]))
                same += int(logits.argmax()) == drafted[i]
            draft.free(0)
        return same / (depth * len(prompts))

    def gap(self, text: Sequence[int], a: int, b: int) -> float:
        """Difference of the padded model's logits of tokens `a` and `b` after `text`."""
        logits = _logits(self.pair.runners[0], text, 1)[0]
        return abs(float(logits[a]) - float(logits[b]))

    def transformers_speed(
        self, prompts: Sequence[Sequence[int]], num_tokens: int, temperature: float
    ) -> dict[str, Any]:
        models = [as_transformers(runner.model.config, runner.model.weights) for runner in self.pair.runners]
        for assistant in (None, models[1]):  # warm-up: libraries choose kernels and allocate workspaces
            generate(models[0], prompts[0], num_tokens, temperature, assistant)
        seconds, answers = [0.0, 0.0], list[list[list[int]]]([[], []])
        for prompt in prompts:
            for i, assistant in enumerate((None, models[1])):
                text, taken = generate(models[0], prompt, num_tokens, temperature, assistant)
                seconds[i] += taken
                answers[i].append(text)
        plain, assisted = (sum(map(len, texts)) / taken for texts, taken in zip(answers, seconds, strict=True))
        return {
            "temperature": temperature, "prompts": len(prompts), "new_tokens": num_tokens,
            "plain_tokens_per_s": plain, "assisted_tokens_per_s": assisted, "speedup": assisted / plain,
            "same_texts": sum(a == b for a, b in zip(*answers, strict=True)),
        }  # fmt: skip


def own_texts(config: Architecture, weights: Weights, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Prompts with the model's answers, alternately at temperature 0 and 1."""
    longest = max(map(len, prompts)) + NUM_ANSWER_TOKENS + 1
    at_once = min(len(prompts), 128)
    settings = EngineConfig(
        speculation="off", max_sequences=at_once, max_context=longest, max_step_tokens=4096,
        cache_tokens=at_once * longest, prefix_reuse=False,
    ).resolve(model_context=longest, model_path="small", draft_path=None, backend="torch")  # fmt: skip
    room = Capacity(at_once + 1, settings.cache_tokens, longest, settings.max_step_tokens)
    runner = TorchRunner(Model(config, weights, ops_for(weights.embedding.device), longest), room)
    loaded = LoadedModel(runner, Letters(config.vocab_size), "small", 0, 0)
    engine = Engine(loaded, {"none": NoDraft()}, settings)
    requests = [
        engine.submit(prompt, SamplingParams(max_tokens=NUM_ANSWER_TOKENS, temperature=i % 2, ignore_eos=True, seed=i))
        for i, prompt in enumerate(prompts)
    ]
    while engine.has_requests:
        engine.step()
    runner.close()
    return [request.tokens for request in requests]


def converted(weights: Weights, dtype: torch.dtype) -> Weights:
    """The same weights in another dtype."""

    def each(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, torch.Tensor) else value

    layers = [type(layer)(*(each(getattr(layer, name)) for name in layer.__slots__)) for layer in weights.layers]
    embedding = each(weights.embedding)
    head = embedding if weights.head is weights.embedding else each(weights.head)
    return Weights(embedding, head, each(weights.final_norm), layers)


def _logits(runner: TorchRunner, tokens: Sequence[int], count: int | None = None) -> NDArray[np.float32]:
    try:
        return runner.forward(StepPlan([Row(0, 0, list(tokens), count or len(tokens))])).copy()
    finally:
        runner.free(0)
