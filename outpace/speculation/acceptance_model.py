"""How likely the next draft token is to be accepted, given that those before it were.

Everything is kept in log-odds. Of each proposer, recent traffic gives the general part, by temperature: what its own
confidence is worth (its share of right guesses where it claims 60%, 90%, ...), and its rate before any confidence is
known. Each request adds one number of its own, learned from its own drafts, drifting with time and drawn back to the
general part where it has not been seen lately. Both are learned by the same rule, one step of Newton's method on the
likelihood of each trial: few observations move them little or much according to how sure they were.

A trial is a draft token whose fate became known. Tokens after a refused one were never tried, and a draft accepted
whole says nothing about the token that would have come next: only what was tried is counted.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.intp]
Bools = NDArray[np.bool_]

TEMPERATURES = (0.0, 0.5, 0.9)  # up to and including; hotter is a class of its own
_NUM_POSITIONS = 4  # the rate without confidence: of the first, second, third, and of all further tokens
_LOW, _HIGH, _NUM_KNOTS = -3.0, 5.0, 9  # log-odds of confidence
_WIDTH = (_HIGH - _LOW) / (_NUM_KNOTS - 1)

# What is believed before any traffic, in log-odds. A draft model is right four times in five on greedy text and less as
# text gets freer; a confidence is taken for half of what it says, because proposers flatter themselves.
_RATE_PRIOR = (1.4, 0.8, 0.4, 0.0)
_TRUST_PRIOR = 0.7
_CONFIDENCE_SHIFT = (-0.2, -0.4, -0.7, -1.0)

_GENERAL_CERTAINTY = 3.0  # of the prior, in units of information; a trial brings at most a quarter
_MOST_CERTAINTY = 40.0  # traffic changes: older trials are forgotten once there are many
_OWN_VARIANCE = 1.0  # how far requests differ from the general part
_MOST_VARIANCE = 2.0
_DRIFT_VARIANCE = 0.12  # how far a request moves from one step to the next
_RETURN = 0.985  # and how it is drawn back each step
_LEAST, _MOST = 0.005, 0.995  # probabilities nobody can claim to know better

_START_SLOTS = 16


def temperature_class(temperature: float) -> int:
    return sum(temperature > bound for bound in TEMPERATURES)


class AcceptanceModel:
    """Works on whole batches at once: requests are rows, positions of their drafts are columns."""

    def __init__(self, methods: Sequence[str], shift: float = 0.0) -> None:
        self._methods = {method: _Method(shift) for method in methods}
        self._free = list(range(_START_SLOTS))
        self._num_slots = _START_SLOTS

    def open(self, shift: float = 0.0) -> int:
        """A slot for a new request; `shift` is what is known of it beforehand, in log-odds."""
        if not self._free:
            self._free = list(range(self._num_slots, 2 * self._num_slots))
            self._num_slots *= 2
        slot = self._free.pop()
        for method in self._methods.values():
            method.open(slot, self._num_slots, shift)
        return slot

    def close(self, slot: int) -> None:
        self._free.append(slot)

    def given_confidence(self, method: str, slots: Ints, classes: Ints, confidence: Floats) -> Floats:
        """P(accepted | those before were) for drafts whose proposer said how sure it is, [rows, positions]."""
        state = self._methods[method]
        return _probability(state.calibrated(classes, _log_odds(confidence)) + state.own_trust.at(slots))

    def forecast(self, method: str, slots: Ints, classes: Ints, depth: int) -> Floats:
        """The same before anything was drafted, [rows, depth]."""
        state = self._methods[method]
        return _probability(state.rates[classes][:, _positions(depth)] + state.own_rate.at(slots))

    def observe(
        self, method: str, slots: Ints, classes: Ints, confidence: Floats | None, hits: Ints, trials: Ints
    ) -> None:
        """Of each row's draft, `trials` tokens met their fate and the first `hits` of them were accepted."""
        depth = int(trials.max(initial=0))
        if not depth:
            return
        state = self._methods[method]
        columns = np.arange(depth)
        tried = columns < trials[:, None]
        accepted = (columns < hits[:, None]).astype(np.float64)
        if confidence is not None:
            odds = _log_odds(confidence[:, :depth])
            predicted = _probability(state.calibrated(classes, odds) + state.own_trust.at(slots))
            state.learn_calibration(classes, odds, tried, accepted, predicted)
            state.own_trust.learn(slots, tried, accepted, predicted)
        self._learn_rate(state, slots, classes, tried, accepted, self.forecast(method, slots, classes, depth))

    def observe_unsaid(self, method: str, slots: Ints, classes: Ints, confidence: Floats, positions: Ints) -> None:
        """Drafts that stopped before a token because of this confidence: what that is worth stands in for its fate."""
        state = self._methods[method]
        depth = int(positions.max()) + 1
        tried = np.arange(depth) == positions[:, None]
        worth = self.given_confidence(method, slots, classes, confidence[:, None])
        accepted = np.where(tried, worth, 0.0)
        self._learn_rate(state, slots, classes, tried, accepted, self.forecast(method, slots, classes, depth))

    def _learn_rate(
        self, state: _Method, slots: Ints, classes: Ints, tried: Bools, accepted: Floats, predicted: Floats
    ) -> None:
        state.learn_rates(classes, tried, accepted, predicted)
        state.own_rate.learn(slots, tried, accepted, predicted)

    def pass_time(self, slots: Ints) -> None:
        """A step went by for these requests: what is known of them gets older."""
        for state in self._methods.values():
            state.own_rate.pass_time(slots)
            state.own_trust.pass_time(slots)

    def general_rate(self, method: str, temperature: float) -> float:
        """For people: how often the first draft token is accepted in recent traffic."""
        return float(_probability(self._methods[method].rates[temperature_class(temperature), 0]))


class _Method:
    """One proposer's numbers."""

    def __init__(self, shift: float) -> None:
        num_classes = len(TEMPERATURES) + 1
        self.rates = np.repeat(np.array(_RATE_PRIOR)[:, None] + shift, _NUM_POSITIONS, axis=1)
        self._rate_certainty = np.full((num_classes, _NUM_POSITIONS), _GENERAL_CERTAINTY)
        knots = np.linspace(_LOW, _HIGH, _NUM_KNOTS)
        self._knots = _TRUST_PRIOR * knots[None, :] + np.array(_CONFIDENCE_SHIFT)[:, None] + shift
        self._knot_certainty = np.full((num_classes, _NUM_KNOTS), _GENERAL_CERTAINTY)
        self.own_rate = _Own()  # how the request differs where no confidence is known,
        self.own_trust = _Own()  # and where it is

    def open(self, slot: int, num_slots: int, shift: float) -> None:
        self.own_rate.open(slot, num_slots, shift)
        self.own_trust.open(slot, num_slots, shift)

    def calibrated(self, classes: Ints, odds: Floats) -> Floats:
        """Straight lines between the knots of confidence."""
        left, share = _knot(odds)
        rows = classes[:, None]
        out: Floats = self._knots[rows, left] * (1 - share) + self._knots[rows, left + 1] * share
        return out

    def learn_calibration(self, classes: Ints, odds: Floats, tried: Bools, accepted: Floats, predicted: Floats) -> None:
        left, share = _knot(odds)
        rows = np.broadcast_to(classes[:, None], left.shape)
        surprise = np.where(tried, accepted - predicted, 0.0)
        information = np.where(tried, predicted * (1 - predicted), 0.0)
        for knots, weight in ((left, 1 - share), (left + 1, share)):
            np.add.at(self._knot_certainty, (rows, knots), weight * weight * information)
            np.add.at(self._knots, (rows, knots), weight * surprise / self._knot_certainty[rows, knots])
        np.minimum(self._knot_certainty, _MOST_CERTAINTY, out=self._knot_certainty)

    def learn_rates(self, classes: Ints, tried: Bools, accepted: Floats, predicted: Floats) -> None:
        columns = np.broadcast_to(_positions(tried.shape[1]), tried.shape)
        rows = np.broadcast_to(classes[:, None], tried.shape)
        np.add.at(self._rate_certainty, (rows, columns), np.where(tried, predicted * (1 - predicted), 0.0))
        np.add.at(
            self.rates,
            (rows, columns),
            np.where(tried, accepted - predicted, 0.0) / self._rate_certainty[rows, columns],
        )
        np.minimum(self._rate_certainty, _MOST_CERTAINTY, out=self._rate_certainty)


class _Own:
    """One number per request: its distance from the general part, and how uncertain that is."""

    def __init__(self) -> None:
        self._mean = np.zeros(_START_SLOTS)
        self._variance = np.full(_START_SLOTS, _OWN_VARIANCE)

    def open(self, slot: int, num_slots: int, mean: float) -> None:
        missing = num_slots - self._mean.size
        if missing > 0:
            self._mean = np.concatenate([self._mean, np.zeros(missing)])
            self._variance = np.concatenate([self._variance, np.full(missing, _OWN_VARIANCE)])
        self._mean[slot], self._variance[slot] = mean, _OWN_VARIANCE

    def at(self, slots: Ints) -> Floats:
        out: Floats = self._mean[slots][:, None]
        return out

    def learn(self, slots: Ints, tried: Bools, accepted: Floats, predicted: Floats) -> None:
        information = np.where(tried, predicted * (1 - predicted), 0.0).sum(axis=1)
        surprise = np.where(tried, accepted - predicted, 0.0).sum(axis=1)
        variance = 1.0 / (1.0 / self._variance[slots] + information)
        self._variance[slots] = variance
        self._mean[slots] += variance * surprise

    def pass_time(self, slots: Ints) -> None:
        self._mean[slots] *= _RETURN
        self._variance[slots] = np.minimum(self._variance[slots] + _DRIFT_VARIANCE, _MOST_VARIANCE)


def _positions(depth: int) -> Ints:
    return np.minimum(np.arange(depth), _NUM_POSITIONS - 1)


def _knot(odds: Floats) -> tuple[Ints, Floats]:
    place = (odds - _LOW) / _WIDTH
    left = np.minimum(place.astype(np.intp), _NUM_KNOTS - 2)
    return left, place - left


def _log_odds(probability: Floats) -> Floats:
    inside = np.clip(probability, 1e-4, 1 - 1e-4)
    return np.clip(np.log(inside / (1 - inside)), _LOW, _HIGH)


def _probability(odds: Floats) -> Floats:
    return np.clip(1.0 / (1.0 + np.exp(-odds)), _LEAST, _MOST)
