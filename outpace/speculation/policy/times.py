"""Predicts the time of a step by its kind: plain, with looked-up drafts, or with a model's drafts of some depth.

The sum of the measured costs (`costs/`) is right for a step whose parts run one after the other. On a device they
overlap: the host's work hides behind a running pass in plain steps, and in steps for which a model drafts alike for all
requests, but not in steps with looked-up drafts. So each kind of step has a factor on that sum, learned from the steps
of that kind. A plain step's time is the baseline that every gain and loss is measured against: only plain steps teach
it, so that no draft can make itself look good.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, log
from typing import TYPE_CHECKING, NamedTuple

from outpace.core import StepStats
from outpace.speculation.costs.curves import Costs
from outpace.speculation.policy.tunables import TUNABLES

if TYPE_CHECKING:
    from outpace.speculation.policy.planner import Plan, Situation

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


@dataclass(slots=True)
class Seen:
    """Sums over the steps of pure decoding for which a decision stood: their costs are learned at its end."""

    num_steps: int = 0
    seconds: float = 0.0  # of the steps, without deciding and catching up
    forward_seconds: float = 0.0
    schedule_seconds: float = 0.0
    verify_seconds: float = 0.0
    num_drafted: int = 0
    num_emitted: int = 0
    num_passes: int = 0  # the longest draft of a model, step by step

    def add(self, stats: StepStats, seconds: float, num_drafted: int) -> None:
        self.num_steps += 1
        self.seconds += seconds
        self.forward_seconds += stats.forward_seconds + stats.hidden_seconds
        self.schedule_seconds += stats.schedule_seconds
        self.verify_seconds += stats.verify_seconds
        self.num_drafted += num_drafted
        self.num_emitted += stats.num_emitted


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

    def learn(self, seen: Seen, situation: Situation, plan: Plan | None, costs: Costs) -> float:
        """Learn from the mean time of the steps in which `plan` stood; only a plain step also teaches what the target's
        pass costs. Returns the log of what the kind's factor does not explain."""
        if not seen.num_steps:
            return 0.0
        n, rows, surprise = seen.num_steps, situation.rows, 0.0
        num_tokens = rows + round(seen.num_drafted / n)
        context = situation.context + seen.num_emitted / (2 * rows)
        forward = costs.target.seconds(rows, num_tokens, context)
        if plan is None and num_tokens > rows:  # of mode `on`: no kind that is planned
            costs.target.observe(rows, num_tokens, context, seen.forward_seconds / n, n)
        elif seen.seconds > 0.0:
            summed = forward + costs.schedule_seconds + costs.token_seconds * seen.num_emitted / n
            if plan is not None and plan.model is not None:
                drafting = len(plan.depths) - len(plan.lookups)
                summed += costs.drafts[plan.model].seconds(drafting, max(1, round(seen.num_passes / n)), context)
            surprise = self.observe(PLAIN if plan is None else plan.kind, rows, summed, seen.seconds / n, n)
            if plan is None:
                costs.target.observe(rows, num_tokens, context, forward * exp(surprise), n)
        costs.observe_host(
            schedule_seconds=seen.schedule_seconds / n, verify_seconds=seen.verify_seconds, num_emitted=seen.num_emitted
        )
        return surprise

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
        """Without steps of the kind, that of the most similar one; without one, a plain step's, but a mixed step is not
        expected to overlap better than the sum of its costs."""
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
        if kind.is_mixed:
            guess = max(0.0, guess)
        if known is None:
            return guess
        log_factor, _, num_plain = known
        return guess + (log_factor - guess) * _KEPT ** (self._num_plain - num_plain)
