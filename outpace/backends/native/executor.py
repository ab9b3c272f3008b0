"""Runs a step and verifies its drafts. Greedy requests without logit adjustments do not read the logits, and those with
a grammar only where the grammar forbids the likeliest token.

The threads of a step find each row's argmax over the part of the row that they have just computed, while it is in their
cache. It is the token that `Shaper.greedy` finds, and faster than one thread that reads the whole row again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from outpace.backends.base import StepResult
from outpace.backends.native.verifier import NativeVerifier
from outpace.core import Case, Request, StepPlan, Verdict
from outpace.decoding import acceptance
from outpace.decoding.matcher import Matcher

if TYPE_CHECKING:
    from outpace.backends.native.runner import NativeRunner


FloatRows = NDArray[np.float32]


class NativeExecutor:
    def __init__(self, runner: NativeRunner, verifier: NativeVerifier) -> None:
        self._runner = runner
        self._verifier = verifier

    def __call__(
        self, plan: StepPlan, cases: Sequence[Case], meanwhile: Callable[[], None] | None = None
    ) -> StepResult:  # fmt: skip
        begin = perf_counter()
        logits = self._runner.forward(plan)
        seconds = perf_counter() - begin
        lines = plan.lines_of_cases() if plan.num_scored else None
        of_cases = logits if lines is None else logits[lines]
        if all(_emits_argmax(case.request) for case in cases):
            likeliest = self._runner.likeliest(len(logits))
            of_lines = likeliest if lines is None else [likeliest[line] for line in lines]
            verdicts = self._matched(cases, of_cases, of_lines)
        else:
            verdicts = self._verifier.verify(cases, of_cases)
        return StepResult(logits, verdicts, seconds)

    def _matched(self, cases: Sequence[Case], logits: FloatRows, likeliest: list[int]) -> list[Verdict]:
        verdicts, at = [], 0
        for case in cases:
            end = at + len(case.tokens) + 1
            own_token: Callable[[int], int] = likeliest[at:end].__getitem__
            if case.request.matcher is not None:
                own_token = _Constrained(case, case.request.matcher, self._verifier, logits[at:end], likeliest[at:end])
            verdicts.append(acceptance.match(case.tokens, own_token))
            at = end
        return verdicts


def _emits_argmax(request: Request) -> bool:
    params = request.params
    return params.is_greedy and request.shaper.has_only_mask and not params.speculation.is_lossy


@dataclass(frozen=True, slots=True)
class _Constrained:
    """The likeliest allowed token of each row: most often the likeliest of all, and then no mask is needed."""

    case: Case
    matcher: Matcher
    verifier: NativeVerifier
    logits: FloatRows
    likeliest: list[int]

    def __call__(self, i: int) -> int:
        token, prefix = self.likeliest[i], self.case.tokens[:i]
        only = self.matcher.only_token(prefix)
        if only is not None:
            return only
        if self.matcher.allows(token, prefix):
            return token
        return self.verifier.own_token(self.case.request, prefix, self.logits[i])
