"""Which plans the budgets of the engine and of its requests cover.

Each refusal differs in one thing from a case that is covered, so that only the rule in question can refuse it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from outpace.speculation.policy.planner import Plan
from outpace.speculation.policy.tunables import TUNABLES
from tests.session_driver import FLAT, SessionDriver, nothing, request_of

MOST = TUNABLES.most_balance
DEBT = 5.0
REPAID = DEBT / TUNABLES.payback_steps  # of the debt, by each step


@dataclass
class Case:
    """A plan for the first `len(gains)` requests of a batch. A plain step takes one second."""

    seconds: float = 1.5  # of the step with drafts
    gains: tuple[float, ...] = (0.6, 0.6)  # accepted draft tokens that are expected
    lower_gain: float = 0.6
    balance: float = 1.0  # of the engine's budget
    balances: tuple[float, ...] = (1.0, 1.0)  # of the requests' budgets
    wishes: dict[str, Any] = field(default_factory=dict)  # of the last request
    is_proven: bool = True
    catch_up_seconds: float = 0.0
    steps_left: float = TUNABLES.payback_steps

    def is_covered(self) -> bool:
        wishes: list[dict[str, Any]] = [{}] * (len(self.balances) - 1) + [self.wishes]
        batch = [request_of(**each) for each in wishes]
        driver = SessionDriver(FLAT, suffix=nothing, lookup_seconds=0.0)
        situation, accounts = driver.decision(batch).situation, driver.policy._accounts
        assert situation is not None and situation.plain_seconds == 1.0
        accounts.budget.balance = self.balance
        for state, balance in zip(situation.states, self.balances, strict=True):
            state.budget.balance = balance
        plan = Plan(
            depths=dict.fromkeys(range(len(self.gains)), 4),
            gains=dict(enumerate(self.gains)),
            model="draft",
            depth=4,
            seconds=self.seconds,
            catch_up_seconds=self.catch_up_seconds,
            steps_left=self.steps_left,
        )
        return accounts.covers(situation, plan, self.lower_gain, is_proven=self.is_proven)


def catching_up(seconds: float, gains: tuple[float, ...] = (9.0, 9.0), **options: Any) -> Case:
    """The time is paid back many times over, so that only the rule about trials can refuse it."""
    options = {"is_proven": False, "balances": (1.0,) * len(gains), **options}
    return Case(1.0, gains, 9.0, catch_up_seconds=seconds, steps_left=1000.0, **options)


# ---- the engine


@pytest.mark.parametrize(("lower_gain", "is_covered"), [(0.19, False), (0.21, True)])
def test_the_engine_may_lose_its_budget_at_the_lower_bound_and_no_more(lower_gain, is_covered):
    """The step takes half a plain step longer, of which 0.3 may be lost."""
    assert Case(balance=0.3, lower_gain=lower_gain).is_covered() == is_covered


@pytest.mark.parametrize(("more", "is_covered"), [(-0.01, False), (0.01, True)])
def test_in_debt_a_plan_must_gain_at_the_lower_bound_and_repay_a_part_of_the_debt(more, is_covered):
    assert Case(balance=-DEBT, lower_gain=0.5 + REPAID + more).is_covered() == is_covered


# ---- requests


@pytest.mark.parametrize(("balance", "is_covered"), [(0.49, False), (0.51, True)])
def test_a_request_without_a_draft_may_lose_its_budget_and_no_more(balance, is_covered):
    assert Case(gains=(9.0,), lower_gain=4.5, balances=(1.0, balance)).is_covered() == is_covered


@pytest.mark.parametrize(("gain", "is_covered"), [(0.19, False), (0.21, True)])
def test_a_request_assumes_what_is_expected_of_its_own_draft(gain, is_covered):
    """The step takes half a plain step longer, of which this request may lose 0.3."""
    assert Case(gains=(9.0, gain), lower_gain=4.5, balances=(1.0, 0.3)).is_covered() == is_covered


@pytest.mark.parametrize(("more", "is_covered"), [(-0.01, False), (0.01, True)])
def test_a_request_in_debt_must_gain_by_its_own_draft_and_repay_a_part_of_the_debt(more, is_covered):
    case = Case(gains=(9.0, 0.5 + REPAID + more), lower_gain=4.5, balances=(1.0, -DEBT))
    assert case.is_covered() == is_covered


def test_a_request_in_debt_without_a_draft_refuses_what_makes_the_step_longer():
    assert not Case(gains=(9.0,), lower_gain=4.5, balances=(1.0, -0.1)).is_covered()
    assert Case(gains=(9.0,), lower_gain=4.5, balances=(1.0, 0.51)).is_covered()


@pytest.mark.parametrize("wishes", [{"mode": "on", "max_depth": 1}, {"mode": "off"}], ids=["on", "off"])
def test_requests_for_which_the_policy_does_not_choose_have_no_say(wishes):
    refused = Case(gains=(9.0,), lower_gain=4.5, balances=(1.0, -5.0))
    assert not refused.is_covered()
    refused.wishes = wishes
    assert refused.is_covered()


# ---- catching up


@pytest.mark.parametrize(("steps_left", "is_covered"), [(5.0, False), (7.0, True)])
def test_later_steps_pay_for_catching_up(steps_left, is_covered):
    """4 plain steps, of which the budgets cover 1, and 0.5 gained per step."""
    case = Case(1.0, (0.5, 0.5), 0.5, catch_up_seconds=4.0, steps_left=steps_left)
    assert case.is_covered() == is_covered


@pytest.mark.parametrize("balance", [0.5, 2.0])
def test_a_model_that_is_not_proven_catches_up_within_the_budget(balance):
    assert catching_up(0.99 * balance, balance=balance).is_covered()
    assert not catching_up(1.01 * balance, balance=balance).is_covered()
    assert catching_up(1.01 * balance, balance=balance, is_proven=True).is_covered()


def test_a_first_trial_with_a_single_request_may_cost_more_than_the_budget():
    assert catching_up(0.99 * MOST, (9.0,), balance=0.5).is_covered()
    assert not catching_up(1.01 * MOST, (9.0,), balance=0.5).is_covered()
    assert catching_up(1.01 * MOST, (9.0,), balance=0.5, is_proven=True).is_covered()


@pytest.mark.parametrize(("of_other", "is_covered"), [(4.9, False), (5.1, True)])
def test_one_of_several_requests_may_be_the_first_trial_if_the_others_budgets_cover_it(of_other, is_covered):
    """The other request has no draft, so that later steps pay it back nothing."""
    assert catching_up(5.0, (9.0,), balance=0.5, balances=(1.0, of_other)).is_covered() == is_covered


def test_in_debt_there_is_no_first_trial():
    assert not catching_up(0.1, (9.0,), balance=-1.0).is_covered()
    assert catching_up(0.1, (9.0,), balance=-1.0, is_proven=True).is_covered()


@pytest.mark.parametrize(("more", "is_covered"), [(-0.01, False), (0.01, True)])
@pytest.mark.parametrize("steps_left", [1.0, 20.0])
def test_in_debt_later_steps_repay_it_and_all_of_the_catching_up(more, is_covered, steps_left):
    needed = 0.5 + (DEBT + 2.0) / steps_left
    case = Case(1.5, (9.0, 9.0), needed + more, balance=-DEBT, catch_up_seconds=2.0, steps_left=steps_left)
    assert case.is_covered() == is_covered
