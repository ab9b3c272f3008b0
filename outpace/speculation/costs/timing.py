"""Where the time of a draft went, as the proposer that made it measured it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(slots=True)
class DraftTiming:
    """Where the time of one call to a proposer that runs a model went."""

    forwards: list[tuple[int, int, float, float]] = field(default_factory=list)  # rows, tokens, mean context, seconds
    catch_up_seconds: float = 0.0  # of passes over texts that were not followed before,
    num_caught_up: int = 0  # and their tokens, where nothing else was done in that time
    draw_seconds: float = 0.0  # shaping and drawing, on the host
    num_drawn: int = 0
    undivided: tuple[int, int, float, float] | None = None  # rows, passes, context, seconds: both in one go

    def divide(self, pass_seconds: Callable[[int, int, float], float]) -> float:
        """Of what was done in one go, the passes took what they usually take (rows, tokens, context), and the rest was
        catching up; returns what the first pass would have taken without it."""
        if self.undivided is None:
            return 0.0
        rows, passes, context, seconds = self.undivided
        usual = min(pass_seconds(rows, rows, context), seconds / passes)
        self.catch_up_seconds += seconds - passes * usual
        self.undivided = None
        return usual
