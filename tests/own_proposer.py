"""The proposer that CONTRIBUTING.md shows: a complete proposer that drafts by a function."""

from collections.abc import Callable, Sequence
from time import perf_counter

from outpace.core import Draft, Request
from outpace.speculation.costs.curves import DraftCosts, StepCosts
from outpace.speculation.costs.timing import DraftTiming
from outpace.speculation.proposers.base import DraftAsk, NoDraft


class OwnProposer(NoDraft):
    """Drafts with any function that continues texts by a given number of tokens, such as a model of your own."""

    name = "own"
    is_lookup = False  # its drafts cost time, so they are made only if the policy decides that they pay

    def __init__(self, continued: Callable[[list[list[int]], int], list[list[int]]]) -> None:
        self._continued = continued

    def propose(self, asks: Sequence[DraftAsk]) -> list[Draft]:
        depth, texts = max(ask.depth for ask in asks), [ask.request.tokens for ask in asks]
        begin = perf_counter()
        found = self._continued(texts, depth)
        forward = (len(texts), len(texts) * depth, sum(map(len, texts)) / len(texts), perf_counter() - begin)
        self.timing = DraftTiming(forwards=[forward])  # rows, tokens, mean context, seconds
        return [Draft(tokens[: ask.depth], self.name) for ask, tokens in zip(asks, found, strict=True)]

    def measure_costs(self, scratch: Request) -> DraftCosts:
        seconds = dict[int, float]()
        for depth in (1, 4, 16):
            begin = perf_counter()
            self.propose([DraftAsk(scratch, depth)])
            seconds[depth] = perf_counter() - begin
        return DraftCosts(StepCosts(seconds), one_pass=True)
