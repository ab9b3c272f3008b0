"""Whether a plain step is worth beginning before it is asked for.

A right guess hides what the host does between two steps; a wrong one costs a step that nobody wanted. How often plans
go on as expected is learned from all plain steps, whether the next one was begun or not. Requests that are never
drafted for are apart in this: what becomes of others says nothing about them. So are steps by how many plain ones came
before them: while drafts go on a plain step stays alone, but where none is worth while there are many on end.
"""

from __future__ import annotations

_RATE = 1 / 16  # of learning
_LEAST_PLAIN = 2  # plain steps in a row, before anything is guessed
_MOST_DOUBLED = 4  # times that a row of plain steps has doubled, beyond which its length says no more


class Foresight:
    def __init__(self) -> None:
        # Shares of plain steps, by whether never drafted for and by how many there had been in a row.
        self._surprises = dict[tuple[bool, int], float]()
        self._host_seconds = 0.0  # between two steps
        self._step_seconds = 0.0  # of a plain one that was not begun
        self._num_plain = 0  # in a row,
        self._num_before = 0  # and when the latest plan came
        self._last_end: float | None = None

    def begin(self, now: float, is_plain: bool) -> None:
        """A plan has come."""
        if self._last_end is not None:
            self._host_seconds += _RATE * (min(now - self._last_end, self._step_seconds) - self._host_seconds)
        self._num_before = self._num_plain
        self._num_plain = self._num_plain + 1 if is_plain else 0

    def end(self, now: float, step_seconds: float | None) -> None:
        """It is done; `step_seconds` of a plain step from its beginning."""
        self._last_end = now
        if step_seconds is not None:
            self._step_seconds += (_RATE if self._step_seconds else 1.0) * (step_seconds - self._step_seconds)

    def learn(self, is_never_drafted: bool, was_right: bool) -> None:
        """Whether the plan that came goes on as the plain step before it."""
        kind = is_never_drafted, _doubled(self._num_before)
        surprises = self._surprises.get(kind, 0.0)
        self._surprises[kind] = surprises + _RATE * ((not was_right) - surprises)

    def is_worth(self, is_never_drafted: bool) -> bool:
        surprises = self._surprises.get((is_never_drafted, _doubled(self._num_plain)), 0.0)
        lost, won = surprises * self._step_seconds, (1.0 - surprises) * self._host_seconds
        return self._num_plain >= _LEAST_PLAIN and lost < won


def _doubled(num_plain: int) -> int:
    return min(num_plain.bit_length(), _MOST_DOUBLED)
