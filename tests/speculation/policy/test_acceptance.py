"""The estimated chance of a draft token, its uncertainty, and how fast it follows observations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace.core import Draft, MeasuredAcceptance, Request, StepStats, Verdict
from outpace.speculation.policy.acceptance import Acceptance, RequestShift, temperature_class
from outpace.speculation.policy.state import Choice, Outcome
from outpace.speculation.proposers.base import DraftAsk
from tests.session_driver import FLAT, RIGHT, WRONG, SessionDriver, always, model_costs, nothing, request_of

COLD, HOT = temperature_class(0.0), temperature_class(1.2)


@dataclass
class Who:
    """A request, as acceptance sees it."""

    acceptance: Acceptance
    temperature: int = COLD
    shift: float = 0.0
    step: int = 0
    shifts: dict[str, RequestShift] = field(default_factory=dict)

    @property
    def own_shift(self) -> RequestShift:
        return self.acceptance.shift_of(self.shifts, "any", self.shift, self.step)

    def see(self, hits: int, trials: int, confidence: Sequence[float] = (), *, steps: int = 1) -> None:
        """Of `trials` tokens the first `hits` were accepted. Without confidence they are counted by position, as for a
        model's forecast."""
        for _ in range(steps):
            fates = [float(i < hits) for i in range(trials)]
            self.acceptance.learn(self.temperature, self.own_shift, confidence, fates)
            self.step += 1

    def chance(self, confidence: float) -> float:
        return self.chance_at(confidence, self.own_shift.mean)

    def chance_at(self, confidence: float, shift: float) -> float:
        return self.acceptance.survival(self.temperature, [confidence], shift, 0.0)[0]

    @property
    def doubt(self) -> float:
        """Log-odds between its mean and its lower bound."""
        return self.acceptance.doubt(self.temperature, self.own_shift, 1)

    def low_chance(self, confidence: float) -> float:
        return self.chance_at(confidence, self.own_shift.mean - self.doubt)

    def forecast(self, depth: int) -> list[float]:
        """The chance of each token to be reached and accepted, before anything is drafted."""
        totals = self.acceptance.forecast(self.temperature, depth, self.own_shift.mean)
        return [after - before for before, after in pairwise([0.0, *totals])]


def lookup() -> Acceptance:
    return Acceptance(is_lookup=True)


def model() -> Acceptance:
    return Acceptance(is_lookup=False)


def test_temperature_classes_are_cut_where_they_say():
    assert [temperature_class(t) for t in (0.0, 0.01, 0.5, 0.51, 0.9, 0.91, 2.0)] == [0, 1, 1, 2, 2, 3, 3]


# ---- before any traffic


@pytest.mark.parametrize("make", [lookup, model])
def test_hotter_text_is_believed_harder_to_draft(make):
    requests = [Who(make(), temperature) for temperature in range(4)]
    for chances in ([who.chance(0.8) for who in requests], [who.forecast(1)[0] for who in requests]):
        assert chances == sorted(chances, reverse=True) and chances[0] > chances[-1]


def test_a_lookup_is_trusted_less_by_heat_than_a_model():
    """The model draws at the same temperature, so its distribution includes the effect."""
    of_lookup, of_model = ([Who(make(), kind).chance(0.8) for kind in (COLD, HOT)] for make in (lookup, model))
    assert of_lookup[0] - of_lookup[1] > of_model[0] - of_model[1]


@pytest.mark.parametrize("make", [lookup, model])
def test_more_confidence_is_believed_more_and_at_first_as_much_as_is_claimed(make):
    who = Who(make())
    claims = np.linspace(0.02, 0.98, 40)
    believed = [who.chance(float(claim)) for claim in claims]
    assert all(a <= b for a, b in pairwise(believed))
    assert believed == pytest.approx(claims.tolist(), abs=0.5 / 16 + 0.001), "confidence has 16 buckets"


def test_a_wish_shifts_what_is_believed_and_evidence_takes_over():
    hopeful, doubtful = Who(lookup(), shift=0.5), Who(lookup(), shift=-0.5)
    assert hopeful.chance(0.7) > doubtful.chance(0.7)
    apart = hopeful.chance(0.7) - doubtful.chance(0.7)
    for who in (hopeful, doubtful):
        who.see(0, 1, [0.7], steps=40)
        assert who.chance(0.7) < 0.2
    assert abs(hopeful.chance(0.7) - doubtful.chance(0.7)) < apart / 2


@given(st.floats(0, 1, exclude_max=True), st.integers(0, 3), st.booleans())
@settings(max_examples=40)
def test_nothing_is_believed_to_be_certain(confidence, temperature, right):
    who = Who(lookup(), temperature)
    who.see(int(right), 1, [confidence], steps=50)
    who.see(int(right), 1, steps=50)
    assert 0 < who.chance(confidence) < 1
    assert 0 < who.forecast(1)[0] < 1


def test_a_confidence_of_one_is_certain_and_teaches_nothing():
    who = Who(lookup(), 3)
    before = who.chance(0.99)
    who.see(2, 2, [1.0, 1.0], steps=50)
    assert who.chance(1.0) == 1.0 and who.chance(0.99) == pytest.approx(before, abs=0.02)


# ---- learning


@pytest.mark.parametrize("truth", [0.15, 0.5, 0.9])
def test_means_learn_what_happens(truth):
    rng, acceptance = np.random.default_rng(3), lookup()
    for _ in range(40):
        who = Who(acceptance)
        for _ in range(20):
            who.see(int(rng.uniform() < truth), 1, [0.6])
    assert Who(acceptance).chance(0.6) == pytest.approx(truth, abs=0.15)


@pytest.mark.parametrize("truth", [0.15, 0.5, 0.9])
def test_means_of_a_models_drafts_learn_what_happens_before_anything_is_drafted(truth):
    rng, acceptance = np.random.default_rng(3), model()
    for _ in range(40):
        who = Who(acceptance)
        for _ in range(20):
            who.see(int(rng.uniform() < truth), 1)
    assert Who(acceptance).forecast(1)[0] == pytest.approx(truth, abs=0.15)
    assert acceptance.rate(COLD) == pytest.approx(Who(acceptance).forecast(1)[0], abs=0.02)


@pytest.mark.parametrize("overrated", [-1.0, 0.0, 1.5])
def test_what_confidence_is_worth_is_learned(overrated):
    """A proposer that is over- or underconfident by so many log-odds, for many requests."""
    rng, acceptance = np.random.default_rng(3), lookup()
    for _ in range(100):
        who = Who(acceptance)
        for _ in range(20):
            odds = rng.uniform(-2, 3)
            claim, truth = 1 / (1 + np.exp(-odds)), 1 / (1 + np.exp(overrated - odds))
            who.see(int(rng.uniform() < truth), 1, [float(claim)])
    for odds in (-1.0, 0.0, 1.0, 2.0):
        truth = 1 / (1 + np.exp(overrated - odds))
        assert Who(acceptance).chance(1 / (1 + np.exp(-odds))) == pytest.approx(truth, abs=0.25)


def test_rates_are_learned_by_position():
    """A draft whose first token is good and whose later ones are not."""
    acceptance = model()
    for _ in range(100):
        Who(acceptance).see(1, 2, steps=3)
    first, second = Who(acceptance).forecast(2)
    assert first > 0.75 and second < 0.4 * first


def test_a_request_is_known_after_a_few_of_its_own_trials():
    acceptance = lookup()
    good, bad = Who(acceptance), Who(acceptance)
    before = bad.chance(0.7)
    for _ in range(8):
        good.see(4, 4, [0.7] * 4)
        bad.see(0, 1, [0.7])
    assert good.chance(0.7) > 0.75 and bad.chance(0.7) < min(0.5, before - 0.15)
    assert bad.chance(0.7) < Who(acceptance).chance(0.7) - 0.2 < good.chance(0.7), "it is known to be no usual one"
    bad.see(0, 1, [0.7], steps=6)
    assert bad.chance(0.7) < 0.4


def test_one_trial_moves_belief_and_settles_nothing():
    who = Who(lookup())
    before = who.chance(0.7)
    who.see(0, 1, [0.7])
    assert 0.1 < who.chance(0.7) < before


def test_what_one_request_showed_is_the_start_of_the_next():
    acceptance = lookup()
    for _ in range(10):
        Who(acceptance).see(0, 1, [0.7], steps=10)
    assert Who(acceptance).chance(0.7) < Who(lookup()).chance(0.7) - 0.2


def test_traffic_that_changes_is_followed():
    acceptance = lookup()
    for hits in (1, 0, 1):
        for _ in range(60):
            Who(acceptance).see(hits, 1, [0.7], steps=5)
        believed = Who(acceptance).chance(0.7)
        assert believed > 0.6 if hits else believed < 0.45


# ---- the lower bound


@pytest.mark.parametrize("confidence", [0.2, 0.6, 0.95])
def test_the_lower_bound_is_below_the_mean_and_closes_with_evidence(confidence):
    acceptance = lookup()
    gaps = []
    for _ in range(4):
        who = Who(acceptance)
        gaps.append(who.doubt)
        assert 0.0 < who.low_chance(confidence) < who.chance(confidence)
        for _ in range(12):
            seen = Who(acceptance)
            seen.see(1, 1, [confidence], steps=4)
            seen.see(0, 1, [confidence])
    assert all(later < earlier for earlier, later in pairwise(gaps))


def test_a_request_with_trials_of_its_own_is_doubted_less():
    acceptance = lookup()
    known, fresh = Who(acceptance), Who(acceptance)
    for i in range(20):
        known.see(i % 2, 1, [0.7])
    assert known.doubt < 0.97 * fresh.doubt


@pytest.mark.parametrize("hits", [0, 1])
@pytest.mark.parametrize("confidence", [0.7, 0.95])
def test_a_request_whose_drafts_all_fare_alike_is_doubted_no_more_than_a_new_one(hits, confidence):
    """Confirming evidence does not raise the uncertainty."""
    acceptance = lookup()
    known, fresh = Who(acceptance), Who(acceptance)
    known.see(hits, 1, [confidence], steps=60)
    assert known.doubt <= fresh.doubt


def test_evidence_of_one_temperature_closes_no_bound_of_another():
    acceptance = lookup()
    before = Who(acceptance, HOT).doubt
    for _ in range(10):
        Who(acceptance, COLD).see(1, 1, [0.7], steps=10)
    assert Who(acceptance, HOT).doubt == pytest.approx(before)
    assert Who(acceptance, COLD).doubt < before


# ---- what was never tried


def test_tokens_after_a_refusal_are_no_evidence():
    """Of eight tokens one was accepted and one rejected; the six after it were not tried."""
    long, short = Who(lookup()), Who(lookup())
    for who, drafted in ((long, 8), (short, 2)):
        who.see(1, 2, [0.8] * drafted, steps=10)
    assert long.chance(0.8) == short.chance(0.8)
    assert long.low_chance(0.8) == short.low_chance(0.8)


def test_a_draft_refused_at_its_first_token_says_nothing_of_the_others():
    """A model's first of four tokens was rejected: that does not change the chance of the second."""
    acceptance = model()
    first, second = Who(acceptance).forecast(2)
    Who(acceptance).acceptance.learn(COLD, Who(acceptance).own_shift, (), [0.0])
    worse, later = Who(acceptance).forecast(2)
    assert worse < first
    assert later / worse == pytest.approx(second / first)


def test_no_trial_is_no_evidence():
    who = Who(lookup())
    before = who.chance(0.7), who.low_chance(0.7), who.forecast(3)
    who.acceptance.learn(COLD, who.own_shift, [], [])
    who.acceptance.learn(COLD, who.own_shift, [0.7, 0.7], [])
    assert (who.chance(0.7), who.low_chance(0.7), who.forecast(3)) == before


def test_a_token_before_which_a_draft_stopped_counts_as_what_its_confidence_is_worth():
    """Otherwise only confident tokens would count, and drafts would seem better than they are."""
    driver, who = SessionDriver(FLAT, draft=always(sure=0.02), draft_seconds=0.02), request_of(length=2)
    before = driver.policy.acceptances["draft"].rate(COLD)
    learn(driver, who, Draft([], "draft", confidence=[0.02]), num_accepted=0, times=10)
    assert driver.policy.acceptances["draft"].rate(COLD) < before - 0.1


def test_a_draft_is_one_trial_for_each_token_whether_or_not_it_claims_a_confidence():
    """The forecast before drafting is counted by position: once in both cases."""
    rates = []
    for confidence in ([0.78], []):
        driver, who = SessionDriver(FLAT, models={"any": (nothing, model_costs(0.02))}), request_of(length=2)
        learn(driver, who, Draft([WRONG], "any", confidence=list(confidence)), num_accepted=0)
        rates.append(driver.policy.acceptances["any"].rate(COLD))
    assert rates[0] == pytest.approx(rates[1], abs=0.005)


@pytest.mark.parametrize("right", [True, False])
def test_a_models_confidence_is_worth_the_same_whether_one_request_or_many_have_shown_it(right):
    """What a request's own texts are like is in its confidence already: a shift must not explain it a second time."""
    worth = []
    for num_requests in (1, 12):
        driver = SessionDriver(FLAT, models={"any": (nothing, model_costs(0.02))})
        requests = [request_of(length=2) for _ in range(num_requests)]
        for i in range(12):
            draft = Draft([RIGHT if right else WRONG], "any", confidence=[0.5])
            learn(driver, requests[i % num_requests], draft, num_accepted=int(right))
        worth.append(driver.policy.acceptances["any"].chance(COLD, 0.5))
    assert worth[0] == pytest.approx(worth[1]) and abs(worth[0] - 0.5) > 0.2


def learn(driver: SessionDriver, who: Request, draft: Draft, *, num_accepted: int, times: int = 1) -> None:
    """A model made this draft on request, and `num_accepted` of its tokens were accepted."""
    for _ in range(times):
        decision = driver.policy.decide([who], lambda asks: {})
        while decision.is_idle:
            decision = driver.policy.decide([who], lambda asks: {})
        choice = Choice(draft.proposer, max(1, len(draft.tokens)), draft=draft, ask=DraftAsk(who, 1))
        decision.choices[0] = choice
        verdict = Verdict([*draft.tokens[:num_accepted], RIGHT], len(draft.tokens), num_accepted)
        stats = StepStats(num_decode_rows=1, num_emitted=num_accepted + 1, forward_seconds=1.0)
        driver.policy.learn(decision, [Outcome(who, choice, verdict)], stats, 0.0)


# ---- texts that change


def test_a_request_not_seen_lately_returns_to_what_is_general():
    acceptance = lookup()
    who, fresh = Who(acceptance), Who(acceptance)
    who.see(0, 1, [0.7], steps=10)
    gaps = [fresh.chance(0.7) - who.chance(0.7)]
    for _ in range(5):
        who.step += 60
        gaps.append(fresh.chance(0.7) - who.chance(0.7))
    assert gaps == sorted(gaps, reverse=True) and gaps[0] > 0.05 and gaps[-1] == pytest.approx(0.0, abs=0.03)


def test_a_request_not_seen_lately_is_doubted_more_again():
    acceptance = lookup()
    who = Who(acceptance)
    for i in range(20):
        who.see(i % 2, 1, [0.7])
    before = who.doubt
    who.step += 100
    assert who.doubt > before


def test_a_text_that_turns_from_prose_to_copying_is_noticed_soon():
    who, steps = Who(lookup()), 0
    who.see(0, 1, [0.7], steps=200)
    assert who.chance(0.7) < 0.15
    while who.chance(0.7) < 0.6:
        who.see(1, 1, [0.7])
        steps += 1
        assert steps <= 30
    who.see(1, 1, [0.7], steps=200)
    while who.chance(0.7) > 0.4:
        who.see(0, 1, [0.7])
        steps += 1
        assert steps <= 60, "and back"


# ---- many requests


@given(st.integers(0, 3), st.lists(st.floats(0.0, 1.0), min_size=1, max_size=8), st.floats(0.0, 1.0), st.integers(0, 3))
@settings(max_examples=50)
def test_survival_is_the_product_of_chances_down_to_the_least_that_matters(temperature, confidence, least, misses):
    who = Who(lookup(), temperature, shift=0.3)
    who.see(0, 1, [0.6], steps=misses)
    whole = np.cumprod([who.chance(each) for each in confidence]).tolist()
    cut = who.acceptance.survival(temperature, confidence, who.own_shift.mean, least)
    assert cut == pytest.approx(whole[: len(cut)])
    assert all(chance >= least for chance in cut)
    assert len(cut) == len(whole) or whole[len(cut)] < least + 1e-12


@given(st.integers(1, 12), st.integers(0, 3))
def test_a_deeper_forecast_begins_like_a_shallower_one(depth, temperature):
    who = Who(model(), temperature)
    who.see(1, 2, steps=5)
    deeper = who.forecast(12)
    assert who.forecast(depth) == pytest.approx(deeper[:depth]) and len(deeper) == 12
    assert all(a >= b for a, b in pairwise(deeper))
    assert who.forecast(0) == []


def test_requests_differ_and_share_what_is_general_and_nothing_else():
    """Drafts fail for three of a hundred requests: the others start like a new one."""
    acceptance = lookup()
    requests = [Who(acceptance) for _ in range(100)]
    for bad in requests[::40]:
        bad.see(0, 1, [0.7], steps=12)
    fresh = Who(acceptance).chance(0.7)
    for i, who in enumerate(requests):
        believed = who.chance(0.7)
        assert (believed < fresh - 0.03) if i % 40 == 0 else (believed == pytest.approx(fresh))


@pytest.mark.parametrize("right", [True, False])
def test_a_trial_for_eight_of_many_requests_teaches_as_much_as_one_for_eight_alone(right):
    """Requests without the model's drafts do not take the turns of those that have them."""
    driver = SessionDriver(FLAT, suffix=always(), draft=always(right, sure=0.9), draft_seconds=0.01)
    tried = [request_of(length=2, method="draft") for _ in range(8)]
    others = [request_of(length=2, method="suffix") for _ in range(24)]
    driver.step([*others, *tried])
    alone = SessionDriver(FLAT, draft=always(right, sure=0.9), draft_seconds=0.01)
    alone.step([request_of(length=2, method="draft") for _ in range(8)])
    rates = [each.policy.acceptances["draft"].rate(COLD) for each in (driver, alone)]
    assert rates[0] == pytest.approx(rates[1])
    assert abs(rates[0] - model().rate(COLD)) > 0.05


@pytest.mark.parametrize("num_requests", [1, 8, 40])
def test_every_draft_of_a_step_teaches_once_what_all_requests_share(num_requests, monkeypatch):
    driver, learned = SessionDriver(FLAT, suffix=always()), list[RequestShift]()
    acceptance = driver.policy.acceptances["suffix"]
    learn = acceptance.learn

    def counted(temperature, shift, confidence, fates):
        learned.append(shift)
        learn(temperature, shift, confidence, fates)

    monkeypatch.setattr(acceptance, "learn", counted)
    driver.step([request_of(length=2) for _ in range(num_requests)])
    assert len(learned) == len(set(map(id, learned))) == num_requests


def _shift_of_three_misses(rates: Sequence[float]) -> float:
    """How far three misses in a row shift a new request, in log-odds, after requests with these rates."""
    acceptance, rng = lookup(), np.random.default_rng(3)
    for _ in range(40):
        for right in rates:
            who = Who(acceptance)
            for _ in range(30):
                who.see(int(rng.uniform() < right), 1, [0.7])
            acceptance.end(COLD, who.own_shift, by_position=False)
    who = Who(acceptance)
    who.see(0, 1, [0.7], steps=3)
    return -who.own_shift.mean


def test_where_requests_are_alike_a_few_misses_are_bad_luck():
    alike, mixed = _shift_of_three_misses([0.6]), _shift_of_three_misses([0.2, 0.95])
    assert 0.0 < alike < 0.75 * mixed


def test_temperature_classes_teach_each_other_nothing():
    """A request learns the same alone as beside requests of other temperatures."""
    seen = [(0, 1, [0.9]), (2, 2, [0.6, 0.7]), (1, 2, [0.2, 0.5]), (3, 4, [0.8, 0.8, 0.6, 0.4])]
    together = lookup()
    beside = [Who(together, kind) for kind in range(4)]
    for who, (hits, tried, confidence) in zip(beside, seen, strict=True):
        who.see(hits, tried, confidence)
        who.see(hits, tried)
    for kind, (hits, tried, confidence) in enumerate(seen):
        alone = Who(lookup(), kind)
        alone.see(hits, tried, confidence)
        alone.see(hits, tried)
        assert alone.forecast(6) == pytest.approx(beside[kind].forecast(6))
        assert alone.chance(0.7) == pytest.approx(beside[kind].chance(0.7))
        assert alone.low_chance(0.7) == pytest.approx(beside[kind].low_chance(0.7))


def test_a_request_that_is_first_asked_about_late_starts_at_that_step():
    """A proposer not tried for a thousand steps has not been forgotten for a thousand steps."""
    early, late = Who(lookup(), shift=0.5), Who(lookup(), shift=0.5)
    late.step = 1000
    assert early.chance(0.7) == late.chance(0.7)
    for who in (early, late):
        who.see(0, 1, [0.7], steps=3)
    assert early.chance(0.7) == late.chance(0.7)


def test_proposers_are_known_apart():
    driver, who = SessionDriver(FLAT, suffix=always(False), ngram=always(True)), request_of()
    before = {name: each.chance(COLD, 0.9) for name, each in driver.policy.acceptances.items()}
    driver.run([who], 20)
    after = {name: each.chance(COLD, 0.9) for name, each in driver.policy.acceptances.items()}
    assert after["suffix"] < before["suffix"] - 0.2 and after["ngram"] > before["ngram"]


def test_a_measurement_on_other_prompts_is_where_forecasts_begin() -> None:
    measured = MeasuredAcceptance(greedy=(0.6, 0.5), sampled=(0.3,))
    acceptance = Acceptance(is_lookup=False, measured=measured)
    greedy, sampled = temperature_class(0.0), temperature_class(1.0)
    assert acceptance.forecast(greedy, 3, 0.0) == pytest.approx([0.6, 0.6 + 0.3, 0.6 + 0.3 + 0.15])
    assert acceptance.forecast(sampled, 2, 0.0) == pytest.approx([0.3, 0.3 + 0.09])
    between = acceptance.forecast(temperature_class(0.7), 1, 0.0)[0]
    assert 0.3 < between < 0.6
    unknown = Acceptance(is_lookup=False)
    shift = RequestShift(0.0, 0.0, 0)
    assert acceptance.doubt(greedy, shift, 1) < unknown.doubt(greedy, shift, 1)


def test_trials_outweigh_a_measurement() -> None:
    acceptance = Acceptance(is_lookup=False, measured=MeasuredAcceptance((0.9,), (0.9,)))
    for _ in range(200):
        acceptance.learn(0, RequestShift(0.0, 0.01, 0), (), [0.0])
    assert acceptance.rate(0) < 0.15


def test_what_is_forgotten_is_forgotten_by_position_and_by_confidence() -> None:
    """Otherwise a draft that stops before its first token, for its confidence, would stop there for ever."""
    acceptance, shift = Acceptance(is_lookup=False), RequestShift(0.0, 0.01, 0)
    first = acceptance.chance(0, 0.8), acceptance.rate(0)
    for _ in range(40):
        acceptance.learn(0, None, [0.8], [0.0])
        acceptance.learn(0, shift, (), [0.0])
    worst = acceptance.chance(0, 0.8), acceptance.rate(0)
    assert worst[0] < 0.5 * first[0] and worst[1] < 0.5 * first[1]
    for _ in range(2000):
        acceptance.forget()
    assert (acceptance.chance(0, 0.8), acceptance.rate(0)) == pytest.approx(first, rel=0.01)
