"""Draft heads that people bring, on the CPU: compared with their publishers' programs, with numpy, and by engine."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from safetensors.torch import load_file, save_file

from outpace import LLM, SamplingParams
from outpace.backends.base import Capacity, HeadTask
from outpace.backends.torch.device import TorchOptions
from outpace.backends.torch.execution import staging
from outpace.backends.torch.execution.step import HostStep, StepInputs, StepShape, views
from outpace.backends.torch.kernels.base import Cache
from outpace.backends.torch.kernels.reference import ReferenceOps
from outpace.backends.torch.model.head import HeadModel
from outpace.backends.torch.model.head_folder import HeadFolder
from outpace.backends.torch.model.taps import TapStore
from outpace.backends.torch.runner import TorchModel
from outpace.backends.torch.storage import plain_tensor
from outpace.core import Row, StepPlan
from outpace.errors import ModelError, UsageError
from outpace.models.architecture import Architecture
from outpace.models.rope import Rope, unscaled
from tests.head_folders import DullHead, Options, drafted, random_tensors, write_head_folder
from tests.numpy_reference import ReferenceModel
from tests.tiny_gguf import write_model
from tests.tiny_head import request_of

FIXTURES = Path(__file__).parents[2] / "head_fixtures"
CPU = torch.device("cpu")
TOLERANCE = 1e-4
FORMS = {
    "safeailab": Options(),
    "safeailab, own embedding": Options(has_embedding=True, width=48, num_heads=6, num_kv_heads=3, head_dim=8),
    "speculators": Options(form="speculators", taps=(1, 5, 8), norm_before_residual=True, tap_norm="joint"),
    "speculators, qwen3": Options(form="speculators", taps=(8, 3), qk_norm=True, tap_norm="each", norm_output=True),
    "speculators, biases": Options(form="speculators", bias=True, norm_output=True, has_embedding=True, head_dim=32),
}


def architecture(options: Options, **more: Any) -> Architecture:
    """A target that the options fit."""
    values: dict[str, Any] = {
        "family": "llama", "num_layers": 8, "width": options.target_width, "hidden": 96, "num_heads": 4,
        "num_kv_heads": 2, "head_dim": 16, "num_rotated": 16, "vocab_size": options.vocab_size, "context": 512,
        "epsilon": 1e-5, "rope": Rope(unscaled(10000.0, 16)), "tied": True,
    }  # fmt: skip
    return Architecture(**(values | more))


def opened(folder: Path, target: Architecture) -> HeadFolder:
    return HeadFolder(folder, folder / "no target", target, "target")


class Passes:
    """Runs a head's passes over hidden states that the test gives, in one page of 64 tokens."""

    def __init__(self, checkpoint: HeadFolder, taps: torch.Tensor, embedding: torch.Tensor) -> None:
        """`taps` [positions, taps, target's width]"""
        c = checkpoint.config
        store = TapStore(c.taps, 1, 64, c.tap_width, torch.zeros(1))
        for i, layer in enumerate(c.taps):
            store.write(layer, torch.arange(len(taps)), taps[:, i])
        pages = torch.zeros(2, 1, c.num_kv_heads, 64, c.head_dim)
        rope = torch.from_numpy(Rope(unscaled(10000.0, c.head_dim)).table(64))  # the target's
        weights = checkpoint.load(torch.float32, CPU)
        self._model = HeadModel(
            c, weights, ReferenceOps(), embedding, store, Cache(pages[0], pages[1], first=1), rope
        )  # fmt: skip

    def begin(self, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """`tokens` from position 1 on: logits and states of every one."""
        step = self._step(tokens, 1)
        return self._model.forward(step, self._model.fuse(step))

    def go_on(self, token: int, position: int, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._model.forward(self._step([token], position), state)

    def _step(self, tokens: list[int], start: int) -> StepInputs:
        shape = StepShape(len(tokens), 1, len(tokens), len(tokens), 1)
        host = HostStep(shape, pinned=False)
        staging.fill(host, [Row(0, start, tokens, len(tokens))], np.zeros((1, 1), np.int32))
        return views(host.buffer, shape)


def all_passes(passes: Passes, text: list[int], num_passes: int) -> dict[tuple[int, int], torch.Tensor]:
    """Logits by pass and position, where pass s at p reads hidden states up to p and tokens up to p + 1 + s."""
    first, states = passes.begin(text[1:])
    found = {}
    for p in reversed(range(len(text) - 1)):  # later passes overwrite the entries after p + 1
        found[0, p], state = first[p], states[p : p + 1]
        for s in range(1, min(num_passes, len(text) - 1 - p)):
            logits, state = passes.go_on(text[p + 1 + s], p + 1 + s, state)
            found[s, p] = logits[0]
    return found


@pytest.mark.parametrize("name", ["safeailab", "speculators_llama", "speculators_qwen3"])
def test_logits_are_those_of_the_programs_that_publish_heads(name: str) -> None:
    folder, expected = FIXTURES / name, load_file(FIXTURES / name / "expected.safetensors")
    taps = expected["taps"].unflatten(1, (3, -1))
    checkpoint = opened(folder, architecture(Options(vocab_size=24, target_width=taps.shape[2])))
    found = all_passes(Passes(checkpoint, taps, torch.zeros(24, 8)), expected["text"].tolist(), 3)
    assert len(found) == 9 + 8 + 7
    for (s, p), logits in found.items():
        torch.testing.assert_close(logits, expected["logits"][s, p], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", FORMS)
def test_logits_are_those_of_a_head_that_reads_one_token_at_a_time(tmp_path: Path, name: str) -> None:
    options = FORMS[name]
    folder = write_head_folder(tmp_path / "head", options)
    rng = np.random.default_rng(1)
    embedding = rng.normal(size=(280, 64)).astype(np.float32)
    taps = rng.normal(size=(12, len(options.taps), 64)).astype(np.float32) * 3
    text = [int(token) for token in rng.integers(0, 280, 13)]
    passes = Passes(opened(folder, architecture(options)), torch.from_numpy(taps), torch.from_numpy(embedding))
    found = all_passes(passes, text, 4)
    dull = DullHead(options, random_tensors(options), embedding)
    for p in range(12):
        dull.rewind(p)
        expected, state = dull.read(dull.fuse(taps[p]), text[p + 1])
        for s in range(min(4, 12 - p)):
            if s:
                expected, state = dull.read(state, text[p + 1 + s])
            np.testing.assert_allclose(found[s, p], expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", FORMS)
def test_a_runner_drafts_from_the_targets_own_hidden_states(tmp_path: Path, name: str) -> None:
    """Which layers a head reads, in which order, and the tokens that its vocabulary stands for."""
    options = FORMS[name]
    target = write_model(tmp_path / "target.gguf", num_layers=8)
    folder = write_head_folder(tmp_path / "head", options)
    capacity = Capacity(max_sequences=4, cache_tokens=512, max_context=256, max_step_tokens=64)
    runner = TorchModel(target, TorchOptions("cpu", "float32", 0.9), head=folder).start(capacity, 1).runner
    reference = ReferenceModel.load(target)
    dull = DullHead(options, random_tensors(options), reference.tensors["token_embd.weight"])
    for seq, length in enumerate((2, 5, 40)):
        request = request_of(length, seq=seq, text=length)
        runner.forward(StepPlan([Row(seq, 0, request.tokens[:-1], 0)]))
        request.num_computed = length - 1
        head = runner.capabilities.head
        assert head is not None
        (found,) = head.draft([HeadTask(request, 4)])
        by_layer = dict(
            zip(sorted(options.taps), reference.residuals(request.tokens[:-1], list(options.taps)), strict=True)
        )
        taps = [by_layer[tap] for tap in options.taps]
        assert found.tokens == drafted(dull, taps, request.tokens, 4)
    runner.close()


SAMPLING: dict[str, dict[str, Any]] = {"greedy": {"temperature": 0.0}, "seeded": {"temperature": 4.0, "seed": 11}}
TEXTS = [[5] * 40 + [i, 7, i] for i in range(2)] + [[9 + i] * (3 + 40 * i) for i in range(2)]
SMALL: dict[str, Any] = {"cache_tokens": 96, "max_context": 80, "max_step_tokens": 24, "max_sequences": 3}


def answers(target: Path, draft: Path | None, **options: Any) -> tuple[dict[str, list[list[int]]], int]:
    """The tokens of all texts in one batch, greedy and seeded, and the number of accepted ones."""
    found, num_accepted = {}, 0
    with LLM(
        str(target), str(draft) if draft else None, backend="torch", device="cpu", dtype="float32", threads=1, **options
    ) as llm:
        for name, params in SAMPLING.items():
            done = llm.generate(TEXTS, SamplingParams(max_tokens=12, ignore_eos=True, **params), progress=False)
            found[name] = [d.outputs[0].token_ids for d in done]
            num_accepted += sum(d.outputs[0].speculation.num_accepted for d in done)
    return found, num_accepted


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[list[int]]]]:
    """A target, and what it answers without drafts."""
    target = write_model(tmp_path_factory.mktemp("plain") / "target.gguf", num_layers=8)
    return target, answers(target, None, speculation="off")[0]


@pytest.mark.parametrize("name", ["safeailab, own embedding", "speculators", "speculators, qwen3"])
def test_speculation_with_such_a_head_changes_nothing(
    tmp_path: Path, name: str, plain: tuple[Path, dict[str, list[list[int]]]]
) -> None:
    """In batches, with prompts that share a prefix, and with a cache so small that requests are preempted."""
    target, expected = plain
    folder = write_head_folder(tmp_path / "head", FORMS[name])
    found, num_accepted = answers(target, folder, speculation="on", method="head", depth=3)
    assert found == expected and num_accepted > 0
    assert answers(target, folder, speculation="on", method="head", depth=3, **SMALL)[0] == expected


def test_weights_of_torch_save_are_read_without_running_what_is_in_them(tmp_path: Path) -> None:
    folder = write_head_folder(tmp_path / "head", Options())
    expected = opened(folder, architecture(Options())).load(torch.float32, CPU)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    found = opened(folder, architecture(Options())).load(torch.float32, CPU)
    assert torch.equal(plain_tensor(found.layer.qkv), plain_tensor(expected.layer.qkv))
    assert torch.equal(found.ids, expected.ids)
    torch.save({"fc.weight": _Hostile(tmp_path / "ran")}, folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pytorch_model.bin is not a file of tensors alone \(UnpicklingError\)"):
        opened(folder, architecture(Options()))
    assert not (tmp_path / "ran").exists()


class _Hostile:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return os.mkdir, (str(self._path),)


def test_a_head_with_the_whole_vocabulary_needs_no_mapping(tmp_path: Path) -> None:
    options = Options(draft_vocab_size=280)
    folder = write_head_folder(tmp_path / "head", options)
    change_tensors(folder, lambda t: t.update(d2t=None, t2d=None))
    assert opened(folder, architecture(options)).load(torch.float32, CPU).ids.tolist() == list(range(280))


Tensors = dict[str, Any]


def change_tensors(folder: Path, change: Callable[[Tensors], Any]) -> None:
    """Tensors that `change` sets to None are dropped."""
    tensors: Tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, folder / "model.safetensors")


def change_config(folder: Path, change: dict[str, Any]) -> None:
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | change))


def cut(path: Path, share: float) -> None:
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])


def replace_weights(folder: Path, content: bytes) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(content)


def out_of_range(tensors: Tensors) -> None:
    tensors["d2t"][-1] += 280


def repeated(tensors: Tensors) -> None:
    tensors["d2t"][1] = tensors["d2t"][0] - 1


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing tensor": (
        lambda f: change_tensors(f, lambda t: t.update({"midlayer.hidden_norm.weight": None})),
        "has no tensor layers.0.hidden_norm.weight; it is damaged",
    ),
    "missing vocabulary": (lambda f: change_tensors(f, lambda t: t.update(d2t=None)), "has no tensor d2t"),
    "another shape": (
        lambda f: change_tensors(f, lambda t: t.update({"fc.weight": torch.zeros(64, 100)})),
        r"holds fc.weight of shape \[64, 100\] and its config.json asks for \[64, 192\]",
    ),
    "unknown tensor": (
        lambda f: change_tensors(f, lambda t: t.update(mask_hidden=torch.zeros(1, 64))),
        "has an unknown tensor mask_hidden",
    ),
    "token out of range": (lambda f: change_tensors(f, out_of_range), "has tokens in d2t outside the target's 280"),
    "token twice": (lambda f: change_tensors(f, repeated), "has tokens in d2t outside the target's 280, or twice"),
    "fractional tokens": (
        lambda f: change_tensors(f, lambda t: t.update(d2t=t["d2t"].float())), "holds d2t as float32, which is not read"
    ),
    "8-bit weights": (
        lambda f: change_tensors(f, lambda t: t.update({"fc.weight": t["fc.weight"].to(torch.float8_e4m3fn)})),
        "holds fc.weight as float8_e4m3fn, which is not read; get the head in bfloat16",
    ),
    "not finite": (
        lambda f: change_tensors(f, lambda t: t["lm_head.weight"].fill_(torch.nan)),
        "has values in lm_head.weight that are not finite",
    ),
    "truncated": (lambda f: cut(f / "model.safetensors", 0.7), "model.safetensors is damaged .* download it again"),
    "empty": (lambda f: cut(f / "model.safetensors", 0), "model.safetensors is damaged"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "holds no .safetensors file"),
    "pickle cut": (lambda f: replace_weights(f, b"\x80\x02}q"), "pytorch_model.bin is not a file of tensors alone"),
    "config not JSON": (lambda f: cut(f / "config.json", 0.5), "config.json is not JSON"),
    "no config": (lambda f: (f / "config.json").unlink(), "has no readable config.json"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_head_is_refused_in_one_sentence(tmp_path: Path, damage: str) -> None:
    folder = write_head_folder(tmp_path / "head", Options())
    change, sentence = DAMAGES[damage]
    change(folder)
    with pytest.raises(ModelError, match=sentence) as error:
        opened(folder, architecture(Options())).load(torch.float32, CPU)
    assert str(folder) in str(error.value) and "\n" not in str(error.value)


def test_other_backends_refuse_such_a_head(tmp_path: Path) -> None:
    target = write_model(tmp_path / "target.gguf", num_layers=8)
    folder = write_head_folder(tmp_path / "head", Options())
    for backend in ("auto", "native", "llamacpp"):
        with pytest.raises(UsageError, match="only the torch backend reads; use backend 'torch'"):
            LLM(str(target), str(folder), backend=backend)
