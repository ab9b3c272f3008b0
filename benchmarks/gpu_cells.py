"""Runs one cell of the GPU experiment: a speculation setting, a number of concurrent requests, a temperature.

All requests are prefilled and then decode together until they have emitted a given number of tokens on average. The
time of decode steps counts, with all work of the engine and the policy. The prefill of a draft model or a head counts
too, also in steps where the target still prefills. The target's prefill does not count, nor do steps that captured a
graph or compiled a kernel, because a server does that once.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise, product
from typing import Any, cast

from outpace.backends.base import LoadedModel
from outpace.backends.torch.execution.graphs import PACKED_ROW_TOKENS, PACKED_TOKENS
from outpace.backends.torch.runner import TorchRunner
from outpace.config import EngineConfig, Method, SamplingParams, SpeculationParams
from outpace.core import Request, Row, StepPlan
from outpace.engine.engine import Engine
from outpace.speculation.costs.curves import Costs
from outpace.speculation.proposers.base import NoDraft, Proposer
from outpace.speculation.proposers.draft_model import DraftModelProposer
from outpace.speculation.proposers.head import HeadProposer
from outpace.speculation.proposers.ngram import NgramProposer
from outpace.speculation.proposers.suffix import SuffixProposer
from outpace.speculation.proposers.tree import TreeProposer

# max_tokens as a multiple of the mean: a run ends when its first request reaches max_tokens.
MAX_TOKENS_FACTOR = 3


@dataclass(frozen=True, slots=True)
class Pair:
    """A loaded target and what drafts for it: another loaded model, or without one its own head, chains and trees."""

    target: LoadedModel
    draft: LoadedModel | None = None

    @property
    def runners(self) -> list[TorchRunner]:
        return [cast(TorchRunner, model.runner) for model in (self.target, self.draft) if model is not None]

    @property
    def num_prepared(self) -> int:
        return sum(runner.num_prepared() for runner in self.runners)

    def engine(self, concurrency: int, costs: Costs | None) -> Engine:
        """A new engine with the same models. Its policy knows only the costs; None: they are measured now."""
        room = self.target.runner.capacity
        config = EngineConfig(
            max_sequences=concurrency, max_context=room.max_context, max_step_tokens=room.max_step_tokens,
            cache_tokens=room.cache_tokens, prefix_reuse=False,
        ).resolve(
            model_context=room.max_context, model_path=self.target.description,
            draft_path="head" if self.draft is None else self.draft.description, is_head=self.draft is None,
            drafts_trees=self.draft is None, backend="torch",
        )  # fmt: skip
        proposers: list[Proposer] = [
            NoDraft(),
            NgramProposer(config.ngram_min, config.ngram_max),
            SuffixProposer(config.suffix_store_tokens),
            *self._drafting(),
        ]
        engine = Engine(self.target, {each.name: each for each in proposers}, config, draft=self.draft)
        if costs is None:
            engine.calibrate()
        else:
            engine.policy.use_costs(Costs.from_dict(costs.as_dict()))
        return engine

    def _drafting(self) -> list[Proposer]:
        runner = self.target.runner
        if self.draft is not None:
            return [DraftModelProposer(self.draft, runner.vocab_size)]
        head = runner.capabilities.head
        assert head is not None, "the target has neither a draft model nor a head"
        return [HeadProposer(runner, head), TreeProposer(runner, head)]


def speculation_params(setting: str) -> SpeculationParams:
    """`setting`: 'plain', 'auto', or a proposer and its fixed depth, as in 'head:4' or 'tree:4'."""
    if setting in ("plain", "auto"):
        return SpeculationParams(mode="off" if setting == "plain" else "auto")
    method, _, depth = setting.partition(":")
    return SpeculationParams(mode="on", method=cast(Method, method), max_depth=int(depth))


@dataclass(slots=True)
class Measured:
    """The result of one run of a cell."""

    seconds: float = 0.0
    num_tokens: int = 0
    num_steps: int = 0
    num_rows: int = 0  # summed over all steps
    num_preparing: int = 0  # steps that captured a graph or compiled a kernel
    parts: dict[str, float] | None = None  # seconds by part of the step
    drafted_per_position: list[int] | None = None
    accepted_per_position: list[int] | None = None
    methods: dict[str, int] | None = None  # drafts by proposer
    texts: list[list[int]] | None = None
    trace: list[dict[str, Any]] = field(default_factory=list)  # one entry per step, with keep_trace

    def as_dict(self) -> dict[str, Any]:
        return {
            "tokens_per_s": self.num_tokens / self.seconds if self.seconds else None,
            "ms_per_step": 1e3 * self.seconds / self.num_steps if self.num_steps else None,
            "tokens_per_step_and_request": self.num_tokens / self.num_rows if self.num_rows else None,
            "tokens": self.num_tokens, "steps": self.num_steps, "preparing_steps": self.num_preparing,
            "ms_per_step_in": {name: 1e3 * s / max(self.num_steps, 1) for name, s in (self.parts or {}).items()},
            "drafts_by_method": self.methods, "drafted_per_position": self.drafted_per_position,
            "accepted_per_position": self.accepted_per_position,
        }  # fmt: skip


_PARTS = ("schedule", "policy", "lookup", "draft", "forward", "verify")


def run(
    pair: Pair,
    engine: Engine,
    setting: str,
    prompts: Sequence[Sequence[int]],
    concurrency: int,
    temperature: float,
    num_tokens: int,
    *,
    keep_trace: bool = False,
) -> Measured:
    """Run `concurrency` prompts at a time, until each has emitted `num_tokens` on average.

    Above temperature 0 requests have no seed, as most requests have none: their drafts are verified by rejection.
    """
    found = Measured(parts=dict.fromkeys(_PARTS, 0.0), drafted_per_position=[], accepted_per_position=[], methods={})
    assert found.parts is not None
    assert found.methods is not None
    engine.policy.keep_trace(int(keep_trace))
    engine.forget()  # otherwise proposers would copy the answers of earlier runs of the same prompts
    all_requests: list[Request] = []
    for begin in range(0, len(prompts), concurrency):
        requests = [
            engine.submit(
                prompt,
                SamplingParams(
                    max_tokens=MAX_TOKENS_FACTOR * num_tokens, temperature=temperature, ignore_eos=True,
                    speculation=speculation_params(setting),
                ),
                seed=begin + i,
            )
            for i, prompt in enumerate(prompts[begin : begin + concurrency])
        ]  # fmt: skip
        all_requests += requests
        num_emitted = 0
        while num_emitted < num_tokens * len(requests) and not any(request.finish_reason for request in requests):
            num_prepared = pair.num_prepared
            started = time.perf_counter()
            engine.step()
            taken = time.perf_counter() - started
            stats = engine.stats
            had_one_time_work = pair.num_prepared > num_prepared
            found.num_preparing += had_one_time_work
            if keep_trace:
                found.trace.append(_traced(engine, taken, had_one_time_work=had_one_time_work))
            if stats.num_prefill_tokens:
                found.seconds += 0.0 if had_one_time_work else stats.draft_seconds
                continue
            num_emitted += stats.num_emitted
            if had_one_time_work:
                continue
            found.seconds += taken
            found.num_tokens += stats.num_emitted
            found.num_steps += 1
            found.num_rows += stats.num_decode_rows
            for name in _PARTS:
                found.parts[name] += getattr(stats, f"{name}_seconds")
            for name, counts in stats.drafts_by_method.items():
                found.methods[name] = found.methods.get(name, 0) + counts.num_drafts
        for request in requests:
            engine.abort(request)
    found.texts = [request.tokens[len(request.prompt) :] for request in all_requests]
    found.drafted_per_position = _elementwise_sum([request.spec.drafted_per_position for request in all_requests])
    found.accepted_per_position = _elementwise_sum([request.spec.accepted_per_position for request in all_requests])
    return found


def _traced(engine: Engine, seconds: float, *, had_one_time_work: bool) -> dict[str, Any]:
    """The last step: its time by part and, if the policy decided, the reason for the decision."""
    stats, why = engine.stats, engine.policy.trace
    return {
        "ms": 1e3 * seconds, "prepared": had_one_time_work, "prefill": stats.num_prefill_tokens,
        "rows": stats.num_decode_rows, "drafted": stats.num_drafted, "accepted": stats.num_accepted,
        "emitted": stats.num_emitted, "ms_in": {name: 1e3 * getattr(stats, f"{name}_seconds") for name in _PARTS},
        "balance": engine.budget.balance, "policy": why.popleft().as_dict() if why else None,
    }  # fmt: skip


def _elementwise_sum(lists: Sequence[Sequence[int]]) -> list[int]:
    longest = max(map(len, lists), default=0)
    return [sum(each[i] for each in lists if i < len(each)) for i in range(longest)]


def capture_packed(runner: TorchRunner, num_rows: int, *, greedy: bool) -> None:
    """Capture the graphs of steps whose rows have different depths, as `auto` makes them, before measuring."""
    for num_tokens, (shorter, longest) in product(PACKED_TOKENS, pairwise((1, *PACKED_ROW_TOKENS))):
        lengths = [shorter + 1] + [1] * (num_rows - 1)
        for i in range(num_rows):
            lengths[i] += max(0, min(longest - lengths[i], num_tokens - sum(lengths)))
        if sum(lengths) == num_tokens:
            plan = StepPlan([Row(seq, 0, [0] * length, length) for seq, length in enumerate(lengths)])
            runner.reserve_rows(plan.rows)
            launched = runner.launch(plan)
            launched.draws("greedy" if greedy else "sampled")
            launched[:1]  # waits for the device
            for row in plan.rows:
                runner.free(row.seq)


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Index of the first different token, up to the shorter length; None if there is none."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
