"""A user's own proposer: `auto` uses it while it saves time and otherwise stops.

Time is counted, not measured: only target steps, drafts and readings of the clock take any, so no other process can
change what a test decides.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from outpace.backends.base import Capacity
from outpace.config import SamplingParams, SpeculationParams
from outpace.core import Request, StepPlan
from outpace.engine.engine import Engine
from outpace.speculation.policy.tunables import TUNABLES
from outpace.speculation.proposers.base import NoDraft, Proposer
from outpace.speculation.proposers.suffix import SuffixProposer
from outpace.speculation.session import Session
from tests import own_proposer
from tests.engine.test_engine import plainly, prompt_of, run
from tests.fakes import FakeModel, FakeRunner, fake_config, fake_loaded
from tests.own_proposer import OwnProposer

STEP = 2e-3  # seconds of a target step of any size
READING = 1e-6  # seconds between two readings of the clock: what the host does takes some time
NUM_TOKENS = 120
TIMED = (
    "outpace.engine.engine", "outpace.engine.scheduler", "outpace.decoding.verification",
    "outpace.speculation.costs.calibration", "outpace.speculation.proposers.base", "tests.own_proposer",
)  # fmt: skip


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += READING
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch) -> Clock:
    """The time of every module that takes part."""
    made = Clock()
    for module in TIMED:
        monkeypatch.setattr(f"{module}.perf_counter", made)
    monkeypatch.setattr("outpace.engine.engine.Session", partial(Session, clock=made))
    return made


class SlowRunner(FakeRunner):
    def __init__(self, clock: Clock, model: FakeModel, capacity: Capacity) -> None:
        super().__init__(model, capacity)
        self._clock = clock

    def forward(self, plan: StepPlan) -> NDArray[np.float32]:
        self._clock.sleep(STEP)
        return super().forward(plan)


class Case:
    """A prompt, the target's output for it, and an engine whose proposer drafts that output or another one."""

    def __init__(
        self, clock: Clock, *, is_right: bool, draft_seconds: float = 0.0, beside: Sequence[Proposer] = ()
    ) -> None:
        self._clock, self._is_right, self._seconds = clock, is_right, draft_seconds
        self._prompt = prompt_of(random.Random(3), 20)
        model, self._params = FakeModel(), SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
        self._answer = plainly(model, self._prompt, self._params, 0)
        proposers: list[Proposer] = [NoDraft(), OwnProposer(self._continued), *beside]
        config = fake_config(speculation="auto", depth=4, prefix_reuse=False)
        # A request cannot select it by name; in `auto` it competes with the other proposers.
        config = replace(config, methods=cast(Any, tuple(each.name for each in proposers[1:])))
        loaded = fake_loaded(model, config)
        loaded = replace(loaded, runner=SlowRunner(clock, model, loaded.runner.capacity))
        self.engine = Engine(loaded, {each.name: each for each in proposers}, config)

    def _continued(self, texts: list[list[int]], depth: int) -> list[list[int]]:
        self._clock.sleep(self._seconds)
        return [self._continue(text, depth) for text in texts]

    def _continue(self, text: list[int], depth: int) -> list[int]:
        following = [*self._prompt, *self._answer][len(text) :][:depth]
        following += [0] * (depth - len(following))
        return following if self._is_right else [(token + 1) % 256 for token in following]

    def answer(self, **wishes: Any) -> Request:
        params = replace(self._params, speculation=SpeculationParams(**wishes))
        request = self.engine.submit(self._prompt, params, seed=0)
        assert run(self.engine, [request]) == [self._answer], "whatever is drafted, the target's tokens are emitted"
        return request


def test_its_costs_are_measured_like_any_proposers(clock):
    case = Case(clock, is_right=True, draft_seconds=STEP)
    case.engine.calibrate()
    assert case.engine.costs is not None and case.engine.costs.drafts.keys() - {"none"} == {"own"}
    costs = case.engine.costs.drafts["own"]
    assert costs.one_pass and costs.seconds(1, 4, 20.0) >= STEP


def test_it_is_used_where_its_drafts_are_right_and_cheap(clock):
    request = Case(clock, is_right=True).answer()
    assert request.spec.proposers == {"own"}
    assert request.spec.num_accepted > NUM_TOKENS / 2
    assert request.spec.steps < NUM_TOKENS / 2


def test_it_is_left_where_its_drafts_are_wrong(clock):
    case = Case(clock, is_right=False, draft_seconds=STEP / 10)  # drafts that cost nothing could not lose
    request = case.answer()
    assert request.spec.num_accepted == 0
    lost = (request.spec.decode_seconds - request.spec.plain_seconds) / STEP
    assert lost <= TUNABLES.engine_grant + 0.02 * NUM_TOKENS, "it is tried, and given up"
    assert case.answer().spec.num_drafts < NUM_TOKENS / 8, "and hardly tried again for the next"


def test_it_is_left_where_its_drafts_are_dear(clock):
    """Four correct tokens save four steps, but drafting takes ten."""
    request = Case(clock, is_right=True, draft_seconds=10 * STEP).answer()
    assert request.spec.num_drafts < NUM_TOKENS / 20


def test_it_stands_beside_others(clock):
    request = Case(clock, is_right=True, beside=[SuffixProposer(0)]).answer()
    assert "own" in request.spec.proposers and request.spec.num_accepted > NUM_TOKENS / 2


def test_a_request_that_wants_plain_decoding_gets_it(clock):
    assert Case(clock, is_right=True).answer(mode="off").spec.num_drafts == 0


def test_the_proposer_that_contributing_shows_is_this_one():
    shown = Path(__file__).parents[3].joinpath("CONTRIBUTING.md").read_text(encoding="utf-8")
    blocks = [block.strip() for block in re.findall(r"^```python\n(.*?)^```", shown, re.MULTILINE | re.DOTALL)]
    assert own_proposer.__file__ is not None
    code = Path(own_proposer.__file__).read_text(encoding="utf-8").split('"""', 2)[2].strip()
    assert code in blocks, "CONTRIBUTING.md has to show what stands in tests/own_proposer.py after its docstring"


@pytest.mark.parametrize("draft_seconds", [0.0, STEP])
def test_what_its_drafts_take_is_learned_from_every_one(clock, draft_seconds):
    """Drafting takes half the time measured at the start: costs follow."""
    case = Case(clock, is_right=True, draft_seconds=draft_seconds + STEP / 2)
    case.engine.calibrate()
    assert case.engine.costs is not None
    before = case.engine.costs.drafts["own"].seconds(1, 4, 20.0)
    case._seconds = draft_seconds
    case.answer()
    assert case.engine.costs.drafts["own"].seconds(1, 4, 20.0) < 0.9 * before
