"""When a verification begins before its plan: only where the device would wait, and plans are as expected."""

from __future__ import annotations

import pytest

from outpace.backends.torch.execution.foresight import Foresight, rows_of
from outpace.core import Row

STEP = 7e-3
ROWS = [Row(0, 5, [1, 2], 2), Row(1, 9, [3, 4, 5], 3)]


def after(*, host: float, launch: float, draft: float, every: int = 0, num_steps: int = 200) -> Foresight:
    """After steps of which each `every`-th has another plan than expected."""
    foresight, now = Foresight(), 0.0
    for step in range(1, num_steps + 1):
        foresight.learn_verified(step, now)
        foresight.expect(rows_of(ROWS))
        foresight.learn_begun(launch)
        foresight.learn_launched(launch)
        foresight.learn_asked(now + launch + host)
        foresight.learn_drafted(draft)
        foresight.learn_plan(ROWS[: 1 if every and step % every == 0 else 2])
        now += STEP
    return foresight


def test_nothing_begins_early_before_times_are_known() -> None:
    assert not Foresight().is_worth()


def test_it_is_worth_it_where_the_device_would_wait_for_the_host() -> None:
    assert after(host=0.9e-3, launch=0.4e-3, draft=0.7e-3).is_worth()
    assert not after(host=0.1e-3, launch=0.3e-3, draft=0.7e-3).is_worth()  # all is ready before the draft


@pytest.mark.parametrize(("every", "is_worth"), [(100, True), (4, False), (2, False)])
def test_lost_verifications_cost_a_step(every: int, is_worth: bool) -> None:
    assert (
        after(host=0.9e-3, launch=0.4e-3, draft=0.7e-3, every=every, num_steps=200 + every // 2).is_worth() == is_worth
    )


def test_a_rare_surprise_is_worth_more_where_the_host_takes_longer() -> None:
    assert after(host=3e-3, launch=0.4e-3, draft=0.7e-3, every=12).is_worth()
    assert not after(host=0.5e-3, launch=0.4e-3, draft=0.7e-3, every=12).is_worth()
