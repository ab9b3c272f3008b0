"""An estimated speedup needs 32 generated tokens wherever it is shown; `server/test_contract.py` has the usage."""

from __future__ import annotations

import json

import pytest

from outpace.cli import main
from outpace.config import SamplingParams
from outpace.core import MIN_ESTIMATE_TOKENS, MethodCounts, SpeculationCounts, estimated_speedup, speedup_or_none
from outpace.llm import LLM
from outpace.metrics import EngineMetrics, log_line, summary
from tests.test_llm import use_fakes

ENOUGH = [(MIN_ESTIMATE_TOKENS - 1, False), (MIN_ESTIMATE_TOKENS, True)]


def test_32_tokens_are_enough():
    assert MIN_ESTIMATE_TOKENS == 32


@pytest.mark.parametrize(
    ("plain", "spent", "generated", "drafted", "expected"),
    [
        (3.0, 2.0, 32, 1, 1.5),
        (3.0, 2.0, 31, 1, None),
        (3.0, 2.0, 32, 0, None),
        (0.0, 2.0, 32, 1, None),
        (3.0, 0.0, 32, 1, None),
    ],
)
def test_an_estimate_needs_drafts_times_and_tokens(plain, spent, generated, drafted, expected):
    assert speedup_or_none(plain, spent, num_generated=generated, num_drafted=drafted) == expected


def test_requests_that_are_too_short_each_have_an_estimate_together():
    short = SpeculationCounts(num_generated=20, num_drafted=4, plain_seconds=3.0, decode_seconds=2.0)
    assert short.estimated_speedup is None
    assert estimated_speedup([short, short]) == 1.5


@pytest.mark.parametrize(("num_tokens", "is_known"), ENOUGH)
@pytest.mark.parametrize("depth", [1, 5])
def test_the_outputs_of_an_llm_count_every_generated_token(monkeypatch, num_tokens, is_known, depth):
    use_fakes(monkeypatch)
    with LLM(draft="d.gguf", speculation="on", method="draft", depth=depth) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        counts = llm.generate("abc", params)[0].outputs[0].speculation
    assert counts.num_generated == num_tokens and counts.num_drafted > 0
    assert (counts.estimated_speedup is not None) == is_known


@pytest.mark.parametrize(("num_tokens", "is_known"), ENOUGH)
def test_run_shows_it_in_json_and_in_its_last_line(monkeypatch, capsys, num_tokens, is_known):
    use_fakes(monkeypatch)
    drafting = ["--draft", "d.gguf", "--speculation", "on", "--temperature", "0", "--max-tokens", str(num_tokens)]
    assert main(["run", "abc", *drafting, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["usage"]["completion_tokens"] == num_tokens and found["speculation"]["drafted"] > 0
    assert (found["speculation"]["estimated_speedup"] is not None) == is_known
    assert main(["run", "abc", *drafting]) == 0
    assert ("x plain" in capsys.readouterr().err) == is_known


@pytest.mark.parametrize(("num_tokens", "is_known"), ENOUGH)
def test_the_metrics_have_it(num_tokens, is_known):
    metrics = EngineMetrics(num_generated_tokens=num_tokens, plain_seconds=3.0, spent_seconds=2.0)
    metrics.by_method["suffix"] = MethodCounts(num_drafts=1, num_drafted=4, num_accepted=2)
    found = summary(metrics)
    assert found["estimated_speedup"] == (1.5 if is_known else None)
    assert ("1.50x plain" in log_line(summary(EngineMetrics()), found, 1.0)) == is_known
