"""Trees of drafts: the head's nodes, the shapes that are played, and the costs that they are charged."""

from __future__ import annotations

import json
from itertools import product

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed; pip install outpace[torch]")
pytest.importorskip("safetensors", reason="safetensors is not installed; pip install outpace[torch]")

import torch

from benchmarks import trees
from benchmarks.trees import Machine, as_text, compare
from benchmarks.trees_drafts import NEVER, Drafts
from benchmarks.trees_replay import MAX_DEPTH, Answer, chains, dynamic_trees, likely_nodes, num_expanded, num_followed
from outpace.models.embedded import own_head
from outpace.models.resolve import resolve_model
from outpace.speculation.costs.curves import StepCosts
from outpace.training.batches import BatchShape, join, make_batch
from tests.tiny_training import CPU, tiny_head, tiny_target

PROMPT, LENGTH, DEPTH = 9, 24, 3


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return tiny_target(tmp_path_factory.mktemp("target"))


def text_of(kept):
    """A text of tokens that the head can draft, and of one that it cannot."""
    tokens = np.random.default_rng(0).choice(kept.numpy(), LENGTH)
    tokens[PROMPT + 6] = 1
    return tokens, join([tokens], [PROMPT])


@torch.no_grad()
def chain_log_probs(head, text, path):
    """By the head as it is trained: feed the same tokens after every entry. [entries, draft vocabulary]"""
    batch = make_batch(text, 32, [0], BatchShape(num_tokens=32, chunk=1, num_steps=1), CPU)
    drafts = head.begin(head.target.features(batch, head.config.taps), batch)
    rows = drafts.step(batch.shifted(1), batch.entries)
    for token in path:
        rows = drafts.step(torch.full_like(batch.tokens, token), batch.entries)
    return (rows @ drafts.output.T).log_softmax(-1)


def test_nodes_and_ranks_are_those_of_chains_along_their_paths(target):
    kept = torch.tensor([5, 7, 8, 20, 31])
    head, _ = tiny_head(target, kept=kept)
    tokens, text = text_of(kept)
    drafts = Drafts(head, kept, text)
    paths = [path for n in range(DEPTH) for path in product(range(len(kept)), repeat=n)]
    after = {path: chain_log_probs(head, text, [int(kept[i]) for i in path]).numpy() for path in paths}
    num = len(drafts.entries)
    assert num == LENGTH - PROMPT - 1

    parents, fed = torch.zeros((num, 2), dtype=torch.int64), kept[torch.tensor([[1, 4]])].expand(num, 2)
    level = drafts.grow(drafts.root(), parents, fed)
    level = drafts.grow(level, torch.tensor([[1, 0]]).expand(num, 2), fed)
    np.testing.assert_allclose(level.log_probs[:, 0], after[4, 1], atol=1e-4)
    np.testing.assert_allclose(level.log_probs[:, 1], after[1, 4], atol=1e-4)

    true, ranks = drafts.true_ranks(DEPTH), drafts.tree_ranks(2, DEPTH)
    place_of = {int(token): i for i, token in enumerate(kept)}
    for entry in range(num):
        said = [place_of.get(int(token), -1) for token in tokens[PROMPT + 1 + entry :]]
        for depth in range(DEPTH):
            path = tuple(said[: depth + 1])
            is_known = len(path) == depth + 1 and -1 not in path
            expected = NEVER
            if is_known:
                here = after[path[:-1]][entry]
                expected = int((here > here[path[-1]]).sum())
            assert true[entry, depth] == expected
        candidates, joint = beam({path: rows[entry] for path, rows in after.items()}, 2)
        for depth in range(DEPTH):
            for last in range(depth, DEPTH):
                order = sorted((n for n in candidates if len(n) <= last + 1), key=lambda n: (-joint[n], len(n)))
                path = tuple(said[: depth + 1])
                assert ranks[entry, depth, last] == (order.index(path) if path in order else NEVER)
    assert (true == 0).any() and ((ranks != NEVER) & (ranks > 2)).any()


def beam(after, width):
    """All nodes of a tree, and their joint log probabilities."""
    joint: dict[tuple[int, ...], float] = {(): 0.0}
    nodes: set[tuple[int, ...]] = set()
    level: list[tuple[int, ...]] = [()]
    for _ in range(DEPTH):
        children = list[tuple[int, ...]]()
        for node in level:
            for child in np.argsort(-after[node])[:width]:
                children.append((*node, int(child)))
                joint[children[-1]] = joint[node] + after[node][child]
        nodes |= set(children)
        level = sorted(children, key=lambda node: -joint[node])[:width]
    return nodes, joint


def answer(ranks, positions, steps=1):
    """With the same ranks at every entry; `positions`: of the true nodes in a tree of any depth."""
    row = np.full(MAX_DEPTH, NEVER, np.int32)
    row[: len(ranks)] = ranks
    places = np.full((MAX_DEPTH, MAX_DEPTH), NEVER, np.int32)
    for i, position in enumerate(positions):
        places[i, i:] = position
    # Drafts do not reach beyond the last of 12 entries.
    true, tree = np.tile(row, (12, 1)), np.tile(places, (12, 1, 1))
    for entry in range(12):
        true[entry, 12 - entry :] = NEVER
        tree[entry, 12 - entry :] = NEVER
    return Answer("qa", true, {4: tree}, steps)


def test_shapes_are_played_by_hand():
    answers = [answer([0, 1, 0], [0, 3, 9])]
    by_depth = {each.depth: each.steps[0] for each in chains(answers)}
    assert by_depth[1] == by_depth[8] == 6  # of 12 tokens: one drafted and one of the target's in each step
    found = {(each.depth, each.nodes): each.steps[0] for each in dynamic_trees(answers)}
    assert [found[3, nodes] for nodes in (3, 4, 9, 11)] == [6, 4, 4, 3]
    assert found[2, 11] == 4  # the level that it lacks is not accepted


def test_a_static_tree_takes_the_nodes_that_are_accepted_most():
    rates = np.array([[0.6, 0.2, 0.1], [0.5, 0.3, 0.1], [0.5, 0.1, 0.1]])
    tree = likely_nodes(np.pad(rates, ((0, 0), (0, 13))), 3, 5)
    assert tree == {(0,), (0, 0), (1,), (0, 1), (0, 0, 0)}  # 0.6, 0.3, 0.2, 0.18, 0.15
    assert num_expanded(tree, 3) == [1, 1, 1]
    ranks = np.array([[0, 1, 0], [1, 0, 0], [2, 0, 0], [0, 0, 0]], np.int32)
    assert num_followed(tree, ranks).tolist() == [2, 1, 0, 3]


STEPS = StepCosts({1: 4e-3, 64: 4e-3, 128: 8e-3})
MACHINE = Machine(STEPS, {1: 0.3e-3, 128: 0.5e-3}, {1: 0.2e-3, 5: 0.4e-3})


def test_a_step_is_charged_a_pass_per_level_and_a_pass_of_the_target():
    answers = [answer([0, 1, 0], [0, 3, 9])]
    tree = next(each for each in dynamic_trees(answers) if (each.depth, each.nodes) == (3, 11))
    assert MACHINE.step(1, tree) == pytest.approx(4e-3 + 0.3e-3 + 2 * 0.35e-3)  # passes of one row, then of four
    first = 0.3e-3 + 0.2e-3 * 9 / 127
    # 120 tokens are verified; 40 rows count as five, the most that were timed.
    assert MACHINE.step(10, tree) == pytest.approx(7.5e-3 + first + 2 * 0.4e-3)
    assert MACHINE.gain(1, tree) == pytest.approx(4.0 * 4.0 / 5.0)


def test_the_table_divides_gains_and_says_what_slack_there_is():
    answers = [answer([0, 1, 0], [0, 3, 9], 6) for _ in range(4)]
    found = compare(MACHINE, answers)
    chain, dynamic = (found["best"]["1"][kind] for kind in ("chain", "dynamic"))
    assert chain["shape"] == "chain, depth 1" and chain["gain"] == pytest.approx(2 * 4.0 / 4.3)
    # Four tokens in 5.0 ms are the most: three would take 4.65.
    assert dynamic["shape"] == "dynamic, depth 3, 11 nodes, width 4"
    assert dynamic["ratio"] == pytest.approx(4.3 / 5.0 * 2)
    assert dynamic["interval"] == pytest.approx((dynamic["ratio"],) * 2)
    assert dynamic["ratio_chosen_on_others"] == pytest.approx(dynamic["ratio"])
    assert dynamic["slack_ms"]["for 1.0"] == pytest.approx(5.0 * 0.72)
    assert found["engine_tokens_per_step"] == 2.0
    text = "\n".join(as_text(found))
    assert "dynamic, depth 3, 11 nodes, width 4     4.00  1.250  3.200   1.720 (1.720-1.720)" in text


@pytest.mark.model
def test_it_runs_with_the_embedded_model(tmp_path):
    assert own_head(resolve_model(None)) is not None
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("Count to ten.", "Say hello twice.")))
    few = ["--max-tokens", "24", "--widths", "2"]
    assert trees.main([str(tmp_path / "out"), "--prompts", str(prompts), *few]) == 0
    found = json.loads((tmp_path / "out.json").read_text())
    rates = [found["chains"][str(depth)] for depth in range(1, MAX_DEPTH + 1)]
    assert found["answers"] == 2 and rates[0] > 1.0
    assert found["engine_tokens_per_step"] == pytest.approx(rates[2], rel=0.25)  # the engine rounds the head to 4 bits
    for requests in ("1", "8", "32"):
        gains = [found["by_nodes"][requests][kind]["1"]["gain"] for kind in ("chain", "static", "dynamic")]
        assert gains == pytest.approx([gains[0]] * 3)  # a tree of one node is a chain
    assert "32 at once" in (tmp_path / "out.txt").read_text()
