"""How a request differs from the others, and how far requests differ at all.

Few trials say little about one request. What they are worth depends on how much requests have been seen to differ:
where all are alike, one that has missed a few times is unlucky, not different, and is forecast like the others.
"""

from __future__ import annotations

from dataclasses import dataclass

_OWN_VARIANCE = 1.0  # how far requests are believed to differ from the general part before any have been seen, and
_PRIOR_WEIGHT = 4.0  # how much that counts, in units of information squared
_LEAST_VARIANCE, _MOST_VARIANCE = 0.04, 1.5
_OLDEST = 2.0  # times that, what a request not seen lately may differ by
_DRIFT = 0.12  # of that, how far a request moves from one step to the next
_RETURN = 0.985  # and how it is drawn back each step
_FADE = 0.97  # per request that ends


class Spread:
    """How far requests differ from the general part, learned from how far their fates together were from it.

    Were all alike, the square of a request's summed surprises would on average be its summed information; what it is
    more than that, over the information squared, is the variance between requests.
    """

    def __init__(self) -> None:
        self._excess = _PRIOR_WEIGHT * _OWN_VARIANCE
        self._weight = _PRIOR_WEIGHT
        self.variance = _OWN_VARIANCE

    def add(self, surprise: float, information: float, more_surprise: float, more_information: float) -> None:
        """A request that had come to so much has come to more."""
        after, known = surprise + more_surprise, information + more_information
        self._excess += after * after - surprise * surprise - more_information
        self._weight += known * known - information * information
        self.variance = min(max(self._excess / self._weight, _LEAST_VARIANCE), _MOST_VARIANCE)

    def fade(self) -> None:
        """A request has ended: what was seen gets older, and what was believed at first comes back."""
        self._excess += (1.0 - _FADE) * (_PRIOR_WEIGHT * _OWN_VARIANCE - self._excess)
        self._weight += (1.0 - _FADE) * (_PRIOR_WEIGHT - self._weight)


@dataclass(slots=True)
class Own:
    """A request's distance from the general part, how uncertain that is, and when it was last looked at."""

    spread: Spread
    mean: float
    variance: float
    step: int = 0
    surprise: float = 0.0  # of all its trials, against the general part,
    information: float = 0.0  # and what they said

    def at(self, step: int) -> float:
        """What is known gets older with every step."""
        passed = step - self.step
        if passed:
            spread = self.spread.variance
            self.mean *= _RETURN**passed
            self.variance = min(self.variance + passed * _DRIFT * spread, _OLDEST * spread)
            self.step = step
        return self.mean

    def learn(self, surprise: float, information: float) -> None:
        from_general = surprise + information * self.mean
        self.spread.add(self.surprise, self.information, from_general, information)
        self.surprise += from_general
        self.information += information
        self.variance = 1.0 / (1.0 / self.variance + information)
        self.mean += self.variance * surprise
