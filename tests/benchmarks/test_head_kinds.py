"""The comparison of kinds of heads: drafts as a server makes them, start values, and the figures of the table."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed; pip install outpace[torch]")
pytest.importorskip("safetensors", reason="safetensors is not installed; pip install outpace[torch]")

import torch

from benchmarks import head_kinds
from benchmarks import head_kinds_onepass as onepass
from benchmarks.head_kinds import VARIANTS, as_text, compare, gain, one_pass_estimate, sampled_tokens_a_step
from benchmarks.head_kinds_drafts import ChainDrafter, OnePassDrafter, OnePassWeights
from outpace.backends.torch.execution.pages import PAGE_TOKENS, Pages
from outpace.backends.torch.kernels.reference import ReferenceOps
from outpace.backends.torch.model.head_weights import allocate_head, named_head_tensors
from outpace.speculation.costs.curves import DraftCosts, StepCosts
from outpace.training.batches import Texts, make_batch
from outpace.training.data import Answers
from outpace.training.display import Display
from tests.benchmarks.tiny_onepass import tiny_onepass_head
from tests.tiny_gguf import VOCAB_SIZE
from tests.tiny_training import CPU, SHAPE, random_texts, tiny_head, tiny_prepared, tiny_target

KNOWN = 21  # tokens of each request


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return tiny_target(tmp_path_factory.mktemp("target"))


def features(target, head, tokens):
    texts = Texts(np.concatenate([tokens, [0] * 9]), np.array([0, KNOWN + 9]), np.array([KNOWN - 1]))
    batch = make_batch(texts, 32, [0], SHAPE, CPU)
    return target.features(batch, head.config.taps), batch


def drafted(target, head, kept, texts, depth):
    """As a server would: first the entries of the whole text, then the draft."""
    c, num_rows, ops = head.config, len(texts), ReferenceOps()
    is_chain = not isinstance(c, onepass.OnePassConfig)
    num_layers = 1 if is_chain else c.num_layers
    pages = Pages(num_layers, 2 * num_rows, c.num_kv_heads, c.head_dim, torch.float32, CPU, first=int(is_chain))
    rope, embedding = torch.from_numpy(target.config.rope.table(2 * PAGE_TOKENS)), target.weights.embedding
    taps = torch.cat([features(target, head, tokens)[0].taps[: KNOWN - 1] for tokens in texts])
    if is_chain:
        weights = allocate_head(c, torch.float32, CPU)
        for name, tensor in named_head_tensors(weights, c).items():
            tensor.copy_(head.parameters[name])
        weights.ids.copy_(kept)
        chain = ChainDrafter(c, weights, ops, embedding, rope, pages.caches[0], num_rows, KNOWN, 2, depth, KNOWN - 1)
        return chain.draft(taps, torch.tensor(np.stack(texts)[:, 1:]).flatten().int(), depth).tolist()
    one_pass = OnePassWeights.of(c, head.parameters, kept, torch.zeros(()))
    drafter = OnePassDrafter(c, one_pass, ops, embedding, rope, pages.caches, num_rows, KNOWN, 2)
    return drafter.draft(taps, torch.tensor(np.stack(texts)[:, -1]).int(), depth).tolist()


@pytest.mark.parametrize("make", [tiny_head, tiny_onepass_head])
@torch.no_grad()
def test_a_paged_draft_is_the_one_of_training_and_a_short_one_begins_a_long_one(target, make):
    head, kept = make(target)
    texts = [np.random.default_rng(seed).integers(3, 250, KNOWN) for seed in range(3)]
    found = drafted(target, head, kept, texts, 7)
    for tokens, draft in zip(texts, found, strict=True):
        about, batch = features(target, head, tokens)
        chains, fed = head.begin(about, batch), batch.shifted(1)
        expected = []
        for _ in range(7):
            expected.append(int(kept[(chains.step(fed, batch.entries[:1]) @ chains.output.T).argmax()]))
            fed = torch.full_like(fed, expected[-1])
        assert draft == expected
    assert len({tuple(draft) for draft in found}) == 3
    assert drafted(target, head, kept, texts, 3) == [draft[:3] for draft in found]  # no slot sees a later one


def test_layers_with_half_an_mlp_begin_with_different_halves_of_the_targets(target):
    config = head_kinds.head_config(VARIANTS["onepass"], target.config, 64)
    assert config.hidden == target.config.hidden // 2
    assert isinstance(config, onepass.OnePassConfig)
    found = onepass.start_values(config, target, torch.arange(64))
    gates = torch.stack([found[f"layers.{i}.mlp.gate_proj.weight"] for i in range(2)], 1).flatten(0, 1)
    whole = target.weights.layers[-1].gate_up[: target.config.hidden]
    torch.testing.assert_close(gates, whole.float())
    down = torch.stack([found[f"layers.{i}.mlp.down_proj.weight"] for i in range(2)], 2).flatten(1, 2)
    torch.testing.assert_close(down, 0.3 * target.weights.layers[-1].down.float())


def test_a_head_is_trained_and_its_figures_are_kept(target, tmp_path, monkeypatch):
    monkeypatch.setattr(head_kinds, "DRAFT_VOCABULARY", 64)
    texts = random_texts([20, 24, 30, 18] * 4)
    held = texts.take([0, 1, 2, 3])
    answers = Answers(texts, held, held, seconds=1.0, num_own_prompts=0)
    found = head_kinds.train(
        "onepass", target, answers, tiny_prepared(target), tmp_path, 0.005, compile=False, display=Display(),
        shape=replace(SHAPE, num_tokens=32 * 4),
    )  # fmt: skip
    assert found["progress"]["steps"] > 0 and found["num_steps"] == 7
    assert json.loads((tmp_path / "onepass.json").read_text())["evaluation"] == found["evaluation"]
    sizes = found["parameters"]
    assert sizes["looked_up"] == VOCAB_SIZE * 32 and sizes["markov"] == 64 * 32
    assert sizes["all"] == sum(size for name, size in sizes.items() if name != "all")


CHAIN = DraftCosts(StepCosts({1: 0.1, 2: 0.12, 4: 0.2, 8: 0.4}), first=StepCosts({1: 0.15}))


def test_gains_and_estimates_by_hand():
    assert sampled_tokens_a_step([0.5, 0.5, 0.0]) == [1.5, 1.75, 1.75]
    # A plain step takes 1 s, verifying 3 tokens 1.2 s and the draft 0.3 s; 3 tokens come of it.
    assert gain(3.0, StepCosts({1: 1.0, 3: 1.2}), 0.3, rows=1, depth=2, context=0) == pytest.approx(2.0)
    chain_sizes = {"pass": 100, "markov": 0}
    same = one_pass_estimate(CHAIN, {"pass": 100, "markov": 0}, chain_sizes, 1, 1)
    assert same == pytest.approx(CHAIN.seconds(1, 1, 0))  # a draft of one token by as many parameters
    # Taking in features 0.05, one pass of 4 tokens with 1.5 times the weights, and four tenths of a pass of one token.
    larger = one_pass_estimate(CHAIN, {"pass": 150, "markov": 10}, chain_sizes, 1, 4)
    assert larger == pytest.approx(0.05 + 1.5 * 0.2 + 4 * 0.1 * 0.1)


def test_the_table_divides_tokens_by_costs(tmp_path):
    for name, rows in (("eagle3", [1.5, 2.0]), ("onepass", [1.5, 1.8])):
        evaluation = {"tokens_a_step": {"all": rows}, "overlap": [0.5, 0.5]}
        sizes = {"all": 120, "pass": 100, "markov": 0, "looked_up": 10, "fuse": 10}
        progress = {"steps": 5, "tokens": 1000}
        found = {"evaluation": evaluation, "parameters": sizes, "progress": progress, "minutes": 1, "num_steps": 4}
        (tmp_path / f"{name}.json").write_text(json.dumps(found))
    each = {str(rows): {str(depth): 100.0 * depth for depth in range(1, 8)} for rows in (1, 8, 32, 128)}
    flat = {rows: dict.fromkeys(row, 100.0) for rows, row in each.items()}
    (tmp_path / "draft_ms.json").write_text(json.dumps({"ms": {"eagle3": each, "onepass": flat}}))
    costs = {"target": StepCosts({1: 1.0, 1024: 1.0}).as_dict(), "drafts": {"head": CHAIN.as_dict()}}
    result = compare(tmp_path, costs, costs)
    figures = result["machines"]["H200, shape of an 8B"][8]
    assert figures["gain"]["0"]["eagle3"] == pytest.approx({1: 1.5 / 1.1, 2: 2.0 / 1.2})
    assert figures["gain"]["0"]["onepass"] == pytest.approx({1: 1.5 / 1.1, 2: 1.8 / 1.1})
    assert figures["gain"]["1"]["onepass"][2] == pytest.approx(1.75 / 1.1)
    assert figures["enough"]["onepass"][2] == pytest.approx(1.1 / 1.2)  # at depth 2 it saves 0.1 s of 1.2 s
    text = "\n".join(as_text(result))
    assert "8 at once, temperature 0  eagle3          1.364   1.667*" in text
