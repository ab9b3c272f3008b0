"""The server's metrics equal the sums of what clients received, and Prometheus parsers can read them."""

from __future__ import annotations

import json
import logging
import subprocess
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from outpace.config import SamplingParams
from outpace.metrics import EngineMetrics, Histogram, log_line, summary
from outpace.server.logs import JsonFormatter, TextFormatter
from tests.fakes import ByteTokenizer, fake_engine
from tests.server_helper import LiveServer, live

NAMES = [
    "vllm:spec_decode_num_drafts_total",
    "vllm:spec_decode_num_draft_tokens_total",
    "vllm:spec_decode_num_accepted_tokens_total",
    "vllm:spec_decode_draft_acceptance_rate",
    "vllm:time_to_first_token_seconds_count",
    "vllm:time_per_output_token_seconds_count",
    "vllm:e2e_request_latency_seconds_count",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:gpu_cache_usage_perc",
    "vllm:num_preemptions_total",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "outpace_estimated_speedup_ratio",
    "outpace_speculation_depth_count",
    "outpace_plain_steps_total",
    "outpace_lossy_requests_total",
    "outpace_lossy_tokens_total",
    "outpace_engine_faults_total",
    "outpace_ledger_seconds{kind=spent}",
    "outpace_ledger_seconds{kind=plain}",
]


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[LiveServer, list[dict[str, Any]]]]:
    """A server after some traffic, and the usage that its replies reported."""
    engine = fake_engine(max_context=256, cache_tokens=1024, max_sequences=4, speculation="on", method="draft")
    with live(engine, ByteTokenizer(), 256) as server:

        def ask(i: int) -> dict[str, Any]:
            how = {"mode": "off"} if i % 3 == 0 else {"method": ("ngram", "draft")[i % 2]}
            body = {"prompt": f"prompt {i}", "max_tokens": 20 + i, "seed": i, "n": 1 + i % 2, "speculation": how}
            usage: dict[str, Any] = server.post("/v1/completions", body)[1]["usage"]
            return usage | {"n": 1 + i % 2}

        with ThreadPoolExecutor(8) as pool:
            usages = list(pool.map(ask, range(16)))
        server.wait_until_idle()
        yield server, usages


def test_counters_are_what_clients_were_told(served):
    server, usages = served
    metrics = server.metrics()
    spec = [usage["speculation"] for usage in usages]
    assert metrics["vllm:generation_tokens_total"] == sum(usage["completion_tokens"] for usage in usages)
    assert metrics["vllm:prompt_tokens_total"] == sum(usage["prompt_tokens"] * usage["n"] for usage in usages)
    drafted, accepted = sum(s["drafted"] for s in spec), sum(s["accepted"] for s in spec)
    assert metrics["vllm:spec_decode_num_draft_tokens_total"] == drafted > 0
    assert metrics["vllm:spec_decode_num_accepted_tokens_total"] == accepted > 0
    assert metrics["vllm:spec_decode_draft_acceptance_rate"] == pytest.approx(accepted / drafted)
    per_position = [value for name, value in metrics.items() if "accepted_tokens_per_pos_total" in name]
    assert sum(per_position) == accepted and per_position == sorted(per_position, reverse=True)
    num_completions = sum(usage["n"] for usage in usages)
    ended = sum(value for name, value in metrics.items() if name.startswith("vllm:request_success_total"))
    assert ended == metrics["vllm:e2e_request_latency_seconds_count"] == num_completions
    assert metrics["vllm:time_to_first_token_seconds_count"] == num_completions
    assert (
        metrics["vllm:time_per_output_token_seconds_count"] == metrics["vllm:generation_tokens_total"] - num_completions
    )
    assert metrics["outpace_speculation_depth_sum"] == drafted
    plain = metrics["outpace_speculation_depth_bucket{le=0.0}"]
    assert metrics["outpace_plain_steps_total"] == plain > 0
    for method in ("draft", "ngram"):
        assert metrics[f"outpace_acceptance_rate_per_request_count{{method={method}}}"] > 0
    assert drafted == sum(metrics[f"outpace_drafted_tokens_total{{method={method}}}"] for method in ("draft", "ngram"))
    assert metrics["vllm:num_requests_running"] == metrics["vllm:num_requests_waiting"] == 0


def test_every_name_is_there_from_the_start():
    with live(fake_engine(), ByteTokenizer(), 256) as server:
        metrics = server.metrics()
    assert [name for name in NAMES if name not in metrics] == []


def test_the_line_from_the_articles(served):
    """curl -s localhost:8000/metrics | grep spec_decode"""
    server, _ = served
    shell = f"curl -s {server.url}/metrics | grep spec_decode"
    lines = subprocess.run(
        ["sh", "-c", shell], capture_output=True, text=True, timeout=20, check=True
    ).stdout.splitlines()
    kinds = Counter(line.split()[1] if line.startswith("#") else "sample" for line in lines)
    assert kinds["HELP"] == kinds["TYPE"] == 5 and kinds["sample"] > 5
    assert any(line.startswith('vllm:spec_decode_draft_acceptance_rate{model_name="fake"} 0.') for line in lines)


def test_openmetrics_is_spoken_too(served):
    server, _ = served
    _, text, headers = server.get("/metrics", {"accept": "application/openmetrics-text; version=1.0.0"})
    assert headers["content-type"].startswith("application/openmetrics-text") and text.endswith("# EOF\n")


def test_a_histogram_counts_a_value_in_every_bucket_above_it():
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        histogram.observe(value)
    histogram.observe(2.0, times=3)
    assert histogram.buckets() == [("1.0", 2.0), ("2.0", 6.0), ("+Inf", 7.0)]
    assert histogram.count == 7 and histogram.total == pytest.approx(18.0)


def test_the_log_line_says_what_happened_in_between():
    engine = fake_engine(speculation="on", method="ngram")
    metrics = EngineMetrics()
    before = summary(metrics)
    request = engine.submit([97, 98] * 8, SamplingParams(max_tokens=30, seed=1, ignore_eos=True))
    while engine.has_requests:
        for delta in engine.step():
            metrics.step_done(engine.stats)
            metrics.advanced(request, len(delta.token_ids), request.submitted_at, request.submitted_at)
        metrics.look_at(engine)
    metrics.ended(request, "length")
    now = summary(metrics)
    assert now["generated_tokens"] == 30 and now["finished"] == {"length": 1}
    line = log_line(before, now, seconds=2.0)
    assert (
        "15.0 tokens/s generated, 0.0 prompt tokens/s" in line
        and f"of {request.spec.num_drafted} draft tokens accepted" in line
    )
    assert "no drafts: plain decoding" in log_line(now, now, seconds=2.0)


def test_log_lines_are_text_or_json_with_the_same_facts():
    record = logging.makeLogRecord(
        {"name": "outpace.server", "levelno": 20, "levelname": "INFO", "msg": "request", "facts": {"status": 200}}
    )
    assert TextFormatter().format(record).endswith("INFO request status=200")
    line = json.loads(JsonFormatter().format(record))
    assert line["message"] == "request" and line["status"] == 200 and line["level"] == "info"


def test_every_request_leaves_one_line_with_its_id(served, caplog):
    server, _ = served
    with caplog.at_level("INFO", logger="outpace.server"):
        server.post("/v1/completions", {"prompt": "ab", "max_tokens": 3, "seed": 1}, {"x-request-id": "known"})
        server.get("/health")
    facts = [record.facts for record in caplog.records if record.message == "request"]
    assert [fact["request_id"] for fact in facts] == ["known"]
    assert facts[0]["status"] == 200 and facts[0]["completion_tokens"] == 3 and facts[0]["finish"] == "length"
