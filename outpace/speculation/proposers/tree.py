"""A head that drafts trees: several guesses where the first one may be wrong, all verified in one step.

The tree is the same in every step, so that all of its passes are one call. Its nodes are those that are likeliest to be
accepted by what the head measured when it was trained. A draft with less room than the tree is a chain.

To the policy it is another way of drafting than the same head's chains, with acceptance and costs of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

from outpace.backends.base import Head, HeadTask, Runner
from outpace.core import Draft, MeasuredAcceptance, Request
from outpace.decoding.tree import Tree, level_chances, likely_tree, usual_chances
from outpace.speculation.costs.calibration import measure_head
from outpace.speculation.costs.curves import DraftCosts
from outpace.speculation.proposers.base import DraftAsk
from outpace.speculation.proposers.head import HeadProposer, timing_of

DEPTH = 4
NUM_NODES = 15  # with the token before them 16, the most that a GPU verifies for hardly more than one


class TreeProposer(HeadProposer):
    name = "tree"

    def __init__(self, runner: Runner, head: Head) -> None:
        """`runner` is the target's."""
        super().__init__(runner, head)
        self.drafts_whole = True
        self._tree = self.tree = likely_tree(usual_chances(head.measured, DEPTH), NUM_NODES)
        self.measured = _of_levels(head.measured, self._tree)

    def serves(self, request: Request) -> bool:
        """Grammars cut drafts, and lossy rules accept what no child equals: both are for chains."""
        has_grammar = request.matcher is not None or request.params.structured is not None
        return not has_grammar and not request.params.speculation.is_lossy

    def propose(self, asks: Sequence[DraftAsk]) -> list[Draft]:
        num_uncached = [self._num_uncached(ask.request) for ask in asks]
        begin = perf_counter()
        found = dict[int, Draft]()
        for tree in (self._tree, None):
            group = [ask for ask in asks if self._may_branch(ask) == (tree is not None)]
            if group:
                drafted = self._head.draft([HeadTask(ask.request, min(ask.depth, DEPTH), tree=tree) for ask in group])
                for ask, each in zip(group, drafted, strict=True):
                    found[ask.request.id] = Draft(each.tokens, self.name, each.probs, tree=each.tree)
        is_usual = all(draft.tree is not None for draft in found.values())  # else its time tells little about trees
        self.timing = timing_of(asks, num_uncached, DEPTH, perf_counter() - begin) if is_usual else None
        return [found[ask.request.id] for ask in asks]

    def _may_branch(self, ask: DraftAsk) -> bool:
        return ask.depth >= len(self._tree) and self.serves(ask.request)

    def measure_costs(self, scratch: Request) -> DraftCosts:
        return measure_head(self._runner, self._head, scratch, self._tree)


def _of_levels(measured: MeasuredAcceptance | None, tree: Tree) -> MeasuredAcceptance | None:
    """How often a level of the tree is right, by how often first guesses are."""
    if measured is None or not measured.greedy or not measured.sampled:
        return None
    greedy, sampled = (
        [chances[min(level, len(chances) - 1)] for level in range(tree.depth)]
        for chances in (measured.greedy, measured.sampled)
    )
    return MeasuredAcceptance(tuple(level_chances(tree, greedy)), tuple(level_chances(tree, sampled)))
