"""What is believed of a draft token's chances, and how soon what happens changes it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace.speculation.acceptance_model import TEMPERATURES, AcceptanceModel, temperature_class

TEXT, NEURAL = "suffix", "draft"


def model() -> AcceptanceModel:
    return AcceptanceModel([TEXT, NEURAL])


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.intp)


def rate(beliefs: AcceptanceModel, slot: int, *, kind: int = 0, method: str = TEXT, position: int = 0) -> float:
    """Believed of the draft token at this position, before anything was drafted."""
    return float(beliefs.forecast(method, ints(slot), ints(kind), position + 1)[0, position])


def worth(beliefs: AcceptanceModel, slot: int, confidence: float, *, kind: int = 0, method: str = TEXT) -> float:
    return float(beliefs.given_confidence(method, ints(slot), ints(kind), np.array([[confidence]]))[0, 0])


def see(
    beliefs: AcceptanceModel,
    slot: int,
    hits: int,
    trials: int,
    confidence: Sequence[float] | None = None,
    *,
    kind: int = 0,
    method: str = TEXT,
    steps: int = 1,
) -> None:
    sure = None if confidence is None else np.array([confidence])
    for _ in range(steps):
        beliefs.observe(method, ints(slot), ints(kind), sure, ints(hits), ints(trials))
        beliefs.pass_time(ints(slot))


def test_temperature_classes_cut_where_they_say():
    assert [temperature_class(t) for t in (0.0, 0.01, 0.5, 0.51, 0.9, 0.91, 2.0)] == [0, 1, 1, 2, 2, 3, 3]
    assert len(TEMPERATURES) == 3


# ---- before any traffic


def test_hotter_text_is_believed_harder_to_guess():
    beliefs = model()
    slot = beliefs.open()
    rates = [rate(beliefs, slot, kind=kind) for kind in range(4)]
    assert rates == sorted(rates, reverse=True) and rates[0] > rates[-1]
    worths = [worth(beliefs, slot, 0.8, kind=kind) for kind in range(4)]
    assert worths == sorted(worths, reverse=True) and worths[0] > worths[-1]


def test_more_confidence_is_believed_more_and_none_is_believed_whole():
    beliefs = model()
    slot = beliefs.open()
    claims = np.linspace(0.05, 0.99, 20)
    believed = [worth(beliefs, slot, float(claim)) for claim in claims]
    assert all(a < b for a, b in pairwise(believed))
    assert worth(beliefs, slot, 0.95) < 0.95, "proposers flatter themselves"


def test_what_is_known_beforehand_shifts_what_is_believed_and_evidence_takes_over():
    beliefs = model()
    hopeful, doubtful = beliefs.open(0.5), beliefs.open(-0.5)
    assert rate(beliefs, hopeful) > rate(beliefs, doubtful)
    assert worth(beliefs, hopeful, 0.7) > worth(beliefs, doubtful, 0.7)
    for slot in (hopeful, doubtful):
        see(beliefs, slot, 0, 1, steps=40)
    assert rate(beliefs, hopeful) < 0.2
    assert rate(beliefs, hopeful) == pytest.approx(rate(beliefs, doubtful), abs=0.05)


@given(st.floats(0, 1), st.integers(0, 3))
def test_nobody_claims_to_be_certain(confidence, kind):
    beliefs = model()
    slot = beliefs.open()
    see(beliefs, slot, 1, 1, [confidence], kind=kind, steps=50)
    assert 0 < worth(beliefs, slot, confidence, kind=kind) < 1
    assert 0 < rate(beliefs, slot, kind=kind) < 1


# ---- learning from few trials


def test_a_request_is_known_after_a_few_of_its_own_trials():
    beliefs = model()
    good, bad = beliefs.open(), beliefs.open()
    for _ in range(8):
        see(beliefs, good, 4, 4)
        see(beliefs, bad, 0, 1)
    assert rate(beliefs, good) > 0.75 and rate(beliefs, bad) < 0.35


def test_one_trial_moves_belief_and_settles_nothing():
    beliefs = model()
    slot = beliefs.open()
    before = rate(beliefs, slot)
    see(beliefs, slot, 0, 1)
    assert 0.1 < rate(beliefs, slot) < before


def test_what_one_request_showed_is_the_start_of_the_next():
    beliefs = model()
    for _ in range(10):
        slot = beliefs.open()
        see(beliefs, slot, 0, 1, steps=10)
        beliefs.close(slot)
    fresh = beliefs.open()
    assert rate(beliefs, fresh) < rate(model(), 0) - 0.2
    assert beliefs.general_rate(TEXT, 0.0) == pytest.approx(rate(beliefs, fresh))


def test_the_general_rate_is_kept_by_temperature_and_by_proposer():
    beliefs = model()
    slot = beliefs.open()
    before = {(m, t): beliefs.general_rate(m, t) for m in (TEXT, NEURAL) for t in (0.0, 0.4, 0.7, 1.0)}
    see(beliefs, slot, 0, 1, kind=temperature_class(0.7), method=TEXT, steps=20)
    for (method, temperature), known in before.items():
        moved = beliefs.general_rate(method, temperature) != known
        assert moved == ((method, temperature) == (TEXT, 0.7))


def test_traffic_that_changes_is_followed():
    beliefs = model()
    for hits in (1, 0, 1):
        for _ in range(60):
            slot = beliefs.open()
            see(beliefs, slot, hits, 1, steps=5)
            beliefs.close(slot)
        believed = beliefs.general_rate(TEXT, 0.0)
        assert believed > 0.6 if hits else believed < 0.45


@pytest.mark.parametrize("flattery", [-1.0, 0.0, 1.5])
def test_what_confidence_is_worth_is_learned(flattery):
    """A proposer that over- or underrates itself by so many log-odds, seen through many requests."""
    rng = np.random.default_rng(3)
    beliefs = model()
    for _ in range(60):
        slot = beliefs.open()
        for _ in range(20):
            odds = rng.uniform(-2, 3)
            claim, truth = 1 / (1 + np.exp(-odds)), 1 / (1 + np.exp(flattery - odds))
            see(beliefs, slot, int(rng.uniform() < truth), 1, [float(claim)])
        beliefs.close(slot)
    fresh = beliefs.open()
    for odds in (-1.0, 0.0, 1.0, 2.0):
        truth = 1 / (1 + np.exp(flattery - odds))
        assert worth(beliefs, fresh, 1 / (1 + np.exp(-odds))) == pytest.approx(truth, abs=0.2)


def test_rates_are_learned_by_position():
    """A draft whose first token is good and whose later ones are not."""
    beliefs = model()
    for _ in range(100):
        slot = beliefs.open()
        see(beliefs, slot, 1, 2, steps=3)
        beliefs.close(slot)
    fresh = beliefs.open()
    assert rate(beliefs, fresh, position=0) > 0.75 > 0.4 > rate(beliefs, fresh, position=1)


# ---- what was never tried


def test_a_draft_accepted_whole_says_nothing_of_the_token_after_it():
    """Two tokens accepted of two: the general rate of the third position stays what it was."""
    beliefs = model()
    slot, fresh = beliefs.open(), beliefs.open()
    before = beliefs.forecast(TEXT, ints(fresh), ints(0), 4)[0]
    see(beliefs, slot, 2, 2, steps=10)
    after = beliefs.forecast(TEXT, ints(fresh), ints(0), 4)[0]
    assert (after[:2] > before[:2]).all() and (after[2:] == before[2:]).all()


def test_tokens_after_a_refusal_are_not_counted():
    """Of eight tokens one was accepted and one refused; the six behind were never tried."""
    long, short = model(), model()
    for beliefs, drafted in ((long, 8), (short, 2)):
        slot = beliefs.open()
        see(beliefs, slot, 1, 2, [0.8] * drafted, steps=10)
    assert (long.forecast(TEXT, ints(slot), ints(0), 6) == short.forecast(TEXT, ints(slot), ints(0), 6)).all()
    assert worth(long, slot, 0.8) == worth(short, slot, 0.8)


def test_no_trial_is_no_evidence():
    beliefs = model()
    slot = beliefs.open()
    before = rate(beliefs, slot), worth(beliefs, slot, 0.7)
    beliefs.observe(TEXT, ints(slot), ints(0), np.zeros((1, 0)), ints(0), ints(0))
    assert (rate(beliefs, slot), worth(beliefs, slot, 0.7)) == before


def test_a_token_left_unsaid_for_want_of_confidence_counts_as_what_that_is_worth():
    """Else only confident tokens would be tried, and drafts would seem better than they are."""
    beliefs = model()
    slot = beliefs.open()
    before = rate(beliefs, slot, method=NEURAL)
    for _ in range(10):
        beliefs.observe_unsaid(NEURAL, ints(slot), ints(0), np.array([0.05]), ints(0))
    assert rate(beliefs, slot, method=NEURAL) < before - 0.1
    high = model()
    slot = high.open()
    for _ in range(10):
        high.observe_unsaid(NEURAL, ints(slot), ints(0), np.array([0.05]), ints(2))
    assert rate(high, high.open(), method=NEURAL) == before, "in general, only of its own position"


# ---- texts that change


def test_a_request_not_seen_lately_returns_to_what_is_general():
    beliefs = model()
    slot = beliefs.open()
    see(beliefs, slot, 0, 1, steps=10)
    fresh = beliefs.open()
    gap = rate(beliefs, fresh) - rate(beliefs, slot)
    gaps = [gap]
    for _ in range(5):
        for _ in range(60):
            beliefs.pass_time(ints(slot))
        gaps.append(rate(beliefs, fresh) - rate(beliefs, slot))
    assert gaps == sorted(gaps, reverse=True) and gaps[0] > 0.1 and gaps[-1] == pytest.approx(0.0, abs=0.02)


@pytest.mark.parametrize("confidence", [None, 0.7])
def test_a_text_that_turns_from_prose_to_copying_is_noticed_soon(confidence):
    sure = None if confidence is None else [confidence]

    def believed() -> float:
        return rate(beliefs, slot) if confidence is None else worth(beliefs, slot, confidence)

    beliefs = model()
    slot = beliefs.open()
    see(beliefs, slot, 0, 1, sure, steps=200)
    assert believed() < 0.15
    steps = 0
    while believed() < 0.6:
        see(beliefs, slot, 1, 1, sure)
        steps += 1
        assert steps <= 25
    see(beliefs, slot, 1, 1, sure, steps=200)
    while believed() > 0.4:
        see(beliefs, slot, 0, 1, sure)
        steps += 1
        assert steps <= 50, "and back"


# ---- many requests


CALLS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4), st.integers(1, 4)), min_size=1, max_size=6)


@given(CALLS, st.randoms(use_true_random=False))
@settings(max_examples=50)
def test_asking_about_a_batch_is_asking_one_by_one(rows, random):
    beliefs = model()
    slots = [beliefs.open(random.uniform(-1, 1)) for _ in rows]
    for slot, (kind, hits, trials) in zip(slots, rows, strict=True):
        see(beliefs, slot, min(hits, trials), trials, [0.6] * trials, kind=kind)
    kinds = ints(*(kind for kind, *_ in rows))
    confidence = np.array([[random.uniform(0, 1) for _ in range(5)] for _ in rows])
    together = beliefs.forecast(TEXT, ints(*slots), kinds, 5)
    calibrated = beliefs.given_confidence(TEXT, ints(*slots), kinds, confidence)
    assert together.shape == calibrated.shape == (len(rows), 5)
    for i, slot in enumerate(slots):
        alone = ints(slot), kinds[i : i + 1]
        assert (beliefs.forecast(TEXT, *alone, 5) == together[i]).all()
        assert (beliefs.given_confidence(TEXT, *alone, confidence[i : i + 1]) == calibrated[i]).all()


def test_learning_from_a_batch_is_learning_one_by_one_where_nothing_is_shared():
    """One request of each temperature, with drafts of different lengths."""
    hits, trials, kinds = ints(0, 2, 1, 3), ints(1, 2, 2, 4), ints(0, 1, 2, 3)
    confidence = np.array([[0.9, 0.0, 0.0, 0.0], [0.6, 0.7, 0.0, 0.0], [0.2, 0.5, 0.0, 0.0], [0.8, 0.8, 0.6, 0.4]])
    together, alone = model(), model()
    slots = ints(*(together.open() for _ in range(4)))
    assert [alone.open() for _ in range(4)] == slots.tolist()
    together.observe(TEXT, slots, kinds, confidence, hits, trials)
    for i in range(4):
        one = slice(i, i + 1)
        alone.observe(TEXT, slots[one], kinds[one], confidence[one], hits[one], trials[one])
    asked = np.full((4, 3), 0.7)
    for beliefs in (together, alone):
        beliefs.pass_time(slots)
    assert np.allclose(together.forecast(TEXT, slots, kinds, 6), alone.forecast(TEXT, slots, kinds, 6))
    assert np.allclose(
        together.given_confidence(TEXT, slots, kinds, asked), alone.given_confidence(TEXT, slots, kinds, asked)
    )


def test_a_batch_of_alike_requests_teaches_about_as_much_as_one_by_one():
    together, alone = model(), model()
    slots = ints(*(together.open() for _ in range(8)))
    for _ in range(8):
        alone.open()
    for _ in range(10):
        together.observe(TEXT, slots, ints(*[0] * 8), None, ints(*[0] * 8), ints(*[1] * 8))
        for slot in slots:
            alone.observe(TEXT, ints(int(slot)), ints(0), None, ints(0), ints(1))
    assert together.general_rate(TEXT, 0.0) == pytest.approx(alone.general_rate(TEXT, 0.0), abs=0.1)


def test_a_slot_used_again_remembers_nothing_of_its_last_request():
    beliefs = model()
    slot = beliefs.open()
    for method in (TEXT, NEURAL):
        see(beliefs, slot, 0, 1, [0.9], method=method, steps=30)
    beliefs.close(slot)
    reused, never_used = beliefs.open(), beliefs.open()
    assert reused == slot
    for method in (TEXT, NEURAL):
        assert rate(beliefs, reused, method=method) == rate(beliefs, never_used, method=method)
        assert worth(beliefs, reused, 0.9, method=method) == worth(beliefs, never_used, 0.9, method=method)
        see(beliefs, reused, 1, 1, [0.9], method=method)
        see(beliefs, never_used, 1, 1, [0.9], method=method)
        assert rate(beliefs, reused, method=method) == pytest.approx(rate(beliefs, never_used, method=method), abs=0.03)


def test_there_is_room_for_any_number_of_requests():
    beliefs = model()
    slots = [beliefs.open() for _ in range(100)]
    assert len(set(slots)) == 100
    bad = slots[::40]
    for slot in bad:
        see(beliefs, slot, 0, 1, steps=12)
    rates = beliefs.forecast(TEXT, ints(*slots), ints(*[0] * 100), 1)[:, 0]
    fresh = rates[1]
    for slot, believed in zip(slots, rates, strict=True):
        assert (believed < fresh - 0.05) if slot in bad else (believed == fresh)
    for slot in slots:
        beliefs.close(slot)
    assert len({beliefs.open() for _ in range(100)}) == 100


def test_what_was_learned_survives_making_room():
    beliefs = model()
    first = beliefs.open()
    see(beliefs, first, 0, 1, steps=12)
    before = rate(beliefs, first)
    for _ in range(40):
        beliefs.open()
    assert rate(beliefs, first) == before
