"""Estimates the chance that a draft token is accepted, given that all before it were: a mean and a lower bound.

For each proposer and temperature class, trials are counted in cells: by the proposer's confidence, and by position in
the draft for forecasts made before drafting. Each request adds one learned shift, in log-odds, to all cells of a
proposer.

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
_NUM_CLASSES = len(_TEMPERATURES) + 1
_NUM_BUCKETS = 16  # of confidence
_BUCKET_SCALE = _NUM_BUCKETS - 0.01  # confidence times this, rounded down, is the number of its bucket
_NUM_POSITIONS = 4  # the first three tokens of a draft, and all further ones
_MAX_LOG_ODDS = log(199.0)  # chances stay between 1/200 and 199/200
_MODEL_TEMPERATURE_EFFECT = (0.0, -0.1, -0.2, -0.3)  # log-odds by class; the model draws at the same temperature
_LOOKUP_TEMPERATURE_EFFECT = (0.0, -0.3, -0.7, -1.0)  # log-odds by class; a lookup ignores the temperature
_CONFIDENCE_SCALE = 0.8  # applied to the log-odds of a confidence: proposers are overconfident
_SHIFT_DECAY = 0.985  # per step: a request's shift returns to zero, its variance to the prior
_MEASURED_TRIALS = 32.0  # weight of a measurement on other prompts, which may differ from these
_FADE = 0.995  # of the evidence about a model, each time its drafts are not worth their cost
_TRIAL_INFORMATION = 0.16  # Fisher information of one trial about its log-odds, at a chance of 0.8
_PRIOR_INFORMATION = _TRIAL_INFORMATION * TUNABLES.prior_weight
_MOST_INFORMATION = _TRIAL_INFORMATION * TUNABLES.most_evidence
_MANY_TRIALS = 3.0 * TUNABLES.prior_weight  # they clearly outweigh the prior


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
        temperature_effect = _LOOKUP_TEMPERATURE_EFFECT if is_lookup else _MODEL_TEMPERATURE_EFFECT
        claimed = [(bucket + 0.5) / _NUM_BUCKETS for bucket in range(_NUM_BUCKETS)]
        self._by_confidence = [
            _Cells([_CONFIDENCE_SCALE * log(sure / (1.0 - sure)) + effect for sure in claimed])
            for effect in temperature_effect
        ]
        prior = log(TUNABLES.model_prior / (1.0 - TUNABLES.model_prior))
        if measured is None:
            self._by_position = [_Cells([prior + effect] * _NUM_POSITIONS) for effect in temperature_effect]
            self._num_tried = [0.0] * _NUM_CLASSES  # by temperature class
        else:
            self._by_position = [_Cells(each, _MEASURED_TRIALS) for each in _log_odds_by_class(measured)]
            self._num_tried = [_MEASURED_TRIALS] * _NUM_CLASSES
        self._shift_variance = TUNABLES.shift_variance
        self._forecasts: dict[tuple[int, int, int], list[float]] = {}

    # ---- queries

    def survival(self, temperature: int, confidence: Sequence[float], shift: float, least: float) -> list[float]:
        """The chance of each token to be reached and accepted; ends before the first one below `least`."""
        odds_of, factor = self._by_confidence[temperature].odds, exp(shift)
        product, out = 1.0, list[float]()
        for sure in confidence:
            if sure < 1.0:  # 1 is certain
                odds = odds_of[int(sure * _BUCKET_SCALE)] * factor
                product *= odds / (1.0 + odds)
                if product < least:
                    break
            out.append(product)
        return out

    def chance(self, temperature: int, confidence: float, shift: float) -> float:
        if confidence >= 1.0:
            return 1.0
        odds = self._by_confidence[temperature].odds[int(confidence * _BUCKET_SCALE)] * exp(shift)
        return odds / (1.0 + odds)

    def forecast(self, temperature: int, depth: int, shift: float) -> list[float]:
        """Expected accepted tokens of drafts of 1, 2, ... tokens, before anything is drafted.

        Similar requests share the returned list: do not modify it.
        """
        rounded = round(8.0 * shift)
        key = (temperature, depth, rounded)
        known = self._forecasts.get(key)
        if known is None:
            factor, product, total, known = exp(rounded / 8.0), 1.0, 0.0, []
            chances = [odds * factor / (1.0 + odds * factor) for odds in self._by_position[temperature].odds]
            chances += chances[-1:] * (depth - _NUM_POSITIONS)
            for chance in chances[:depth]:
                product *= chance
                total += product
                known.append(total)
            self._forecasts[key] = known
        return known

    def shift_of(self, shifts: dict[str, RequestShift], name: str, initial: float, step: int) -> RequestShift:
        """A request's shift for a proposer, with its evidence faded to this step."""
        shift = shifts.get(name)
        if shift is None:
            shift = shifts[name] = RequestShift(initial, self._shift_variance, step)
        elif shift.step < step:
            kept = _SHIFT_DECAY ** (step - shift.step)
            shift.mean *= kept
            shift.variance = self._shift_variance + (shift.variance - self._shift_variance) * kept
            shift.step = step
        return shift

    def doubt(self, temperature: int, shift: RequestShift, num_requests: int) -> float:
        """Log-odds between the mean and the lower bound; smaller for several requests, whose shifts average out."""
        known = _TRIAL_INFORMATION * (self._num_tried[temperature] + TUNABLES.prior_weight)
        return TUNABLES.caution * sqrt(shift.variance / num_requests + 1.0 / known)

    def is_tried(self, temperature: int) -> bool:
        """Whether trials clearly outweigh the prior."""
        return self._num_tried[temperature] >= _MANY_TRIALS

    def rate(self, temperature: int) -> float:
        """For reports: the chance of a draft's first token, before anything is drafted."""
        odds = self._by_position[temperature].odds[0]
        return odds / (1.0 + odds)

    # ---- learning

    def learn(
        self,
        temperature: int,
        shift: RequestShift,
        confidence: Sequence[float],
        num_accepted: int,
        num_tried: int,
        *,
        in_general: bool = True,
    ) -> None:
        """Learn from a draft with confidences: of `num_tried` tokens the first `num_accepted` were accepted.

        This updates the request's shift and, with `in_general`, the shared cells.
        """
        cells, factor = self._by_confidence[temperature], exp(shift.mean)
        odds_of = cells.odds
        surprise = information = 0.0
        for i in range(num_tried):
            if confidence[i] >= 1.0:
                continue  # it was certain, so there is nothing to learn
            cell = int(confidence[i] * _BUCKET_SCALE)
            odds = odds_of[cell] * factor
            chance = odds / (1.0 + odds)
            fate = 1.0 if i < num_accepted else 0.0
            surprise += fate - chance
            information += chance * (1.0 - chance)
            if in_general:
                cells.add(cell, fate, chance)
        self._learn_shift(shift, surprise, information)
        if in_general:
            self._count(temperature, num_tried)

    def learn_positions(
        self,
        temperature: int,
        shift: RequestShift,
        fates: Sequence[float],
        num_drafted: int,
        *,
        in_general: bool = True,
    ) -> None:
        """Learn the forecast by position. A fate is 1 (accepted), 0 (rejected) or, for the token before which a draft
        stopped, its estimated chance."""
        cells, factor = self._by_position[temperature], exp(shift.mean)
        odds_of = cells.odds
        surprise = information = moved = 0.0
        cell = 0
        for fate in fates:
            odds = odds_of[cell] * factor
            chance = odds / (1.0 + odds)
            surprise += fate - chance
            information += chance * (1.0 - chance)
            if in_general:
                moved = cells.add(cell, fate, chance)
            if cell < _NUM_POSITIONS - 1:
                cell += 1
        self._learn_shift(shift, surprise, information)
        if in_general:
            if len(fates) >= num_drafted:
                # Positions beyond the draft follow the last one reached, the less the more trials they have.
                for deeper in range(len(fates), _NUM_POSITIONS):
                    cells.follow(deeper, moved)
            self._count(temperature, len(fates))
            self._forecasts.clear()

    def _learn_shift(self, shift: RequestShift, surprise: float, information: float) -> None:
        most = self._shift_variance
        before = shift.variance + TUNABLES.shift_drift * most
        shift.variance = variance = 1.0 / (1.0 / (before if before < most else most) + information)
        shift.mean += variance * surprise

    def _count(self, temperature: int, num_tried: int) -> None:
        self._num_tried[temperature] = min(self._num_tried[temperature] + num_tried, TUNABLES.most_evidence)

    def forget(self) -> None:
        """Fade the evidence after drafts were not worth their cost, so that they are tried again later."""
        for cells in (*self._by_position, *self._by_confidence):
            cells.fade()
        self._num_tried = [_FADE * count for count in self._num_tried]
        self._forecasts.clear()

    def end(self, temperature: int, shift: RequestShift, *, is_forecast: bool) -> None:
        """A request finished. Its shift updates how far requests are expected to differ, and the shared cells, which
        its trials could move only by what its shift did not explain."""
        cells = (self._by_position if is_forecast else self._by_confidence)[temperature]
        cells.follow_request(shift.mean, 1.0 / (self._shift_variance + shift.variance))
        self._forecasts.clear()
        seen = shift.mean * shift.mean + shift.variance
        self._shift_variance += 0.5 * TUNABLES.smoothing * (seen - self._shift_variance)


def _log_odds_by_class(measured: MeasuredAcceptance) -> list[list[float]]:
    """By temperature class and position; between temperatures 0 and 1 the log-odds are interpolated."""
    ends = []
    for chances in (measured.greedy, measured.sampled):
        known = [min(max(chance, 0.01), 0.99) for chance in chances[:_NUM_POSITIONS]]
        known += known[-1:] * (_NUM_POSITIONS - len(known))
        ends.append([log(chance / (1.0 - chance)) for chance in known])
    shares = [i / (_NUM_CLASSES - 1) for i in range(_NUM_CLASSES)]
    return [[(1.0 - share) * a + share * b for a, b in zip(*ends, strict=True)] for share in shares]


class _Cells:
    """Log-odds of several cells, each learned from its own trials, by one Newton step per trial."""

    __slots__ = ("_information", "_log_odds", "_priors", "odds")

    def __init__(self, priors: list[float], num_trials: float = TUNABLES.prior_weight) -> None:
        self._priors, self._log_odds = priors, list(priors)
        self._information = [_TRIAL_INFORMATION * num_trials] * len(priors)
        self.odds = [exp(prior) for prior in priors]

    def add(self, cell: int, fate: float, chance: float) -> float:
        """A token with this chance was accepted (1) or not (0). Returns the change of the log-odds."""
        information = self._information[cell] + chance * (1.0 - chance)
        if information > _MOST_INFORMATION:
            information = _MOST_INFORMATION
        self._information[cell] = information
        moved = (fate - chance) / information
        self._move(cell, moved)
        return moved

    def follow(self, cell: int, moved: float) -> None:
        """Apply the change of a neighbouring cell, in proportion to the weight of the prior."""
        self._move(cell, moved * _TRIAL_INFORMATION * TUNABLES.prior_weight / self._information[cell])

    def follow_request(self, shift: float, information: float) -> None:
        """A request's log-odds were higher by `shift`; `information` is what that tells about other requests'."""
        for cell, known in enumerate(self._information):
            self._move(cell, shift * information / (known + information))

    def fade(self) -> None:
        """Move back towards the priors."""
        for cell, prior in enumerate(self._priors):
            self._information[cell] = _PRIOR_INFORMATION + _FADE * (self._information[cell] - _PRIOR_INFORMATION)
            self._move(cell, (1.0 - _FADE) * (prior - self._log_odds[cell]))

    def _move(self, cell: int, by: float) -> None:
        self._log_odds[cell] = log_odds = min(max(self._log_odds[cell] + by, -_MAX_LOG_ODDS), _MAX_LOG_ODDS)
        self.odds[cell] = exp(log_odds)
