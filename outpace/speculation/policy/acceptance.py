"""Estimates the chance that a draft token is accepted, given that all before it were: a mean and a lower bound.

For each proposer and temperature class, trials are counted in cells: by the proposer's confidence and, before anything
is drafted, by position in the draft. A cell holds log-odds, moved by one Newton step per trial. Each request adds one
learned shift to all cells of a proposer.

A trial is a draft token whose outcome is known. Tokens after a rejected one were not tried, and a fully accepted draft
does not tell whether a further token would have been accepted. Only tried tokens are counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log, sqrt

from outpace.core import MeasuredAcceptance
from outpace.speculation.policy.tunables import TUNABLES

_TEMPERATURES = (0.0, 0.5, 0.9)  # inclusive upper bounds of the classes; the last class has none
_CLASSES = range(len(_TEMPERATURES) + 1)
_BUCKETS = 16  # of confidence: cells 0 to 15
_BUCKET_SCALE = _BUCKETS - 0.01  # confidence times this, rounded down, is the number of its bucket
_POSITIONS = range(_BUCKETS, _BUCKETS + 4)  # cells of the first three tokens of a draft, and of all further ones
_MAX_LOG_ODDS = log(199.0)  # chances stay between 1/200 and 199/200
_LOOKUP_LOG_ODDS = -1.0  # at temperature 1: a lookup ignores the temperature, the target does not
_MODEL_LOG_ODDS = -0.3  # at temperature 1: a model draws at the same temperature
_TRIAL = 0.16  # Fisher information of one trial about its log-odds, at a chance of 0.8
_KEPT = 1.0 - TUNABLES.smoothing / 4.0  # of a request's shift, per step, and of a model's evidence, per vain attempt


def temperature_class(temperature: float) -> int:
    return sum(temperature > bound for bound in _TEMPERATURES)


@dataclass(slots=True)
class RequestShift:
    """How far one request's log-odds differ from the shared ones: mean and variance, as of a step."""

    mean: float
    variance: float
    step: int


class Acceptance:
    """The acceptance of one proposer's drafts."""

    def __init__(self, *, is_lookup: bool, measured: MeasuredAcceptance | None = None) -> None:
        trials = TUNABLES.prior_trials if measured is None else TUNABLES.measured_trials
        self._priors = [_priors(share / _CLASSES[-1], is_lookup, measured) for share in _CLASSES]
        self._log_odds = [list(priors) for priors in self._priors]
        self._odds = [[exp(prior) for prior in priors] for priors in self._priors]
        self._information = [[_TRIAL * trials] * len(priors) for priors in self._priors]
        self._num_tried = [trials if measured is not None else 0.0 for _ in _CLASSES]
        self._spread = TUNABLES.spread

    # ---- queries

    def survival(self, temperature: int, confidence: Sequence[float], shift: float, least: float) -> list[float]:
        """The chance of each token to be reached and accepted; ends before the first one below `least`."""
        odds_of, factor = self._odds[temperature], exp(shift)
        product, out = 1.0, list[float]()
        for sure in confidence:
            if sure < 1.0:  # 1 is certain
                odds = odds_of[int(sure * _BUCKET_SCALE)] * factor
                product *= odds / (1.0 + odds)
                if product < least:
                    break
            out.append(product)
        return out

    def chance(self, temperature: int, confidence: float) -> float:
        """Of a model's token, by its confidence: that already tells how this request differs."""
        if confidence >= 1.0:
            return 1.0
        odds = self._odds[temperature][int(confidence * _BUCKET_SCALE)]
        return odds / (1.0 + odds)

    def forecast(self, temperature: int, depth: int, shift: float) -> list[float]:
        """Expected accepted tokens of drafts of 1, 2, ... tokens, before anything is drafted."""
        odds_of, factor = self._odds[temperature], exp(shift)
        product, total, totals = 1.0, 0.0, list[float]()
        chance = 0.0
        for at in range(depth):
            if at < len(_POSITIONS):
                odds = odds_of[_POSITIONS[at]] * factor
                chance = odds / (1.0 + odds)
            product *= chance
            total += product
            totals.append(total)
        return totals

    def shift_of(self, shifts: dict[str, RequestShift], name: str, initial: float, step: int) -> RequestShift:
        """A request's shift for a proposer, with its evidence faded to this step."""
        shift = shifts.get(name)
        if shift is None:
            shift = shifts[name] = RequestShift(initial, self._spread, step)
        elif shift.step < step:
            kept = _KEPT ** (step - shift.step)
            shift.mean *= kept
            shift.variance = self._spread + (shift.variance - self._spread) * kept
            shift.step = step
        return shift

    def doubt(self, temperature: int, shift: RequestShift, num_requests: int) -> float:
        """Log-odds between the mean and the lower bound; smaller for several requests, whose shifts average out."""
        known = _TRIAL * (self._num_tried[temperature] + TUNABLES.prior_trials)
        return TUNABLES.caution * sqrt(shift.variance / num_requests + 1.0 / known)

    def is_proven(self, temperature: int) -> bool:
        """Whether trials clearly outweigh the prior."""
        return self._num_tried[temperature] >= 3.0 * TUNABLES.prior_trials

    def rate(self, temperature: int) -> float:
        """For reports: the chance of a draft's first token, before anything is drafted."""
        return self.forecast(temperature, 1, 0.0)[0]

    # ---- learning

    def learn(
        self,
        temperature: int,
        shift: RequestShift | None,
        confidence: Sequence[float],
        fates: Sequence[float],
    ) -> None:
        """Learn from the tried tokens of a draft. A fate is 1 (accepted), 0 (rejected) or, for the token before which a
        draft stopped, its estimated chance. Without confidences, tokens count by position.

        This updates the request's shift, if given, and the shared cells.
        """
        odds_of, factor = self._odds[temperature], 1.0 if shift is None else exp(shift.mean)
        surprise = information = 0.0
        for at, fate in enumerate(fates):
            if confidence:
                if confidence[at] >= 1.0:
                    continue  # it was certain, so there is nothing to learn
                cell = int(confidence[at] * _BUCKET_SCALE)
            else:
                cell = _POSITIONS[at] if at < len(_POSITIONS) else _POSITIONS[-1]
            odds = odds_of[cell] * factor
            chance = odds / (1.0 + odds)
            surprise += fate - chance
            information += chance * (1.0 - chance)
            self._try(temperature, cell, fate, chance)
        if shift is not None:
            shift.variance = 1.0 / (1.0 / shift.variance + information)
            shift.mean += shift.variance * surprise
            self._num_tried[temperature] = min(self._num_tried[temperature] + len(fates), TUNABLES.most_trials)

    def forget(self) -> None:
        """Fade the evidence after drafts were not worth their cost, so that they are tried again later."""
        for temperature, priors in enumerate(self._priors):
            information = self._information[temperature]
            for cell, prior in enumerate(priors):
                information[cell] = _TRIAL * TUNABLES.prior_trials * (1.0 - _KEPT) + _KEPT * information[cell]
                self._move(temperature, cell, (1.0 - _KEPT) * (prior - self._log_odds[temperature][cell]))
            self._num_tried[temperature] *= _KEPT

    def end(self, temperature: int, shift: RequestShift, *, by_position: bool) -> None:
        """A request finished. Its shift updates how far requests are expected to differ, and the shared cells, which
        its trials could move only by what its shift did not explain."""
        told = 1.0 / (self._spread + shift.variance)
        for cell in _POSITIONS if by_position else range(_BUCKETS):
            known = self._information[temperature][cell]
            self._move(temperature, cell, shift.mean * told / (known + told))
        self._spread += TUNABLES.smoothing * (shift.mean**2 + shift.variance - self._spread)

    def _try(self, temperature: int, cell: int, fate: float, chance: float) -> None:
        """A token with this chance was accepted (1) or not (0)."""
        information = self._information[temperature]
        information[cell] = min(information[cell] + chance * (1.0 - chance), _TRIAL * TUNABLES.most_trials)
        self._move(temperature, cell, (fate - chance) / information[cell])

    def _move(self, temperature: int, cell: int, by: float) -> None:
        log_odds = min(max(self._log_odds[temperature][cell] + by, -_MAX_LOG_ODDS), _MAX_LOG_ODDS)
        self._log_odds[temperature][cell] = log_odds
        self._odds[temperature][cell] = exp(log_odds)


def _priors(share: float, is_lookup: bool, measured: MeasuredAcceptance | None) -> list[float]:
    """Log-odds of all cells at `share` of temperature 1: by confidence, as claimed; by position, as measured."""
    effect = (_LOOKUP_LOG_ODDS if is_lookup else _MODEL_LOG_ODDS) * share
    by_confidence = [_logit((bucket + 0.5) / _BUCKETS) + effect for bucket in range(_BUCKETS)]
    if measured is None:
        return by_confidence + [_logit(TUNABLES.model_prior) + effect] * len(_POSITIONS)
    greedy, sampled = (
        [*map(_logit, chances), *[_logit(chances[-1])] * len(_POSITIONS)]
        for chances in (measured.greedy, measured.sampled)
    )
    return (
        by_confidence
        + [(1.0 - share) * a + share * b for a, b in zip(greedy, sampled, strict=False)][: len(_POSITIONS)]
    )


def _logit(chance: float) -> float:
    inside = min(max(chance, 0.01), 0.99)
    return log(inside / (1.0 - inside))
