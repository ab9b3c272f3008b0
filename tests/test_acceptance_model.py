"""What is believed of a draft token's chances, and how soon what happens changes it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace.speculation.acceptance_model import TEMPERATURES, AcceptanceModel, Prospects, temperature_class

TEXT, NEURAL = "suffix", "draft"


def model() -> AcceptanceModel:
    return AcceptanceModel([TEXT, NEURAL])


def rate(beliefs: AcceptanceModel, who: Prospects, *, method: str = TEXT, position: int = 0) -> float:
    """Believed of the draft token at this position, before anything was drafted."""
    return beliefs.forecast(method, who, position + 1)[position]


def worth(beliefs: AcceptanceModel, who: Prospects, confidence: float, *, method: str = TEXT) -> float:
    [believed] = beliefs.given_confidence(method, who, [confidence])
    return believed


def see(
    beliefs: AcceptanceModel,
    who: Prospects,
    hits: int,
    trials: int,
    confidence: Sequence[float] = (),
    *,
    method: str = TEXT,
    steps: int = 1,
) -> None:
    for _ in range(steps):
        beliefs.observe(method, who, confidence, hits, trials)
        who.step += 1


def test_temperature_classes_cut_where_they_say():
    assert [temperature_class(t) for t in (0.0, 0.01, 0.5, 0.51, 0.9, 0.91, 2.0)] == [0, 1, 1, 2, 2, 3, 3]
    assert len(TEMPERATURES) == 3


# ---- before any traffic


def test_hotter_text_is_believed_harder_to_guess():
    beliefs, requests = model(), [Prospects(kind) for kind in range(4)]
    rates = [rate(beliefs, who) for who in requests]
    assert rates == sorted(rates, reverse=True) and rates[0] > rates[-1]
    worths = [worth(beliefs, who, 0.8) for who in requests]
    assert worths == sorted(worths, reverse=True) and worths[0] > worths[-1]


def test_more_confidence_is_believed_more_and_none_is_believed_whole():
    beliefs, who = model(), Prospects(0)
    claims = np.linspace(0.05, 0.99, 20)
    believed = [worth(beliefs, who, float(claim)) for claim in claims]
    assert all(a < b for a, b in pairwise(believed))
    assert worth(beliefs, who, 0.95) < 0.95, "proposers flatter themselves"


def test_what_is_known_beforehand_shifts_what_is_believed_and_evidence_takes_over():
    beliefs = model()
    hopeful, doubtful = Prospects(0, 0.5), Prospects(0, -0.5)
    assert rate(beliefs, hopeful) > rate(beliefs, doubtful)
    assert worth(beliefs, hopeful, 0.7) > worth(beliefs, doubtful, 0.7)
    for who in (hopeful, doubtful):
        see(beliefs, who, 0, 1, steps=40)
    assert rate(beliefs, hopeful) < 0.2
    assert rate(beliefs, hopeful) == pytest.approx(rate(beliefs, doubtful), abs=0.05)


@given(st.floats(0, 1), st.integers(0, 3))
def test_nobody_claims_to_be_certain(confidence, kind):
    beliefs, who = model(), Prospects(kind)
    see(beliefs, who, 1, 1, [confidence], steps=50)
    assert 0 < worth(beliefs, who, confidence) < 1
    assert 0 < rate(beliefs, who) < 1


# ---- learning from few trials


def test_a_request_is_known_after_a_few_of_its_own_trials():
    beliefs, good, bad = model(), Prospects(0), Prospects(0)
    for _ in range(8):
        see(beliefs, good, 4, 4)
        see(beliefs, bad, 0, 1)
    assert rate(beliefs, good) > 0.75 and rate(beliefs, bad) < 0.35


def test_one_trial_moves_belief_and_settles_nothing():
    beliefs, who = model(), Prospects(0)
    before = rate(beliefs, who)
    see(beliefs, who, 0, 1)
    assert 0.1 < rate(beliefs, who) < before


def test_what_one_request_showed_is_the_start_of_the_next():
    beliefs = model()
    for _ in range(10):
        see(beliefs, Prospects(0), 0, 1, steps=10)
    fresh = Prospects(0)
    assert rate(beliefs, fresh) < rate(model(), Prospects(0)) - 0.2
    assert beliefs.general_rate(TEXT, 0.0) == pytest.approx(rate(beliefs, fresh))


def test_the_general_rate_is_kept_by_temperature_and_by_proposer():
    beliefs = model()
    before = {(m, t): beliefs.general_rate(m, t) for m in (TEXT, NEURAL) for t in (0.0, 0.4, 0.7, 1.0)}
    see(beliefs, Prospects(temperature_class(0.7)), 0, 1, method=TEXT, steps=20)
    for (method, temperature), known in before.items():
        moved = beliefs.general_rate(method, temperature) != known
        assert moved == ((method, temperature) == (TEXT, 0.7))


def test_traffic_that_changes_is_followed():
    beliefs = model()
    for hits in (1, 0, 1):
        for _ in range(60):
            see(beliefs, Prospects(0), hits, 1, steps=5)
        believed = beliefs.general_rate(TEXT, 0.0)
        assert believed > 0.6 if hits else believed < 0.45


@pytest.mark.parametrize("flattery", [-1.0, 0.0, 1.5])
def test_what_confidence_is_worth_is_learned(flattery):
    """A proposer that over- or underrates itself by so many log-odds, seen through many requests."""
    rng = np.random.default_rng(3)
    beliefs = model()
    for _ in range(60):
        who = Prospects(0)
        for _ in range(20):
            odds = rng.uniform(-2, 3)
            claim, truth = 1 / (1 + np.exp(-odds)), 1 / (1 + np.exp(flattery - odds))
            see(beliefs, who, int(rng.uniform() < truth), 1, [float(claim)])
    fresh = Prospects(0)
    for odds in (-1.0, 0.0, 1.0, 2.0):
        truth = 1 / (1 + np.exp(flattery - odds))
        assert worth(beliefs, fresh, 1 / (1 + np.exp(-odds))) == pytest.approx(truth, abs=0.2)


def test_rates_are_learned_by_position():
    """A draft whose first token is good and whose later ones are not."""
    beliefs = model()
    for _ in range(100):
        see(beliefs, Prospects(0), 1, 2, steps=3)
    fresh = Prospects(0)
    assert rate(beliefs, fresh, position=0) > 0.75 > 0.4 > rate(beliefs, fresh, position=1)


# ---- what was never tried


def test_a_draft_accepted_whole_says_nothing_of_the_token_after_it():
    """Two tokens accepted of two: the general rate of the third position stays what it was."""
    beliefs = model()
    who, fresh = Prospects(0), Prospects(0)
    before = beliefs.forecast(TEXT, fresh, 4)
    see(beliefs, who, 2, 2, steps=10)
    after = beliefs.forecast(TEXT, fresh, 4)
    assert after[0] > before[0] and after[1] > before[1] and after[2:] == before[2:]


def test_tokens_after_a_refusal_are_not_counted():
    """Of eight tokens one was accepted and one refused; the six behind were never tried."""
    long, short = (model(), Prospects(0)), (model(), Prospects(0))
    for (beliefs, who), drafted in ((long, 8), (short, 2)):
        see(beliefs, who, 1, 2, [0.8] * drafted, steps=10)
    assert long[0].forecast(TEXT, long[1], 6) == short[0].forecast(TEXT, short[1], 6)
    assert worth(*long, 0.8) == worth(*short, 0.8)


def test_no_trial_is_no_evidence():
    beliefs, who = model(), Prospects(0)
    before = rate(beliefs, who), worth(beliefs, who, 0.7)
    beliefs.observe(TEXT, who, [], 0, 0)
    assert (rate(beliefs, who), worth(beliefs, who, 0.7)) == before


def test_a_token_left_unsaid_for_want_of_confidence_counts_as_what_that_is_worth():
    """Else only confident tokens would be tried, and drafts would seem better than they are."""
    beliefs, who = model(), Prospects(0)
    before = rate(beliefs, who, method=NEURAL)
    for _ in range(10):
        beliefs.observe_unsaid(NEURAL, who, 0.05, 0)
    assert rate(beliefs, who, method=NEURAL) < before - 0.1
    high = model()
    who = Prospects(0)
    for _ in range(10):
        high.observe_unsaid(NEURAL, who, 0.05, 2)
    assert rate(high, Prospects(0), method=NEURAL) == before, "in general, only of its own position"


# ---- texts that change


def test_a_request_not_seen_lately_returns_to_what_is_general():
    beliefs, who = model(), Prospects(0)
    see(beliefs, who, 0, 1, steps=10)
    fresh = Prospects(0)
    gap = rate(beliefs, fresh) - rate(beliefs, who)
    gaps = [gap]
    for _ in range(5):
        who.step += 60
        gaps.append(rate(beliefs, fresh) - rate(beliefs, who))
    assert gaps == sorted(gaps, reverse=True) and gaps[0] > 0.1 and gaps[-1] == pytest.approx(0.0, abs=0.02)


@pytest.mark.parametrize("confidence", [None, 0.7])
def test_a_text_that_turns_from_prose_to_copying_is_noticed_soon(confidence):
    sure = [] if confidence is None else [confidence]

    def believed() -> float:
        return rate(beliefs, who) if confidence is None else worth(beliefs, who, confidence)

    beliefs, who = model(), Prospects(0)
    see(beliefs, who, 0, 1, sure, steps=200)
    assert believed() < 0.15
    steps = 0
    while believed() < 0.6:
        see(beliefs, who, 1, 1, sure)
        steps += 1
        assert steps <= 25
    see(beliefs, who, 1, 1, sure, steps=200)
    while believed() > 0.4:
        see(beliefs, who, 0, 1, sure)
        steps += 1
        assert steps <= 50, "and back"


# ---- many requests


@given(st.integers(0, 3), st.lists(st.floats(0.0, 1.0), min_size=1, max_size=8), st.floats(0.0, 1.0), st.integers(0, 3))
@settings(max_examples=50)
def test_survival_is_the_product_of_chances_down_to_the_least_that_matters(kind, confidence, least, misses):
    beliefs, who = model(), Prospects(kind, 0.3)
    see(beliefs, who, 0, 1, [0.6], steps=misses)
    whole = np.cumprod(beliefs.given_confidence(TEXT, who, confidence)).tolist()
    cut = beliefs.survival(TEXT, who, confidence, least)
    assert cut == pytest.approx(whole[: len(cut)])
    assert all(chance >= least for chance in cut)
    assert len(cut) == len(whole) or whole[len(cut)] < least + 1e-12


@given(st.integers(1, 12), st.integers(0, 3))
def test_a_deeper_forecast_begins_like_a_shallower_one(depth, kind):
    beliefs, who = model(), Prospects(kind)
    see(beliefs, who, 1, 2, steps=5)
    deeper = beliefs.forecast(TEXT, who, 12)
    assert beliefs.forecast(TEXT, who, depth) == deeper[:depth] and len(deeper) == 12
    assert beliefs.forecast(TEXT, who, 0) == []


def test_a_request_learns_of_each_proposer_and_way_of_guessing_by_itself():
    beliefs, who, fresh = model(), Prospects(0), Prospects(0)
    see(beliefs, who, 0, 1, method=TEXT, steps=10)
    assert rate(beliefs, who, method=TEXT) < rate(beliefs, fresh, method=TEXT)
    assert rate(beliefs, who, method=NEURAL) == rate(beliefs, fresh, method=NEURAL)
    assert worth(beliefs, who, 0.7) == worth(beliefs, fresh, 0.7), "no confidence was given, so none was judged"


def test_requests_share_what_is_general_and_nothing_else():
    """Of a hundred requests, three fare badly: the others all start where a new one would."""
    beliefs = model()
    requests = [Prospects(0) for _ in range(100)]
    for bad in requests[::40]:
        see(beliefs, bad, 0, 1, [0.7], steps=12)
    fresh = rate(beliefs, Prospects(0))
    for i, who in enumerate(requests):
        believed = rate(beliefs, who)
        assert (believed < fresh - 0.05) if i % 40 == 0 else (believed == fresh)


def _shift_of_three_misses(rates: Sequence[float]) -> float:
    """What three misses in a row say of a new request, in log-odds, after traffic of requests with these rates."""
    beliefs, rng = model(), np.random.default_rng(3)
    for _ in range(40):
        for right in rates:
            who = Prospects(0)
            for _ in range(30):
                see(beliefs, who, int(rng.uniform() < right), 1, method=NEURAL)
            beliefs.end(who)
    who, fresh = Prospects(0), Prospects(0)
    before = rate(beliefs, fresh, method=NEURAL)
    see(beliefs, who, 0, 1, method=NEURAL, steps=3)
    after = rate(beliefs, who, method=NEURAL)
    return float(np.log(before / (1 - before)) - np.log(after / (1 - after)))


def test_where_requests_are_alike_a_few_misses_are_bad_luck():
    alike, mixed = _shift_of_three_misses([0.6]), _shift_of_three_misses([0.2, 0.95])
    assert alike < 0.6 < 1.2 < mixed


def test_requests_of_other_temperatures_teach_each_other_nothing():
    """One request of each temperature learns the same beside the others as alone."""
    seen = [(0, 1, [0.9]), (2, 2, [0.6, 0.7]), (1, 2, [0.2, 0.5]), (3, 4, [0.8, 0.8, 0.6, 0.4])]
    together, beside = model(), [Prospects(kind) for kind in range(4)]
    for who, (hits, tried, confidence) in zip(beside, seen, strict=True):
        see(together, who, hits, tried, confidence)
    for kind, (hits, tried, confidence) in enumerate(seen):
        alone, who = model(), Prospects(kind)
        see(alone, who, hits, tried, confidence)
        assert alone.forecast(TEXT, who, 6) == together.forecast(TEXT, beside[kind], 6)
        assert worth(alone, who, 0.7) == worth(together, beside[kind], 0.7)


def test_what_a_request_was_first_asked_about_late_starts_at_that_step():
    """A proposer not tried for a thousand steps has not been forgotten for a thousand steps."""
    early, late = (model(), Prospects(0, 0.5)), (model(), Prospects(0, 0.5))
    late[1].step = 1000
    for beliefs, who in (early, late):
        see(beliefs, who, 0, 1, [0.7], steps=3)
    assert rate(*early) == rate(*late) and worth(*early, 0.7) == worth(*late, 0.7)


def test_a_guess_from_text_is_trusted_less_the_hotter_and_a_models_own_confidence_as_it_is():
    """The model has drawn at that temperature, and says what it has done to its distribution."""
    beliefs = AcceptanceModel([TEXT, NEURAL], models=[NEURAL])
    cold, hot = (Prospects(temperature_class(temperature)) for temperature in (0.0, 1.0))
    [of_text], [of_hot_text] = (beliefs.given_confidence(TEXT, who, [0.8]) for who in (cold, hot))
    assert of_hot_text < of_text - 0.1
    assert beliefs.given_confidence(NEURAL, cold, [0.8]) == beliefs.given_confidence(NEURAL, hot, [0.8])
    [when_cold], [when_hot] = (beliefs.forecast(NEURAL, who, 1) for who in (cold, hot))
    assert when_cold - 0.1 < when_hot < when_cold, "before it has drafted, a little less is expected of it"


def test_drafts_of_one_token_speak_for_deeper_ones_until_those_speak_for_themselves():
    beliefs, who = AcceptanceModel([NEURAL]), Prospects(temperature_class(1.0))
    before = beliefs.forecast(NEURAL, who, 3)
    for _ in range(40):
        beliefs.observe(NEURAL, who, [], 1, 1, 1)
    first, second, third = beliefs.forecast(NEURAL, Prospects(temperature_class(1.0)), 3)
    assert first > before[0] + 0.15 and second == pytest.approx(first, abs=0.05) and third == pytest.approx(second)
    for _ in range(40):
        beliefs.observe(NEURAL, who, [], 1, 2, 2)
    first, second, third = beliefs.forecast(NEURAL, Prospects(temperature_class(1.0)), 3)
    assert second < first - 0.2, "the second token was refused every time"


def test_a_draft_refused_at_its_first_token_says_nothing_of_the_others():
    beliefs, who = AcceptanceModel([NEURAL]), Prospects(temperature_class(0.0))
    general = list(beliefs._methods[NEURAL].rates[0])
    beliefs.observe(NEURAL, who, [], 0, 1, 4)
    assert beliefs._methods[NEURAL].rates[0][1:] == general[1:]
