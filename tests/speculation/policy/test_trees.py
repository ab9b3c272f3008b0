"""Chains and trees of one head compete as two ways of drafting: the costs decide."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from outpace.core import Draft, MeasuredAcceptance, Request, Verdict
from outpace.decoding.tree import level_chances, likely_tree
from outpace.speculation.policy.acceptance import Acceptance
from outpace.speculation.policy.state import Choice, Outcome
from outpace.speculation.proposers.base import DraftAsk, depth_of, num_tokens
from tests.session_driver import FLAT, OTHER, RIGHT, USUAL, ScriptedModel, SessionDriver, model_costs, request_of

TREE = likely_tree([0.7, 0.6, 0.6, 0.6], 15)
CHANCES = [0.7, 0.6, 0.6, 0.6]  # as measured when the head was trained
NUM_RIGHT = {"head": (True, True), "tree": (True, True, True)}  # of each chain or path; what follows is wrong


class ScriptedTree(ScriptedModel):
    tree = TREE

    def _draft(self, ask: DraftAsk) -> Draft:
        if ask.depth < len(TREE):
            return super()._draft(ask)
        return Draft([RIGHT] * len(TREE), self.name, tree=TREE)

    def _passes(self, rows: int, depth: int, context: float) -> list[tuple[float, int]]:
        return super()._passes(rows, min(depth, TREE.depth), context)


class TreeDriver(SessionDriver):
    """Of a tree, as many levels are accepted as its script says."""

    def __init__(self, points: dict[int, float]) -> None:
        scripts = {
            name: ((lambda request, right=right: ([*right, *[False] * 14], 0.9)), model_costs(0.03))
            for name, right in NUM_RIGHT.items()
        }
        super().__init__(points, models=scripts)
        head, tree = self.model("head"), self.model("tree")
        found = ScriptedTree("tree", tree.script, tree.costs, self.clock)
        found.num_cached = head.num_cached  # they are one head
        self.proposers["tree"] = found
        for name, chances in (("head", CHANCES), ("tree", level_chances(TREE, CHANCES))):
            measured = MeasuredAcceptance(tuple(chances), tuple(chances))
            self.policy.acceptances[name] = Acceptance(is_lookup=False, measured=measured)

    def _verify(self, request: Request, choice: Choice) -> Outcome:
        if choice.draft is None or choice.draft.tree is None:
            return super()._verify(request, choice)
        num_accepted = len(NUM_RIGHT["tree"])
        emitted = [*[RIGHT] * num_accepted, OTHER]
        request.tokens += emitted
        path = TREE.continued(())[:num_accepted]
        return Outcome(request, choice, Verdict(emitted, len(TREE), num_accepted, 0, TREE, path))


def tree_request(**wishes: Any) -> Request:
    return request_of(mode="on", method="tree", **wishes)


def methods(driver: SessionDriver, requests: Sequence[Request], steps: int) -> Counter[str]:
    return Counter(outcome.choice.method for _ in range(steps) for outcome in driver.step(requests))


def test_where_further_tokens_are_free_the_tree_is_drafted() -> None:
    driver, requests = TreeDriver(FLAT), [request_of()]
    methods(driver, requests, 200)
    assert methods(driver, requests, 100)["tree"] > 85
    assert driver.lost < 0


def test_where_tokens_cost_the_chain_is_drafted() -> None:
    """Two tokens of a chain for one token more of the target; the tree's third costs twelve."""
    driver, requests = TreeDriver(USUAL), [request_of() for _ in range(4)]
    methods(driver, requests, 200)
    found = methods(driver, requests, 100)
    assert found["tree"] <= 0.05 * found.total() < found["head"]


def test_acceptance_is_learned_by_level() -> None:
    driver = TreeDriver(FLAT)
    for _ in range(60):
        [outcome] = driver.step([tree_request()])
        assert outcome.choice.method == "tree"
    totals = driver.policy.acceptances["tree"].forecast(0, TREE.depth, 0.0)
    assert totals[2] == pytest.approx(3.0, abs=0.35) and totals[3] - totals[2] < 0.4


def test_a_tree_is_asked_for_by_its_nodes() -> None:
    driver = TreeDriver(FLAT)
    assert driver.depths([tree_request()]) == [len(TREE)]
    near_the_end = tree_request(max_length=3 + 1 + 3)
    [choice] = driver.decide([near_the_end])
    assert choice.depth == choice.ask.depth == 3 if choice.ask is not None else False
    assert driver.depths([tree_request(max_depth=2)]) == [2]
    tree, chain = driver.proposers["tree"], driver.proposers["head"]
    assert [num_tokens(tree, depth) for depth in (1, 3, 4, 16)] == [1, 3, 15, 15]
    assert [depth_of(tree, count) for count in (1, 3, 15)] == [1, 3, 4]
    assert [num_tokens(chain, 5), depth_of(chain, 5)] == [5, 5]


def test_requests_about_to_end_get_no_tree_from_auto() -> None:
    driver = TreeDriver(FLAT)
    methods(driver, [request_of()], 200)
    near_the_end = [request_of(max_length=3 + 1 + 3) for _ in range(2)]
    assert {choice.method for choice in driver.decide(near_the_end)} <= {"head", "none"}
