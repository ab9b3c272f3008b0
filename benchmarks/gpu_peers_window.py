"""One way to measure every engine: the time and the tokens of the steps in which all requests decode.

Requests are submitted together. The measurement begins when each has its first token, so prefill is not in it, and
ends when they have emitted the asked number of tokens on average, or when one has reached its limit.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

MAX_TOKENS_FACTOR = 3  # a request's limit, as a multiple of the mean
FIRST_TOKENS = 8  # of every request, which are kept: engines with the same model say the same


@dataclass(frozen=True, slots=True)
class Step:
    emitted: Mapping[int, Sequence[int]]  # new tokens, by request
    is_one_time: bool = False  # it captured a graph or compiled a kernel, as no later step will


class Driven(Protocol):
    """An engine that is driven step by step."""

    def submit(self, prompts: Sequence[Sequence[int]], temperature: float, max_tokens: int) -> None:
        """Start requests, numbered from 0. None of them ends before `max_tokens`."""
        ...

    def step(self) -> Step: ...

    def abort(self) -> None:
        """End all requests."""
        ...


@dataclass(slots=True)
class Window:
    seconds: float = 0.0
    num_tokens: int = 0
    num_steps: int = 0
    num_one_time: int = 0  # steps left out, with their tokens
    lengths: Counter[int] = field(default_factory=Counter)  # how often a step gave a request that many tokens
    first_tokens: list[list[int]] = field(default_factory=list)  # of every request

    def add(self, other: Window) -> None:
        self.seconds += other.seconds
        self.num_tokens += other.num_tokens
        self.num_steps += other.num_steps
        self.num_one_time += other.num_one_time
        self.lengths.update(other.lengths)
        self.first_tokens += other.first_tokens

    def as_dict(self) -> dict[str, Any]:
        rows = sum(self.lengths.values())
        longest = max(self.lengths, default=0)
        return {
            "tokens_per_s": self.num_tokens / self.seconds, "ms_per_step": 1e3 * self.seconds / self.num_steps,
            "tokens_per_step_and_request": self.num_tokens / rows, "tokens": self.num_tokens, "steps": self.num_steps,
            "one_time_steps": self.num_one_time, "seconds": self.seconds, "first_tokens": self.first_tokens,
            # How often the first, second, ... token of a draft was accepted, steps without a draft counted too.
            "accepted_of_steps": [
                sum(count for length, count in self.lengths.items() if length > i) / rows for i in range(1, longest)
            ],
        }  # fmt: skip


def measure(
    engine: Driven, prompts: Sequence[Sequence[int]], concurrency: int, temperature: float, num_tokens: int
) -> Window:
    """Run `concurrency` prompts at a time until they have `num_tokens` on average."""
    total = Window()
    for begin in range(0, len(prompts), concurrency):
        total.add(_one(engine, prompts[begin : begin + concurrency], temperature, num_tokens))
    return total


def _one(engine: Driven, prompts: Sequence[Sequence[int]], temperature: float, num_tokens: int) -> Window:
    found, most = Window(), MAX_TOKENS_FACTOR * num_tokens
    texts: list[list[int]] = [[] for _ in prompts]
    engine.submit(prompts, temperature, most)
    try:
        while not all(texts):
            for request, tokens in engine.step().emitted.items():
                texts[request] += tokens
        measured = 0
        while measured < num_tokens * len(prompts) and max(map(len, texts)) < most:
            begin = time.perf_counter()
            step = engine.step()
            taken = time.perf_counter() - begin
            counts = [len(tokens) for tokens in step.emitted.values()]
            measured += sum(counts)
            for request, tokens in step.emitted.items():
                texts[request] += tokens
            if step.is_one_time:
                found.num_one_time += 1
                continue
            found.seconds += taken
            found.num_tokens += sum(counts)
            found.num_steps += bool(counts)
            found.lengths.update(counts)
    finally:
        engine.abort()
    found.first_tokens = [text[:FIRST_TOKENS] for text in texts]
    return found
