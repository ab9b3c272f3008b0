"""Whether to speculate, for whom, and how deep; depth 0 is an ordinary answer.

`on` drafts to the depth asked for. `auto` weighs: with the acceptance each request has shown so far and the measured
cost of a step by its number of tokens, it takes the draft tokens most likely to survive, as many as make the whole
batch's expected tokens per second largest. A request for which it takes none is still followed where that is free: a
model-free proposer is asked what it would have guessed, and the guess is compared with what the target then says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outpace.config import MAX_DEPTH, ResolvedConfig, SpeculationMode
from outpace.core import Request, Verdict
from outpace.speculation.costs import CostCurve

NEURAL = "draft"
_PROBE_EVERY = 64  # steps between probes of a neural draft that does not seem to pay
_MEMORY = 0.9  # how much of the evidence survives each observation: about the last ten count
_DRIFT = 1.02  # how fast a cost that is no longer met is forgotten
_PRIOR_TRIALS = 2.0
_PRIOR_RATE = 0.6


@dataclass(slots=True)
class Choice:
    """Ask `method` for `depth` tokens; `verify` False: only to see whether the guess would have been right."""

    method: str
    depth: int
    verify: bool = True


class AcceptanceRate:
    """How often the next draft token is accepted, given that the ones before it were: recent evidence over a prior."""

    def __init__(self) -> None:
        self._hits = _PRIOR_RATE * _PRIOR_TRIALS
        self._trials = _PRIOR_TRIALS
        self.steps_unobserved = 0

    @property
    def value(self) -> float:
        return min(self._hits / self._trials, 0.99)

    def observe(self, num_hits: int, num_misses: int) -> None:
        self._hits = self._hits * _MEMORY + num_hits
        self._trials = self._trials * _MEMORY + num_hits + num_misses
        self.steps_unobserved = 0


class Policy:
    def __init__(self, config: ResolvedConfig, costs: CostCurve, *, can_speculate: bool) -> None:
        self._config = config
        self._costs = costs
        self._can_speculate = can_speculate
        self._rates: dict[int, AcceptanceRate] = {}
        self._draft_token_seconds: dict[str, float] = {}  # per method: what one token has cost to guess, lately

    def decide(self, requests: Sequence[Request]) -> list[Choice]:
        """One choice per decoding request of this step."""
        choices = [Choice(self._method(request), self._fixed_depth(request)) for request in requests]
        undecided = [i for i, request in enumerate(requests) if self._mode(request) == "auto" and choices[i].depth]
        if undecided:
            self._weigh(requests, choices, undecided)
        return choices

    def observe(self, request: Request, choice: Choice, guessed: Sequence[int], verdict: Verdict) -> None:
        """What came of a choice. `guessed` is the draft, verified or not."""
        rate = self._rates.setdefault(request.id, AcceptanceRate())
        rate.steps_unobserved += 1
        if verdict.num_drafted:
            rate.observe(verdict.num_accepted, int(verdict.num_accepted < verdict.num_drafted))
        elif guessed and not choice.verify:
            hit = guessed[0] == verdict.tokens[0]
            rate.observe(int(hit), int(not hit))

    def observe_drafting(self, method: str, num_tokens: int, seconds: float) -> None:
        """The cheapest seen lately: a draft that also had to catch up says little about the next one."""
        if num_tokens:
            each = seconds / num_tokens
            known = self._draft_token_seconds.get(method, each)
            self._draft_token_seconds[method] = min(each, known * _DRIFT)

    def release(self, request: Request) -> None:
        self._rates.pop(request.id, None)

    def _mode(self, request: Request) -> SpeculationMode:
        return request.params.speculation.mode or self._config.speculation

    def _method(self, request: Request) -> str:
        return request.params.speculation.method or self._config.method

    def _fixed_depth(self, request: Request) -> int:
        """The depth asked for, which is also the most `auto` may take."""
        if not self._can_speculate or self._mode(request) == "off" or self._method(request) == "none":
            return 0
        if self._mode(request) == "auto" and not self._costs.is_known:
            return 0  # nothing to weigh with
        wanted = request.params.speculation.max_depth
        depth = self._config.depth if wanted is None else wanted
        return min(depth, request.max_useful_depth, MAX_DEPTH)

    def _weigh(self, requests: Sequence[Request], choices: list[Choice], undecided: list[int]) -> None:
        """Keep the draft tokens that pay, across the batch."""
        slots: list[tuple[float, int]] = []  # survival probability of each possible draft token, and whose it is
        expected = float(len(requests))
        num_tokens = len(requests)
        weighed = set(undecided)
        for i, choice in enumerate(choices):
            rate = self._rates.setdefault(requests[i].id, AcceptanceRate()).value
            survivals = [rate**d for d in range(1, choice.depth + 1)]
            if i in weighed:
                slots += [(survival, i) for survival in survivals]
            else:  # drafted in any case
                expected += sum(survivals)
                num_tokens += choice.depth
        slots.sort(key=lambda slot: -slot[0])
        best_speed, best_count = expected / self._costs.seconds(num_tokens), 0
        drafting = 0.0
        for count, (survival, i) in enumerate(slots, start=1):
            expected += survival
            drafting += self._draft_token_seconds.get(choices[i].method, 0.0)
            speed = expected / (self._costs.seconds(num_tokens + count) + drafting)
            if speed > best_speed:
                best_speed, best_count = speed, count
        depths = dict.fromkeys(undecided, 0)
        for _, i in slots[:best_count]:
            depths[i] += 1
        for i, depth in depths.items():
            choices[i] = self._follow(requests[i], choices[i].method, depth)

    def _follow(self, request: Request, method: str, depth: int) -> Choice:
        """Depth 0 still learns, where that is free, and probes a draft model now and then."""
        if depth:
            return Choice(method, depth)
        if method != NEURAL:
            return Choice(method, 1, verify=False)
        rate = self._rates[request.id]
        if rate.steps_unobserved >= _PROBE_EVERY:
            rate.steps_unobserved = 0
            return Choice(method, 1)
        return Choice(method, 0)
