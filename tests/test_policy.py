"""The economics of a draft token: it is taken where it is likely enough to survive to be worth what it costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from outpace.config import MAX_DEPTH, SamplingParams, SpeculationParams
from outpace.core import Request, Verdict
from outpace.speculation.costs import CostCurve
from outpace.speculation.policy import _PROBE_EVERY, Choice, Policy
from tests.fakes import fake_config, fake_engine
from tests.requests_helper import make_request

FLAT = {1: 1.0, 64: 1.0}  # further tokens are free: a step waits for the weights
PROPORTIONAL = {1: 1.0, 64: 64.0}  # a second token costs as much as a second step
USUAL = {1: 1.0, 64: 1.0 + 63 * 0.3}  # a further token costs a third of a step


def policy(points: dict[int, float], *, can_speculate: bool = True, **options: Any) -> Policy:
    config = fake_config(draft="fake", **{"speculation": "auto", "method": "suffix", "depth": 8, **options})
    return Policy(config, CostCurve(points), can_speculate=can_speculate)


def request(*, max_length: int = 1000, **speculation: Any) -> Request:
    made = make_request([97, 98], [99])
    made.params = SamplingParams(speculation=SpeculationParams(**speculation))
    made.max_length = max_length
    return made


def verdict(num_drafted: int, num_accepted: int) -> Verdict:
    return Verdict([7] * (num_accepted + 1), num_drafted, num_accepted)


def follow(policy: Policy, who: Request, *, num_accepted: int, steps: int = 20, num_drafted: int = 4) -> None:
    for _ in range(steps):
        policy.observe(who, Choice("suffix", num_drafted), [7] * num_drafted, verdict(num_drafted, num_accepted))


def depths(choices: Sequence[Choice]) -> list[int]:
    return [choice.depth if choice.verify else 0 for choice in choices]


def decide(policy: Policy, who: Request) -> int:
    return depths(policy.decide([who]))[0]


# ---- one request


def test_no_draft_where_a_second_token_costs_as_much_as_a_second_step():
    weighing, who = policy(PROPORTIONAL), request()
    assert decide(weighing, who) == 0
    follow(weighing, who, num_accepted=4, steps=200)
    assert decide(weighing, who) == 0, "even a draft that is always right gains nothing here"


def test_flat_costs_draft_to_the_limit():
    assert decide(policy(FLAT), request()) == 8
    assert decide(policy(FLAT, depth=3), request()) == 3
    assert decide(policy(FLAT), request(max_depth=5)) == 5


def test_the_depth_taken_makes_expected_tokens_per_second_largest():
    weighing, who = policy(USUAL), request()
    for num_accepted in (4, 3, 2, 1, 0):
        follow(weighing, who, num_accepted=num_accepted)
        rate = weighing._rates[who.id].value
        speed = [sum(rate**i for i in range(d + 1)) / (1 + 0.3 * d) for d in range(9)]
        assert decide(weighing, who) == speed.index(max(speed))


def test_acceptance_that_falls_stops_drafting():
    weighing, who = policy(USUAL), request()
    follow(weighing, who, num_accepted=4)
    assert decide(weighing, who) == 8
    taken = []
    while decide(weighing, who):
        taken.append(decide(weighing, who))
        follow(weighing, who, num_accepted=0, steps=1)
        assert len(taken) < 30, "ten refused drafts in a row count more than all before"
    assert taken == sorted(taken, reverse=True), "the draft gets shorter before it goes"


def test_a_new_request_is_given_a_chance_at_usual_costs():
    assert decide(policy(USUAL), request()) >= 1


def test_a_guess_that_would_have_been_right_brings_drafting_back():
    weighing, who = policy(USUAL), request()
    follow(weighing, who, num_accepted=0)
    assert weighing.decide([who]) == [Choice("suffix", 1, verify=False)], "followed, not verified"
    num_right = 0
    while not decide(weighing, who) and num_right < 30:
        weighing.observe(who, Choice("suffix", 1, verify=False), [7], Verdict([7], 0, 0))
        num_right += 1
    assert 1 < num_right < 30


def test_a_guess_that_would_have_been_wrong_keeps_drafting_away():
    weighing, who = policy(USUAL), request()
    follow(weighing, who, num_accepted=0)
    for _ in range(30):
        weighing.observe(who, Choice("suffix", 1, verify=False), [8], Verdict([7], 0, 0))
        assert decide(weighing, who) == 0


def test_no_guess_at_all_is_no_evidence():
    weighing, who = policy(USUAL), request()
    before = decide(weighing, who)
    for _ in range(30):
        weighing.observe(who, Choice("suffix", 1, verify=False), [], Verdict([7], 0, 0))
        weighing.observe(who, Choice("suffix", 4), [], Verdict([7], 0, 0))
    assert decide(weighing, who) == before


def test_tokens_after_the_first_refusal_are_no_evidence():
    """Of eight, three accepted: three hits and one miss; the four behind it were never judged."""
    weighing, who, other = policy(USUAL), request(), request()
    follow(weighing, who, num_accepted=3, num_drafted=8)
    follow(weighing, other, num_accepted=3, num_drafted=4)
    assert weighing._rates[who.id].value == weighing._rates[other.id].value == pytest.approx(0.75, abs=0.02)


def test_a_neural_draft_that_does_not_pay_is_left_alone_and_probed_rarely():
    weighing, who = policy(USUAL, method="draft"), request()
    follow(weighing, who, num_accepted=0)
    seen = []
    for _ in range(3 * _PROBE_EVERY):
        [choice] = weighing.decide([who])
        seen.append(choice)
        drafted = choice.depth
        weighing.observe(who, choice, [8] * drafted, verdict(drafted, 0))
    probes = [i for i, choice in enumerate(seen) if choice.depth]
    assert all(choice in (Choice("draft", 0), Choice("draft", 1)) for choice in seen)
    assert len(probes) in (2, 3) and probes[1] - probes[0] >= _PROBE_EVERY


def test_what_a_neural_draft_costs_to_guess_counts_against_it():
    cheap, dear, who = policy(FLAT, method="draft"), policy(FLAT, method="draft"), request()
    for _ in range(100):
        cheap.observe_drafting("draft", 4, 4 * 0.001)
        dear.observe_drafting("draft", 4, 4 * 1.0)
    assert decide(cheap, who) == 8
    assert decide(dear, who) == 0, "a draft token as dear as a step of the target never pays"


def test_a_model_free_guess_is_not_charged_for_what_the_neural_one_costs():
    weighing = policy(FLAT)
    for _ in range(100):
        weighing.observe_drafting("draft", 4, 4.0)
    assert decide(weighing, request()) == 8


def test_drafting_nothing_teaches_nothing_about_its_cost():
    weighing = policy(FLAT, method="draft")
    weighing.observe_drafting("draft", 0, 5.0)
    assert decide(weighing, request()) == 8


def test_a_released_request_is_forgotten():
    weighing, who = policy(USUAL), request()
    follow(weighing, who, num_accepted=0)
    weighing.release(who)
    weighing.release(who)
    assert weighing._rates == {}
    assert decide(weighing, who) >= 1


# ---- what was asked for


def test_on_drafts_to_the_depth_asked_for_whatever_it_costs():
    weighing, who = policy(PROPORTIONAL, speculation="on", depth=6), request()
    follow(weighing, who, num_accepted=0)
    assert weighing.decide([who]) == [Choice("suffix", 6)]


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"mode": "off"}, Choice("suffix", 0)),
        ({"mode": "on"}, Choice("suffix", 8)),
        ({"mode": "on", "max_depth": 2}, Choice("suffix", 2)),
        ({"mode": "on", "method": "ngram"}, Choice("ngram", 8)),
        ({"mode": "on", "max_depth": MAX_DEPTH}, Choice("suffix", MAX_DEPTH)),
        ({"method": "none"}, Choice("none", 0)),
        ({"max_depth": 0}, Choice("suffix", 0)),
    ],
    ids=repr,
)
def test_a_requests_own_wishes_override_the_engines(asked, expected):
    assert policy(PROPORTIONAL).decide([request(**asked)]) == [expected]


def test_a_request_may_turn_auto_on_where_the_engine_always_drafts():
    weighing, who = policy(PROPORTIONAL, speculation="on"), request(mode="auto")
    assert decide(weighing, who) == 0


def test_a_backend_that_cannot_rewind_is_never_asked_to():
    assert policy(FLAT, can_speculate=False, speculation="on").decide([request()]) == [Choice("suffix", 0)]


@pytest.mark.parametrize("mode", ["on", "auto"])
@pytest.mark.parametrize(("room", "depth"), [(1, 0), (2, 1), (4, 3), (100, 8)])
def test_no_more_is_drafted_than_the_request_may_still_say(mode, room, depth):
    """A step says depth + 1 tokens."""
    assert decide(policy(FLAT, speculation=mode), request(max_length=3 + room)) == depth


# ---- a batch


def test_in_a_mixed_batch_only_the_request_that_accepts_gets_slots():
    weighing = policy(USUAL)
    good, bad = request(), request()
    follow(weighing, good, num_accepted=4)
    follow(weighing, bad, num_accepted=0)
    for batch in ([good, bad], [bad, good]):
        taken = dict(zip([r.id for r in batch], depths(weighing.decide(batch)), strict=True))
        assert taken[good.id] > 0 and taken[bad.id] == 0


def test_requests_that_accept_alike_share_the_slots():
    weighing = policy(USUAL)
    batch = [request() for _ in range(3)]
    for who in batch:
        follow(weighing, who, num_accepted=3)
    taken = depths(weighing.decide(batch))
    assert min(taken) > 0 and max(taken) - min(taken) <= 1


def test_a_full_batch_drafts_less_than_a_lone_request():
    """Costs flat to eight tokens, then steep: eight requests fill the flat part by themselves."""
    weighing = policy({1: 1.0, 8: 1.0, 16: 3.0})
    batch = [request() for _ in range(8)]
    assert decide(weighing, batch[0]) > 0
    assert depths(weighing.decide(batch)) == [0] * 8


def test_what_others_insist_on_leaves_less_room_for_those_who_weigh():
    weighing = policy({1: 1.0, 9: 1.0, 16: 8.0})
    insisting, weighed = request(mode="on", max_depth=7), request()
    assert decide(weighing, weighed) == 8
    assert depths(weighing.decide([insisting, weighed])) == [7, 0]


def test_plain_requests_in_the_batch_count_as_rows():
    weighing = policy({1: 1.0, 8: 1.0, 16: 3.0})
    plain = [request(mode="off") for _ in range(7)]
    assert depths(weighing.decide([*plain, request()])) == [0] * 8


def test_no_requests_no_choices():
    assert policy(USUAL).decide([]) == []


# ---- faults once found


def test_a_request_may_ask_for_auto_where_the_engine_is_off():
    engine = fake_engine(speculation="off")
    wish = SpeculationParams(mode="auto", method="suffix", max_depth=4)
    who = engine.submit([97, 98, 99] * 4, SamplingParams(temperature=0.0, max_tokens=8, speculation=wish))
    while engine.has_requests:
        engine.step()
    assert who.finish_reason is not None


def test_a_request_may_turn_drafting_on_where_the_engine_is_off():
    config = fake_config(speculation="off")
    weighing = Policy(config, CostCurve(FLAT), can_speculate=True)
    assert decide(weighing, request(mode="on")) > 0


def test_what_others_insist_on_is_expected_to_bring_tokens_too():
    """Nine tokens are fixed: a second of work for 2 rows + 0.6 + 0.6^2 + ... = 3.46 tokens. One more slot would bring
    0.6 tokens for 0.2 seconds, which makes the batch slower: 4.06 / 1.2 < 3.46 / 1."""
    weighing = policy({1: 1.0, 9: 1.0, 16: 2.4})
    assert depths(weighing.decide([request(mode="on", max_depth=7), request()])) == [7, 0]


def test_model_free_guesses_do_not_make_the_neural_one_look_cheap():
    weighing = policy(FLAT, method="draft")
    for _ in range(100):  # what Engine._draft reports when one request drafts by model and three by lookup
        weighing.observe_drafting("draft", 4, 4 * 1.0)
        for _ in range(3):
            weighing.observe_drafting("suffix", 4, 4 * 1e-6)
    assert decide(weighing, request(method="draft")) == 0


def test_the_first_neural_drafts_already_say_what_they_cost():
    weighing = policy(FLAT, method="draft")
    weighing.observe_drafting("draft", 4, 4 * 1.0)
    assert decide(weighing, request()) == 0


def test_a_probe_that_got_no_draft_is_not_repeated_every_step():
    weighing, who = policy(USUAL, method="draft"), request()
    follow(weighing, who, num_accepted=0)
    asked = 0
    for _ in range(2 * _PROBE_EVERY):
        [choice] = weighing.decide([who])
        asked += choice.depth
        weighing.observe(who, choice, [], Verdict([7], 0, 0))
    assert asked <= 3
