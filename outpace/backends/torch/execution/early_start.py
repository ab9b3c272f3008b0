"""Decides whether to start a plain step before its plan arrives.

A right guess hides the host's work between two steps; a wrong one costs one useless step. Every plain step teaches how
often the next plan is as expected, whether that step was started early or not. Rates are kept apart for requests that
never use drafts, because other requests tell nothing about them, and for the number of plain steps in a row: while
drafts pay, a plain step is followed by drafts; when they do not, plain steps come in long runs.
"""

from __future__ import annotations

_RATE = 1 / 16  # of the moving averages
_LEAST_PLAIN = 2  # plain steps in a row before one is started early
_MOST_DOUBLED = 4  # runs are grouped by powers of two; 8 or more plain steps are one group


class EarlyStart:
    def __init__(self) -> None:
        # Share of wrong guesses, by (requests never use drafts, group of the number of plain steps in a row).
        self._surprises = dict[tuple[bool, int], float]()
        self._host_seconds = 0.0  # the host's, between two steps
        self._step_seconds = 0.0  # of a plain step that was not started early
        self._num_plain = 0  # plain steps in a row
        self._num_before = 0  # the same, before the latest plan
        self._last_end: float | None = None

    def begin(self, now: float, is_plain: bool) -> None:
        """A plan has arrived."""
        if self._last_end is not None:
            self._host_seconds += _RATE * (min(now - self._last_end, self._step_seconds) - self._host_seconds)
        self._num_before = self._num_plain
        self._num_plain = self._num_plain + 1 if is_plain else 0

    def end(self, now: float, step_seconds: float | None) -> None:
        """The step is done. `step_seconds`: of a plain step that was not started early, else None."""
        self._last_end = now
        if step_seconds is not None:
            self._step_seconds += (_RATE if self._step_seconds else 1.0) * (step_seconds - self._step_seconds)

    def learn(self, is_never_drafted: bool, was_right: bool) -> None:
        """Record whether the plan continues the plain step before it, as expected."""
        kind = is_never_drafted, _doubled(self._num_before)
        surprises = self._surprises.get(kind, 0.0)
        self._surprises[kind] = surprises + _RATE * ((not was_right) - surprises)

    def is_worth(self, is_never_drafted: bool) -> bool:
        surprises = self._surprises.get((is_never_drafted, _doubled(self._num_plain)), 0.0)
        lost, won = surprises * self._step_seconds, (1.0 - surprises) * self._host_seconds
        return self._num_plain >= _LEAST_PLAIN and lost < won


def _doubled(num_plain: int) -> int:
    return min(num_plain.bit_length(), _MOST_DOUBLED)
