"""Predicts the time of a step by its kind: plain, with looked-up drafts, or with a model's drafts of some depth.

The sum of the measured costs (`costs/`) is right for a step whose parts run one after the other. On a device they
overlap: the host's work hides behind a running pass in plain steps, and in steps for which a model drafts alike for all
requests, but not in steps with looked-up drafts. So each kind of step has a factor on that sum, learned from the steps
of that kind. A plain step's time is the baseline that every gain and loss is measured against.
"""

from __future__ import annotations

from math import exp, log
from typing import NamedTuple

_LEARNING_RATE = 0.05  # of a step; higher for the first ones
_PRIOR_WEIGHT = 2  # the sum of costs counts as this many observed steps
_MAX_SURPRISE = log(1.2)  # limits the effect of a single disturbed step
_SETTLED = 16  # steps of a kind after which a surprise is the machine's speed, not the kind's factor


class Kind(NamedTuple):
    """What distinguishes steps whose parts overlap differently."""

    model: str | None = None
    depth: int = 0  # of the model's drafts
    is_mixed: bool = False  # some requests have a looked-up draft or none, others a draft of the model


PLAIN = Kind()


class StepTimes:
    def __init__(self) -> None:
        self._known: dict[tuple[Kind, int], tuple[float, int]] = {}  # log-factor and number of steps, by kind and size
        self._unknown: dict[tuple[Kind, int], float] = {}  # factors of kinds without steps, from their neighbours

    def factor(self, kind: Kind, rows: int) -> float:
        """The time of such a step over the sum of its costs."""
        key = (kind, rows.bit_length())
        known = self._known.get(key)
        if known is not None:
            return exp(known[0])
        guess = self._unknown.get(key)
        if guess is None:
            guess = self._unknown[key] = exp(self._of_neighbour(*key))
        return guess

    def observe(self, kind: Kind, rows: int, summed: float, seconds: float) -> float:
        """Learn from a step that took `seconds`, where its costs sum up to `summed`. Returns the log of the machine's
        present slowness: of the step's time over the predicted one, or 0 while the kind's factor is not settled."""
        key = (kind, rows.bit_length())
        log_factor, count = self._known.get(key) or (log(self.factor(kind, rows)), 0)
        surprise = max(-_MAX_SURPRISE, min(_MAX_SURPRISE, log(seconds / summed) - log_factor))
        rate = max(_LEARNING_RATE, 1.0 / (_PRIOR_WEIGHT + count))
        self._known[key] = log_factor + rate * surprise, count + 1
        if not count:
            self._unknown.clear()
        return surprise if kind is PLAIN or count >= _SETTLED else 0.0

    def _of_neighbour(self, kind: Kind, size: int) -> float:
        """The log-factor of the most similar kind; without one, a step with drafts is not expected to overlap better
        than the sum of its costs, nor than a plain step does."""
        similar = [
            (abs(each.depth - kind.depth) + abs(of_size - size), log_factor)
            for (each, of_size), (log_factor, _) in self._known.items()
            if (each.model, each.is_mixed) == (kind.model, kind.is_mixed)
        ]
        if similar:
            return min(similar)[1]
        plain = self._known.get((PLAIN, size))
        return max(0.0, plain[0]) if plain is not None else 0.0
