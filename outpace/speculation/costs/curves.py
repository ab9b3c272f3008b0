"""What things cost on this machine: steps of the target, drafts of each proposer, and the host's own work.

Everything here is measured, first by a short calibration, then by every step that runs. `StepCosts` answers what a
forward pass over so many rows and tokens takes, `DraftCosts` what a proposer's drafts take; `Costs` holds one for the
target and one for each proposer, so that the policy and the advice given to people use the same figures.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from outpace.speculation.costs.timing import DraftTiming

_DRIFT_RATE = 0.1  # how fast the machine as a whole is believed to have become faster or slower
_POINT_RATE = 0.03  # how fast one size is believed to cost more or less than its neighbours say
_ROW_RATE = 0.4  # and what each row adds, where that is much more than
_ROW_NOISE = 0.1  # of a step
_MOST_ROW_CHANGE = 0.2  # that one step can make
_HOST_RATE = 0.05
_STALE_POINTS = 16
_MANY_SIZES = 256  # from which on an array is faster than a list, though its code is not at hand
_MOST_SURPRISE = math.log(2.0)  # a step disturbed by something else says at most this much


class StepCosts:
    """Seconds of a forward pass: a curve over its number of tokens, plus what further rows and context add.

    The curve keeps every size it has met as it was measured, so a staircase stays one; between sizes it is straight,
    beyond them it goes on as it last went. A common factor follows the speed of the machine, which a busy neighbour
    or a warm processor changes for all sizes alike; single sizes are corrected more slowly.
    """

    def __init__(
        self,
        points: Mapping[int, float],
        *,
        row_seconds: float = 0.0,
        context_seconds: float = 0.0,
        row_context_seconds: float = 0.0,
        token_context_seconds: float = 0.0,
    ) -> None:
        assert points, "nothing has been measured"
        self._points = {size: float(points[size]) for size in sorted(points)}
        self.row_seconds = row_seconds  # for each row beyond the first
        self.context_seconds = context_seconds  # for each token of context that rows have on average, however many
        self.row_context_seconds = row_context_seconds  # for each token of context a row has
        self.token_context_seconds = token_context_seconds  # for each pair of a new token and one of its context
        self._drift = 1.0
        self._dense: list[float] = []  # seconds by number of tokens, drift aside
        self._num_changed = 0  # points, since that was made

    @property
    def points(self) -> dict[int, float]:
        """Seconds by number of tokens, in one row without context, as of now."""
        return {size: seconds * self._drift for size, seconds in self._points.items()}

    def seconds(self, rows: int, tokens: int, context: float = 0.0) -> float:
        """`context` is the mean number of tokens the rows already have in the cache."""
        return self._drift * (self._at(tokens) + self._extra(rows, tokens, context))

    def by_tokens(self, rows: int, least: int, most: int, context: float = 0.0) -> list[float]:
        """`seconds` for every number of tokens from least to most."""
        dense = self._dense_to(most)
        base, for_token = self._drift * self._extra(rows, 0, context), context * self.token_context_seconds
        if most - least >= _MANY_SIZES:
            sizes = np.arange(least, most + 1)
            many: list[float] = (base + self._drift * (np.array(dense[least : most + 1]) + sizes * for_token)).tolist()
            return many
        return [base + self._drift * (dense[tokens] + tokens * for_token) for tokens in range(least, most + 1)]

    def observe(self, rows: int, tokens: int, context: float, seconds: float) -> None:
        """A forward pass took this long."""
        if seconds <= 0:
            return
        if rows > 1:
            self._observe_rows(rows, tokens, context, seconds)
        surprise = math.log(seconds / self.seconds(rows, tokens, context))
        surprise = max(-_MOST_SURPRISE, min(_MOST_SURPRISE, surprise))
        self._drift *= math.exp(_DRIFT_RATE * surprise)
        if tokens <= 2 * max(self._points):  # a prompt's chunk is no size a draft is weighed at
            self._points[tokens] = self._at(tokens) * math.exp(_POINT_RATE * surprise)
            self._num_changed += 1

    def _observe_rows(self, rows: int, tokens: int, context: float, seconds: float) -> None:
        """What each row adds is believed by the same measure to be more or less, the more so the more it matters."""
        for_rows = (rows - 1) * self.row_seconds + context * rows * self.row_context_seconds
        believed = self._at(tokens) + self._extra(rows, tokens, context)
        missed = seconds / self._drift - believed
        change = _ROW_RATE * missed * for_rows / (for_rows**2 + (_ROW_NOISE * believed) ** 2)
        factor = max(1.0 - _MOST_ROW_CHANGE, min(1.0 + _MOST_ROW_CHANGE, 1.0 + change))
        self.row_seconds *= factor
        self.row_context_seconds *= factor

    def as_dict(self) -> dict[str, Any]:
        return {
            "points": {str(size): seconds for size, seconds in sorted(self.points.items())},
            "row_seconds": self.row_seconds * self._drift,
            "context_seconds": self.context_seconds * self._drift,
            "row_context_seconds": self.row_context_seconds * self._drift,
            "token_context_seconds": self.token_context_seconds * self._drift,
        }

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> StepCosts:
        """The inverse of `as_dict`; ValueError, KeyError or TypeError where that was damaged."""
        points = {int(size): float(seconds) for size, seconds in saved["points"].items()}
        names = ("row_seconds", "context_seconds", "row_context_seconds", "token_context_seconds")
        extras = {name: float(saved[name]) for name in names}
        plausible = bool(points) and all(1 <= size < 1e6 and 0 < seconds < 1e4 for size, seconds in points.items())
        if not plausible or not all(0 <= extra < 1e3 for extra in extras.values()):
            raise ValueError("costs that no machine has")
        return cls(points, **extras)

    def _extra(self, rows: int, tokens: int, context: float) -> float:
        for_context = self.context_seconds + rows * self.row_context_seconds + tokens * self.token_context_seconds
        return (rows - 1) * self.row_seconds + context * for_context

    def _at(self, tokens: int) -> float:
        known = self._points.get(tokens)
        return known if known is not None else self._dense_to(tokens)[tokens]

    def _dense_to(self, most: int) -> list[float]:
        """Made anew now and then: a point that has moved a little since changes no decision."""
        if len(self._dense) <= most or self._num_changed >= _STALE_POINTS:
            sizes = sorted(self._points)
            seconds = [self._points[size] for size in sizes]
            length = max(most, sizes[-1], len(self._dense) - 1) + 1
            dense = np.interp(np.arange(length), sizes, seconds)
            if len(sizes) > 1:
                slope = max(0.0, (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2]))
                dense += slope * np.maximum(np.arange(length) - sizes[-1], 0)
            self._dense = dense.tolist()
            self._num_changed = 0
        return self._dense


class DraftCosts:
    """What drafts of one proposer cost, by rows and depth, and what it costs it to catch up with a text.

    A lookup has a price for each request. A model has a price for each pass: one for each token of a draft, or one for
    the whole draft (`one_pass`). Drawing tokens on the host is priced by the token.
    """

    def __init__(
        self,
        passes: StepCosts | None = None,
        catch_up: StepCosts | None = None,
        *,
        one_pass: bool = False,
        lookup_seconds: float = 0.0,
        draw_seconds: float = 0.0,
    ) -> None:
        self.passes = passes
        self.catch_up = catch_up  # passes over texts that were not followed, of which only the last logits matter
        self.one_pass = one_pass
        self.lookup_seconds = lookup_seconds  # for each request,
        self.draw_seconds = draw_seconds  # and for each token drafted by a model

    def seconds(self, rows: int, depth: int, context: float) -> float:
        """Drafting `depth` tokens for each of `rows` requests whose texts it has followed."""
        if self.passes is None:
            return rows * self.lookup_seconds
        if self.one_pass:
            forward = self.passes.seconds(rows, rows * depth, context)
        else:
            forward = depth * self.passes.seconds(rows, rows, context)
        return forward + rows * depth * self.draw_seconds

    def catch_up_seconds(self, num_tokens: int, rows: int = 1) -> float:
        """What so many tokens of texts it has not followed add to a pass that has `rows` tokens in any case."""
        curve = self.catch_up or self.passes
        if curve is None or num_tokens <= 0:
            return 0.0
        return curve.seconds(1, rows + num_tokens) - curve.seconds(1, rows)

    def observe_lookups(self, num_requests: int, seconds: float) -> None:
        self.lookup_seconds = _followed(self.lookup_seconds, seconds / num_requests)

    def observe(self, timing: DraftTiming) -> None:
        """A model drafted, and this is where its time went."""
        if self.passes is None:
            return
        first_seconds = timing.divide(self.passes.seconds)
        for rows, tokens, context, seconds in timing.forwards:
            self.passes.observe(rows, tokens, context, seconds)
        if timing.num_caught_up and self.catch_up is not None:
            self.catch_up.observe(1, timing.num_caught_up, 0.0, timing.catch_up_seconds + first_seconds)
        if timing.num_drawn:
            self.draw_seconds = _followed(self.draw_seconds, timing.draw_seconds / timing.num_drawn)

    def as_dict(self) -> dict[str, Any]:
        return {
            "passes": None if self.passes is None else self.passes.as_dict(),
            "catch_up": None if self.catch_up is None else self.catch_up.as_dict(),
            "one_pass": self.one_pass,
            "lookup_seconds": self.lookup_seconds,
            "draw_seconds": self.draw_seconds,
        }

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> DraftCosts:
        return cls(
            None if saved["passes"] is None else StepCosts.from_dict(saved["passes"]),
            None if saved["catch_up"] is None else StepCosts.from_dict(saved["catch_up"]),
            one_pass=bool(saved["one_pass"]),
            lookup_seconds=_seconds(saved["lookup_seconds"]),
            draw_seconds=_seconds(saved["draw_seconds"]),
        )


@dataclass(slots=True)
class Costs:
    """All that deciding about a step needs to know."""

    target: StepCosts
    drafts: dict[str, DraftCosts] = field(default_factory=dict)  # by proposer
    judge_seconds: float = 0.0  # the host's part of one token emitted: sampling, detokenising
    schedule_seconds: float = 0.0  # the host's part of a step, whatever its size

    def plain_seconds(self, rows: int, context: float) -> float:
        """A whole step of plain decoding: the model's part and the host's."""
        return self.target.seconds(rows, rows, context) + self.schedule_seconds + rows * self.judge_seconds

    def observe_host(self, *, schedule_seconds: float, verify_seconds: float, num_emitted: int) -> None:
        self.schedule_seconds = _followed(self.schedule_seconds, schedule_seconds)
        self.judge_seconds = _followed(self.judge_seconds, verify_seconds / max(num_emitted, 1))

    def as_dict(self) -> dict[str, Any]:
        return {
            "target": self.target.as_dict(),
            "drafts": {name: costs.as_dict() for name, costs in self.drafts.items()},
            "judge_seconds": self.judge_seconds,
            "schedule_seconds": self.schedule_seconds,
        }

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> Costs:
        return cls(
            target=StepCosts.from_dict(saved["target"]),
            drafts={str(name): DraftCosts.from_dict(each) for name, each in saved["drafts"].items()},
            judge_seconds=_seconds(saved["judge_seconds"]),
            schedule_seconds=_seconds(saved["schedule_seconds"]),
        )


def _followed(known: float, seen: float) -> float:
    """A host cost follows what is seen, but one step that was interrupted does not set it."""
    return known + _HOST_RATE * (min(seen, 4 * known) - known) if known else seen


def _seconds(value: object) -> float:
    seconds = float(value)  # type: ignore[arg-type]
    if not 0 <= seconds < 1e3:
        raise ValueError("a cost that no host has")
    return seconds
