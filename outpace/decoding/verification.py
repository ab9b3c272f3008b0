"""Verifies a draft against the target's logits. Selects the acceptance rule for each request:

    greedy, seeded, or a one-hot draft   match: the target's own token at each position decides
    a tree                               the same, node by node
    sampled, unseeded, a neural draft    block verification (token-by-token rejection if the request asks for it)
    a lossy rule, set by the request     match, with leniency

Logits are processed row by row and only as far as the rule needs them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from outpace.backends.base import Logits, Runner, StepExecutor, StepResult, Verifier
from outpace.config import SamplingParams
from outpace.core import Case, Draft, Request, StepPlan, TokenLogprob, Verdict
from outpace.decoding import acceptance, sampling
from outpace.decoding.randomness import Purpose, key, uniform

FloatRow = NDArray[np.float32]


def matches_own_tokens(params: SamplingParams) -> bool:
    """Whether a draft for this request should be drawn with the target's noise, because `match` verifies it."""
    speculation = params.speculation
    return params.is_greedy or params.seed is not None or speculation.is_lossy


def verify(request: Request, draft: Draft | None, logits: NDArray[np.float32]) -> Verdict:
    """Verify a draft. `logits` has the rows of its `Case`."""
    rows = _Rows(Case(request, draft), logits)
    if draft is not None and draft.tree is not None:
        return acceptance.match_tree(draft.tokens, draft.tree, lambda node: rows.own_token(node + 1))
    tokens = draft.tokens if draft is not None else []
    if draft is None or draft.probs is None or matches_own_tokens(request.params):
        return acceptance.match(tokens, rows.own_token, _leniency(request.params, rows))
    rule = acceptance.reject if request.params.speculation.acceptance == "rejection" else acceptance.verify_block
    return rule(tokens, draft.probs, rows.probs, Dice(request.seed, rows.position(0)))


class HostVerifier:
    """The reference, in numpy, one request at a time; used if a backend provides nothing faster."""

    def verify(self, cases: Sequence[Case], logits: NDArray[np.float32]) -> list[Verdict]:
        verdicts = []
        at = 0
        for case in cases:
            num_rows = len(case.tokens) + 1
            verdicts.append(verify(case.request, case.draft, logits[at : at + num_rows]))
            at += num_rows
        return verdicts

    def own_token(self, request: Request, prefix: Sequence[int], logits: FloatRow) -> int:
        if request.params.is_greedy:
            return request.shaper.greedy(logits, prefix)
        return sampling.choose(self.probs(request, prefix, logits), request.seed, len(request.tokens) + len(prefix))

    def probs(self, request: Request, prefix: Sequence[int], logits: FloatRow) -> FloatRow:
        return request.shaper.probs(logits, prefix)

    def close(self) -> None:
        pass  # it has no resources


def executor_of(runner: Runner) -> StepExecutor:
    """The backend's own executor, or one that verifies on the host."""
    return runner.capabilities.executor or HostExecutor(runner, runner.capabilities.verifier or HostVerifier())


def host_scores(logits: Logits, begin: int, tokens: Sequence[int], num_top: int) -> list[TokenLogprob]:
    """`Scorer` in numpy; used if a backend provides nothing faster."""
    rows = logits[begin : begin + len(tokens)]
    return [sampling.token_logprob(row, token, num_top) for row, token in zip(rows, tokens, strict=True)]


class HostExecutor:
    def __init__(self, runner: Runner, verifier: Verifier) -> None:
        self._runner = runner
        self.verifier = verifier

    def __call__(
        self, plan: StepPlan, cases: Sequence[Case], meanwhile: Callable[[], None] | None = None
    ) -> StepResult:  # fmt: skip
        begin = perf_counter()
        logits = self._runner.forward(plan)
        seconds = perf_counter() - begin
        of_cases = logits[plan.lines_of_cases()] if plan.num_scored else logits
        return StepResult(logits, self.verifier.verify(cases, of_cases) if cases else [], seconds)


class _Rows:
    """The target's distributions and tokens along a draft, computed on first use."""

    def __init__(self, case: Case, logits: NDArray[np.float32]) -> None:
        self._case = case
        self._request = case.request
        self._logits = logits
        self._probs: dict[int, FloatRow] = {}

    def position(self, i: int) -> int:
        return len(self._request.tokens) + self._case.offsets[i]

    def probs(self, i: int) -> FloatRow:
        if i not in self._probs:
            self._probs[i] = self._request.shaper.probs(self._logits[i], self._case.prefix(i))
        return self._probs[i]

    def own_token(self, i: int) -> int:
        if self._request.params.is_greedy:
            return self._request.shaper.greedy(self._logits[i], self._case.prefix(i))
        return sampling.choose(self.probs(i), self._request.seed, self.position(i))


def _leniency(params: SamplingParams, rows: _Rows) -> acceptance.Leniency | None:
    speculation = params.speculation
    if speculation.acceptance == "typical":
        return acceptance.typical_leniency(rows.probs, speculation.posterior_threshold, speculation.posterior_alpha)
    if speculation.acceptance == "threshold":
        assert speculation.threshold is not None
        return acceptance.threshold_leniency(rows.probs, speculation.threshold)
    return None


class Dice:
    """`Chance` from counter-based noise, addressed by the position where the draft begins and the offset in it.

    The begin of the draft is part of the address because in block verification noise at later offsets influences where
    the accepted prefix ends. Those positions are drafted again in the next step and need fresh noise.
    """

    def __init__(self, seed: int, anchor: int) -> None:
        self._seed = seed
        self._anchor = anchor

    def happens(self, offset: int, probability: float) -> bool:
        return uniform(key(self._seed, Purpose.ACCEPT, self._anchor, offset)) < float(probability)

    def draw(self, offset: int, weights: FloatRow) -> int:
        return draw_weighted(weights, uniform(key(self._seed, Purpose.RECOVER, self._anchor, offset)))


def draw_weighted(weights: FloatRow, u: float) -> int:
    """Inverse transform over unnormalised weights; a token of weight zero is never drawn."""
    cumulative = np.cumsum(weights, dtype=np.float64)
    index = int(np.searchsorted(cumulative, u * cumulative[-1], side="right"))
    return min(index, int(np.flatnonzero(weights)[-1])) if index >= weights.size else index
