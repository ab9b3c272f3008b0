"""Costs from data sheets against measured ones, and speeds against the policy's own planner."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from benchmarks.plan_check import recorded
from outpace.bench.simulation.sharded import LLAMA_70B, communication_seconds
from outpace.core import MeasuredAcceptance
from outpace.plan import roofline
from outpace.plan.drafts import open_draft
from outpace.plan.machines import machine
from outpace.plan.models import open_model
from outpace.plan.roofline import draft_costs, extended, sampled, step_costs, target_costs
from outpace.plan.speed import ENDLESS, Answer, Drafting, known_acceptance
from outpace.speculation.costs.curves import Costs, DraftCosts, StepCosts
from outpace.speculation.policy.acceptance import Acceptance
from outpace.speculation.policy.planner import Plan, Planner
from outpace.speculation.policy.times import StepTimes
from outpace.speculation.proposers.base import NoDraft

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
FLAT = StepCosts({1: 1.0, 2: 1.0, 64: 1.0})


def drafting(draft_seconds: float = 0.1, chances=(0.8,), target: StepCosts = FLAT, **options) -> Drafting:
    return Drafting(
        Costs(target, {"draft": DraftCosts(StepCosts({1: draft_seconds}))}), known_acceptance(chances), **options
    )


def test_the_textbook_case():
    """Verifying is free, a draft pass costs c: tokens (1 - a^(k+1)) / (1 - a), in 1 + k c."""
    chance, depth, cost = 0.8, 4, 0.1
    found = drafting(cost, [chance]).fixed(1, depth, 0)
    assert found.tokens_per_step == pytest.approx((1 - chance ** (depth + 1)) / (1 - chance))
    assert found.speedup == pytest.approx(found.tokens_per_step / (1 + depth * cost))


def test_break_even_of_one_token_is_its_cost():
    assert drafting(0.3).break_even(1, 1, 0) == pytest.approx(0.3, abs=2e-3)
    assert drafting(1.2).break_even(1, 1, 0) is None


def test_reading_the_prompt_is_spread_over_the_answer():
    """For each of r requests a prompt of p tokens is read once, for n tokens that it then emits."""
    chance, depth, cost, read, p, n = 0.8, 4, 0.1, 3.0, 40, 20
    costs = Costs(FLAT, {"draft": DraftCosts(StepCosts({1: cost}), StepCosts({1: cost, 1 + p: cost + read}))})
    for rows in (1, 8):
        steady = Drafting(costs, known_acceptance([chance])).fixed(rows, depth, 0)
        found = Drafting(costs, known_acceptance([chance]), answer=Answer(p, n)).fixed(rows, depth, 0)
        steps = n / steady.tokens_per_step
        assert found.tokens_per_second == pytest.approx(rows * n / (steps * steady.seconds + rows * read))
        assert found.seconds == steady.seconds
    assert steady.speedup > 1.0 > found.speedup


def test_an_answer_that_is_too_short_for_its_prompt_gets_no_draft():
    costs = Costs(FLAT, {"draft": DraftCosts(StepCosts({1: 0.1}), StepCosts({1: 0.1, 1001: 10.1}))})
    long, short = (Drafting(costs, known_acceptance([0.8]), answer=Answer(1000, n)).best(1, 0) for n in (500, 10))
    assert long.depth > 0 and long.speedup > 1.0
    assert (short.depth, short.speedup) == (0, 1.0)
    endless, brief = (Drafting(costs, known_acceptance([0.8]), answer=Answer(1000, n)) for n in (1e9, 100))
    of_endless, of_brief = endless.break_even(1, 4, 0), brief.break_even(1, 4, 0)
    assert of_endless is not None and of_brief is not None and of_endless < of_brief


def test_lookups_read_no_prompt():
    costs = Costs(FLAT, {"ngram": DraftCosts(lookup_seconds=1e-5)})
    speeds = {
        Drafting(costs, known_acceptance([0.6]), match_share=0.5, answer=answer).fixed(1, 4, 0).speedup
        for answer in (ENDLESS, Answer(10_000, 1))
    }
    assert len(speeds) == 1


def test_the_usual_answer_follows_from_the_mean_context():
    assert Answer.within(4096, 256) == Answer(3968, 256)
    assert Answer.within(4096, 6000) == Answer(1096, 6000), "7,096 tokens in all, of at most 8,192"
    assert Answer.within(64, 256) == Answer(0, 128), "no more is emitted than a sequence has"


def test_a_draft_that_never_pays_is_left_out():
    found = drafting(0.5, [0.3]).best(1, 0)
    assert found.depth == 0 and found.speedup == 1.0


@pytest.mark.parametrize("rows", [1, 8, 64])
@pytest.mark.parametrize("chance", [0.5, 0.8, 0.95])
def test_the_depth_and_the_speed_are_the_policys_own(rows, chance):
    target, h200 = open_model("llama-3.1-8b"), machine("h200")
    costs = target_costs(target, h200, 1, 4096, 2.0)
    costs.drafts["draft"] = draft_costs(open_draft("llama-3.2-1b", target), target, h200, 1, 4096, 2.0)
    ours = Drafting(costs, known_acceptance([chance]))
    best = ours.best(rows, 2048)
    acceptance = Acceptance(is_lookup=False, measured=MeasuredAcceptance((chance,), (chance,)))
    same = Costs(costs.target, {"model": costs.drafts["draft"]}, costs.token_seconds, costs.schedule_seconds)
    planner = Planner(same, StepTimes(), {"model": acceptance}, {"model": NoDraft()})
    plans = planner.with_model(ours._situation(ours.costs, rows, 2048), "model", Plan(), math.inf)
    if not best.depth:
        assert not plans
        return
    assert plans[0].depth == best.depth
    assert plans[0].speed == pytest.approx(best.tokens_per_second, rel=1e-9)
    for plan in plans:  # and of every other depth that it weighed
        assert plan.speed == pytest.approx(ours.fixed(rows, plan.depth, 2048).tokens_per_second, rel=1e-9)


def test_more_requests_gain_less():
    target, h100 = open_model("llama-3.1-70b", "int8"), machine("h100")
    costs = target_costs(target, h100, 2, 4096, 2.0)
    costs.drafts["draft"] = draft_costs(open_draft("llama-3.1-8b", target), target, h100, 1, 4096, 2.0)
    ours = Drafting(costs, known_acceptance([0.8]))
    gains = [ours.best(rows, 2048).speedup for rows in (1, 8, 64, 256)]
    assert gains == sorted(gains, reverse=True) and gains[0] > 1.3 and gains[-1] < 1.1
    assert ours.fixed(256, 4, 2048).speedup < 1.0, "at a fixed depth it becomes a loss"


def test_lookups_gain_with_the_share_of_steps_that_match():
    costs = Costs(FLAT, {"ngram": DraftCosts(lookup_seconds=1e-5)})
    rates = [
        Drafting(costs, known_acceptance([0.6]), match_share=share).best(1, 0).speedup for share in (0.1, 0.5, 0.9)
    ]
    assert rates == sorted(rates)
    assert rates[0] == pytest.approx(1 + 0.1 * 1.5, abs=0.02)  # 0.6 + 0.6^2 + ... = 1.5


# ---- costs


def test_an_h200_by_its_data_sheet_is_near_the_measured_one():
    """Steps of the 8B: within 20% at every measured size, within 10% at one token (8B and 1B, 1,024 of context)."""
    measured = json.loads((RESULTS / "gpu_speculation_h200.json").read_text())["costs"]["target"]["points"]
    ours = step_costs(open_model("llama-3.1-8b"), machine("h200"), 1, 1024, 2.0)
    for size, seconds in measured.items():
        assert ours.seconds(1, int(size)) == pytest.approx(seconds, rel=0.2), size
    assert ours.seconds(1, 1, 1024) == pytest.approx(3.93e-3, rel=0.1)
    assert ours.seconds(128, 128, 1024) == pytest.approx(9.45e-3, rel=0.1)
    small = step_costs(open_model("llama-3.2-1b"), machine("h200"), 1, 1024, 2.0)
    assert small.seconds(1, 1, 1024) == pytest.approx(0.77e-3, rel=0.1)


def test_recorded_speedups_of_an_h200_are_predicted():
    """From recorded costs and acceptance, with up to 128 requests at once, greedy and sampled."""
    errors = [abs(row["error"]) for row in recorded(RESULTS)]
    assert len(errors) >= 40 and max(errors) < 0.1


def test_sampling_is_priced_by_vocabulary_on_a_gpu():
    model, h200 = open_model("llama-3.1-8b"), machine("h200")
    greedy = target_costs(model, h200, 1, 4096, 2.0)
    hot = sampled(greedy, model.shape, h200)
    for tokens in (1, 128):
        more = hot.target.seconds(1, tokens) - greedy.target.seconds(1, tokens)
        assert more == pytest.approx(tokens * 2e-6, rel=0.1)


def test_two_gpus_are_faster_than_one_and_slower_than_twice_as_fast():
    model = open_model("llama-3.1-70b", "int4")
    one, two, pcie = (
        step_costs(model, machine(name), gpus, 4096, 2.0).seconds(1, 1)
        for name, gpus in (("h100", 1), ("h100", 2), ("h100-pcie", 2))
    )
    assert one / 2 < two < one
    assert pcie > two


def test_a_plan_and_the_simulated_machines_have_the_same_sums(monkeypatch):
    """What the sums of a sharded 70B add to a step is what docs/scale.md has."""
    model, h200, sizes = open_model("llama-3.1-70b"), machine("h200"), [(n, t) for n in (2, 4, 8) for t in (1, 32, 160)]
    whole = [step_costs(model, h200, gpus, 4096, 2.0).seconds(1, tokens) for gpus, tokens in sizes]
    monkeypatch.setattr(roofline, "all_reduce_seconds", lambda *_, **__: 0.0)
    without = [step_costs(model, h200, gpus, 4096, 2.0).seconds(1, tokens) for gpus, tokens in sizes]
    added = [a - b for a, b in zip(whole, without, strict=True)]
    # Both are interpolated between measured sizes, of which a plan has more.
    assert added == pytest.approx([communication_seconds(LLAMA_70B, *each) for each in sizes], rel=0.05)


def test_int4_is_faster_at_one_token_and_not_at_many():
    bf16, int4 = (
        step_costs(open_model("llama-3.1-8b", fmt), machine("h200"), 1, 4096, 2.0) for fmt in ("bf16", "int4")
    )
    assert int4.seconds(1, 1) == pytest.approx(2.08e-3, rel=0.1)  # benchmarks/results/gpu_quantised_h200.txt
    assert int4.seconds(1, 1) < 0.55 * bf16.seconds(1, 1)
    assert int4.seconds(1, 4096) == pytest.approx(bf16.seconds(1, 4096), rel=0.15)


def test_experts_make_drafts_dearer():
    """Eight tokens of a mixture read most experts, where one token reads two of eight."""
    dense, mixture = (
        step_costs(open_model(name), machine("h200"), 1, 4096, 2.0) for name in ("mistral-7b", "mixtral-8x7b")
    )
    assert dense.seconds(1, 8) / dense.seconds(1, 1) < 1.1
    assert mixture.seconds(1, 8) / mixture.seconds(1, 1) > 2.0


def test_measured_costs_are_continued_with_the_modelled_slope():
    joined = extended(StepCosts({1: 1.0, 8: 2.0}, row_seconds=0.5), StepCosts({1: 5.0, 8: 6.0, 16: 10.0}))
    assert joined.points == {1: 1.0, 8: 2.0, 16: 6.0} and joined.row_seconds == 0.5
