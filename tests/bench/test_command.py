"""`outpace bench` from the command line: with a fake model for its behaviour, with real models for its verdict."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import outpace.backends
from benchmarks.gguf_edit import shallow_draft, shuffled_weights
from outpace.bench import peers
from outpace.bench.peer.base import Answer
from outpace.bench.workloads import built_in
from outpace.cli import main
from outpace.config import EngineConfig
from outpace.engine.engine import Engine
from outpace.models.resolve import resolve_model
from tests.fakes import FakeModel, fake_loaded
from tests.server_helper import free_port, wait_until_healthy
from tests.test_llm import use_fakes


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    rng = random.Random(1)
    path = tmp_path / "mine.jsonl"
    texts = ["".join(rng.choice("abc") for _ in range(20)) * 2 for _ in range(12)]
    path.write_text(
        "\n".join(json.dumps({"prompt": text, "class": "ab"[i % 2], "max_tokens": 12}) for i, text in enumerate(texts))
    )
    return path


@pytest.fixture
def faked(monkeypatch, tmp_path):
    use_fakes(monkeypatch)
    path = tmp_path / "fake.gguf"
    path.write_bytes(b"fake")
    monkeypatch.setattr("outpace.commands.bench_run.resolve_model", lambda name: path)
    return path


def bench(*arguments: object) -> int:
    return main(["bench", *map(str, arguments)])


def test_a_run_ends_in_a_verdict_with_its_files(faked, prompts, tmp_path, capsys):
    json_path, html_path = tmp_path / "out.json", tmp_path / "out.html"
    status = bench("--mix", prompts, "--concurrency", "1,2", "--temperature", "0,1", "--requests", 8,
                   "--depths", "2", "--json", json_path, "--html", html_path)  # fmt: skip
    assert status == 0
    results = json.loads(json_path.read_text())
    assert {"verdict", "cells", "provenance"} <= set(results)
    assert len(results["cells"]) >= 5
    assert results["verdict"]["sentence"].split()[0] in capsys.readouterr().out
    assert results["provenance"]["models"] == {"fake.gguf": results["provenance"]["models"]["fake.gguf"]}
    for cell in results["cells"]:
        assert all(figures["num_unequal"] == 0 for figures in cell["settings"].values())
    assert "<svg" in html_path.read_text()
    assert main(["bench", "compare", str(json_path), str(json_path)]) == 0
    assert "measured only" not in capsys.readouterr().out


def test_an_open_loop_runs_too(faked, prompts, tmp_path):
    path = tmp_path / "out.json"
    assert bench("--mix", prompts, "--rate", "400", "--arrivals", "bursty", "--temperature", "0", "--requests", 8,
                 "--settings", "auto", "--json", path) == 0  # fmt: skip
    (cell,) = json.loads(path.read_text())["cells"]
    assert cell["load"] == {"kind": "open", "rate": 400.0, "arrivals": "bursty", "name": "400/s bursty"}


def test_an_interrupt_keeps_what_was_measured(faked, prompts, tmp_path, monkeypatch, capsys):
    calls = 0
    step = Engine.step

    def interrupted(self):
        nonlocal calls
        calls += 1
        if calls == 700:
            raise KeyboardInterrupt
        return step(self)

    monkeypatch.setattr(Engine, "step", interrupted)
    path = tmp_path / "out.json"
    status = bench("--mix", prompts, "--concurrency", "1", "--requests", 200, "--depths", "0", "--json", path)
    assert status == 1
    results = json.loads(path.read_text())
    assert results["plan"]["was_interrupted"] and results["cells"]
    assert "interrupted" in capsys.readouterr().out


def test_the_time_budget_ends_the_measuring_not_the_report(faked, prompts, tmp_path, capsys):
    path = tmp_path / "out.json"
    assert bench("--mix", prompts, "--requests", 5000, "--time-budget", 0.5, "--json", path) == 0
    assert json.loads(path.read_text())["plan"]["ran_out_of_time"]
    assert "time budget" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--mix", "poetry"], "neither a built-in workload"),
        (["--temperature", "hot"], "--temperature must be numbers"),
        (["--temperature", "-1"], "between 0 and 100"),
        (["--concurrency", "0"], "at least 1"),
        (["--concurrency", "1", "--rate", "2"], "give one of them"),
        (["--rate", "0"], "above 0"),
        (["--settings", "fast"], "a setting is off, auto"),
        (["--time-budget", "0"], "--time-budget must be above 0"),
        (["--url", "localhost"], "not a URL"),
        (["compare", "none.json", "none.json"], "cannot read none.json"),
        (["peers", "--peers", "abacus"], "not among the peers"),
    ],
)
def test_wrong_usage_is_one_sentence_before_anything_is_loaded(capsys, arguments, words):
    assert main(["bench", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and len(captured.err.splitlines()) == 1
    assert words in captured.err


def test_help_names_the_other_commands(capsys):
    with pytest.raises(SystemExit):
        main(["bench", "--help"])
    text = capsys.readouterr().out
    assert "compare" in text and "peers" in text and "--quick" in text


class FakePeer:
    """Answers with the prompt itself; its second variant is twice as fast and can be set to be wrong or to fail."""

    def __init__(
        self, clock: SimpleNamespace, *, lies: bool = False, breaks: bool = False, seconds: float = 1.0
    ) -> None:
        self.variants = ("plain", "auto")
        self._clock, self._lies, self._breaks, self._seconds = clock, lies, breaks, seconds

    def answer(self, variant: str, tokens: Any, max_tokens: int) -> Answer:
        self._clock.now += self._seconds if variant == "plain" else self._seconds / 2
        if variant == "auto" and self._breaks:
            raise RuntimeError("out of memory\nwith details")
        return Answer("other" if variant == "auto" and self._lies else str(list(tokens)), 10)

    def close(self) -> None:
        pass


def test_peers_are_compared_with_their_own_plain_and_with_ours(monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(peers, "perf_counter", lambda: clock.now)
    opened = {"outpace": FakePeer(clock), "liar": FakePeer(clock, lies=True), "broken": FakePeer(clock, breaks=True)}
    monkeypatch.setattr(peers, "PAUSE", 0.0)
    attempts, was_cut_short = peers.measure(opened, [("chat", [i]) for i in range(5)], 10, 1e6)
    assert not was_cut_short
    rows = {(row["engine"], row["variant"]): row for row in peers.rows(attempts)}
    assert rows["outpace", "auto"]["to_own_plain"]["value"] == pytest.approx(2.0)
    assert rows["outpace", "auto"]["same_as_own_plain"] == 5
    assert rows["liar", "auto"]["same_as_own_plain"] == 0
    assert rows["liar", "plain"]["to_outpace_auto"]["value"] == pytest.approx(0.5)
    assert rows["broken", "auto"]["num_failed"] == 5 and rows["broken", "auto"]["errors"] == [
        "out of memory with details"
    ]
    assert rows["broken", "auto"]["tokens_per_second"] is None
    text = peers.as_text({"rows": list(rows.values()), "skipped": {"vllm": "not installed"}, "was_cut_short": False})
    assert "vllm: skipped, not installed" in text and "failed: out of memory" in text


def test_peers_that_are_ahead_are_said_to_be(monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(peers, "perf_counter", lambda: clock.now)
    opened = {"outpace": FakePeer(clock, seconds=3.0), "quick": FakePeer(clock)}
    monkeypatch.setattr(peers, "PAUSE", 0.0)
    attempts, _ = peers.measure(opened, [("chat", [i]) for i in range(5)], 10, 1e6)
    text = peers.as_text({"rows": peers.rows(attempts), "skipped": {}, "was_cut_short": False})
    assert "quick, auto is ahead of Outpace here" in text


# ---- real models: constructed cases, whose effects are far larger than the noise of a machine


def run_bench(tmp_path: Path, *arguments: object) -> dict[str, Any]:
    path = tmp_path / "results.json"
    assert bench(*arguments, "--json", path) == 0
    results: dict[str, Any] = json.loads(path.read_text())
    return results


def settings_of(results: dict[str, Any]) -> dict[str, list[str]]:
    return {cell["purpose"]: list(cell["settings"]) for cell in results["cells"]}


@pytest.mark.parametrize(
    ("draft", "is_head", "fixed", "swept"),
    [
        (None, False, "suffix:4", ["suffix:2", "ngram:2"]),
        ("draft.gguf", False, "draft:4", ["draft:2", "suffix:2"]),
        ("head.gguf", True, "head:4", ["head:2", "suffix:2"]),  # the embedded model has one without being asked
    ],
)
def test_the_fixed_setting_is_that_of_the_draft_a_model_is_opened_with(
    faked, prompts, tmp_path, monkeypatch, draft, is_head, fixed, swept
):
    """`--draft HEAD` chose the method `draft`, and the embedded model's own head was left out."""
    load = outpace.backends.load

    def with_draft(wanted: EngineConfig, *paths: Any) -> Any:
        loaded = load(wanted, *paths)
        config = wanted.resolve(model_context=512, model_path="x", draft_path=draft, is_head=is_head)
        return replace(loaded, config=config, draft=fake_loaded(FakeModel(), config) if draft else None)

    monkeypatch.setattr(outpace.backends, "load", with_draft)
    if is_head:
        monkeypatch.setattr("outpace.llm.DraftModelProposer.name", "head")
    arguments = ("--mix", prompts, "--temperature", 0, "--concurrency", 1, "--requests", 1, "--depths", "2")
    found = settings_of(run_bench(tmp_path, *arguments))
    assert found == {"grid": ["off", "auto", fixed], "sweep": ["off", "auto", *swept]}


@pytest.fixture(scope="module")
def bad_draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drafts")
    return shuffled_weights(shallow_draft(resolve_model(None), folder / "shallow.gguf", 15), folder / "bad.gguf")


@pytest.mark.model
@pytest.mark.slow
def test_a_planted_bad_draft_is_recognised(tmp_path, bad_draft):
    results = run_bench(tmp_path, "--draft", bad_draft, "--settings", "draft:4", "--mix", "json,story", "--temperature",
                        "0,1.5", "--concurrency", "1", "--requests", 10, "--max-tokens", 32)  # fmt: skip
    assert results["verdict"]["decision"] == "leave_off"
    assert "draft_mismatched" in {finding["kind"] for finding in results["verdict"]["findings"]}


@pytest.mark.model
@pytest.mark.slow
def test_a_planted_good_case_is_recognised(tmp_path):
    results = run_bench(tmp_path, "--settings", "auto", "--mix", "code_edit", "--temperature", "0",
                        "--concurrency", "1", "--requests", 12, "--max-tokens", 96)  # fmt: skip
    assert results["verdict"]["decision"] == "use"


@pytest.mark.model
@pytest.mark.slow
def test_a_planted_mixed_workload_is_told_apart(tmp_path):
    """One batch has copying at temperature 0 and inventing at 1.5, with deep drafts for all: requests that invent wait
    while the drafts of the others are verified."""
    path = tmp_path / "mixed.jsonl"
    records = [
        {"messages": prompt.messages, "class": category, "temperature": temperature, "max_tokens": 48}
        for category, workload, temperature in (("copy", "code_edit", 0.0), ("invent", "story", 1.5))
        for prompt in built_in(workload)
    ]
    path.write_text("\n".join(json.dumps(record) for record in sorted(records, key=json.dumps)))
    results = run_bench(tmp_path, "--settings", "suffix:16", "--mix", path, "--concurrency", "4", "--temperature", "0",
                        "--requests", 112)  # fmt: skip
    verdict = results["verdict"]
    assert verdict["decision"] in ("use_for_some", "leave_off")
    assert verdict["classes_that_lose"] == ["invent"]
    assert "invent" in verdict["sentence"]


@pytest.fixture(scope="module")
def served(bad_draft: Path) -> Iterator[str]:
    """The URL of an `outpace serve` process."""
    port = free_port()
    command = [sys.executable, "-m", "outpace", "serve", "--port", str(port), "--speculative-model", str(bad_draft)]
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield wait_until_healthy(port, child)
    finally:
        child.terminate()
        child.wait(timeout=60)


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize(
    ("decision", "arguments"),
    [
        ("use", ("--settings", "suffix:4", "--mix", "code_edit")),
        ("leave_off", ("--settings", "draft:4", "--mix", "story")),
    ],
)
def test_a_live_server_gets_the_verdict_that_the_engine_gets(served, bad_draft, tmp_path, decision, arguments):
    arguments = (*arguments, "--temperature", "0", "--concurrency", "1", "--requests", "12", "--max-tokens", "96")
    in_process = run_bench(tmp_path, "--draft", bad_draft, *arguments)["verdict"]
    by_url = run_bench(tmp_path, "--url", served, *arguments)["verdict"]
    assert in_process["decision"] == by_url["decision"] == decision
