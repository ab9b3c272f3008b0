"""Runs a step and verifies its drafts. Greedy requests without logit adjustments do not read the logits.

The threads of a step find each row's argmax over the part of the row that they have just computed, while it is in their
cache. It is the token that `Shaper.greedy` finds, and faster than one thread that reads the whole row again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import TYPE_CHECKING

from outpace.backends.base import StepResult
from outpace.backends.native.verifier import NativeVerifier
from outpace.core import Case, Request, StepPlan, Verdict
from outpace.decoding import acceptance

if TYPE_CHECKING:
    from outpace.backends.native.runner import NativeRunner


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
        if all(_emits_argmax(case.request) for case in cases):
            verdicts = _matched(cases, self._runner.likeliest(len(logits)))
        else:
            verdicts = self._verifier.verify(cases, logits)
        return StepResult(logits, verdicts, seconds)


def _emits_argmax(request: Request) -> bool:
    params = request.params
    return params.is_greedy and not request.shaper.may_adjust and not params.speculation.is_lossy


def _matched(cases: Sequence[Case], likeliest: list[int]) -> list[Verdict]:
    verdicts, at = [], 0
    for case in cases:
        num_rows = len(case.tokens) + 1
        verdicts.append(acceptance.match(case.tokens, likeliest[at : at + num_rows].__getitem__))
        at += num_rows
    return verdicts
