"""Decides whether to begin the verification of a head's draft before its plan arrives.

Otherwise it begins when the host has committed the last verdicts, scheduled and decided: the device waits for that, as
far as the draft does not take as long. So beginning early wins nothing with few requests and much with many. If the
plan is another one, the verification is lost, and it takes a whole step.
"""

from __future__ import annotations

from outpace.core import Row

_RATE = 1 / 16  # of the moving averages

Foreseen = list[tuple[int, int, int]]  # sequence, start and number of tokens of each row


def rows_of(rows: list[Row]) -> Foreseen:
    return [(row.seq, row.start, len(row.tokens)) for row in rows]


class Foresight:
    def __init__(self) -> None:
        self._expected: Foreseen | None = None  # the next plan's rows
        self._share = 1.0  # of plans that were as expected
        self._verified: tuple[int, float] | None = None  # number and time of the last verification
        self._beginning = 0.0  # seconds that the host then spent on beginning the next one
        # Moving averages of seconds; 0: not known.
        self._step = 0.0  # from one verification to the next
        self._host = 0.0  # the host's between a verification and the begin of the next one
        self._launch = 0.0  # to launch it
        self._draft = 0.0  # the device's, for the draft

    def is_worth(self) -> bool:
        late = max(self._draft, self._host + self._launch)
        won = late - max(self._draft, self._launch)
        return self._share * won > (1.0 - self._share) * self._step

    def expect(self, rows: Foreseen) -> None:
        self._expected = rows

    def learn_plan(self, rows: list[Row]) -> None:
        if self._expected is not None:
            self._share += _RATE * ((rows_of(rows) == self._expected) - self._share)
            self._expected = None

    def learn_verified(self, num_steps: int, now: float) -> None:
        """The host knows the result of a verification, in the step of this number."""
        if self._verified is not None and self._verified[0] + 1 == num_steps:
            self._step = _averaged(self._step, now - self._verified[1])
        self._verified, self._beginning = (num_steps, now), 0.0

    def learn_begun(self, seconds: float) -> None:
        self._beginning = seconds

    def learn_asked(self, now: float) -> None:
        """The draft behind the last verification is asked for: now its verification would begin."""
        if self._verified is not None:
            self._host = _averaged(self._host, now - self._verified[1] - self._beginning)

    def learn_launched(self, seconds: float) -> None:
        self._launch = _averaged(self._launch, seconds)

    def learn_drafted(self, seconds: float) -> None:
        self._draft = _averaged(self._draft, seconds)


def _averaged(average: float, seconds: float) -> float:
    return average + (_RATE if average else 1.0) * (seconds - average)
