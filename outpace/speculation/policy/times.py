"""Predicts the time of a step by its kind: plain, with looked-up drafts, or with a model's drafts of some depth.

The sum of the measured costs (`costs/`) is right for a step whose parts run one after the other. On a device they
overlap: the host's work hides behind a running pass in plain steps, and in steps for which a model drafts alike for all
requests, but not in steps with looked-up drafts. So each kind of step has a factor on that sum, learned from the steps
of that kind. A plain step's time is the baseline that every gain and loss is measured against: only plain steps teach
it, so that no draft can make itself look good.
"""

from __future__ import annotations

from math import exp, log
from typing import NamedTuple

from outpace.speculation.policy.tunables import TUNABLES

_PRIOR_STEPS = 2  # the sum of costs counts as this many observed steps
SURPRISE = log(1.2)  # more than steps of a kind differ by chance; limits the effect of a single disturbed step
_PLAIN_RATE = 0.15  # learning rate of a plain step: there are few of them while drafts pay
_KEPT = 1.0 - TUNABLES.smoothing / 8.0  # of a kind's log-factor, per plain step: the machine may have been busy then


class Kind(NamedTuple):
    """What distinguishes steps whose parts overlap differently."""

    model: str | None = None
    depth: int = 0  # of the model's drafts
    is_mixed: bool = False  # some requests have a looked-up draft or none, others a draft of the model


PLAIN = Kind()


class StepTimes:
    def __init__(self) -> None:
        # By kind and size: log-factor, number of steps, and the number of plain steps until then.
        self._known: dict[tuple[Kind, int], tuple[float, int, int]] = {}
        self._num_plain = 0
        self._factors: dict[tuple[Kind, int], float] = {}  # as asked for, also of kinds without steps

    def factor(self, kind: Kind, rows: int) -> float:
        """The time of such a step over the sum of its costs."""
        key = (kind, rows.bit_length())
        factor = self._factors.get(key)
        if factor is None:
            factor = self._factors[key] = exp(self._log_factor(*key))
        return factor

    def observe(self, kind: Kind, rows: int, summed: float, seconds: float, num_steps: int = 1) -> float:
        """Learn from steps that took `seconds` on average, where their costs sum up to `summed`. Returns the log of
        what the factor does not explain of it."""
        size = rows.bit_length()
        log_factor = self._log_factor(kind, size)
        _, count, _ = self._known.get((kind, size), (0.0, 0, 0))
        most = num_steps * SURPRISE
        surprise = max(-most, min(most, log(seconds / summed) - log_factor))
        kept = 1.0 - (_PLAIN_RATE if kind is PLAIN else TUNABLES.smoothing)
        moved = max(1.0 - kept**num_steps, 1.0 / (_PRIOR_STEPS + count)) * surprise
        self._num_plain += num_steps if kind is PLAIN else 0
        self._known[kind, size] = log_factor + moved, count + num_steps, self._num_plain
        self._factors.clear()
        return surprise - moved

    def _log_factor(self, kind: Kind, size: int) -> float:
        """Without steps of the kind, that of the most similar one; without one, a step with drafts is not expected to
        overlap better than the sum of its costs, nor than a plain step does."""
        known = self._known.get((kind, size))
        if known is None:
            similar = [
                (abs(each.depth - kind.depth) + abs(of_size - size), of_kind)
                for (each, of_size), of_kind in self._known.items()
                if (each.model, each.is_mixed) == (kind.model, kind.is_mixed)
            ]
            known = min(similar)[1] if similar else None
        guess = self._known.get((PLAIN, size), (0.0,))[0]
        if kind is PLAIN:
            return guess
        guess = max(0.0, guess)
        if known is None:
            return guess
        log_factor, _, num_plain = known
        return guess + (log_factor - guess) * _KEPT ** (self._num_plain - num_plain)
