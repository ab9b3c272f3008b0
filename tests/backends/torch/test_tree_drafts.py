"""Trees drafted by a head in the torch backend, on the CPU: compared with numpy, and through the engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from outpace import LLM, SamplingParams
from outpace.backends.base import USUAL_UNCACHED, DraftedTokens, HeadTask
from outpace.backends.torch.execution import tree_drafting
from outpace.backends.torch.execution.pages import Pages
from outpace.backends.torch.execution.tree_drafting import levels_of
from outpace.backends.torch.execution.tree_following import accepted_paths
from outpace.backends.torch.head import TorchHead
from outpace.backends.torch.runner import TorchRunner
from outpace.backends.torch.sampling.children import first_tokens
from outpace.backends.torch.sampling.draws import DrawWords
from outpace.config import SpeculationParams
from outpace.core import CompletionOutput, Request
from outpace.decoding.randomness import Purpose, exponentials, key
from outpace.decoding.sampling import sharpness
from outpace.decoding.tree import ROOT, Tree, likely_tree
from outpace.errors import UsageError
from outpace.structured import StructuredOutput
from tests.backends.torch.test_head import Drafting
from tests.backends.torch.tree_paths import check_accepted_paths
from tests.tiny_gguf import write_model
from tests.tiny_head import IDS, ReferenceHead, request_of, write_head

TREE = likely_tree([0.6] * 4, 15)
SAMPLED: dict[str, Any] = {"temperature": 4.0, "seed": 11}


@pytest.fixture
def drafting(tmp_path: Path) -> Iterator[Drafting]:
    made = Drafting(tmp_path)
    yield made
    made.runner.close()


def draft(drafting: Drafting, *requests: Request, tree: Tree = TREE) -> list[DraftedTokens]:
    return drafting.head.draft([HeadTask(request, tree.depth, tree=tree) for request in requests])


def expected(reference: ReferenceHead, request: Request, tree: Tree = TREE) -> list[int]:
    """Node by node, every path as a text of its own."""
    tokens, params = [0] * len(tree), request.params
    for node in (ROOT, *range(len(tree))):
        children, path = tree.children(node), [tokens[each] for each in tree.path(node)]
        if not children:
            continue
        logits = reference.draft(request.tokens, len(path) + 1, path)[1][-1].astype(np.float64)
        if not params.is_greedy:
            noise = exponentials(key(request.seed, Purpose.TOKEN, len(request.tokens) + len(path)), np.array(IDS))
            logits = logits / params.temperature - np.log(noise)
        for child, column in zip(children, np.argsort(-logits, kind="stable"), strict=False):
            tokens[child] = IDS[int(column)]
    return tokens


@pytest.mark.parametrize("params", [{"temperature": 0.0}, SAMPLED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("length", [2, 5, 33, 62, 150])
def test_trees_are_those_of_the_reference(drafting: Drafting, length: int, params: dict[str, Any]) -> None:
    """Short texts are one pass, longer ones are caught up first; some trees cross a page."""
    reference = ReferenceHead(drafting.path, drafting.target, rounds_taps=False)
    request = request_of(length, text=length, **params)
    drafting.feed(request)
    [found] = draft(drafting, request)
    assert found.tokens == expected(reference, request) and found.tree is TREE


@pytest.mark.parametrize("tree", [Tree((ROOT,)), Tree((ROOT, 0, 1)), Tree((ROOT,) * 5), Tree((ROOT, ROOT, 1, 1, 3))])
def test_trees_of_any_shape(drafting: Drafting, tree: Tree) -> None:
    reference = ReferenceHead(drafting.path, drafting.target, rounds_taps=False)
    requests = [request_of(20, seq=0), request_of(9, seq=1, text=1, **SAMPLED)]
    for request in requests:
        drafting.feed(request)
    for request, found in zip(requests, draft(drafting, *requests, tree=tree), strict=True):
        assert found.tokens == expected(reference, request, tree)


def test_a_tree_takes_as_many_passes_as_it_is_deep(drafting: Drafting, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the entries it leaves behind disturb no later draft, whether chain or tree."""
    reference = ReferenceHead(drafting.path, drafting.target, rounds_taps=False)
    request = request_of(4)
    assert isinstance(drafting.head, TorchHead)
    model, passes = drafting.head._model, list[int]()
    forward = model.forward

    def counting(step: Any, states: torch.Tensor) -> Any:
        passes.append(len(step.tokens))
        return forward(step, states)

    monkeypatch.setattr(model, "forward", counting)
    for place, num_emitted in enumerate((1, 3, 5, 2, USUAL_UNCACHED, 40, 1)):
        request.tokens = [*request.tokens, *request_of(num_emitted, text=num_emitted).tokens]
        drafting.feed(request)
        if place % 3 == 1:
            assert drafting.draft(request)[0].tokens == reference.draft(request.tokens, 4)[0]
            continue
        passes.clear()
        [found] = draft(drafting, request)
        assert found.tokens == expected(reference, request)
        assert len(passes) == TREE.depth
        assert passes[1:] == [len(level.expanded) for level in levels_of(TREE)][1:]


def test_a_padded_loop_drafts_the_same(drafting: Drafting, monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured loops have fixed numbers of rows. Here one runs without a graph, with other rows each time."""
    reference = ReferenceHead(drafting.path, drafting.target, rounds_taps=False)
    requests = [request_of(length, seq=seq, text=seq) for seq, length in enumerate((3, 5, 4, 2))]
    for request in requests:
        drafting.feed(request)
    assert isinstance(drafting.head, TorchHead)
    trees = drafting.head._trees
    loop = tree_drafting.TreeLoop(trees._model, TREE, 8, 5, trees._graphs, samples=True, captures=False)
    monkeypatch.setattr(tree_drafting.TreeLoops, "find", lambda loops, tree, tasks, width: loop)
    for group in (requests[:3], requests[3:], requests[1:2]):
        for request, found in zip(group, draft(drafting, *group), strict=True):
            assert found.tokens == expected(reference, request)


def test_first_tokens_are_drawn_without_replacement_with_the_targets_noise() -> None:
    """The first is the target's own token where the distributions agree, whatever is mixed in the batch."""
    generator = torch.manual_seed(3)
    logits = 3 * torch.randn(6, 40, generator=generator)
    columns = torch.randperm(100, generator=generator)[:40].sort().values
    requests = [request_of(5, **params) for params in ({}, SAMPLED, {"temperature": 0.7, "seed": 5})]
    words = DrawWords(3, pinned=False)
    words.fill(slice(0, 3), requests, [9, 9, 30])
    found = first_tokens(logits, columns, words.buffer, 2, 4, samples=True)
    for node, row in enumerate(found.tolist()):
        params, position = requests[node // 2].params, [9, 9, 30][node // 2] + 2
        scores = logits[node].numpy().astype(np.float64)
        if not params.is_greedy:
            noise = exponentials(key(requests[node // 2].seed, Purpose.TOKEN, position), columns.numpy())
            scores = scores * float(sharpness(params.temperature)) * np.log(2) - np.log(noise)
        assert row == columns[np.argsort(-scores)[:4].copy()].tolist()
    greedy = first_tokens(logits, columns, words.buffer, 2, 4, samples=False)
    assert torch.equal(greedy[:2], found[:2]) and not torch.equal(greedy, found)


# --- through the engine -------------------------------------------------------------------------------------------

TEXTS = [[5] * 40 + [i, 7, i] for i in range(3)] + [[9 + i] * (3 + 30 * i) for i in range(3)]
PLAIN: dict[str, Any] = {"speculation": "off"}
TREES: dict[str, Any] = {"speculation": "on", "method": "tree", "depth": 16}


class Engines:
    """A small model with a head, and what it says."""

    def __init__(self, folder: Path) -> None:
        self.target = write_model(folder / "target.gguf")
        self.head = write_head(folder / "head.gguf", self.target)

    def open(self, **options: Any) -> LLM:
        fixed: dict[str, Any] = {"backend": "torch", "device": "cpu", "dtype": "float32", "threads": 1}
        return LLM(str(self.target), str(self.head), **fixed | options)

    def say(self, params: dict[str, Any], texts: Sequence[list[int]] = TEXTS, **options: Any) -> list[CompletionOutput]:
        with self.open(**options) as llm:
            many = SamplingParams(**({"max_tokens": 30, "ignore_eos": True} | params))
            return [done.outputs[0] for done in llm.generate(texts, many, progress=False)]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Engines:
    return Engines(tmp_path_factory.mktemp("engines"))


def tokens_of(outputs: Sequence[CompletionOutput]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": SAMPLED,
    "filters": {"temperature": 3.0, "seed": 7, "top_k": 60, "top_p": 0.95},
    "penalties": {"temperature": 2.0, "seed": 3, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
    "logprobs": {"temperature": 4.0, "seed": 11, "logprobs": 2},
}


@pytest.mark.parametrize("params", KINDS.values(), ids=KINDS.keys())
def test_trees_change_nothing(engines: Engines, params: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone and in a batch."""
    moved, move = list[int](), Pages.move

    def counting(pages: Pages, *where: torch.Tensor) -> None:
        moved.append(len(where[0]))
        move(pages, *where)

    monkeypatch.setattr(Pages, "move", counting)
    plain, found = engines.say(params, **PLAIN), engines.say(params, **TREES)
    assert tokens_of(found) == tokens_of(plain)
    assert tokens_of(engines.say(params, TEXTS[1:2], **TREES)) == tokens_of(plain[1:2])
    counts = [output.speculation for output in found]
    assert all(each.proposers == {"tree"} for each in counts)
    assert sum(each.num_drafted for each in counts) > 15 * 20  # trees, not chains
    if params["temperature"] > 0:
        assert sum(each.num_accepted for each in counts) > 0
        assert len(moved) > 3 or params["temperature"] < 4  # other branches than the first
        assert all(len(each.accepted_per_position) <= TREE.depth for each in counts)
    for mine, other in zip(found, plain, strict=True):
        for line, expected_line in zip(mine.logprobs or (), other.logprobs or (), strict=True):
            assert line.token_id == expected_line.token_id
            assert line.logprob == pytest.approx(expected_line.logprob, abs=1e-3)


@pytest.mark.parametrize("params", [KINDS["greedy"], KINDS["seeded"]], ids=["greedy", "seeded"])
def test_trees_change_nothing_where_memory_is_short(engines: Engines, params: dict[str, Any]) -> None:
    """Requests are preempted and computed again, trees have no room and become chains, and prompts come in chunks."""
    small = {"cache_tokens": 160, "max_context": 140, "max_step_tokens": 24, "max_sequences": 4}
    plain = engines.say(params, **PLAIN)
    with engines.open(**TREES, **small) as llm:
        many = SamplingParams(max_tokens=30, ignore_eos=True, **params)
        requests = [llm.engine.submit(text, many) for text in TEXTS]
        while llm.engine.has_requests:
            llm.engine.step()
        assert [request.tokens[len(request.prompt) :] for request in requests] == tokens_of(plain)
        assert sum(request.num_preemptions for request in requests) > 0


@pytest.mark.parametrize("params", [KINDS["greedy"], KINDS["seeded"]], ids=["greedy", "seeded"])
def test_a_text_that_shares_what_trees_have_left_goes_on_as_alone(engines: Engines, params: dict[str, Any]) -> None:
    """Prompts begin with earlier outputs: their cache, kept from trees, is shared, and rewound where they differ."""
    many = SamplingParams(max_tokens=24, ignore_eos=True, **params)
    with engines.open(**TREES) as llm:
        [first] = llm.generate([TEXTS[0]], many, progress=False)
        said = [*TEXTS[0], *first.outputs[0].token_ids]
        texts = [said, [*said[:-9], 4, 4], [*said[:50], 8]]
        requests = [llm.engine.submit(text, many) for text in texts]
        while llm.engine.has_requests:
            llm.engine.step()
        assert all(request.num_shared > 40 for request in requests)
        found = [request.tokens[len(request.prompt) :] for request in requests]
    assert found == tokens_of(engines.say(params | {"max_tokens": 24}, texts, **PLAIN))


def test_trees_chains_and_plain_rows_share_a_batch(engines: Engines) -> None:
    """Also with a prompt that arrives while others decode, and unseeded requests beside seeded ones."""
    plain = tokens_of(engines.say(SAMPLED, **PLAIN))
    with engines.open(speculation="on", method="tree", depth=16, max_step_tokens=40) as llm:
        modes = [
            SpeculationParams(mode="on", method="tree"), SpeculationParams(mode="on", method="head", max_depth=3),
            SpeculationParams(mode="off"), SpeculationParams(mode="on", method="tree"),
        ]  # fmt: skip
        requests = []
        for i, (text, mode) in enumerate(zip(TEXTS, modes, strict=False)):
            params = SamplingParams(max_tokens=30, ignore_eos=True, speculation=mode, **SAMPLED)
            unseeded = SamplingParams(max_tokens=30, ignore_eos=True, speculation=mode, temperature=4.0)
            requests += [llm.engine.submit(text, params), llm.engine.submit(text, unseeded)]
            for _ in range(2 * i):
                llm.engine.step()
        while llm.engine.has_requests:
            llm.engine.step()
    assert [request.tokens[len(request.prompt) :] for request in requests[::2]] == plain[:4]


def test_requests_whose_drafts_are_cut_or_lenient_have_no_trees(engines: Engines) -> None:
    lossy = SpeculationParams(mode="auto", acceptance="typical")
    with engines.open(method="tree") as llm:
        proposer = llm.engine._proposers["tree"]
        assert not proposer.serves(request_of(3, speculation=lossy))
        assert not proposer.serves(request_of(3, structured=StructuredOutput(regex="a+")))
        assert proposer.serves(request_of(3))


def test_auto_chooses_between_chains_and_trees_where_trees_are_asked_for(engines: Engines) -> None:
    plain = engines.say(SAMPLED, **PLAIN)
    with engines.open(speculation="auto", method="tree") as llm:
        assert llm.config.methods == ("head", "tree")
        many = SamplingParams(max_tokens=30, ignore_eos=True, **SAMPLED)
        found = [done.outputs[0] for done in llm.generate(TEXTS, many, progress=False)]
        assert llm.engine.costs is not None and {"head", "tree"} <= llm.engine.costs.drafts.keys()
    assert tokens_of(found) == tokens_of(plain)
    with engines.open() as llm:
        assert "tree" not in llm.config.methods and "tree" not in llm.engine.methods


def test_a_backend_without_trees_says_so(engines: Engines) -> None:
    with pytest.raises(UsageError, match="cannot draft trees here"):
        engines.open(method="tree", batch_invariant=True)


# --- behind a verification ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_the_device_accepts_what_the_host_accepts(seed: int) -> None:
    check_accepted_paths(accepted_paths, seed)


@pytest.mark.parametrize("name", ["greedy", "seeded", "filters", "penalties"])
@pytest.mark.parametrize("small", [False, True], ids=["roomy", "small"])
def test_trees_begun_behind_a_verification_change_nothing(
    engines: Engines, name: str, small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, but the device is as fast as the host. Their cache is moved on the device, and only once."""
    plain = tokens_of(engines.say(KINDS[name], **PLAIN))
    seen, take_next, move, keep = Counter[str](), TorchHead._take_next, Pages.move, TorchRunner.keep_path

    def counted(head: TorchHead, drafts: Any) -> Any:
        run = take_next(head, drafts)
        seen["taken" if run is not None else "new"] += 1
        return run

    def noted(pages: Pages, *where: torch.Tensor) -> None:
        seen["moved by the host" if seen["keeping"] else "moved on the device"] += 1
        move(pages, *where)

    def keeping(runner: TorchRunner, *arguments: Any) -> None:
        seen["keeping"] = 1
        keep(runner, *arguments)
        seen["keeping"] = 0

    monkeypatch.setattr(TorchHead, "_take_next", counted)
    monkeypatch.setattr(Pages, "move", noted)
    monkeypatch.setattr(TorchRunner, "keep_path", keeping)
    options = {"cache_tokens": 200, "max_context": 140, "max_step_tokens": 40, "max_sequences": 3} if small else {}
    with engines.open(**TREES, **options) as llm:
        head = llm.engine._runner.capabilities.head
        assert isinstance(head, TorchHead)
        head.drafts_ahead = True
        many = SamplingParams(max_tokens=30, ignore_eos=True, **KINDS[name])
        requests = [llm.engine.submit(text, many) for text in TEXTS]
        while llm.engine.has_requests:
            llm.engine.step()
        llm.engine._runner.pool.check_integrity()  # type: ignore[attr-defined]
    assert [request.tokens[len(request.prompt) :] for request in requests] == plain
    if name in ("greedy", "seeded"):
        assert small or (seen["taken"] > 10 and seen["moved on the device"] > 10)
        assert seen["moved by the host"] <= seen["new"]
    else:  # penalties need the host, and filters may
        assert seen["moved on the device"] == 0


def test_a_path_that_is_not_moved_behind_a_verification_is_noticed(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = tokens_of(engines.say(SAMPLED, **PLAIN))
    monkeypatch.setattr(TorchRunner, "move", lambda *_: None)
    with engines.open(**TREES) as llm:
        head = llm.engine._runner.capabilities.head
        assert isinstance(head, TorchHead)
        head.drafts_ahead = True
        many = SamplingParams(max_tokens=30, ignore_eos=True, **SAMPLED)
        found = llm.generate(TEXTS, many, progress=False)
    assert [done.outputs[0].token_ids for done in found] != plain
