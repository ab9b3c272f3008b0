"""Rows whose last tokens are a tree: every branch gets the logits of a separate sequence, and a path can be kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed; pip install outpace[torch]")

import torch

from outpace.backends.base import Capacity
from outpace.backends.torch.execution.graphs import Bucket, Captures
from outpace.backends.torch.execution.step import StepShape
from outpace.backends.torch.kernels.reference import InvariantReferenceOps, ReferenceOps
from outpace.backends.torch.model.model import Model
from outpace.backends.torch.model.taps import TapStore
from outpace.backends.torch.model.weights import allocate
from outpace.backends.torch.runner import TorchRunner
from outpace.backends.torch.storage import plain_tensor
from outpace.core import Row, StepPlan
from outpace.decoding.tree import ROOT, Tree
from outpace.models.hf_config import parse_config

SIZES = {
    "architectures": ["Qwen3ForCausalLM"], "vocab_size": 60, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
}  # fmt: skip
CONFIG = parse_config(SIZES)
PROMPT = [(7 * i + 3) % 60 for i in range(61)]  # the tree begins on one page and ends on the next
LAST = 17
TOKENS = [5, 8, 9, 9, 11, 5, 3]
TREE = Tree((ROOT, ROOT, 0, 0, 2, 1, 4))
PATHS = [(), (0,), (1,), (0, 3), (1, 5), (0, 2, 4), (0, 2, 4, 6)]
Make = Callable[..., TorchRunner]


def texts(prompt: Sequence[int] = PROMPT) -> list[list[int]]:
    return [[*prompt, LAST, *(TOKENS[each] for each in TREE.path(node))] for node in range(-1, len(TREE))]


def row_of(seq: int, start: int = len(PROMPT)) -> Row:
    return Row(seq, start, [LAST, *TOKENS], 1 + len(TREE), tree=TREE)


@pytest.fixture
def make() -> Make:
    def runner(cache_dtype: torch.dtype | None = None, **sizes: Any) -> TorchRunner:
        torch.manual_seed(0)
        config = parse_config(SIZES | sizes)
        weights = allocate(config, tied=True, dtype=torch.float32, device=torch.device("cpu"))
        for tensor in map(plain_tensor, weights.tensors):
            tensor.normal_(1.0 if tensor.dim() == 1 else 0.0, 0.3)
        made = TorchRunner(Model(config, weights, ReferenceOps(), 128), Capacity(6, 768, 128, 256), cache_dtype)
        made.model.taps = made._taps = TapStore((1, 2), made.pool.num_blocks, 32, config.width, weights.embedding)
        return made

    return runner


def alone(runner: TorchRunner, text: Sequence[int]) -> np.ndarray:
    """The logits after a text that has a sequence of its own."""
    found: np.ndarray = runner.forward(StepPlan([Row(5, 0, text, 1)]))[0].copy()
    runner.free(5)
    return found


WINDOWED = {
    "architectures": ["Gemma3ForCausalLM"], "sliding_window": 24, "query_pre_attn_scalar": 16,
    "layer_types": ["sliding_attention", "full_attention"], "rope_local_base_freq": 10000.0,
    "hidden_activation": "gelu_pytorch_tanh",
}  # fmt: skip


@pytest.mark.parametrize("sizes", [{}, WINDOWED], ids=["full", "windowed"])
def test_a_tree_in_one_row_is_its_branches(make: Make, sizes: dict[str, Any]) -> None:
    runner = make(**sizes)
    expected = [alone(runner, text) for text in texts()]
    runner.forward(StepPlan([Row(0, 0, PROMPT, 0)]))
    found = runner.forward(StepPlan([row_of(0)]))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_without_a_tree_the_same_row_is_one_text(make: Make) -> None:
    """Shows that the test above detects an ignored mask."""
    runner = make()
    expected = [alone(runner, text) for text in texts()]
    found = runner.forward(StepPlan([Row(0, 0, [*PROMPT, LAST, *TOKENS], 1 + len(TOKENS))]))
    assert np.abs(found[0] - expected[0]).max() < 1e-4
    assert np.abs(found[2] - expected[2]).max() > 1e-2


def test_rows_with_and_without_trees_share_a_step(make: Make) -> None:
    """A tree after several tokens that the cache lacks, a prompt's part, one plain token, and a chain."""
    runner = make()
    plan = StepPlan([
        Row(0, 40, [*PROMPT[40:], LAST, *TOKENS], 1 + len(TREE), tree=TREE), Row(1, 9, PROMPT[9:50], 1),
        Row(2, 7, [PROMPT[7]], 1), Row(3, 7, PROMPT[7:12], 5),
    ])  # fmt: skip
    expected = [alone(runner, text) for text in [*texts(), PROMPT[:50], PROMPT[:8]]]
    expected += [alone(runner, PROMPT[:length]) for length in range(8, 13)]
    runner.forward(StepPlan([Row(row.seq, 0, PROMPT[: row.start], 0) for row in plan.rows]))
    np.testing.assert_allclose(runner.forward(plan), expected, rtol=1e-4, atol=1e-4)


def test_a_padded_step_gives_the_same(make: Make) -> None:
    """Captured steps have fixed shapes; here one runs without a graph, after another row has used its places."""
    runner = make()
    expected = [alone(runner, text) for text in texts()]
    shape = StepShape(24, 2, 24, 12, runner.tables.shape[1], has_trees=True)
    bucket = Bucket(runner.model, runner.caches, shape, None, Captures(), torch.empty(24, runner.vocab_size))
    for plan in ([Row(1, 0, PROMPT[:11], 11), Row(2, 0, PROMPT[:3], 3)], [row_of(0)]):
        if plan[0].seq == 0:
            runner.forward(StepPlan([Row(0, 0, PROMPT, 0)]))
        runner.reserve_rows(plan)
        runner.fill(bucket.host, StepPlan(plan))
        bucket.launch()
    lines = bucket.lines(1 + len(TREE))[1]
    np.testing.assert_allclose(bucket.logits[lines.long()], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("cache_dtype", [None, torch.int8], ids=["float32", "int8"])
@pytest.mark.parametrize("path", PATHS, ids=str)
def test_a_kept_path_is_what_its_text_leaves(
    make: Make, path: tuple[int, ...], cache_dtype: torch.dtype | None
) -> None:
    """Cache and hidden states are those of the text, wherever they were computed, and nothing else stays."""
    runner = make(cache_dtype)
    text = [*PROMPT, LAST, *(TOKENS[node] for node in path)]
    runner.forward(StepPlan([Row(1, 0, PROMPT, 0)]))
    runner.forward(StepPlan([Row(1, len(PROMPT), text[len(PROMPT) :], 0)]))
    runner.forward(StepPlan([Row(0, 0, PROMPT, 0)]))
    runner.forward(StepPlan([row_of(0)]))
    runner.keep_path(0, len(PROMPT) + 1, path)
    runner.pool.check_integrity()
    assert runner.holds(0, len(text))
    places = np.arange(len(text))
    mine, other = (runner.tables[seq, places // 32] * 32 + places % 32 for seq in (0, 1))
    for part in (runner._pages.numbers, runner._pages.scales):
        if part is not None:
            tokens = part.float().movedim(4, 3).flatten(2, 3)  # layers, keys and values, places
            torch.testing.assert_close(tokens[:, :, mine], tokens[:, :, other], rtol=1e-4, atol=1e-4)
    assert runner._taps is not None
    torch.testing.assert_close(runner._taps._states[mine], runner._taps._states[other], rtol=1e-4, atol=1e-4)
    more = [Row(seq, len(text), [2, 4, 6], 3) for seq in (0, 1)]
    found = runner.forward(StepPlan(more))
    np.testing.assert_allclose(found[:3], found[3:], rtol=1e-3, atol=1e-3)


def test_a_path_that_is_not_moved_is_noticed(make: Make) -> None:
    """Shows that the test above detects it."""
    runner = make()
    text = [*PROMPT, LAST, TOKENS[1], TOKENS[5]]
    expected = alone(runner, [*text, 2])
    runner.forward(StepPlan([Row(0, 0, PROMPT, 0)]))
    runner.forward(StepPlan([row_of(0)]))
    runner.truncate(0, len(text))
    assert np.abs(runner.forward(StepPlan([Row(0, len(text), [2], 1)]))[0] - expected).max() > 1e-2


def test_a_shared_page_is_copied_before_a_tree_is_written(make: Make) -> None:
    runner = make()
    runner.forward(StepPlan([Row(0, 0, PROMPT, 0)]))
    runner.fork(0, 1, len(PROMPT))
    expected = alone(runner, [*PROMPT, 2])
    runner.forward(StepPlan([row_of(1)]))
    runner.keep_path(1, len(PROMPT) + 1, (1, 5))
    found = runner.forward(StepPlan([Row(0, len(PROMPT), [2], 1)]))
    np.testing.assert_allclose(found[0], expected, rtol=1e-4, atol=1e-4)


def test_where_sums_have_a_fixed_order_there_are_no_trees(make: Make) -> None:
    model = make().model
    invariant = TorchRunner(Model(model.config, model.weights, InvariantReferenceOps(), 128), Capacity(2, 256, 128, 64))
    assert invariant.capabilities.keep_path is None
