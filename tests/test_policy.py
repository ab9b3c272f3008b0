"""The economics of a draft token: it is taken where it is likely enough to survive to be worth what it costs."""

from __future__ import annotations

import random
from typing import Any

import pytest

from outpace.config import MAX_DEPTH
from outpace.core import Draft, Request, StepStats, Verdict
from outpace.speculation.base import DraftAsk
from outpace.speculation.costs import StepCosts
from outpace.speculation.seats import Choice, Outcome
from outpace.speculation.sweep import survival
from tests.desk import FLAT, PROPORTIONAL, RIGHT, USUAL, WRONG, Desk, ScriptedModel, always, nothing, request_of

NONE = Choice.plain()
GUESS_STAKE = 0.35  # plain steps that may be staked on a guess, and again for each token on end that was as guessed


def expected_of(desk: Desk, who: Request, depth: int, sure: float, method: str = "suffix") -> float:
    """Tokens that `depth` draft tokens of this confidence are believed to say."""
    prospects = desk.policy._seat(who).prospects
    return 1.0 + sum(survival(desk.policy.acceptance.given_confidence(method, prospects, [sure] * depth)))


# ---- one request


def test_no_draft_where_a_second_token_costs_as_much_as_a_second_step():
    desk, who = Desk(PROPORTIONAL, suffix=always(sure=0.99)), request_of()
    assert desk.depths([who]) == [0]
    assert desk.run([who], 200) == [[0]] * 200, "even a guess that is always right gains nothing here"


def test_flat_costs_draft_to_the_limit():
    assert Desk(FLAT, suffix=always()).depths([request_of()]) == [8]
    assert Desk(FLAT, suffix=always(), depth=3).depths([request_of()]) == [3]
    assert Desk(FLAT, suffix=always()).depths([request_of(max_depth=5)]) == [5]
    assert Desk(FLAT, suffix=always(length=2)).depths([request_of()]) == [2], "no longer than the guess"


@pytest.mark.parametrize("right", [True, False])
@pytest.mark.parametrize("sure", [0.3, 0.6, 0.8, 0.95])
def test_the_depth_taken_makes_expected_tokens_per_second_largest(right, sure):
    desk, who = Desk(USUAL, suffix=always(right, sure=sure), guess_seconds=0.0), request_of()
    for _ in range(12):
        [choice] = desk.decide([who])
        longest = 1.0 + GUESS_STAKE * (1 + desk.policy._seat(who).num_right)
        allowed = [depth for depth in range(9) if 1 + 0.3 * depth <= longest]
        speeds = [expected_of(desk, who, depth, sure) / (1 + 0.3 * depth) for depth in allowed]
        best = max(speeds)
        # A gain too small to be told from an error of measurement is left.
        # So is one that would stake more than may be lost; and a step may be plain to measure it, or to rest.
        if desk.policy.is_resting or desk.policy.trace[-1].reason.endswith("to measure it"):
            desk.step([who])
            continue
        assert speeds[choice.depth] >= 0.995 * best or (choice.depth == 0 and best < 1.02 * speeds[0])
        if choice.depth:
            assert choice.expected == pytest.approx(expected_of(desk, who, choice.depth, sure))
        desk.step([who])


def test_a_guess_is_deep_only_where_those_before_it_were_right_unless_that_costs_nothing():
    """However sure of itself a guesser is: copying may have ended, or not begun."""
    desk, who = Desk(USUAL, suffix=always(sure=0.99)), request_of()
    depths = [depth for [depth] in desk.run([who], 6)]
    assert depths[0] == 1 and depths[-1] == 8
    wrong = Desk(USUAL, suffix=always(False, sure=0.99))
    assert max(depth for [depth] in wrong.run([request_of()], 40)) == 1
    assert Desk(FLAT, suffix=always(sure=0.99)).depths([request_of()]) == [8]


def test_guesses_that_turn_wrong_are_soon_left():
    desk, who = Desk(USUAL, suffix=always(True)), request_of()
    assert desk.run([who], 30)[-1] == [8]
    desk.proposers["suffix"].script = always(False)
    taken = [depths[0] for depths in desk.run([who], 60)]
    assert sum(taken) < 40 and sum(taken[-20:]) <= 2, "soon left, and hardly tried again"


def test_a_guess_that_would_have_been_right_brings_drafting_back():
    """Guesses are compared with what was said, verified or not: finding out costs no slot."""
    desk, who = Desk(USUAL, suffix=always(False)), request_of()
    desk.run([who], 60)
    assert desk.depths([who]) == [0]
    desk.proposers["suffix"].script = always(True)
    taken = [depths[0] for depths in desk.run([who], 300)]
    assert taken[-1] == 8
    assert next(i for i, depth in enumerate(taken) if depth) > 0


def test_where_there_is_no_guess_the_step_is_plain():
    desk, who = Desk(FLAT, suffix=nothing), request_of()
    assert desk.run([who], 30) == [[0]] * 30
    assert desk.policy.trace[-1].reason == "no guess"


def test_guesses_that_bring_nothing_are_asked_for_less_and_less():
    """Guessing costs a hundredth of a step here, and none of them is ever right."""
    desk, who = Desk(USUAL, suffix=always(False), guess_seconds=0.01), request_of()
    asked = []
    for _ in range(400):
        asked.append(bool(desk.policy.wanted_guesses([who])))
        guesses = {who.id: [Draft([2] * 8, "suffix", confidence=[0.5] * 8)]} if asked[-1] else {}
        [choice] = desk.policy.decide([who], guesses)
        choice.shorten(choice.depth)
        who.tokens.append(RIGHT)
        desk.policy.observe([Outcome(who, choice, Verdict([RIGHT], choice.depth, 0))])
    assert sum(asked[200:]) * 0.01 < 0.02 * 200, "within the allowed loss"
    assert sum(asked[200:]) >= 1, "but it never stops looking"


def test_guesses_that_are_free_are_always_asked_for():
    desk, who = Desk(USUAL, suffix=always(False), guess_seconds=0.0), request_of()
    desk.run([who], 100)
    assert all(desk.policy.wanted_guesses([who]) for _ in range(5))


def test_tokens_after_the_first_refusal_are_no_evidence():
    """Of eight, three right: three hits and one miss; the four behind it were never judged."""
    long = Desk(FLAT, suffix=lambda _: ([True] * 3 + [False] * 5, 0.7))
    short = Desk(FLAT, suffix=lambda _: ([True] * 3 + [False], 0.7))
    whole, cut = request_of(), request_of()
    long.run([whole], 20)
    short.run([cut], 20)
    assert expected_of(long, whole, 8, 0.7) == pytest.approx(expected_of(short, cut, 8, 0.7))


def test_a_released_request_is_forgotten():
    desk, who = Desk(USUAL, suffix=always(False)), request_of()
    desk.run([who], 40)
    assert desk.depths([who]) == [0]
    before = expected_of(desk, who, 4, 0.9)
    desk.policy.release(who)
    desk.policy.release(who)
    assert desk.policy._seats == {}
    assert expected_of(desk, who, 4, 0.9) > before, "what is left is what is general"


def test_a_request_that_ends_is_forgotten():
    desk = Desk(FLAT, suffix=always())
    for _ in range(50):
        who = request_of(max_length=12)
        while who.finish_reason is None:
            desk.step([who])
    assert desk.policy._seats == {}


def test_before_costs_are_known_nothing_is_weighed():
    desk, who = Desk(FLAT, suffix=always()), request_of()
    desk.policy.use_costs(None)
    assert desk.policy.wanted_guesses([who]) == {}
    assert desk.policy.decide([who], {}) == [NONE]
    insisting = request_of(mode="on", method="suffix")
    assert desk.policy.decide([insisting], {})[0].depth == 8


# ---- what was asked for


def test_on_drafts_to_the_depth_asked_for_whatever_it_costs():
    desk, who = Desk(PROPORTIONAL, suffix=always(False), speculation="on", depth=6), request_of()
    assert desk.policy.wanted_guesses([who]) == {}, "nothing to weigh"
    assert desk.run([who], 50) == [[6]] * 50


@pytest.mark.parametrize(
    ("asked", "method", "depth"),
    [
        ({"mode": "off"}, "none", 0),
        ({"mode": "on"}, "suffix", 8),
        ({"mode": "on", "max_depth": 2}, "suffix", 2),
        ({"mode": "on", "method": "ngram"}, "ngram", 8),
        ({"mode": "on", "max_depth": MAX_DEPTH}, "suffix", MAX_DEPTH),
        ({"method": "none"}, "none", 0),
        ({"max_depth": 0}, "none", 0),
    ],
    ids=repr,
)
def test_a_requests_own_wishes_override_the_engines(asked, method, depth):
    desk = Desk(PROPORTIONAL, suffix=always(), ngram=always())
    [choice] = desk.decide([request_of(**asked)])
    assert (choice.method, choice.depth) == (method, depth)
    assert (choice.ask is not None and choice.ask.depth == depth) if depth else choice.ask is None


def test_a_request_may_ask_for_one_method_in_auto():
    desk = Desk(FLAT, suffix=always(sure=0.99), ngram=always(sure=0.3), draft=always(sure=0.99))
    assert desk.decide([request_of(method="ngram")])[0].method == "ngram"
    assert desk.decide([request_of(method="draft")])[0].method == "draft"
    assert set(desk.policy.wanted_guesses([request_of(method="draft")])) == set()


def test_a_request_may_turn_auto_on_where_the_engine_always_drafts_or_never_does():
    assert Desk(PROPORTIONAL, suffix=always(), speculation="on").depths([request_of(mode="auto")]) == [0]
    assert Desk(FLAT, suffix=always(), speculation="off", depth=None).depths([request_of(mode="auto")])[0] > 0
    assert Desk(FLAT, suffix=always(), speculation="off", depth=None).depths([request_of(mode="on")])[0] > 0
    assert Desk(FLAT, suffix=always(), speculation="off", depth=None).depths([request_of()]) == [0]


@pytest.mark.parametrize("mode", ["on", "auto"])
def test_a_backend_that_cannot_rewind_is_never_asked_to(mode):
    desk, who = Desk(FLAT, suffix=always(), can_speculate=False, speculation=mode), request_of()
    assert desk.policy.wanted_guesses([who]) == {}
    assert desk.decide([who, request_of(mode="on")]) == [NONE, NONE]


@pytest.mark.parametrize("mode", ["on", "auto"])
@pytest.mark.parametrize(("room", "depth"), [(1, 0), (2, 1), (4, 3), (100, 8)])
@pytest.mark.parametrize("method", ["suffix", "draft"])
def test_no_more_is_drafted_than_the_request_may_still_say(mode, room, depth, method):
    """A step says depth + 1 tokens."""
    desk = Desk(FLAT, speculation=mode, method=method, draft_seconds=1e-6, suffix=always(), draft=always())
    assert desk.depths([request_of(max_length=3 + room)]) == [depth]


@pytest.mark.parametrize("mode", ["on", "auto"])
def test_from_a_batch_size_on_nothing_is_drafted(mode):
    desk = Desk(FLAT, suffix=always(), speculation=mode, disable_by_batch_size=3)
    batch = [request_of() for _ in range(3)]
    assert desk.depths(batch[:2]) == [8, 8]
    assert desk.policy.wanted_guesses(batch) == {}
    assert desk.depths(batch) == [0, 0, 0]
    assert desk.depths(batch[1:]) == [8, 8]


def test_a_workload_is_where_belief_starts_and_nothing_more():
    first: dict[str, float] = {}
    later: dict[str, float] = {}
    for workload in ("json", "code", "chat", "narrative"):
        desk, who = Desk(USUAL, suffix=always(sure=0.6)), request_of(workload=workload)
        first[workload] = expected_of(desk, who, 4, 0.6)
        desk.proposers["suffix"].script = always(False, sure=0.6)
        desk.run([who], 100)
        later[workload] = expected_of(desk, who, 4, 0.6)
    assert first["json"] > first["code"] > first["chat"] > first["narrative"]
    assert max(later.values()) - min(later.values()) < 0.05, "evidence has taken over"


def test_a_workload_changes_no_rule_of_acceptance():
    assert request_of(workload="chat").params.speculation.acceptance == "exact"
    assert not request_of(workload="chat").params.speculation.is_lossy


# ---- a batch


def test_in_a_mixed_batch_only_the_request_that_accepts_gets_slots():
    good, bad = request_of(), request_of()
    desk = Desk({1: 1.0, 6: 1.0, 256: 251.0}, suffix=lambda request: ([request is good] * 16, 0.6))
    desk.run([good, bad], 30)
    for batch in ([good, bad], [bad, good]):
        taken = dict(zip([r.id for r in batch], desk.depths(batch), strict=True))
        assert taken[good.id] > 0 and taken[bad.id] == 0


def test_requests_that_accept_alike_share_the_slots():
    desk, batch = Desk(USUAL, suffix=always(sure=0.9)), [request_of() for _ in range(3)]
    desk.run(batch, 20)
    taken = desk.depths(batch)
    assert min(taken) > 0 and max(taken) - min(taken) <= 1


def test_a_full_batch_drafts_less_than_a_lone_request():
    """Costs flat to eight tokens, then steep: eight requests fill the flat part by themselves."""
    desk = Desk({1: 1.0, 8: 1.0, 16: 3.0, 256: 63.0}, suffix=always(sure=0.6))
    batch = [request_of() for _ in range(8)]
    assert desk.depths(batch[:1])[0] > 0
    assert desk.depths(batch) == [0] * 8


def test_stairs_are_filled_to_the_edge():
    """Up to eight tokens cost the same, whoever has them."""
    stairs = {n: 1.0 + 3.0 * ((n - 1) // 8) for n in range(1, 65)}
    desk = Desk(stairs, suffix=always(sure=0.7))
    for rows in (1, 2, 4, 7):
        batch = [request_of() for _ in range(rows)]
        assert sum(desk.depths(batch)) == min(8 - rows, 8 * rows)


def test_what_others_insist_on_leaves_less_room_for_those_who_weigh():
    desk = Desk({1: 1.0, 9: 1.0, 16: 8.0, 256: 248.0}, suffix=always())
    insisting, weighed = request_of(mode="on", max_depth=7), request_of()
    assert desk.depths([weighed]) == [8]
    assert desk.depths([insisting, weighed]) == [7, 0]


def test_what_others_insist_on_is_expected_to_bring_tokens_too():
    desk = Desk(FLAT, suffix=always())
    [fixed, weighed] = desk.decide([request_of(mode="on", max_depth=7), request_of()])
    assert fixed.expected > 1.5 and weighed.expected > 1.5


def test_plain_requests_in_the_batch_count_as_rows():
    desk = Desk({1: 1.0, 8: 1.0, 16: 3.0, 256: 63.0}, suffix=always(sure=0.6))
    plain = [request_of(mode="off") for _ in range(7)]
    assert desk.depths([*plain, request_of()]) == [0] * 8


def test_a_prompt_being_read_takes_room():
    desk, who = Desk({1: 1.0, 8: 1.0, 16: 16.0, 256: 496.0}, suffix=always(sure=0.8)), request_of()
    guess = Draft([RIGHT] * 8, "suffix", confidence=[0.8] * 8)
    assert desk.policy.decide([who], {who.id: [guess]})[0].depth == 7
    assert desk.policy.decide([who], {who.id: [guess]}, num_prefill=4)[0].depth == 3
    assert desk.policy.decide([who], {who.id: [guess]}, num_prefill=7)[0].depth == 0


def test_no_step_is_larger_than_the_engine_allows():
    desk = Desk(FLAT, suffix=always(), max_step_tokens=10)
    assert sum(desk.depths([request_of() for _ in range(4)])) == 6


def test_no_requests_no_choices():
    assert Desk(USUAL, suffix=always()).policy.decide([], {}) == []


# ---- fairness


def test_a_request_that_gains_nothing_is_not_stretched_beyond_its_allowance():
    """Every draft token of one makes the step longer for the other, which never has a guess."""
    good, bad = request_of(), request_of()
    desk = Desk(
        {1: 1.0, 2: 1.0, 256: 1.0 + 254 * 0.08},
        suffix=lambda request: ([True] * 16, 0.95) if request is good else ([], 0.0),
    )
    alone = Desk({1: 1.0, 2: 1.0, 256: 1.0 + 254 * 0.08}, suffix=always(sure=0.95))
    assert alone.run([request_of()], 6)[-1] == [8]
    desk.run([good, bad], 600)
    lost = bad.spec.decode_seconds - bad.spec.plain_seconds
    assert lost < 0.05 * bad.spec.plain_seconds + 2.0


def test_what_costs_the_others_nothing_is_given():
    good, bad = request_of(), request_of()
    desk = Desk(FLAT, suffix=lambda request: ([True] * 16, 0.95) if request is good else ([], 0.0))
    taken = desk.run([good, bad], 50)
    assert [8, 0] in taken[:3] and taken[-1] == [8, 0]
    assert bad.spec.decode_seconds == pytest.approx(bad.spec.plain_seconds)


# ---- the ledger and what keeps costs known


def in_debt(desk: Desk) -> None:
    desk.policy.ledger.write_off(100.0)
    assert desk.policy.ledger.is_in_debt


def test_a_ledger_in_debt_means_plain_decoding_until_that_is_made_good():
    desk, who = Desk(FLAT, suffix=always()), request_of()
    assert desk.depths([who]) == [8]
    in_debt(desk)
    desk.proposers["suffix"].script = always(False)
    assert desk.run([who], 50) == [[0]] * 50
    assert "ledger" in desk.policy.trace[-1].reason
    desk.proposers["suffix"].script = always()
    desk.policy.ledger.add(1.0, 200.0, 1.0)
    assert any(depths == [8] for depths in desk.run([who], 300))


def test_in_debt_a_draft_model_is_probed_rarely_and_shallowly():
    desk, who = Desk(FLAT, draft=always(False), draft_seconds=0.1), request_of(length=2)
    in_debt(desk)
    taken = [depths[0] for depths in desk.run([who], 2000)]
    probes = [depth for depth in taken if depth]
    assert len(probes) >= 2 and max(probes) <= 2
    # What is spent on probing is a small share of the time spent decoding.
    assert sum(depth * 0.15 for depth in probes) < 0.01 * 2000


def test_a_draft_model_that_does_not_pay_is_left_alone_and_found_again_when_it_does():
    desk, who = Desk(USUAL, draft=always(False, sure=0.8), draft_seconds=0.1), request_of(length=2)
    taken = [depths[0] for depths in desk.run([who], 400)]
    assert sum(1 for depth in taken[200:] if depth) < 20
    desk.proposers["draft"].script = always(True, sure=0.8)
    taken = [depths[0] for depths in desk.run([who], 3000)]
    assert sum(1 for depth in taken[-100:] if depth) > 80


def test_a_plain_step_comes_now_and_then_so_that_its_cost_is_known():
    desk, who = Desk(FLAT, suffix=always()), request_of()
    taken = [depths[0] for depths in desk.run([who], 1000)]
    plain = [i for i, depth in enumerate(taken) if not depth]
    assert 2 <= len(plain) <= 20
    assert any("to measure it" in step.reason for step in desk.policy.trace)


def test_beside_a_request_that_always_drafts_the_others_go_on_being_weighed():
    """A batch with such a request in it has no plain steps: waiting for one must not last."""
    desk, insisting, who = Desk(FLAT, suffix=always()), request_of(mode="on", max_depth=2), request_of()
    taken = [depths[1] for depths in desk.run([insisting, who], 500)]
    assert sum(1 for depth in taken[-100:] if depth) > 90


def test_plain_steps_lose_only_the_policys_time():
    desk, who = Desk(PROPORTIONAL, suffix=nothing), request_of()
    for _ in range(10):
        desk.step([who], policy_seconds=0.01)
    ledger = desk.policy.ledger
    assert ledger.spent_seconds == pytest.approx(10.1) and ledger.plain_seconds == pytest.approx(10.0)
    assert who.spec.plain_seconds == pytest.approx(10.0)


def test_a_step_with_drafts_is_weighed_against_plain_steps():
    desk, who = Desk(USUAL, suffix=always()), request_of()
    [outcome] = desk.step([who])
    depth = outcome.verdict.num_drafted
    assert depth > 0
    assert desk.policy.ledger.estimated_speedup == pytest.approx((depth + 1) / (1 + 0.3 * depth))


# ---- the draft model


def test_what_a_draft_model_costs_counts_against_it():
    cheap, dear = (Desk(FLAT, draft=always(sure=0.9), draft_seconds=s) for s in (0.001, 1.0))
    assert cheap.depths([request_of(length=2)])[0] >= 4
    assert dear.depths([request_of(length=2)]) == [0], "a draft token as dear as a step of the target never pays"


def test_a_text_too_long_for_what_is_left_to_say_is_not_read():
    """Reading 2000 tokens takes eight steps of the target; two more tokens are wanted."""
    desk = Desk(FLAT, draft=always(sure=0.9), draft_seconds=0.01)
    assert desk.policy.costs is not None
    desk.policy.costs.draft = desk.truth.draft = type(desk.truth.target)({1: 0.01, 2000: 8.0})
    short = request_of(length=2000, max_length=2003)
    assert desk.depths([short]) == [0]
    read = request_of(length=2000, max_length=2003)
    model = desk.proposers["draft"]
    assert isinstance(model, ScriptedModel)
    model.num_read[read.id] = 1999
    assert desk.depths([read])[0] > 0, "what was read already costs nothing more"


def test_a_draft_goes_on_by_its_confidence_and_a_doubtful_one_stops():
    desk, who = Desk(USUAL, draft=always(sure=0.9), draft_seconds=0.01), request_of(length=2)
    desk.run([who], 40)
    [choice] = desk.decide([who])
    assert choice.ask is not None and choice.ask.goes_on is not None
    assert choice.ask.goes_on(0.99)
    assert not choice.ask.goes_on(0.01)
    assert not choice.ask.goes_on(0.99), "what comes after a token that was left out is left out too"


def test_where_a_draft_stopped_for_want_of_confidence_is_learned_from():
    """Drafts that stop at once say nothing that could be refused, and yet they are known to be short."""
    desk, who = Desk(USUAL, draft=always(sure=0.02), draft_seconds=0.05), request_of(length=2)
    desk.run([who], 300)
    for _ in range(5):
        assert sum(depth for [depth] in desk.run([who], 20)) <= 4


def test_a_step_that_only_measures_is_not_followed_by_a_rest():
    desk, who = Desk(USUAL, draft=always(sure=0.9), draft_seconds=0.01), request_of(length=2)
    depths = [depth for [depth] in desk.run([who], 80)]
    measured = [i for i, trace in enumerate(desk.policy.trace) if trace.reason.endswith("to measure it")]
    assert len(measured) >= 3
    assert all(depths[i] == 0 and depths[i + 1] > 0 for i in measured if i + 1 < len(depths))


def test_where_a_deep_draft_would_slow_others_down_a_shallow_one_is_made():
    """Drafts for half of the batch are right, for the others their first token only. Five passes of the draft model
    would be best for all together; the others would be left behind by what the passes take."""
    good, poor = ([request_of(length=2) for _ in range(4)] for _ in range(2))
    rates = {request.id for request in good}

    def script(request: Request) -> tuple[list[bool], float]:
        return ([True] * 16 if request.id in rates else [True] + [False] * 15), 0.9

    desk, batch = Desk(FLAT, draft=script, draft_seconds=0.2), good + poor
    depths = desk.run(batch, 60)
    assert sum(map(sum, depths[20:])) > 0
    assert sum(any(depth) for depth in depths[20:]) >= 30
    for request in poor:
        assert request.spec.decode_seconds <= 1.05 * request.spec.plain_seconds + 1.0


def test_no_probe_where_the_best_draft_would_gain_nothing():
    desk, batch = (
        Desk(PROPORTIONAL, draft=always(sure=0.9), draft_seconds=0.05),
        [request_of(length=2) for _ in range(4)],
    )
    assert sum(map(sum, desk.run(batch, 100))) == 0


def test_at_first_several_requests_are_probed_at_once():
    desk, batch = Desk(FLAT, draft=always(sure=0.9), draft_seconds=0.05), [request_of(length=2) for _ in range(8)]
    assert sum(depth > 0 for depth in desk.run(batch, 1)[0]) >= 4
    assert min(desk.run(batch, 3)[-1]) > 0, "and where all were right, everybody is drafted for"


def test_what_reading_lost_is_made_good_by_drafts_that_have_paid():
    """Reading 400 tokens takes eight plain steps, which no probe can pay."""
    desk, who = Desk(USUAL, draft=always(sure=0.9), draft_seconds=0.01), request_of(length=2)
    assert desk.policy.costs is not None
    desk.policy.costs.draft = desk.truth.draft = StepCosts({1: 0.01, 2: 0.01, 400: 8.0})
    desk.run([who], 40)
    desk.policy.ledger.write_off(1000.0)
    assert desk.policy.ledger.is_in_debt
    assert sum(depth > 0 for [depth] in desk.run([who], 20)) >= 15
    desk.policy.costs.draft = desk.truth.draft = StepCosts({1: 0.01, 2: 0.01, 400: 80.0})
    assert not any(depth for [depth] in desk.run([request_of(length=400)], 20)), "in debt little is read"


def test_in_debt_by_drafts_that_were_wrong_there_are_no_more_of_them():
    desk, who = Desk(USUAL, draft=always(sure=0.9), draft_seconds=0.01), request_of(length=2)
    desk.run([who], 40)
    model = desk.proposers["draft"]
    model.script = always(False, sure=0.9)
    desk.run([who], 30)
    desk.policy.ledger.write_off(1000.0)
    assert sum(depth > 0 for [depth] in desk.run([who], 100)) <= 3


# ---- several proposers


def test_the_guess_that_promises_more_is_taken():
    desk = Desk(FLAT, suffix=always(sure=0.5), ngram=always(sure=0.95))
    assert desk.decide([request_of()])[0].method == "ngram"
    desk = Desk(FLAT, suffix=always(sure=0.95), ngram=always(sure=0.5))
    assert desk.decide([request_of()])[0].method == "suffix"


def test_a_longer_guess_may_promise_more_than_a_surer_one():
    desk = Desk(FLAT, suffix=always(sure=0.9, length=1), ngram=always(sure=0.8, length=8))
    assert desk.decide([request_of()])[0].method == "ngram"


def test_the_proposer_that_is_right_wins_in_the_end_whatever_each_claims():
    desk, who = Desk(FLAT, suffix=always(False, sure=0.95), ngram=always(True, sure=0.7)), request_of()
    desk.run([who], 60)
    assert desk.decide([who])[0].method == "ngram"


def test_the_guesser_that_is_right_is_asked_and_the_others_now_and_then():
    desk, who = Desk(FLAT, suffix=always(False), ngram=always(True), guess_seconds=0.0), request_of()
    desk.run([who], 40)
    asked = [sorted(desk.policy.wanted_guesses([who])) for _ in range(24)]
    assert asked.count(["ngram", "suffix"]) == 3 and asked.count(["ngram"]) == 21
    desk.proposers["suffix"].script, desk.proposers["ngram"].script = always(True), always(False)
    desk.run([who], 100)
    asked = [sorted(desk.policy.wanted_guesses([who])) for _ in range(24)]
    assert asked.count(["suffix"]) == 21, "comparing shows when that has changed"


def test_guesses_that_were_not_taken_are_learned_from_too():
    desk, who = Desk(FLAT, suffix=always(True, sure=0.95), ngram=always(True, sure=0.5)), request_of()
    before = expected_of(desk, who, 4, 0.5, "ngram")
    desk.run([who], 20)
    assert all(row.method != "ngram" for step in desk.policy.trace for row in step.rows)
    assert expected_of(desk, who, 4, 0.5, "ngram") > before


def test_each_request_of_a_batch_has_its_own_proposer():
    one, other = request_of(length=2), request_of(length=2)
    desk = Desk(
        FLAT,
        suffix=lambda request: ([True] * 16, 0.97) if request is one else ([], 0.0),
        draft=always(True, sure=0.9),
        draft_seconds=0.01,
    )
    desk.run([one, other], 20)
    methods = {tuple(row.method for row in step.rows) for step in list(desk.policy.trace)[-10:]}
    assert methods == {("suffix", "draft")}


def test_a_draft_model_is_not_run_where_a_guess_does_as_well():
    desk, who = (
        Desk(FLAT, suffix=always(True, sure=0.99), draft=always(True, sure=0.9), draft_seconds=0.2),
        request_of(),
    )
    desk.run([who], 40)
    assert {row.method for step in desk.policy.trace for row in step.rows} <= {"suffix", "none"}


# ---- any batch at all


def test_whatever_comes_choices_stay_within_what_may_be_done():
    """Random batches, wishes, guesses and verdicts for a while: depths fit, and methods are those asked for."""
    rng = random.Random(7)
    odd = {1: 1.0, 3: 0.9, 5: 2.0, 8: 2.0, 9: 4.0, 64: 20.0}

    def script(request: Request):
        return [rng.random() < 0.7 for _ in range(rng.choice([0, 1, 3, 16]))], rng.random()

    desk = Desk(odd, suffix=script, ngram=script, draft=script, draft_seconds=0.1, max_step_tokens=40)
    running: list[Request] = []
    for _ in range(1500):
        while len(running) < rng.randint(1, 12):
            wishes: dict[str, Any] = rng.choice(
                [{}, {}, {"mode": "on", "max_depth": 2}, {"mode": "off"}, {"method": "draft"}]
            )
            running.append(request_of(length=rng.randint(2, 40), max_length=rng.randint(45, 120), **wishes))
        room = {request.id: request.max_useful_depth for request in running}
        outcomes = desk.step(running)
        assert sum(o.choice.depth for o in outcomes if o.request.params.speculation.mode is None) <= 40
        for outcome in outcomes:
            wish, choice = outcome.request.params.speculation, outcome.choice
            assert 0 <= choice.depth <= min(room[outcome.request.id], 2 if wish.mode == "on" else 8)
            assert wish.mode != "off" or not choice.depth
            assert not choice.depth or wish.method in (None, choice.method)
        running = [request for request in running if request.finish_reason is None]
    assert len(desk.policy._seats) == len(running)


# ---- faults once found


def test_what_is_left_out_for_a_draft_of_no_tokens_is_no_trial():
    desk, who = Desk(USUAL, suffix=nothing, draft=nothing, draft_seconds=0.01), request_of(length=2)
    before = expected_of(desk, who, 4, 0.9)
    desk.run([who], 50)
    assert expected_of(desk, who, 4, 0.9) == pytest.approx(before)


def test_reading_for_a_request_that_ends_in_that_very_step_is_a_loss():
    desk = Desk(FLAT, draft=always(), allowed_loss=0.0)
    who = request_of(length=50, max_length=52, method="draft")
    read_and_end(desk, who)
    assert desk.policy.ledger.is_in_debt


def test_what_was_read_for_a_request_that_insists_on_drafts_is_no_ones_loss():
    """Its steps are kept out of the books: so is what ends with it."""
    desk = Desk(FLAT, draft=always(), allowed_loss=0.0)
    who = request_of(length=50, max_length=100, mode="on", method="draft")
    read_and_end(desk, who)
    assert not desk.policy.ledger.is_in_debt and desk.policy.ledger.estimated_speedup is None
    assert desk.policy._parts is not None
    assert desk.policy._parts.drafting.reading.record.is_worth_trying, "nor does it keep others from reading"
    assert desk.policy._parts.books.mean_gain == 1.0


def read_and_end(desk: Desk, who: Request) -> None:
    """One step: the draft model reads for five seconds, its token is refused, and the request is over."""
    [choice] = desk.policy.decide([who], {})
    choice = Choice("draft", 1, draft=Draft([WRONG], "draft"), ask=choice.ask or DraftAsk(who, 1))
    who.tokens.append(RIGHT)
    who.finish_reason = "stop"
    outcomes = [Outcome(who, choice, Verdict([RIGHT], 1, 0))]
    desk.policy.observe(outcomes)
    stats = StepStats(num_decode_rows=1, num_emitted=1, draft_seconds=5.0, forward_seconds=1.0)
    desk.policy.account(outcomes, stats, reading_seconds=5.0)
    desk.policy.release(who)
