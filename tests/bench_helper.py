"""Jobs, targets and a clock for benchmark tests without weights and without waiting."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from outpace.bench.targets import EngineTarget
from outpace.bench.trials import Job
from outpace.config import SamplingParams
from outpace.engine.engine import Engine
from outpace.llm import LLM
from tests.fakes import ByteTokenizer, fake_engine


def make(count: int, temperature: float = 0.0, max_tokens: int = 24) -> list[Job]:
    params = [
        SamplingParams(temperature=temperature, seed=i, max_tokens=max_tokens, ignore_eos=True) for i in range(count)
    ]
    return [Job(i, "made", [97 + i % 6, 98, 99, 97 + i % 5] * 6, each) for i, each in enumerate(params)]


def engine_target(**options: object) -> EngineTarget:
    engine = fake_engine(**options)  # type: ignore[arg-type]
    llm = SimpleNamespace(
        engine=engine,
        tokenizer=ByteTokenizer(),
        description="fake",
        config=engine._config,
        encode_chat=lambda messages: list(messages[-1]["content"].encode())[:64],
    )
    return EngineTarget(cast(LLM, llm))


class Clock:
    """A clock that advances only by a given time per engine step, and while sleeping."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds_per_step: float = 0.1) -> None:
        self.now = 0.0
        self.stalls: dict[int, float] = {}  # step number -> seconds it takes instead
        self._steps = 0
        for module in ("outpace.bench.engine_load", "outpace.engine.engine"):
            monkeypatch.setattr(f"{module}.perf_counter", lambda: self.now)
        monkeypatch.setattr("outpace.bench.engine_load.sleep", self._pass)
        step = Engine.step

        def timed_step(engine: Engine) -> object:
            self._steps += 1
            self._pass(self.stalls.get(self._steps, seconds_per_step))
            return step(engine)

        monkeypatch.setattr(Engine, "step", timed_step)

    def _pass(self, seconds: float) -> None:
        self.now += seconds
