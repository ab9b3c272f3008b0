"""The comparison with vLLM: the checkpoint that other engines load, the measurement, and the processes around it."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed; pip install outpace[torch]")
pytest.importorskip("safetensors", reason="safetensors is not installed; pip install outpace[torch]")

import torch

from benchmarks import (
    gpu_experiment,
    gpu_models,
    gpu_padded_model,
    gpu_peers,
    gpu_peers_checkpoint,
    gpu_peers_outpace,
    gpu_peers_worker,
)
from benchmarks.gpu_padded_model import PaddedModel, Small
from benchmarks.gpu_peers_process import Failed, PeerProcess
from benchmarks.gpu_peers_settings import WAVES, PeerSettings
from benchmarks.gpu_peers_summary import summary_lines
from benchmarks.gpu_peers_vllm import engine_settings, environment
from benchmarks.gpu_peers_window import Step, measure
from outpace.backends.base import Capacity, HeadTask
from outpace.backends.torch.kernels.reference import ReferenceOps
from outpace.backends.torch.model.head_loader import open_head
from outpace.backends.torch.model.loader import load_weights, open_checkpoint
from outpace.backends.torch.model.model import Model
from outpace.backends.torch.runner import TorchRunner
from outpace.backends.torch.storage.scaled import Scaled
from outpace.core import Row, StepPlan
from outpace.models.rope import Rope, unscaled
from tests.benchmarks.small_model import DRAFT_VOCABULARY, LARGE, LARGE_CONFIG, write_small
from tests.tiny_gguf import VOCAB_SIZE
from tests.tiny_head import request_of

TOKENS = list(range(1, 40))
ROOM = Capacity(2, 128, 64, 64)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads do not speed up tiny matrix products."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> tuple[Path, Path]:
    return write_small(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def padded(files) -> PaddedModel:
    model, head = files
    small = Small.load(model, head, torch.device("cpu"))
    return PaddedModel.start(small, torch.float32, LARGE, DRAFT_VOCABULARY, ROOM)


@pytest.fixture(scope="module")
def written(padded, tmp_path_factory) -> Path:
    """The padded model and head as folders; small shards, so that there are several."""
    folder: Path = tmp_path_factory.mktemp("written")
    target = padded.pair.runners[0].model
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(gpu_peers_checkpoint, "_SHARD_BYTES", 2**20)
        gpu_peers_checkpoint.write_model(folder / "model", target.config, target.weights)
        gpu_peers_checkpoint.write_head(folder / "head", padded.head, padded.head_weights, target.config)
    return folder


def logits_of(runner: TorchRunner) -> Any:
    found = runner.forward(StepPlan([Row(0, 0, TOKENS, len(TOKENS))])).copy()
    runner.free(0)
    return found


def test_transformers_and_outpace_read_the_written_model(padded, written):
    pytest.importorskip("transformers", reason="transformers is not installed")
    from transformers import LlamaForCausalLM

    expected = logits_of(padded.pair.runners[0])[:, :VOCAB_SIZE]
    assert len(list((written / "model").glob("*.safetensors"))) > 1
    theirs = LlamaForCausalLM.from_pretrained(written / "model", dtype=torch.float32)
    with torch.inference_mode():
        found = theirs(torch.tensor([TOKENS])).logits[0, :, :VOCAB_SIZE].numpy()
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()
    opened = open_checkpoint(written / "model")
    weights = load_weights(opened, torch.float32, torch.device("cpu"))
    ours = logits_of(TorchRunner(Model(opened.config, weights, ReferenceOps(), 64), ROOM))[:, :VOCAB_SIZE]
    assert np.abs(ours - expected).max() < 1e-4 * np.abs(expected).max()


def test_the_written_head_drafts_what_the_padded_one_drafts(padded, written):
    opened = open_checkpoint(written / "model")
    head = open_head(written / "head", written / "model", opened.config, opened.name)
    weights = load_weights(opened, torch.float32, torch.device("cpu"))
    runner = TorchRunner(Model(opened.config, weights, ReferenceOps(), 64), ROOM)
    runner.attach(head.config, head.load(torch.float32, torch.device("cpu")))
    for length in (3, 40):
        for params in ({}, {"temperature": 1.0, "seed": 7}):
            assert drafted(runner, length, **params) == drafted(padded.pair.runners[0], length, **params)


def drafted(runner: TorchRunner, length: int, **params: Any) -> list[int]:
    request = request_of(length, text=length, **params)
    runner.forward(StepPlan([Row(0, 0, request.tokens[:-1], 0)]))
    request.num_computed = length - 1
    head = runner.capabilities.head
    assert head is not None
    [draft] = head.draft([HeadTask(request, 4)])
    runner.free(0)
    return list(draft.tokens)


def test_the_heads_config_has_every_key_that_vllm_reads(written):
    values = json.loads((written / "head" / "config.json").read_text())
    assert values["architectures"] == ["LlamaForCausalLMEagle3"]
    assert values["fc_norm"] is True
    assert values["norm_before_residual"] is values["norm_before_fc"] is values["norm_output"] is False
    assert values["num_aux_hidden_states"] == len(values["eagle_aux_hidden_state_layer_ids"])
    assert values["draft_vocab_size"] == DRAFT_VOCABULARY


def test_a_base_for_larger_heads_gives_the_same_frequencies():
    small = unscaled(100_000.0, 64)
    base = gpu_peers_checkpoint.plain_base(Rope(np.concatenate([small, np.zeros(32)])))
    assert base == pytest.approx(1e10)
    assert np.allclose(unscaled(base, 128)[:32], small, rtol=1e-9)
    with pytest.raises(ValueError, match="scaled"):
        gpu_peers_checkpoint.plain_base(Rope(small / np.linspace(1, 2, 32)))


class Scripted:
    """Emits what the script says, for all requests alike."""

    def __init__(self, script: Sequence[tuple[int, bool]], clock: list[float]) -> None:
        self._script, self._clock = iter(script), clock
        self.log: list[str] = []

    def submit(self, prompts: Sequence[Sequence[int]], temperature: float, max_tokens: int) -> None:
        self.log.append(f"submit {len(prompts)} {temperature} {max_tokens}")
        self._count = len(prompts)

    def step(self) -> Step:
        new, is_one_time = next(self._script)
        self._clock[0] += 1.0
        return Step(dict.fromkeys(range(self._count), [7] * new) if new else {}, is_one_time)

    def abort(self) -> None:
        self.log.append("abort")


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr("benchmarks.gpu_peers_window.time.perf_counter", lambda: now[0])
    return now


def test_prefill_and_one_time_steps_are_left_out(clock):
    script = [(0, False), (1, True), (1, False), (3, True), (0, False), (3, False), (5, False), (1, False)]
    engine = Scripted(script, clock)
    found = measure(engine, [[1], [2]], 2, 1.0, 11)
    values = found.as_dict()
    assert engine.log == ["submit 2 1.0 33", "abort"]
    assert values["tokens"] == 2 * (1 + 3 + 5)  # the first token and those of the one-time step are not in it
    assert values["seconds"] == 4.0  # the step without tokens is
    assert (values["steps"], values["one_time_steps"]) == (3, 1)
    assert values["tokens_per_step_and_request"] == pytest.approx(3.0)
    assert values["accepted_of_steps"] == pytest.approx([2 / 3, 2 / 3, 1 / 3, 1 / 3])
    assert values["first_tokens"] == [[7] * 8] * 2


def test_a_measurement_ends_when_a_request_reaches_its_limit(clock):
    engine = Scripted([(1, False), (100, True), (1, False)], clock)
    found = measure(engine, [[1]], 1, 0.0, 8)
    assert found.num_steps == 0
    assert found.num_one_time == 1


def test_prompts_run_so_many_at_a_time(clock):
    engine = Scripted([(2, False)] * 50, clock)
    measure(engine, [[1]] * 5, 2, 0.0, 4)
    assert [line for line in engine.log if line != "abort"] == ["submit 2 0.0 12", "submit 2 0.0 12", "submit 1 0.0 12"]


def peer_named(name: str) -> PeerSettings:
    return next(peer for wave in WAVES for peer in wave if peer.name == name)


FAKE_VLLM = Path(__file__).parent / "fake_vllm"


def test_vllm_is_driven_in_its_process(tmp_path):
    """The whole way of a command to an engine and back; only vLLM is a fake."""
    (tmp_path / "tokens.json").write_text('{"prompts": [[1], [2]]}')
    (tmp_path / gpu_peers_worker.COMPLETE).touch()
    worker = PeerProcess(peer_named("vllm-plain"), settings_of(tmp_path), tmp_path / "log", FAKE_VLLM, tmp_path)
    try:
        assert worker.wait_until_ready(30)["asynchronous_scheduling"] is True
        assert worker.ask({"do": "begin"}, 30) == {}
        cell = {"do": "cell", "setting": "plain", "concurrency": 2, "temperature": 0.0, "block": 0}
        found = worker.ask(cell, 30)
        assert (found["tokens"], found["steps"]) == (4 * 96, 2 * 48)  # four prompts, two at a time
        assert found["accepted_of_steps"] == [1.0]
        assert found["first_tokens"] == [[1, 2] * 4] * 4
        with pytest.raises(Failed, match="KeyError: 'concurrency'"):
            worker.ask({"do": "cell"}, 30)
        assert worker.ask({"do": "steps", "concurrency": 1}, 30)["steps"] == 64
    finally:
        worker.close()


def test_vllm_gets_the_settings_of_each_measurement(tmp_path):
    model, head = tmp_path / "m", tmp_path / "h"
    eagle = engine_settings(peer_named("vllm-eagle3:3"), model, head)
    assert eagle["compilation_config"]["cudagraph_capture_sizes"] == [4, 8, 32, 128, 512]
    assert eagle["speculative_config"]["draft_sample_method"] == "probabilistic"
    assert eagle["speculative_config"]["model"] == str(head)
    deeper = engine_settings(peer_named("vllm-eagle3:5"), model, head)
    assert deeper["compilation_config"]["cudagraph_capture_sizes"] == [6, 12, 36, 48, 132, 192, 768]
    assert deeper["max_num_seqs"] == 132
    plain = engine_settings(peer_named("vllm-plain"), model, head)
    assert plain["speculative_config"] is None
    assert plain["compilation_config"]["cudagraph_capture_sizes"] == [1, 8, 32, 128]
    assert engine_settings(peer_named("vllm-fp8"), model, head)["quantization"] == "fp8"
    ngram = engine_settings(peer_named("vllm-ngram:5"), model, head)["speculative_config"]
    assert (ngram["method"], ngram["num_speculative_tokens"]) == ("ngram", 5)
    assert (
        engine_settings(peer_named("vllm-ngram:5"), model, head)["compilation_config"]["cudagraph_capture_sizes"][-1]
        == 768
    )
    modes = [environment(peer_named(name), tmp_path)["VLLM_ENABLE_V1_MULTIPROCESSING"]
             for name in ("vllm-plain", "vllm-plain-in-process")]  # fmt: skip
    assert modes == ["1", "0"]
    for wave in WAVES:
        for peer in wave:
            assert PeerSettings.from_dict(json.loads(json.dumps(peer.as_dict()))) == peer


def test_outpace_writes_the_checkpoint_and_is_measured(files, tmp_path, monkeypatch):
    """As on a GPU; only the shape and the lengths are small."""
    monkeypatch.setitem(gpu_models.SHAPES, gpu_padded_model.SHAPE, LARGE_CONFIG)
    monkeypatch.setattr(gpu_padded_model, "DRAFT_VOCABULARY", DRAFT_VOCABULARY)
    monkeypatch.setattr(gpu_experiment, "PREPARED", ())  # a CPU captures no graphs
    monkeypatch.setattr(gpu_experiment, "SETTINGS", ("plain", "head:1", "auto"))
    for module, names in ((gpu_peers_outpace, {"CONTEXT": 96, "STEP_CONTEXT": 40, "STEP_TOKENS": 6, "NEW_TOKENS": 6,
                                               "TEMPERATURES": (1.0,)}),
                          (gpu_peers_worker, {"STEP_PROMPT": 20, "STEP_TOKENS": 6, "NEW_TOKENS": 6,
                                              "_TOKENS": range(VOCAB_SIZE)})):  # fmt: skip
        for name, value in names.items():
            monkeypatch.setattr(module, name, value)
    model, head = files
    rng = random.Random(0)
    prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(12)] for _ in range(7)]
    job = {"peer": peer_named("outpace").as_dict(), "folder": str(tmp_path), "concurrency": [2], "device": "cpu",
           "model": str(model), "head": str(head)}  # fmt: skip
    peer = gpu_peers_worker.start(job, prompts)
    assert (tmp_path / gpu_peers_worker.COMPLETE).exists()
    assert (tmp_path / "head" / "config.json").exists()
    assert peer.describe()["parameters"]["target"] > 0
    assert "target" in gpu_peers_worker.answer(peer, {"do": "begin"}, prompts)["costs"]
    steps = gpu_peers_worker.answer(peer, {"do": "steps", "concurrency": 2}, prompts)
    assert steps["tokens_per_step_and_request"] == 1.0
    assert steps["steps"] + steps["one_time_steps"] == 6
    for setting in ("plain", "auto"):
        cell = {"do": "cell", "setting": setting, "concurrency": 2, "temperature": 1.0, "block": 0}
        found = gpu_peers_worker.answer(peer, cell, prompts)
        assert found["tokens"] >= 4 * 6


def test_a_padded_model_is_rounded_as_the_setting_rounds(files, padded):
    model, head = files
    small = Small.load(model, head, torch.device("cpu"))
    rounded = PaddedModel.start(small, torch.float32, LARGE, DRAFT_VOCABULARY, ROOM, "fp8")
    weights = rounded.pair.runners[0].model.weights
    assert all(isinstance(part, Scaled) for part in (weights.head, weights.layers[0].qkv, weights.layers[-1].down))
    expected, found = (logits_of(each.pair.runners[0])[:, :VOCAB_SIZE] for each in (padded, rounded))
    assert 0 < np.linalg.norm(found - expected) < 0.2 * np.linalg.norm(expected)


def test_a_rounded_copy_drafts_for_the_padded_model(padded):
    own = padded.with_self_draft("int8")
    target, draft = own.pair.runners
    assert draft.model.weights.embedding is target.model.weights.embedding
    assert np.linalg.norm(logits_of(draft) - logits_of(target)) < 0.1 * np.linalg.norm(logits_of(target))


def settings_of(tmp_path: Path) -> dict[str, Any]:
    return {"peer": peer_named("vllm-plain").as_dict(), "folder": str(tmp_path), "concurrency": [1], "device": "cpu",
            "model": "m", "head": "h", "tokens": str(tmp_path / "tokens.json")}  # fmt: skip


def test_a_process_says_why_it_failed_or_took_too_long(tmp_path, monkeypatch):
    job = settings_of(tmp_path)
    (tmp_path / "tokens.json").write_text('{"prompts": [[1]]}')
    (tmp_path / "vllm.py").write_text("raise ImportError('no such kernel')")
    failed = PeerProcess(peer_named("vllm-plain"), job, tmp_path / "log", tmp_path, tmp_path)
    with pytest.raises(Failed, match="no such kernel"):
        failed.wait_until_ready(30)
    with pytest.raises(Failed, match="has ended"):
        failed.ask({"do": "begin"}, 30)
    failed.close()
    (tmp_path / "vllm.py").write_text("import time\ntime.sleep(600)")
    late = PeerProcess(peer_named("vllm-plain"), job, tmp_path / "log", tmp_path, tmp_path)
    with pytest.raises(Failed, match="no answer within 0 s"):
        late.wait_until_ready(0.2)
    late.close()


class FakeProcess:
    """Answers at once; the engine `vllm-plain` does not start, and `vllm-eagle3:3` fails in one cell."""

    def __init__(self, settings: PeerSettings, *_: Any) -> None:
        self.settings = settings

    def wait_until_ready(self, seconds: float) -> dict[str, Any]:
        if self.settings.name == "vllm-fp8":
            raise Failed("out of memory; log: x")
        return {"start_s": 1.0}

    def ask(self, command: dict[str, Any], seconds: float) -> dict[str, Any]:
        if command["do"] == "begin":
            return {"costs": 1}
        if self.settings.method == "eagle3" and command["concurrency"] == 8:
            raise Failed("an error")
        ms = (4.0 if self.settings.kind == "outpace" else 5.0) / (2.0 if command.get("setting") == "auto" else 1.0)
        return {"ms_per_step": ms, "tokens_per_s": 1e3 / ms, "tokens_per_step_and_request": 1.0, "one_time_steps": 0,
                "accepted_of_steps": [], "first_tokens": [[1]]}  # fmt: skip

    def close(self) -> None:
        pass


def test_a_run_writes_what_it_found_and_names_what_is_missing(files, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu_peers, "PeerProcess", FakeProcess)
    model, head = files
    tokens = tmp_path / "tokens.json"
    tokens.write_text(json.dumps({"prompts": [[1]], "source": "random"}))
    arguments = ["run", str(model), str(tokens), str(tmp_path / "out" / "r"), "--head", str(head), "--waves", "1", "2"]
    assert gpu_peers.main(arguments) == 1
    figures = json.loads((tmp_path / "out" / "r.json").read_text())
    assert [row["engine"] for row in figures["rows"][:2]] == ["outpace", "vllm-plain"]
    assert "vllm-fp8: out of memory; log: x" in figures["missing"]
    assert sum("an error" in each for each in figures["missing"]) == 2 * 2 * 2  # temperatures, blocks, depths
    assert figures["engines"]["outpace"] == {"start_s": 1.0, "costs": 1}
    text = (tmp_path / "out" / "r.txt").read_text()
    assert "missing: vllm-fp8" in text
    assert "Outpace auto is 2.00 of its plain and 2.50 of vLLM's best" in text
    assert "vllm-plain 8 of 8" in text  # greedy texts that begin as Outpace's
    assert gpu_peers.main(["summary", str(tmp_path / "out" / "r.json")]) == 0
    assert "vLLM over Outpace, bf16      1.25" in capsys.readouterr().out.replace("  " * 20, "")


def test_after_the_time_nothing_is_measured(files, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_peers, "PeerProcess", FakeProcess)
    tokens = tmp_path / "tokens.json"
    tokens.write_text(json.dumps({"prompts": [[1]], "source": "random"}))
    model, head = files
    out = tmp_path / "r"
    arguments = ["run", str(model), str(tokens), str(out), "--head", str(head), "--seconds", "-1", "--waves", "1"]
    assert gpu_peers.main(arguments) == 0
    figures = json.loads(out.with_suffix(".json").read_text())
    assert figures["rows"] == []
    assert figures["missing"] == [f"{peer.name}: the time is over" for peer in WAVES[0]]


def test_the_summary_compares_with_the_better_of_vllms_modes():
    def step(engine: str, number: int, ms: float, quantization: str | None = None) -> dict[str, Any]:
        return {"do": "steps", "engine": engine, "quantization": quantization, "concurrency": number, "ms_per_step": ms}

    lines = summary_lines([
        step("outpace", 1, 4.0), step("outpace", 8, 4.5), step("vllm-plain", 1, 5.0),
        step("vllm-plain-in-process", 1, 4.4), step("vllm-fp8", 1, 3.4, "fp8"),
    ])  # fmt: skip
    assert lines[-2].split()[-2:] == ["1.10", "-"]
    assert lines[-1].split()[-2:] == ["-", "-"]
