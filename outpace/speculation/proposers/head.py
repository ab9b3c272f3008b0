"""A draft head: a small trained layer that drafts from the target's own hidden states.

It has no cache of its own to manage: the target's runner keeps its entries beside the target's cache. The backend
drafts in one call. A draft ends where its confidence says that further tokens do not pay, if the head can stop there.
Confidence is known before a token is picked, so the kept tokens are not biased.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

from outpace.backends.base import MOST_CONFIDENT, USUAL_UNCACHED, DraftedTokens, Head, HeadTask, Runner
from outpace.core import Draft, Request, Verdict
from outpace.decoding.tree import Tree
from outpace.speculation.costs.calibration import measure_head, warm_up_head
from outpace.speculation.costs.curves import DraftCosts
from outpace.speculation.costs.timing import DraftTiming
from outpace.speculation.proposers.base import DraftAsk


class HeadProposer:
    name = "head"
    is_lookup = False
    tree: Tree | None = None

    def __init__(self, runner: Runner, head: Head) -> None:
        """`runner` is the target's."""
        self._runner = runner
        self._head = head
        self.measured = head.measured
        self.drafts_whole = not head.stops_early
        self.timing: DraftTiming | None = None

    def serves(self, request: Request) -> bool:
        return True

    def propose(self, asks: Sequence[DraftAsk]) -> list[Draft]:
        num_uncached = [self._num_uncached(ask.request) for ask in asks]
        begin = perf_counter()
        drafted = self._head.draft([HeadTask(ask.request, ask.depth, ask.goes_on) for ask in asks])
        num_passes = max([max(len(each.tokens), len(each.confidence)) for each in drafted])
        self.timing = timing_of(asks, num_uncached, num_passes, perf_counter() - begin)
        return [self._cut(ask, each) for ask, each in zip(asks, drafted, strict=True)]

    def _cut(self, ask: DraftAsk, drafted: DraftedTokens) -> Draft:
        if ask.goes_on is None or self.drafts_whole:
            return Draft(drafted.tokens, self.name, drafted.probs)
        # Learning also uses the confidence of the token before which it stops.
        confidence = [min(MOST_CONFIDENT, value) for value in drafted.confidence]
        if len(confidence) == len(drafted.tokens) < ask.depth:
            confidence.append(confidence[-1])  # that of the token which it did not draft is not known
        return Draft(drafted.tokens, self.name, drafted.probs, confidence)

    def num_uncached(self, request: Request) -> int:
        num_tokens = self._num_uncached(request)
        return num_tokens if num_tokens > USUAL_UNCACHED else 0

    def _num_uncached(self, request: Request) -> int:
        return 0 if request.seq is None else self._head.num_uncached(request.seq, len(request.tokens))

    def measure_costs(self, scratch: Request) -> DraftCosts:
        return measure_head(self._runner, self._head, scratch)

    def warm_up(self, scratch: Request) -> None:
        warm_up_head(self._runner, self._head, scratch)

    def observe(self, request: Request, verdict: Verdict) -> None:
        pass  # the runner rewinds the head's entries with the target's cache

    def release(self, request: Request) -> None:
        pass

    def prepare(self, request: Request) -> None:
        pass

    def forget(self) -> None:
        pass


def timing_of(asks: Sequence[DraftAsk], num_uncached: Sequence[int], depth: int, seconds: float) -> DraftTiming:
    timing = DraftTiming()
    rows = len(asks)
    context = sum([len(ask.request.tokens) for ask in asks]) / rows
    if max(num_uncached) > USUAL_UNCACHED:
        timing.undivided = (rows, depth, context, seconds)
        timing.num_caught_up = sum(num_uncached)
    else:
        timing.forwards = [(rows, rows, context, seconds / depth)] * depth
    return timing
