"""No request is slowed down for the others' gain beyond what it may lose."""

from __future__ import annotations

from collections.abc import Sequence

from outpace.core import Request
from outpace.speculation.seats import Seat, Step
from outpace.speculation.sweep import Plan

_REQUEST_LOSS = 0.02  # what one request may lose to the gain of others, of its own time,
_REQUEST_STEPS = 0.4  # and in plain steps, so that a request that has just begun forbids nothing
_BEAR_STEPS = 0.5  # plain steps that one which usually gains may be behind, and
_OF_GAIN, _SOON, _MOST_OF_GAIN = 0.1, 64, 1.5  # of what it will win with its next tokens; up to so many steps
_TOLERANCE = 0.01  # of a plain step
_HELPINGS = 2  # deeper drafts for those who would fall behind, before the step is made shorter, by
_SHORTER = 0.85
_FORGIVEN = 0.5  # of what a request has waited for texts to be read: that is spent, and only drafts can bring it back
_NEVER = float("inf")


def _lost(request: Request, seat: Seat) -> float:
    """What a request is behind plain decoding, less what is forgiven."""
    return request.spec.decode_seconds - request.spec.plain_seconds - _FORGIVEN * seat.reading_seconds


def _spare(request: Request, seat: Seat, plain: float) -> float:
    """What a request may still lose to the gain of others, where a plain step takes so long."""
    left = _REQUEST_LOSS * request.spec.plain_seconds + _REQUEST_STEPS * plain - _lost(request, seat)
    return left if left > 0.0 else 0.0


def make_fair(step: Step, plan: Plan, rows: Sequence[int], longest: float) -> None:
    """Shrink or deepen a plan until nobody loses by it more than may be; its row k is the step's row `rows[k]`.

    It may not last longer than `longest`.
    """
    plain = step.plain_seconds
    spare = [_spare(request, seat, plain) for request, seat in zip(step.requests, step.seats, strict=True)]
    slack = (1.0 + _TOLERANCE) * plain
    if plan.seconds <= min(spare) + slack:
        return  # nobody is hurt, whoever gains
    row_of = {i: row for row, i in enumerate(rows)}
    most = plan.most_gains
    rounds = 0
    while plan.count:
        helped: dict[int, float] = {}
        allowed = hurt_allowed = _NEVER
        gains = [0.0] * step.rows
        for i, gain in zip(rows, plan.gains, strict=True):
            gains[i] = gain
        seconds = plan.seconds
        for i in [i for i in range(step.rows) if seconds - gains[i] * plain > spare[i] + slack]:
            row = row_of.get(i)
            at_most = 1.0 + (most[row] if row is not None else 0.0)
            bearable = at_most * plain + spare[i]
            hurt_allowed = min(hurt_allowed, bearable)
            if seconds > bearable:
                if not _bears(step, i):
                    allowed = min(allowed, bearable)
            elif row is not None and at_most > 1.0 + gains[i]:
                # A deeper draft for one that would fall behind: what it needs to keep up with the step.
                helped[row] = (1.03 * seconds - spare[i]) / plain - 1.0
        rounds += 1
        if allowed < _NEVER:  # the step may last no longer than the request that can spare least allows
            plan.within(allowed)
            rounds = 0
        elif not helped:
            return
        elif rounds > _HELPINGS or not plan.raise_to(helped) or plan.seconds > longest:
            plan.within(min(hurt_allowed, _SHORTER * seconds))
            rounds = 0


def _bears(step: Step, i: int) -> bool:
    """A request that usually gains bears with a bad step, up to a point."""
    request, seat = step.requests[i], step.seats[i]
    if seat.gain < 1.0:
        return False
    to_win = (seat.gain - 1.0) * min(request.max_useful_depth + 1, _SOON)
    return _lost(request, seat) < (_BEAR_STEPS + min(_OF_GAIN * to_win, _MOST_OF_GAIN)) * step.plain_seconds
