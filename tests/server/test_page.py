"""The page's files, drafts in a stream, and the event stream, without a browser. `test_page_browser.py` has one."""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import pytest

from outpace.core import Segment, VerifiedDraft
from outpace.engine.stretches import stretches
from outpace.server.page import page_files
from tests.fakes import ByteTokenizer, fake_engine
from tests.scripted_model import scripted
from tests.server_helper import LiveServer, live, wait_until

HELLO = [{"role": "user", "content": "hello hello hello"}]


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    engine = fake_engine(max_context=1024, cache_tokens=8192)
    engine.calibrate()
    with live(engine, ByteTokenizer(), 1024) as running:
        yield running


# ---- files


def test_the_page_is_small_and_names_nothing_from_elsewhere():
    files = page_files()
    assert sum(len(file.content) for file in files.values()) < 150_000
    for name, file in files.items():
        text = file.content.decode()
        for address in re.findall(r"https?://[^\s\"'<>)]+", text):
            assert address == "http://www.w3.org/2000/svg", f"{name}: {address}"
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", text), name
        if name.endswith(".html"):
            assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son\w+=", text), name
            for used in re.findall(r"static/([\w.]+)", text):
                assert used in files


@pytest.mark.parametrize("path", ["/", "/docs", "/static/main.js", "/static/style.css", "/static/icon.svg"])
def test_files_have_a_strict_policy_and_are_sent_once(server, path):
    status, _, headers = server.get(path)
    policy = headers["content-security-policy"]
    assert status == 200 and "default-src 'none'" in policy and "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy and "http" not in policy and "*" not in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert server.get(path, {"if-none-match": headers["etag"]})[0] == 304


def test_only_known_files_are_served(server):
    for name in ("../app.py", "..%2fapp.py", "documents.py", "__init__.py", "", "%00"):
        status, reply, _ = server.get(f"/static/{name}")
        assert status == 404 and "error" in reply
    assert server.get("/redoc")[0] == 404


def test_without_the_page_the_reference_remains():
    with live(fake_engine(), ByteTokenizer(), 256, page=False) as server:
        assert server.get("/")[0] == 404
        assert server.get("/docs")[0] == server.get("/static/docs.js")[0] == 200


def test_with_a_key_the_page_opens_and_shows_nothing_without_it():
    with live(fake_engine(), ByteTokenizer(), 256, api_keys=("secret",), root_path="/llm") as server:
        for root in ("", "/llm"):
            assert server.get(f"{root}/")[0] == server.get(f"{root}/static/main.js")[0] == 200
            assert server.get(f"{root}/v1/outpace/events")[0] == 401
        assert server.get("/static")[0] == 401


# ---- drafts in a stream


def test_text_belongs_to_the_draft_of_its_step():
    first, second = VerifiedDraft(1, "suffix", [1, 2, 3], 2), VerifiedDraft(5, "head", [4], 0)
    segments = [Segment(letter, token=token) for token, letter in enumerate("abcdefg")]
    found = [(each.text, each.draft, each.is_accepted) for each in stretches(segments, [first, second])]
    assert found == [
        ("a", None, False),
        ("bc", first, True),
        ("d", first, False),
        ("e", None, False),
        ("f", second, False),
        ("g", None, False),
    ]
    assert [each.text for each in stretches(segments[2:4], [first, second])] == ["c", "d"]


def chunks(server: LiveServer, **options: Any) -> tuple[list[dict[str, Any]], Any]:
    body = {"messages": HELLO, "model": "fake", "max_tokens": 80, "seed": 1, "stream": True} | options
    stream = server.client().chat.completions.create(extra_body={"speculation": {"mode": "on"}}, **body)
    found = [chunk.model_dump() for chunk in stream]
    return [choice for chunk in found for choice in chunk["choices"]], found[-1]["usage"]


@pytest.mark.parametrize("stop", [None, "ab"])
def test_a_stream_says_which_draft_its_text_came_from(server, stop):
    asked = {"include_usage": True, "include_drafts": True}
    choices, usage = chunks(server, stream_options=asked, stop=stop)
    plain, _ = chunks(server, stream_options={"include_usage": True}, stop=stop)
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    assert text == "".join(choice["delta"].get("content") or "" for choice in plain)
    assert all("speculation" not in choice for choice in plain)
    drafts = {each["at"]: each for choice in choices if (each := choice.get("speculation"))}
    assert drafts, "the fake draft model proposes something"
    assert all(0 <= each["accepted"] <= len(each["draft"]) for each in drafts.values())
    if stop is None:  # text that a stop string cuts off is not shown, and neither are drafts of nothing else
        assert sum(len(each["draft"]) for each in drafts.values()) == usage["speculation"]["drafted"]
        assert sum(each["accepted"] for each in drafts.values()) == usage["speculation"]["accepted"]
    for choice in choices:
        origin = choice.get("speculation")
        if origin and origin["is_accepted"] and "\ufffd" not in "".join(origin["draft"]):
            assert choice["delta"]["content"] in "".join(origin["draft"][: origin["accepted"]])


def test_thinking_and_calls_are_separated_as_without_drafts():
    thought = "Well.</think>\nThe answer < 7."
    with scripted(f"<think>{thought}", ending="{{ '<think>' }}", reasoning_parser="qwen3") as server:
        said = []
        for asked in ({}, {"include_drafts": True}):
            body = {"messages": HELLO, "stream": True, "stream_options": {"include_usage": True} | asked}
            _, text, _ = server.post("/v1/chat/completions", body)
            chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
            deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
            said.append(["".join(delta.get(name) or "" for delta in deltas) for name in ("reasoning", "content")])
        assert said[0] == said[1] and "Well." in said[0][0] and "answer < 7." in said[0][1]


# ---- the event stream


@contextmanager
def watching(server: LiveServer, **headers: str) -> Iterator[Iterator[tuple[str, dict[str, Any]]]]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    connection.request("GET", "/v1/outpace/events", headers=headers)
    response = connection.getresponse()
    assert response.status == 200, response.read()
    assert response.getheader("content-type", "").startswith("text/event-stream")

    def events() -> Iterator[tuple[str, dict[str, Any]]]:
        while line := response.readline():
            name = line.decode().removeprefix("event: ").strip()
            yield name, json.loads(response.readline().decode().removeprefix("data: "))
            response.readline()

    try:
        yield events()
    finally:
        response.close()
        connection.close()


def test_watchers_see_the_engine_work_and_nothing_is_kept_for_nobody(server):
    policy = server.engine.policy
    assert policy.trace.maxlen == 0
    with watching(server) as events:
        name, about = next(events)
        assert name == "about" and about["model"] == "fake" and "suffix" in about["methods"]
        name, before = next(events)
        assert name == "live" and policy.trace.maxlen
        chunks(server)
        for name, now in events:
            assert name == "live"
            if now["generated"] >= before["generated"] + 80 and not now["running"]:
                break
        assert now["clock"] > before["clock"] and now["steps"] > before["steps"]
        drafted = {method: counts[1] for method, counts in now["methods"].items()}
        by_position = {method: sum(tried for tried, _ in counts) for method, counts in now["positions"].items()}
        assert by_position and all(by_position[method] <= drafted[method] for method in by_position)
        assert now["trace"][-1]["reason"] and now["trace"][-1]["seconds"] > 0
        assert "hello" not in json.dumps(now), "a snapshot has no text"
    wait_until(lambda: policy.trace.maxlen == 0)


def test_a_snapshot_names_requests_for_which_speculation_does_not_pay(server):
    from outpace.config import SamplingParams
    from outpace.engine.watch import Watch
    from outpace.metrics import EngineMetrics

    engine = fake_engine()
    requests = [engine.submit([1, 2, 3], SamplingParams(max_tokens=60)) for _ in range(3)]
    engine.step()
    for request, (spent, plain) in zip(requests, [(1.0, 2.0), (1.0, 0.5), (0.0, 0.0)], strict=True):
        request.spec.decode_seconds, request.spec.plain_seconds = spent, plain
        request.spec.num_generated, request.spec.num_drafted = 40, 10
    seen = Watch(engine, EngineMetrics()).look()["requests"]
    assert (seen["known"], seen["losing"]) == (2, 1)
    assert [each["speedup"] for each in seen["shown"]] == [0.5, 2.0, None]


def test_all_watchers_share_snapshots(server):
    with watching(server) as one, watching(server) as other:
        clocks = [{next(events)[1].get("clock") for _ in range(4)} - {None} for events in (one, other)]
        assert len(clocks[0] & clocks[1]) >= 2


def test_too_many_watchers_are_refused(server, monkeypatch):
    monkeypatch.setattr(server.app.state.outpace.live, "max_watchers", 1)
    wait_until(lambda: server.engine.policy.trace.maxlen == 0)
    with watching(server) as events:
        next(events)
        status, reply, headers = server.get("/v1/outpace/events")
        assert status == 429 and "watch already" in reply["error"]["message"] and "retry-after" in headers


def test_watchers_do_not_delay_the_end_of_the_server():
    with live(fake_engine(), ByteTokenizer(), 256) as server, watching(server) as events:
        next(events)
        next(events)
        began = perf_counter()
        server.stop()
        assert perf_counter() - began < 5.0
        assert all(name == "live" for name, _ in events), "the stream ends as a stream"
