"""Costs on this machine: target steps, each proposer's drafts, and host work.

All costs are measured, first by a short calibration, then by every step that runs. `StepCosts` gives the time of a
forward pass by rows and tokens, `DraftCosts` the time of a proposer's drafts. `Costs` holds one for the target and one
for each proposer; the policy and the reports to users read the same figures.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from outpace.speculation.costs.timing import DraftTiming, Forward

# That are measured, as far as time allows.
SIZES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
_DRIFT_RATE = 0.1  # learning rate of the factor common to all sizes
_POINT_RATE = 0.03  # learning rate of a single size
_ROW_RATE = 0.4  # learning rate of the cost per row, where that is well above the noise
_ROW_NOISE = 0.1  # relative noise of a step's time
_MAX_ROW_CHANGE = 0.2  # relative change per step
_HOST_RATE = 0.05
_STALE_POINTS = 16  # changed points after which the dense curve is rebuilt
_MANY_SIZES = 32  # from this many sizes, numpy is faster than a list
_MAX_SURPRISE = math.log(2.0)  # limits the effect of a disturbed step


class StepCosts:
    """Seconds of a forward pass: a curve over its number of tokens, plus the costs of further rows and of context.

    The curve keeps every measured size, so jumps between sizes are preserved. Between sizes it is linear; beyond the
    last it continues with the mean slope of its upper half, since the last two sizes may take equally long. A common
    factor follows the speed of the machine, which other load or a warm processor changes for all sizes alike; single
    sizes are corrected more slowly.
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
        self.context_seconds = context_seconds  # for each token of the mean context, independent of rows
        self.row_context_seconds = row_context_seconds  # for each token of context in each row
        self.token_context_seconds = token_context_seconds  # for each pair of a new token and a context token
        self._drift = 1.0
        self._dense: list[float] = []  # seconds by number of tokens, without drift
        self._dense_array = np.zeros(0)  # the same
        self._num_changed = 0  # points changed since `_dense` was built

    @property
    def points(self) -> dict[int, float]:
        """Current seconds by number of tokens, in one row without context."""
        return {size: seconds * self._drift for size, seconds in self._points.items()}

    def seconds(self, rows: int, tokens: int, context: float = 0.0) -> float:
        """`context` is the mean number of tokens per row in the cache."""
        return self._drift * (self._at(tokens) + self._extra(rows, tokens, context))

    def by_tokens(
        self, rows: int, least: int, most: int, context: float = 0.0, host_seconds: float = 0.0
    ) -> list[float]:
        """`seconds` plus `host_seconds` for every number of tokens from least to most."""
        dense, drift = self._dense_to(most), self._drift
        base, for_token = drift * self._extra(rows, 0, context), context * self.token_context_seconds
        if most - least < _MANY_SIZES:
            sizes = range(least, most + 1)
            return [host_seconds + (base + drift * (dense[size] + size * for_token)) for size in sizes]
        for_tokens = self._dense_array[least : most + 1] + np.arange(least, most + 1) * for_token
        many: list[float] = (host_seconds + (base + drift * for_tokens)).tolist()
        return many

    def observe(self, rows: int, tokens: int, context: float, seconds: float, num_passes: int = 1) -> None:
        """Learn from the mean time of so many equal forward passes."""
        if seconds <= 0:
            return
        if rows > 1:
            self._observe_rows(rows, tokens, context, seconds)
        surprise = math.log(seconds / self.seconds(rows, tokens, context))
        surprise = max(-_MAX_SURPRISE, min(_MAX_SURPRISE, surprise))
        self._drift *= math.exp((1.0 - (1.0 - _DRIFT_RATE) ** num_passes) * surprise)
        if tokens <= 2 * max(self._points):  # a large prefill chunk is no size that drafts reach
            self._points[tokens] = self._at(tokens) * math.exp((1.0 - (1.0 - _POINT_RATE) ** num_passes) * surprise)
            self._num_changed += 1

    def _observe_rows(self, rows: int, tokens: int, context: float, seconds: float) -> None:
        """Scale both costs per row by one factor; it changes more the larger the rows' share of the step is."""
        for_rows = (rows - 1) * self.row_seconds + context * rows * self.row_context_seconds
        expected = self._at(tokens) + self._extra(rows, tokens, context)
        missed = seconds / self._drift - expected
        change = _ROW_RATE * missed * for_rows / (for_rows**2 + (_ROW_NOISE * expected) ** 2)
        factor = max(1.0 - _MAX_ROW_CHANGE, min(1.0 + _MAX_ROW_CHANGE, 1.0 + change))
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
        """The inverse of `as_dict`; raises ValueError, KeyError or TypeError for damaged data."""
        points = {int(size): float(seconds) for size, seconds in saved["points"].items()}
        names = ("row_seconds", "context_seconds", "row_context_seconds", "token_context_seconds")
        extras = {name: float(saved[name]) for name in names}
        plausible = bool(points) and all(1 <= size < 1e6 and 0 < seconds < 1e4 for size, seconds in points.items())
        if not plausible or not all(0 <= extra < 1e3 for extra in extras.values()):
            raise ValueError("a step cost is out of range")
        return cls(points, **extras)

    def _extra(self, rows: int, tokens: int, context: float) -> float:
        for_context = self.context_seconds + rows * self.row_context_seconds + tokens * self.token_context_seconds
        return (rows - 1) * self.row_seconds + context * for_context

    def _at(self, tokens: int) -> float:
        known = self._points.get(tokens)
        return known if known is not None else self._dense_to(tokens)[tokens]

    def _dense_to(self, most: int) -> list[float]:
        """Rebuilt only after several changes: a small change of a point does not affect decisions."""
        if len(self._dense) <= most or self._num_changed >= _STALE_POINTS:
            sizes = sorted(self._points)
            seconds = [self._points[size] for size in sizes]
            length = max(most, sizes[-1], len(self._dense) - 1) + 1
            dense = np.interp(np.arange(length), sizes, seconds)
            if len(sizes) > 1:
                slope = max(0.0, seconds[-1] - dense[sizes[-1] // 2]) / (sizes[-1] - sizes[-1] // 2)
                dense += slope * np.maximum(np.arange(length) - sizes[-1], 0)
            self._dense, self._dense_array = dense.tolist(), dense
            self._num_changed = 0
        return self._dense


class DraftCosts:
    """The cost of one proposer's drafts, by rows and depth, and of catching up.

    A lookup costs a fixed time per request. A model costs one pass per draft token, or one pass per draft (`one_pass`).
    The first pass of a head's draft takes longer than the others (`first`): it also takes in what the last step
    emitted. Drawing on the host costs a fixed time per token.
    """

    def __init__(
        self,
        passes: StepCosts | None = None,
        catch_up: StepCosts | None = None,
        *,
        first: StepCosts | None = None,
        one_pass: bool = False,
        lookup_seconds: float = 0.0,
        draw_seconds: float = 0.0,
    ) -> None:
        self.passes = passes
        self.catch_up = catch_up  # passes over uncached tokens that need only the last logits
        self.first = first  # the first pass of a draft; None: it takes as long as the others
        self.one_pass = one_pass
        self.lookup_seconds = lookup_seconds  # per request
        self.draw_seconds = draw_seconds  # per token drafted by a model

    def seconds(self, rows: int, depth: int, context: float) -> float:
        """The time to draft `depth` tokens for each of `rows` requests, without catching up."""
        if self.passes is None:
            return rows * self.lookup_seconds
        if self.one_pass:
            forward = self.passes.seconds(rows, rows * depth, context)
        else:
            forward = self._first_seconds(rows, context) + (depth - 1) * self.passes.seconds(rows, rows, context)
        return forward + rows * depth * self.draw_seconds

    def _first_seconds(self, rows: int, context: float) -> float:
        first = self.first or self.passes
        assert first is not None
        return first.seconds(rows, rows, context)

    def catch_up_seconds(self, num_tokens: int, rows: int = 1) -> float:
        """The time that `num_tokens` uncached tokens add to a pass of `rows` tokens."""
        curve = self.catch_up or self.passes
        if curve is None or num_tokens <= 0:
            return 0.0
        return curve.seconds(1, rows + num_tokens) - curve.seconds(1, rows)

    def observe_lookups(self, num_requests: int, seconds: float) -> None:
        self.lookup_seconds = _smoothed(self.lookup_seconds, seconds / num_requests)

    def observe(self, timing: DraftTiming) -> None:
        """Learn from the timing of a model's drafts."""
        if self.passes is None:
            return
        usual_seconds = timing.divide(self.passes.seconds)
        for (rows, tokens, context, seconds), count in Counter(self._divided(timing.forwards)).items():
            self.passes.observe(rows, tokens, context, seconds, count)
        if timing.num_caught_up and self.catch_up is not None:
            self.catch_up.observe(1, timing.num_caught_up, 0.0, timing.catch_up_seconds + usual_seconds)
        if timing.num_drawn:
            self.draw_seconds = _smoothed(self.draw_seconds, timing.draw_seconds / timing.num_drawn)

    def _divided(self, forwards: Sequence[Forward]) -> Sequence[Forward]:
        """The passes after the first, if that has a curve of its own; the curve learns here. Only the time of the whole
        draft is known, so all of its passes are taken to be slower or faster alike."""
        if self.first is None or self.passes is None or not forwards:
            return forwards
        rows, tokens, context, _ = forwards[0]
        expected = self._first_seconds(rows, context), self.passes.seconds(rows, rows, context)
        ratio = sum([each[-1] for each in forwards]) / (expected[0] + (len(forwards) - 1) * expected[1])
        self.first.observe(rows, tokens, context, ratio * expected[0])
        return [(rows, tokens, context, ratio * expected[1])] * (len(forwards) - 1)

    def as_dict(self) -> dict[str, Any]:
        return {
            "passes": None if self.passes is None else self.passes.as_dict(),
            "first": None if self.first is None else self.first.as_dict(),
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
            first=None if saved.get("first") is None else StepCosts.from_dict(saved["first"]),
            one_pass=bool(saved["one_pass"]),
            lookup_seconds=_seconds(saved["lookup_seconds"]),
            draw_seconds=_seconds(saved["draw_seconds"]),
        )


@dataclass(slots=True)
class Costs:
    """All costs that the policy needs."""

    target: StepCosts
    drafts: dict[str, DraftCosts] = field(default_factory=dict)  # by proposer
    token_seconds: float = 0.0  # host time per emitted token: sampling, detokenising
    schedule_seconds: float = 0.0  # host time per step, independent of its size

    def plain_seconds(self, rows: int, context: float) -> float:
        """The time of a plain decoding step, host work included."""
        return self.target.seconds(rows, rows, context) + self.schedule_seconds + rows * self.token_seconds

    def observe_host(self, *, schedule_seconds: float, verify_seconds: float, num_emitted: int) -> None:
        self.schedule_seconds = _smoothed(self.schedule_seconds, schedule_seconds)
        self.token_seconds = _smoothed(self.token_seconds, verify_seconds / max(num_emitted, 1))

    def as_dict(self) -> dict[str, Any]:
        return {
            "target": self.target.as_dict(),
            "drafts": {name: costs.as_dict() for name, costs in self.drafts.items()},
            "token_seconds": self.token_seconds,
            "schedule_seconds": self.schedule_seconds,
        }

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> Costs:
        return cls(
            target=StepCosts.from_dict(saved["target"]),
            drafts={str(name): DraftCosts.from_dict(each) for name, each in saved["drafts"].items()},
            token_seconds=_seconds(saved["token_seconds"]),
            schedule_seconds=_seconds(saved["schedule_seconds"]),
        )


def _smoothed(known: float, seen: float) -> float:
    """A moving average in which a single interrupted step has limited effect."""
    return known + _HOST_RATE * (min(seen, 4 * known) - known) if known else seen


def _seconds(value: object) -> float:
    seconds = float(value)  # type: ignore[arg-type]
    if not 0 <= seconds < 1e3:
        raise ValueError("a host cost is out of range")
    return seconds
