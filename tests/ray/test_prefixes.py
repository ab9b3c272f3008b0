"""Where a request goes, and the metrics of all replicas, without a cluster."""

from __future__ import annotations

import json

from prometheus_client.parser import text_string_to_metric_families

from outpace.ray.board import Board, merged
from outpace.ray.prefixes import PrefixIndex, chain, routed_text

SYSTEM = "You are a careful assistant. " * 40


def body(question: str, **more: object) -> bytes:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    return json.dumps({"temperature": 0.5, "messages": messages, **more}).encode()


def links(question: str, tenant: str = "") -> list[bytes]:
    return chain(routed_text(body(question), tenant))


def test_requests_that_begin_alike_go_to_one_replica():
    index = PrefixIndex()
    assert index.find(links("a"), {"x", "y"}) == (None, 0)
    index.add(links("a"), "x")
    replica, length = index.find(links("something else"), {"x", "y"})
    assert replica == "x" and length == len(SYSTEM) // 256
    assert index.find(links("something else"), {"y"}) == (None, 0)
    assert index.find(links("a", tenant="another key"), {"x", "y"}) == (None, 0)


def test_parameters_before_the_messages_do_not_change_where_a_request_goes():
    assert chain(routed_text(body("a", seed=1), "")) == chain(routed_text(body("a", max_tokens=3), ""))
    assert routed_text(b"not json", "") == routed_text(b"[]", "") == routed_text(b'{"model": "x"}', "") == b""


def test_a_longer_match_is_preferred_and_a_lost_replica_is_forgotten():
    index = PrefixIndex()
    index.add(chain(b"a" * 1000), "x")
    index.add(chain(b"a" * 600 + b"b" * 1000), "y")
    assert index.find(chain(b"a" * 600 + b"b" * 900), {"x", "y"})[0] == "y"
    assert index.find(chain(b"a" * 1000), {"x", "y"})[0] == "x"
    index.forget("x")
    assert index.find(chain(b"a" * 1000), {"x", "y"}) == ("y", 2)


def test_the_index_keeps_only_so_much():
    index = PrefixIndex(most_links=10)
    for number in range(20):
        index.add(chain(f"{number}".encode() * 600), f"{number}")
    assert len(index._replicas) <= 10
    assert index.find(chain(b"19" * 600), {"19"})[0] == "19"
    assert index.find(chain(b"0" * 600), {"0"}) == (None, 0)


METRICS = """# HELP vllm:generation_tokens_total Tokens generated.
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{model_name="m"} %d.0
# HELP vllm:num_requests_running Requests that run now.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running 2.0
"""


def test_metrics_of_all_replicas_have_a_label_and_one_help_each():
    text = merged({"b": METRICS % 7, "a": METRICS % 5})
    assert text.count("# HELP vllm:generation_tokens_total") == 1
    found = {
        (sample.name, sample.labels["replica"]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert found["vllm:generation_tokens_total", "a"] == 5 and found["vllm:generation_tokens_total", "b"] == 7
    assert found["vllm:num_requests_running", "a"] == 2


def test_a_replica_that_leaves_or_falls_silent_has_no_metrics(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("outpace.ray.board.monotonic", lambda: now[0])
    board = Board()
    for name in ("a", "b", "c"):
        board.report(name, METRICS % 1)
    board.leave("a")
    now[0] = 10.0
    board.report("b", METRICS % 2)
    now[0] = 20.0
    assert 'replica="b"' in board.metrics() and 'replica="c"' not in board.metrics()
    assert 'replica="a"' not in board.metrics()
