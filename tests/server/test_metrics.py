"""The server's metrics equal the sums of what clients received, and Prometheus parsers can read them."""

from __future__ import annotations

import json
import logging
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics

from outpace.config import SamplingParams
from outpace.metrics import EngineMetrics, Histogram, log_line, summary
from outpace.server.logs import JsonFormatter, TextFormatter
from tests.fakes import ByteTokenizer, fake_engine
from tests.server_helper import LiveServer, live

# Every family of vLLM's Grafana dashboards, and what others read of vLLM
VLLM_HISTOGRAMS = [
    "time_to_first_token_seconds", "inter_token_latency_seconds", "time_per_output_token_seconds",
    "e2e_request_latency_seconds", "request_queue_time_seconds", "request_prefill_time_seconds",
    "request_decode_time_seconds", "request_inference_time_seconds", "request_prompt_tokens",
    "request_generation_tokens", "request_max_num_generation_tokens", "request_params_max_tokens", "request_params_n",
    "iteration_tokens_total",
]  # fmt: skip
DASHBOARD = Path(__file__).parents[2] / "examples" / "grafana.json"
NAMES = [
    "vllm:spec_decode_num_drafts_total",
    "vllm:spec_decode_num_draft_tokens_total",
    "vllm:spec_decode_num_accepted_tokens_total",
    "vllm:spec_decode_draft_acceptance_rate",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:gpu_cache_usage_perc",
    "vllm:num_preemptions_total",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    *(f"vllm:{name}_{kind}" for name in VLLM_HISTOGRAMS for kind in ("count", "sum", "bucket{le=+Inf}")),
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
            reply = server.post("/v1/completions", body)[1]
            usage: dict[str, Any] = reply["usage"]
            lengths = [len(choice["text"]) for choice in reply["choices"]]
            return usage | {"n": 1 + i % 2, "max_tokens": 20 + i, "texts": lengths}

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


def test_what_dashboards_read_adds_up_after_a_known_load(served):
    server, usages = served
    metrics: dict[str, float] = server.metrics()

    def total(name: str) -> float:
        return metrics[f"vllm:{name}_sum"]

    num_prompts, num_completions = len(usages), sum(usage["n"] for usage in usages)
    per_prompt = {"request_max_num_generation_tokens", "request_params_n"}
    per_token = {"inter_token_latency_seconds", "time_per_output_token_seconds"}
    for name in set(VLLM_HISTOGRAMS) - per_token - {"iteration_tokens_total"}:
        assert metrics[f"vllm:{name}_count"] == (num_prompts if name in per_prompt else num_completions), name
    generated, cached = metrics["vllm:generation_tokens_total"], metrics["vllm:prefix_cache_hits_total"]
    assert total("request_generation_tokens") == generated
    assert total("request_prompt_tokens") == metrics["vllm:prompt_tokens_total"]
    assert total("request_params_n") == num_completions
    assert total("request_params_max_tokens") == sum(usage["max_tokens"] * usage["n"] for usage in usages)
    longest = total("request_max_num_generation_tokens")
    assert sum(max(usage["texts"]) for usage in usages) <= longest <= generated
    phases = [total(f"request_{phase}_time_seconds") for phase in ("queue", "prefill", "decode")]
    assert min(phases) > 0 and sum(phases) == pytest.approx(total("e2e_request_latency_seconds"))
    assert phases[1] + phases[2] == pytest.approx(total("request_inference_time_seconds"))
    assert metrics["vllm:prefix_cache_queries_total"] == metrics["vllm:prompt_tokens_total"]
    assert metrics["vllm:num_preemptions_total"] == 0  # else tokens would be computed again
    assert total("iteration_tokens_total") == metrics["vllm:prompt_tokens_total"] - cached + generated
    assert metrics["vllm:iteration_tokens_total_count"] == metrics["outpace_engine_steps_total"]
    assert total("inter_token_latency_seconds") == total("time_per_output_token_seconds") > 0


def test_prefix_hits_are_the_cached_tokens_of_the_replies():
    with live(fake_engine(), ByteTokenizer(), 256) as server:
        usages = [
            server.post("/v1/completions", {"prompt": "ab" * 20 + end, "max_tokens": 2, "temperature": 0})[1]["usage"]
            for end in ("x", "y", "z")
        ]
        metrics = server.metrics()
    cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]
    assert cached[0] == 0 and min(cached[1:]) >= 40
    assert metrics["vllm:prefix_cache_hits_total"] == sum(cached)
    assert metrics["vllm:prefix_cache_queries_total"] == sum(usage["prompt_tokens"] for usage in usages)


def test_the_longest_of_several_completions_counts_once_per_prompt():
    engine, metrics = fake_engine(), EngineMetrics()
    lengths = {"a": [5, 9], "b": [3, 3]}
    for group, ends in lengths.items():
        for length in ends:
            request = engine.submit([97, 98], SamplingParams(n=2, max_tokens=length, seed=1, ignore_eos=True))
            while engine.has_requests:
                engine.step()
            metrics.ended(request, "length", group)
    assert (metrics.longest_output.count, metrics.longest_output.total) == (2, 9 + 3)
    assert (metrics.output_length.count, metrics.output_length.total) == (4, 5 + 9 + 3 + 3)
    never_ran = engine.submit([97], SamplingParams(seed=1))
    engine.abort(never_ran)
    metrics.ended(never_ran, "abort")
    assert metrics.output_length.count == 4 and metrics.queue_time.count == 4 and metrics.longest_output.count == 2


def test_the_cache_is_described(served):
    server, _ = served
    [(name, value)] = [(k, v) for k, v in server.metrics().items() if k.startswith("vllm:cache_config_info")]
    assert value == 1 and "num_gpu_blocks=1024" in name and "block_size=1" in name
    assert "enable_prefix_caching=True" in name


def test_our_dashboard_reads_only_metrics_that_exist(served):
    server, _ = served
    known = {name.partition("{")[0] for name in server.metrics()}
    panels = json.loads(DASHBOARD.read_text())["panels"]
    queries = [target["expr"] for panel in panels for target in panel.get("targets", [])]
    names = [name for query in queries for name in re.findall(r"\b(?:vllm:|outpace_)\w+", query)]
    assert sorted(set(names) - known) == []
    # It shows what this project is about: acceptance, depth, and the speed over plain decoding.
    assert {
        "vllm:spec_decode_num_accepted_tokens_total",
        "outpace_speculation_depth_bucket",
        "outpace_estimated_speedup_ratio",
    } <= set(names)
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels]
    assert len({panel["id"] for panel in panels}) == len(set(places)) == len(panels)
    assert all(panel["title"] and (panel["type"] == "row" or panel["targets"]) for panel in panels)


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
    families = {family.name: family.type for family in openmetrics(text)}  # Prometheus asks for this format
    assert [name for name in VLLM_HISTOGRAMS if families.get(f"vllm:{name}") != "histogram"] == []


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
