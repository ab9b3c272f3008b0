"""Drafts of a head that begin behind a verification, and their own verification, which begins before that one's tokens
are committed: on the CPU, where the device is as fast as the host.

They must be the drafts that are made without it, and they must be used.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from outpace import LLM, SamplingParams
from outpace.backends.torch.execution import following
from outpace.backends.torch.execution.executor import DeviceExecutor
from outpace.backends.torch.execution.following import UNUSED, Verified
from outpace.backends.torch.execution.step import PADDING, HostStep, StepShape, views
from outpace.backends.torch.head import TorchHead
from outpace.backends.torch.sampling.draws import NUM_FIELDS
from outpace.decoding.randomness import Purpose, key
from tests.tiny_gguf import write_model
from tests.tiny_head import IDS, write_head

WIDTH, ROWS, VOCAB = 5, 4, 50


@pytest.mark.parametrize("by_rejection", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_the_words_are_those_of_the_accepted_tokens(seed: int, by_rejection: bool) -> None:
    """Row by row, as a reader would do it."""
    random = np.random.default_rng(seed)
    first, later = StepShape(ROWS * WIDTH, ROWS, ROWS, WIDTH, 3), StepShape(ROWS, ROWS, ROWS, 1, 3)
    counts = [int(each) for each in random.integers(0, WIDTH, ROWS - 1)] + [UNUSED]
    drafted = random.integers(0, VOCAB, (WIDTH - 1, ROWS))
    first_lines = np.cumsum([0, *(max(count, 0) + 1 for count in counts[:-1])])
    own = random.integers(0, VOCAB, int(first_lines[-1]) + 1)
    found = random.integers(0, VOCAB, (ROWS, 3))
    expected = []
    for row, count in enumerate(counts[:-1]):
        wanted = int(random.integers(0, count + 1))
        own[first_lines[row] : first_lines[row] + wanted] = drafted[:wanted, row]
        accepted = next((i for i in range(count) if own[first_lines[row] + i] != drafted[i, row]), count)
        found[row, 0] = accepted
        last = found[row, 1] if by_rejection else own[first_lines[row] + accepted]
        expected.append([*drafted[:accepted, row].tolist(), int(last)])
    host = HostStep(first, pinned=False)
    host.positions.fill(PADDING)
    starts = [7, 31, 40]
    for row, start in enumerate(starts):
        host.positions[row * WIDTH : (row + 1) * WIDTH] = np.arange(start, start + WIDTH)
    steps = views(host.buffer.clone(), first), views(torch.zeros(later.num_words, dtype=torch.int32), later)
    draw_words = torch.arange(NUM_FIELDS * ROWS).view(NUM_FIELDS, ROWS).clone()
    fed = torch.zeros((2, ROWS), dtype=torch.int32)
    verified = Verified(
        first_lines.tolist(), counts, torch.from_numpy(drafted).int(), torch.from_numpy(np.stack([own, own])).int(),
        torch.from_numpy(found) if by_rejection else None, VOCAB,
    )  # fmt: skip
    lines = torch.tensor([first_lines.tolist(), counts], dtype=torch.int32)
    following.follow(verified, lines, *steps, draw_words, fed, is_independent=by_rejection)
    begun, after = steps
    for row, tokens in enumerate(expected):
        end = starts[row] + len(tokens)
        here = slice(row * WIDTH, row * WIDTH + len(tokens))
        assert begun.tokens[here].tolist() == tokens
        gap = [PADDING] * (WIDTH - len(tokens))
        assert begun.positions[row * WIDTH : (row + 1) * WIDTH].tolist() == [*range(starts[row], end), *gap]
        assert (int(begun.lengths[row]), int(begun.outputs[row])) == (len(tokens), row * WIDTH + len(tokens) - 1)
        assert int(begun.contexts[row]) == int(after.contexts[row]) == end == int(after.positions[row]) + 1
        assert int(draw_words[1, row]) == end
        drawn_with = key(row, Purpose.DRAFT, end) if by_rejection else row
        assert int(draw_words[0, row]) % 2**64 == drawn_with
        assert fed[:, row].tolist() == [len(tokens) - 1, tokens[-1]]
    assert begun.positions[(ROWS - 1) * WIDTH :].tolist() == [PADDING] * WIDTH and fed[:, -1].tolist() == [0, 0]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("models")
    target = write_model(folder / "target.gguf", "llama")
    return str(target), str(write_head(folder / "head.gguf", Path(target)))


OPTIONS: dict[str, Any] = {"backend": "torch", "device": "cpu", "dtype": "float32", "threads": 1, "max_context": 160}
LENGTHS = (20, 70, 41, 33, 90, 12, 55, 64)


def answers(
    paths: tuple[str, str], features: dict[str, Any], *, ahead: bool, num_requests: int = len(LENGTHS), **options: Any
) -> tuple[list[list[int]], list[Any], Counter[str]]:
    """Tokens and drafts of requests of different lengths, more than run at once; and how many drafts were taken, and
    had begun to be verified early."""
    seen = Counter[str]()
    original, verifies = TorchHead._take_next, DeviceExecutor.verifies

    def counted(head: TorchHead, drafts: Any) -> Any:
        run = original(head, drafts)
        seen["taken" if run is not None else "new"] += 1
        return run

    def noted(executor: DeviceExecutor, tasks: Any) -> Any:
        found = verifies(executor, tasks)
        seen["verified early"] += found is not None
        return found

    target, drafting = paths
    with pytest.MonkeyPatch.context() as patch, LLM(
        target, drafting, speculation="on", method="head", depth=3, **OPTIONS, **options
    ) as llm:  # fmt: skip
        patch.setattr(TorchHead, "_take_next", counted)
        patch.setattr(DeviceExecutor, "verifies", noted)
        head = llm.engine._runner.capabilities.head
        assert isinstance(head, TorchHead)
        head.drafts_ahead = ahead
        # As on a GPU, steps have the sizes of graphs; none is captured.
        llm.engine._runner._graphs._captures = True  # type: ignore[attr-defined]
        requests = [
            llm.engine.submit(
                [IDS[(3 * i + j) % len(IDS)] for j in range(5 + 9 * i)],
                SamplingParams(max_tokens=length, ignore_eos=True, **features),
                seed=1_000 + i,
                keep_drafts=True,
            )
            for i, length in enumerate(LENGTHS[:num_requests])
        ]
        while llm.engine.has_requests:
            llm.engine.step()
        llm.engine.scheduler.forget_kept()
        llm.engine._cache.check_integrity()
    return [request.tokens for request in requests], [request.drafts for request in requests], seen


@pytest.mark.parametrize(
    "features",
    [
        {"temperature": 0.0},
        {"temperature": 4.0, "seed": 5},
        {"temperature": 4.0},
        {"temperature": 4.0, "top_p": 0.9},
    ],
    ids=str,
)
@pytest.mark.parametrize("max_sequences", [1, 4])
def test_the_drafts_are_those_without_it(
    paths: tuple[str, str], features: dict[str, Any], max_sequences: int
) -> None:  # fmt: skip
    options = {"max_sequences": max_sequences, "num_requests": 2 * max_sequences}
    tokens, drafts, seen = answers(paths, features, ahead=True, **options)
    plain_tokens, plain_drafts, plain_seen = answers(paths, features, ahead=False, **options)
    assert tokens == plain_tokens
    assert drafts == plain_drafts
    assert not plain_seen["taken"] and seen["taken"] > seen["new"]
    assert not plain_seen["verified early"] and seen["verified early"] > seen["taken"] / 3
    assert any(draft.num_accepted for each in drafts for draft in each) or not features["temperature"]


def test_it_survives_a_cache_that_is_nearly_full(paths: tuple[str, str]) -> None:
    """Pages run out and requests are preempted."""
    crowded = answers(paths, {"temperature": 0.0}, ahead=True, max_sequences=6, cache_tokens=320)
    assert crowded[0] == answers(paths, {"temperature": 0.0}, ahead=False, max_sequences=6, cache_tokens=4096)[0]
    assert crowded[2]["taken"] and crowded[2]["verified early"]


@pytest.mark.parametrize("temperature", [0.0, 4.0])
def test_plans_that_differ_from_the_foreseen_ones_change_no_answer(paths: tuple[str, str], temperature: float) -> None:
    """Now and then a step is plain, a request is aborted, or another one arrives."""
    found = []
    for ahead in (False, True):
        with LLM(*paths, speculation="on", method="head", depth=2, max_sequences=3, **OPTIONS) as llm:
            head = llm.engine._runner.capabilities.head
            assert isinstance(head, TorchHead)
            head.drafts_ahead = ahead
            llm.engine._runner._graphs._captures = True  # type: ignore[attr-defined]
            params = SamplingParams(max_tokens=60, ignore_eos=True, temperature=temperature, seed=3)
            requests = [llm.engine.submit(IDS[i : i + 6], params) for i in range(2)]
            for step in range(80):
                if step == 30:
                    llm.engine.abort(requests[0])
                if step in (10, 20, 40):
                    requests.append(llm.engine.submit(IDS[step % 7 : 9], params))
                requests[1].may_speculate = step % 17 != 5
                llm.engine.step()
            while llm.engine.has_requests:
                llm.engine.step()
            llm.engine._cache.check_integrity()
            found.append([request.tokens for request in requests[1:]])
    assert found[0] == found[1]


def test_drafts_that_nobody_wants_are_no_longer_begun(paths: tuple[str, str]) -> None:
    """Every second step is plain here: its draft is never the one that began."""
    with LLM(*paths, speculation="on", method="head", depth=2, **OPTIONS) as llm:
        head = llm.engine._runner.capabilities.head
        assert isinstance(head, TorchHead)
        head.drafts_ahead = True
        request = llm.engine.submit(IDS[:6], SamplingParams(max_tokens=120, ignore_eos=True), seed=1)
        begun, steps = [], 0
        while llm.engine.has_requests:
            steps += 1
            request.may_speculate = steps % 2 == 0
            llm.engine.step()
            begun.append(head._next is not None and head._next.run is not None)
        assert any(begun[:8]) and not any(begun[-8:])


def test_verifications_that_nobody_wants_are_no_longer_begun(paths: tuple[str, str]) -> None:
    """From a step on, every fourth is plain."""
    with LLM(*paths, speculation="on", method="head", depth=2, **OPTIONS) as llm:
        runner = llm.engine._runner
        head = runner.capabilities.head
        assert isinstance(head, TorchHead)
        head.drafts_ahead = True
        request = llm.engine.submit(IDS[:6], SamplingParams(max_tokens=120, ignore_eos=True), seed=1)
        begun, steps = [], 0
        while llm.engine.has_requests:
            steps += 1
            request.may_speculate = steps <= 24 or steps % 4 != 0
            llm.engine.step()
            begun.append(runner.executor._ahead is not None)  # type: ignore[attr-defined]
        assert any(begun[:24]) and not any(begun[-16:])
