"""How a proposer's drafting time divides into forward passes, catching up and drawing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

Forward = tuple[int, int, float, float]  # rows, tokens, mean context, seconds


@dataclass(slots=True)
class DraftTiming:
    """The time of one call to a proposer that runs a model, measured by the proposer."""

    forwards: list[Forward] = field(default_factory=list)
    catch_up_seconds: float = 0.0  # of passes over tokens that the model had not processed
    num_caught_up: int = 0  # tokens of those passes
    draw_seconds: float = 0.0  # on the host: shaping distributions and drawing from them
    num_drawn: int = 0
    undivided: tuple[int, int, float, float] | None = None  # rows, passes, context, seconds: catch-up included

    def divide(self, pass_seconds: Callable[[int, int, float], float]) -> float:
        """Split the `undivided` time: passes took their usual time (by rows, tokens, context), catching up the rest.
        Returns the usual time of one pass."""
        if self.undivided is None:
            return 0.0
        rows, passes, context, seconds = self.undivided
        usual = min(pass_seconds(rows, rows, context), seconds / passes)
        self.catch_up_seconds += seconds - passes * usual
        self.undivided = None
        return usual
