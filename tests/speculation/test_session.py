"""The protocol of one step: the order of calls, the time booked for each, and the costs learned."""

from __future__ import annotations

import pytest

from outpace.core import Request, StepStats
from outpace.speculation.session import Session
from tests.session_driver import FLAT, RIGHT, USUAL, Clock, SessionDriver, always, nothing, request_of


def plain_request() -> Request:
    made = request_of(mode="off")
    made.may_speculate = False
    return made


def test_lookups_are_made_before_deciding_and_models_draft_after():
    driver = SessionDriver(FLAT, suffix=nothing, draft=always(), draft_seconds=0.01, lookup_seconds=0.02)
    stats, who = StepStats(), request_of(length=2)
    decision = driver.session.choose([who], stats)
    assert driver.proposers["suffix"].num_asked == 1 and driver.proposers["draft"].num_asked == 0
    assert decision.choices[0].depth > 0 and decision.choices[0].draft is None
    driver.session.draft(decision, stats)
    assert driver.proposers["draft"].num_asked == 1 and decision.choices[0].draft is not None


def test_each_part_has_its_time():
    driver = SessionDriver(FLAT, suffix=nothing, draft=always(), draft_seconds=0.01, lookup_seconds=0.02)
    stats, batch = StepStats(), [request_of(length=2) for _ in range(3)]
    decide = driver.policy.decide

    def slowly(*args, **named):
        driver.clock.now += 0.5
        return decide(*args, **named)

    driver.policy.decide = slowly  # type: ignore[method-assign]
    decision = driver.session.choose(batch, stats)
    driver.session.draft(decision, stats)
    assert stats.lookup_seconds == pytest.approx(3 * 0.02)
    assert stats.policy_seconds == pytest.approx(0.5)
    depth = max(choice.depth for choice in decision.choices)
    assert stats.draft_seconds == pytest.approx(driver.truth.drafts["draft"].seconds(3, depth, 2.0), rel=0.01)


def test_what_learning_takes_is_counted_with_the_next_decision():
    driver, who = SessionDriver(FLAT, suffix=always()), request_of()
    learn = driver.policy.learn

    def slowly(*args, **options):
        driver.clock.now += 0.5
        learn(*args, **options)

    driver.policy.learn = slowly  # type: ignore[method-assign]
    driver.step([who])
    for expected in (0.5, 0.0):
        stats = StepStats()
        driver.session.choose([who], stats)
        assert stats.learning_seconds == pytest.approx(expected)


def test_nobody_decides_where_nobody_may_speculate():
    driver, batch = SessionDriver(FLAT, suffix=always()), [plain_request() for _ in range(2)]
    driver.policy.decide = None  # type: ignore[method-assign, assignment]
    assert driver.run(batch, 3) == [[0, 0]] * 3
    assert driver.policy._states == {} and driver.policy.estimated_speedup is None


def test_every_proposer_that_was_chosen_drafts_for_its_own():
    driver = SessionDriver(FLAT, suffix=always(), ngram=always())
    batch = [request_of(mode="on", method=name) for name in ("suffix", "ngram", "suffix")]
    driver.step(batch)
    asked = {name: proposer.asked for name, proposer in driver.proposers.items()}
    assert asked == {"suffix": [[batch[0], batch[2]]], "ngram": [[batch[1]]]}


def test_a_proposer_hears_what_became_of_its_drafts():
    driver, who = SessionDriver(FLAT, draft=always(), draft_seconds=0.01), request_of(length=2)
    driver.step([who])
    model = driver.model()
    assert model.num_cached[who.id] == len(who.tokens) - 2, "it was rewound to what the target kept"


@pytest.mark.parametrize("is_typical", [True, False])
def test_costs_of_drafting_are_learned_only_where_nothing_else_was_done_meanwhile(is_typical):
    driver, who = SessionDriver(FLAT, draft=always(), draft_seconds=0.01), request_of(length=40)
    driver.truth.drafts["draft"].passes = driver.model().costs.passes = _slower(driver)
    before = driver.costs.drafts["draft"].seconds(1, 4, 0.0)
    stats = StepStats()
    decision = driver.session.choose([who], stats)
    driver.session.draft(decision, stats)
    assert driver.session.learn_drafting(decision, is_typical=is_typical) > 0, "catching up was part of it in any case"
    assert (driver.costs.drafts["draft"].seconds(1, 4, 0.0) > before) == is_typical


def _slower(driver: SessionDriver):
    passes = driver.truth.drafts["draft"].passes
    assert passes is not None
    return type(passes)({size: 2 * seconds for size, seconds in passes.points.items()})


@pytest.mark.parametrize(
    ("options", "is_learned"),
    [({}, True), ({"is_typical": False}, False), ({"num_prefill": 5}, False), ({"had_one_time_work": True}, False)],
    ids=["pure", "not typical", "beside a prompt", "done once"],
)
def test_costs_of_steps_are_learned_from_pure_decoding(options, is_learned):
    driver, who = SessionDriver(USUAL, suffix=nothing, lookup_seconds=0.0), request_of()
    before = driver.costs.as_dict()
    stats = StepStats(
        num_prefill_tokens=options.get("num_prefill", 0), had_one_time_work=options.get("had_one_time_work", False)
    )
    decision = driver.session.choose([who], stats)
    stats.forward_seconds, stats.num_emitted, stats.verify_seconds = 1.5, 1, 0.1
    outcomes = [driver._verify(who, decision.choices[0])]
    driver.session.learn(decision, outcomes, stats, is_typical=options.get("is_typical", True))
    assert driver.costs.as_dict() == before, "they are learned when the decision is no longer in force"
    driver.session.choose([who], StepStats())
    assert (driver.costs.as_dict() != before) == is_learned


@pytest.mark.parametrize("is_hidden", [True, False])
def test_learning_counts_unless_a_device_was_at_work_meanwhile(is_hidden):
    driver, who = SessionDriver(USUAL, suffix=nothing, lookup_seconds=0.0), request_of()
    clock = iter(range(100))
    session = Session(driver.policy, driver.proposers, lambda: float(next(clock)))
    decision, stats = session.choose([who], StepStats()), StepStats(forward_seconds=1.0, num_emitted=1)
    session.learn(decision, [driver._verify(who, decision.choices[0])], stats, is_hidden=is_hidden)
    after = StepStats()
    session.choose([who], after)
    assert after.learning_seconds == (0.0 if is_hidden else 1.0)


def test_requests_that_ended_are_forgotten_and_others_kept():
    driver, ending, staying = SessionDriver(FLAT, suffix=nothing), request_of(max_length=4), request_of()
    driver.step([ending, staying])
    assert ending.finish_reason is not None and ending.tokens[-1] == RIGHT
    assert driver.policy._states.keys() == {staying.id}


def test_a_clock_that_stands_still_gives_no_times():
    driver = SessionDriver(FLAT, suffix=always(), lookup_seconds=0.0)
    assert isinstance(driver.clock, Clock)
    stats = StepStats()
    driver.session.choose([request_of()], stats)
    assert stats.speculation_seconds == 0.0
