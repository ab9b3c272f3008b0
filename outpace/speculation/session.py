"""The protocol of one speculative step, shared by the engine, the simulator and the tests:

decision = session.choose(requests, stats)       look up drafts and decide; then the caller reserves cache room
session.draft(decision, stats)                   models make the drafts that were decided
...                                              the target runs once and verifies every request
session.observe(request, choice, verdict)        the proposer gets the verdict and rewinds its own cache
session.learn(decision, outcomes, stats)         costs, acceptance and budgets are updated
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from time import perf_counter

from outpace.core import Draft, Request, StepStats, Verdict
from outpace.speculation import joining
from outpace.speculation.costs.curves import Costs, DraftCosts
from outpace.speculation.policy.decision import Decision
from outpace.speculation.policy.policy import Policy
from outpace.speculation.policy.state import Choice, Outcome
from outpace.speculation.proposers.base import DraftAsk, Proposer


class Session:
    def __init__(
        self, policy: Policy, proposers: Mapping[str, Proposer], clock: Callable[[], float] = perf_counter
    ) -> None:
        """`clock` returns seconds; a simulator passes its own."""
        self.policy = policy
        self._proposers = proposers
        self._clock = clock
        self._lookup_seconds = 0.0  # of the current decision
        self._learning_seconds = 0.0  # since the last decision

    @property
    def costs(self) -> Costs | None:
        return self.policy.costs

    def choose(self, requests: Sequence[Request], stats: StepStats) -> Decision:
        """Decide about the decoding requests of a step. The policy may look up drafts first."""
        if not any(request.may_speculate for request in requests):
            return Decision(0, requests, [Choice.plain()] * len(requests))
        begin = self._clock()
        self._lookup_seconds = 0.0
        decision = self.policy.decide(requests, self._look_up, stats.num_prefill_tokens)
        stats.lookup_seconds = self._lookup_seconds
        stats.policy_seconds = self._clock() - begin - self._lookup_seconds
        stats.learning_seconds, self._learning_seconds = self._learning_seconds, 0.0
        return decision

    def _look_up(self, asks: Mapping[str, list[DraftAsk]]) -> dict[int, list[Draft]]:
        found: dict[int, list[Draft]] = {}
        for name, of_proposer in asks.items():
            begin = self._clock()
            drafts = joining.propose(self._proposers[name], of_proposer)
            seconds = self._clock() - begin
            for ask, draft in zip(of_proposer, drafts, strict=True):
                found.setdefault(ask.request.id, []).append(draft)
            self._lookup_seconds += seconds
            if self.costs is not None:
                self.costs.drafts[name].observe_lookups(len(of_proposer), seconds)
        return found

    def draft(self, decision: Decision, stats: StepStats) -> None:
        """Make the drafts that the decision asks for; lookups exist already."""
        begin = self._clock()
        for name, choices in _by_proposer(decision).items():
            asks = [choice.ask for choice in choices if choice.ask is not None]
            drafts = joining.propose(self._proposers[name], asks)
            for choice, draft in zip(choices, drafts, strict=True):
                choice.draft = draft
            stats.draft_seconds = self._clock() - begin

    def observe(self, request: Request, choice: Choice, verdict: Verdict) -> None:
        """Pass the verdict to the proposer, after the emitted tokens were added to the request."""
        if choice.draft is not None:
            self._proposers[choice.method].observe(request, verdict)

    def learn_drafting(self, decision: Decision, *, is_typical: bool) -> float:
        """Learn the cost of drafting; returns the seconds spent on catching up.

        If the time is not typical, because other work was done in it, no cost is learned.
        """
        total = 0.0
        for name in _by_proposer(decision):
            timing, costs = self._proposers[name].timing, self._costs_of(name)
            if timing is None or costs is None:
                continue
            if is_typical and not self.policy.begins_ahead:  # else it includes waiting for the pass before
                costs.observe(timing)
            elif costs.passes is not None:
                timing.divide(costs.passes.seconds)
            total += timing.catch_up_seconds
        return total

    def _costs_of(self, name: str) -> DraftCosts | None:
        return self.costs.drafts.get(name) if self.costs is not None else None

    def learn(
        self,
        decision: Decision,
        outcomes: Sequence[Outcome],
        stats: StepStats,
        catch_up_seconds: float = 0.0,
        *,
        is_typical: bool = True,
        is_hidden: bool = False,
    ) -> None:
        """Learn from a step, then forget finished requests. `is_hidden`: learning overlaps with device work.

        Costs are learned only from steps of pure decoding, if their time is typical. A step with one-time work, such
        as capturing a graph, teaches no costs and is charged to no budget.
        """
        begin = self._clock()
        if decision.situation is not None or decision.is_idle:
            self.policy.learn(decision, outcomes, stats, catch_up_seconds, is_typical=is_typical)
        if stats.num_finished:
            for outcome in outcomes:
                if outcome.request.finish_reason is not None:
                    self.policy.release(outcome.request)
        if not is_hidden:
            self._learning_seconds += self._clock() - begin


def _by_proposer(decision: Decision) -> dict[str, list[Choice]]:
    found: dict[str, list[Choice]] = {}
    for choice in decision.choices:
        if choice.depth and choice.ask is not None:
            found.setdefault(choice.method, []).append(choice)
    return found
