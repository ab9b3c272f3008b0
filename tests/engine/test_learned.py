"""A new engine begins with what another has learned."""

from __future__ import annotations

import pickle
from dataclasses import replace

from outpace.config import SamplingParams, SpeculationParams
from outpace.engine.engine import Engine
from outpace.engine.learned import learned_by, setting_of, take
from outpace.speculation.costs.curves import Costs, StepCosts
from outpace.speculation.costs.file import CostFile
from outpace.speculation.policy.acceptance import temperature_class
from tests.fakes import fake_engine


def run(engine: Engine, method: str) -> None:
    wanted = SpeculationParams(mode="on", method=method)  # type: ignore[arg-type]
    engine.submit([5, 6, 7], SamplingParams(max_tokens=60, temperature=0.0, speculation=wanted, ignore_eos=True))
    while engine.has_requests:
        engine.step()


def test_acceptance_is_taken_over_and_then_learned_apart():
    old, new = fake_engine(), fake_engine()
    run(old, "draft")
    greedy = temperature_class(0.0)
    rate = old.policy.acceptances["draft"].rate(greedy)
    assert new.policy.acceptances["draft"].rate(greedy) != rate
    assert setting_of(old) == setting_of(new)
    take(new, pickle.loads(pickle.dumps(learned_by(old))))  # as it travels between processes
    assert new.policy.acceptances["draft"].rate(greedy) == rate
    run(old, "draft")
    assert new.policy.acceptances["draft"].rate(greedy) == rate


def test_a_proposer_that_the_new_engine_lacks_is_left_out():
    old, new = fake_engine(), fake_engine()
    learned = learned_by(old)
    take(new, replace(learned, acceptances={**learned.acceptances, "other": learned.acceptances["draft"]}))
    assert "other" not in new.policy.acceptances


def test_costs_that_cannot_be_are_not_taken_over(tmp_path):
    old, new = fake_engine(), fake_engine()
    for engine in (old, new):
        engine.cost_file = CostFile(tmp_path / "costs.json", {"machine": "this"})
    costs = Costs(StepCosts({1: 0.01}))
    old.policy.use_costs(costs)
    take(new, learned_by(old))
    assert new.cost_file is not None and new.cost_file.load() is not None
    (tmp_path / "costs.json").unlink()
    damaged = {**costs.as_dict(), "schedule_seconds": -1.0}
    take(new, replace(learned_by(old), costs=damaged))
    assert new.cost_file.load() is None, "they are measured anew"
