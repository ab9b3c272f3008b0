"""How likely a draft token is to be accepted, given that those before it were: a mean and a lower bound.

Of each proposer and temperature class, trials are counted in cells: by the confidence the proposer claimed and, where
nothing was drafted yet, by position in the draft. A request shifts all cells of a proposer by one number of its own, in
log-odds, learned from its own trials.

A trial is a draft token whose fate became known. Tokens after a refused one were never tried, and a draft accepted
whole says nothing about the token that would have come next: only what was tried is counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log, sqrt

from outpace.speculation.policy.tunables import TUNABLES

_TEMPERATURES = (0.0, 0.5, 0.9)  # up to and including; hotter is a class of its own
_NUM_CLASSES = len(_TEMPERATURES) + 1
_NUM_BUCKETS = 16  # of confidence
_NUM_POSITIONS = 4  # the first three tokens of a draft, and all further ones
_MOST_LOG_ODDS = log(199.0)  # nobody can claim to know better than one in 200
_MODEL_HEAT = (0.0, -0.1, -0.2, -0.3)  # log-odds by temperature class: a model draws at the same temperature,
_LOOKUP_HEAT = (0.0, -0.3, -0.7, -1.0)  # a lookup knows none
_TRUST = 0.8  # of a confidence's log-odds: proposers overrate themselves
_OWN_RETURN = 0.985  # of a request's own number, each step in which nothing was learned of it
_OPTIMISM = 0.5  # log-odds
_KEPT = 0.995  # of what is known of a model, each time it is not worth drafting
_TRIAL_INFORMATION = 0.16  # of a trial about its log-odds, at a chance of 0.8


def temperature_class(temperature: float) -> int:
    return sum(temperature > bound for bound in _TEMPERATURES)


@dataclass(slots=True)
class Own:
    """How far one request's log-odds are from the general ones, how uncertain that is, and since which step."""

    mean: float
    variance: float
    step: int


class Acceptance:
    """Of one proposer."""

    def __init__(self, *, is_lookup: bool) -> None:
        self._heat = _LOOKUP_HEAT if is_lookup else _MODEL_HEAT
        claimed = [(bucket + 0.5) / _NUM_BUCKETS for bucket in range(_NUM_BUCKETS)]
        self._by_confidence = [
            [_Cell(_TRUST * log(sure / (1.0 - sure)) + heat) for sure in claimed] for heat in self._heat
        ]
        prior = log(TUNABLES.model_prior / (1.0 - TUNABLES.model_prior))
        self._by_position = [[_Cell(prior + heat) for _ in range(_NUM_POSITIONS)] for heat in self._heat]
        self._num_tried = [0.0] * _NUM_CLASSES  # by temperature class
        self._own_variance = TUNABLES.own_variance
        self._forecasts: dict[tuple[int, int, int], list[float]] = {}

    # ---- asking

    def survival(self, temperature: int, confidence: Sequence[float], shift: float, least: float) -> list[float]:
        """The chance of each token to be reached and accepted, as far as that exceeds `least`."""
        cells, factor = self._by_confidence[temperature], exp(shift)
        product, out = 1.0, list[float]()
        for sure in confidence:
            odds = cells[int(sure * (_NUM_BUCKETS - 0.01))].odds * factor
            product *= odds / (1.0 + odds)
            if product < least:
                break
            out.append(product)
        return out

    def chance(self, temperature: int, confidence: float, shift: float) -> float:
        odds = self._by_confidence[temperature][int(confidence * (_NUM_BUCKETS - 0.01))].odds * exp(shift)
        return odds / (1.0 + odds)

    def forecast(self, temperature: int, depth: int, shift: float) -> list[float]:
        """Tokens expected to be accepted of drafts of 1, 2, ... tokens, before anything was drafted.

        Requests that differ little share one list: not to be changed.
        """
        rounded = round(8.0 * shift)
        key = (temperature, depth, rounded)
        known = self._forecasts.get(key)
        if known is None:
            factor, product, total, known = exp(rounded / 8.0), 1.0, 0.0, []
            cells = self._by_position[temperature]
            for position in range(depth):
                odds = cells[min(position, _NUM_POSITIONS - 1)].odds * factor
                product *= odds / (1.0 + odds)
                total += product
                known.append(total)
            self._forecasts[key] = known
        return known

    def own(self, owns: dict[str, Own], name: str, shift: float, step: int) -> Own:
        """A request's own number, as of this step; what is known of it gets older."""
        own = owns.get(name)
        if own is None:
            own = owns[name] = Own(shift, self._own_variance, step)
        elif own.step < step:
            kept = _OWN_RETURN ** (step - own.step)
            own.mean *= kept
            own.variance = self._own_variance + (own.variance - self._own_variance) * kept
            own.step = step
        return own

    def doubt(self, temperature: int, own: Own, num_requests: int) -> float:
        """What the lower bound takes from the log-odds of drafts: of one request, or of so many together, whose own
        numbers average out."""
        known = _TRIAL_INFORMATION * (self._num_tried[temperature] + TUNABLES.prior_weight)
        return TUNABLES.caution * sqrt(own.variance / num_requests + 1.0 / known)

    def is_tried(self, temperature: int) -> bool:
        """Whether trials clearly outweigh the prior."""
        return self._num_tried[temperature] >= 3.0 * TUNABLES.prior_weight

    def optimism(self, temperature: int) -> float:
        """What is added to the log-odds of drafts that have hardly been tried, so that they are tried at all."""
        return 0.0 if self.is_tried(temperature) else _OPTIMISM

    def rate(self, temperature: int) -> float:
        """For people: the chance of a draft's first token, before anything was drafted."""
        odds = self._by_position[temperature][0].odds
        return odds / (1.0 + odds)

    # ---- learning

    def learn(
        self,
        temperature: int,
        own: Own,
        confidence: Sequence[float],
        num_accepted: int,
        num_tried: int,
        *,
        in_general: bool = True,
    ) -> None:
        """What confidence is worth: `num_tried` tokens of a draft met their fate, the first `num_accepted` of them were
        accepted. Of many requests in a step, some teach what holds `in_general`, and all what is their own."""
        cells, factor = self._by_confidence[temperature], exp(own.mean)
        surprise = information = 0.0
        for i in range(num_tried):
            cell = cells[int(confidence[i] * (_NUM_BUCKETS - 0.01))]
            odds = cell.odds * factor
            chance = odds / (1.0 + odds)
            surprise += (i < num_accepted) - chance
            information += chance * (1.0 - chance)
            if in_general:
                cell.add(i < num_accepted, chance)
        self._learn_own(own, surprise, information)
        if in_general:
            self._count(temperature, num_tried)

    def learn_positions(
        self, temperature: int, own: Own, fates: Sequence[float], num_drafted: int, *, in_general: bool = True
    ) -> None:
        """What drafts are worth before they are made. A fate is 1 or 0 or, where a draft stopped before a token, the
        chance that this one would have had."""
        cells, factor = self._by_position[temperature], exp(own.mean)
        surprise = information = moved = 0.0
        for position, fate in enumerate(fates):
            cell = cells[min(position, _NUM_POSITIONS - 1)]
            odds = cell.odds * factor
            chance = odds / (1.0 + odds)
            surprise += fate - chance
            information += chance * (1.0 - chance)
            if in_general:
                moved = cell.add(fate, chance)
        self._learn_own(own, surprise, information)
        if in_general:
            if len(fates) >= num_drafted:
                # Positions that drafts do not reach are like the last they do, as far as nothing is known of their own.
                for deeper in cells[len(fates) :]:
                    deeper.follow(moved)
            self._count(temperature, len(fates))
            self._forecasts.clear()

    def _learn_own(self, own: Own, surprise: float, information: float) -> None:
        before = min(own.variance + TUNABLES.own_drift * self._own_variance, self._own_variance)
        own.variance = 1.0 / (1.0 / before + information)
        own.mean += own.variance * surprise

    def _count(self, temperature: int, num_tried: int) -> None:
        self._num_tried[temperature] = min(self._num_tried[temperature] + num_tried, TUNABLES.most_evidence)

    def forget(self) -> None:
        """It was not worth drafting: what is known of it gets older, so that it is tried again some day."""
        for cells in self._by_position:
            for cell in cells:
                cell.fade()
        self._num_tried = [_KEPT * count for count in self._num_tried]
        self._forecasts.clear()

    def end(self, own: Own) -> None:
        """A request is over: how far it differed says how far others will."""
        seen = own.mean * own.mean + own.variance
        self._own_variance += 0.5 * TUNABLES.smoothing * (seen - self._own_variance)


class _Cell:
    """Log-odds learned from trials: one step of Newton's method for each."""

    __slots__ = ("_information", "_log_odds", "_prior", "odds")

    def __init__(self, prior: float) -> None:
        self._prior = self._log_odds = prior
        self._information = _TRIAL_INFORMATION * TUNABLES.prior_weight
        self.odds = exp(prior)

    def add(self, fate: float, chance: float) -> float:
        """A token that had this chance was accepted (1) or not (0); returns by how much the log-odds have moved."""
        self._information = min(
            self._information + chance * (1.0 - chance), _TRIAL_INFORMATION * TUNABLES.most_evidence
        )
        moved = (fate - chance) / self._information
        self._move(moved)
        return moved

    def follow(self, moved: float) -> None:
        """Its neighbour has moved."""
        self._move(moved * _TRIAL_INFORMATION * TUNABLES.prior_weight / self._information)

    def fade(self) -> None:
        """What is known gets older."""
        least = _TRIAL_INFORMATION * TUNABLES.prior_weight
        self._information = least + _KEPT * (self._information - least)
        self._move((1.0 - _KEPT) * (self._prior - self._log_odds))

    def _move(self, by: float) -> None:
        self._log_odds = min(max(self._log_odds + by, -_MOST_LOG_ODDS), _MOST_LOG_ODDS)
        self.odds = exp(self._log_odds)
