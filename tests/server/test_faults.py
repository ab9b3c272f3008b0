"""Faults the server must survive: clients that disconnect, stall or send garbage, engine failures, shutdown."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import openai
import pytest

from outpace.config import SamplingParams
from outpace.core import StepPlan
from outpace.decoding.verification import HostExecutor
from outpace.engine.driver import Driver
from outpace.engine.engine import Engine
from outpace.server.logs import TextFormatter
from tests.fakes import ByteTokenizer, fake_engine, runner_of
from tests.server_helper import LiveServer, live, wait_until

MARK = ord("!")  # no answer contains this token; the faults below are triggered by it


def make(*, step_seconds: float = 0.0, **options: Any) -> Engine:
    """A fake engine whose steps can sleep without the GIL, as real steps compute without it."""
    engine = fake_engine(**({"max_context": 512, "cache_tokens": 4096, "max_sequences": 8} | options))
    engine.calibrate()
    if step_seconds:
        on_forward(engine, lambda _: time.sleep(step_seconds))
    return engine


def on_forward(engine: Engine, before: Callable[[StepPlan], None]) -> None:
    runner = runner_of(engine)
    forward = runner.forward

    def wrapped(plan: StepPlan) -> Any:
        before(plan)
        return forward(plan)

    runner.forward = wrapped  # type: ignore[method-assign]


def offline(prompt: str, **params: Any) -> str:
    engine = make()
    request = engine.submit(ByteTokenizer().encode(prompt), SamplingParams(**params))
    with Driver(engine).submit(lambda: [request]) as stream:
        for _ in stream:
            pass
    return request.writer.text


def body(prompt: str = "ab", **more: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": 60, "seed": 1, "ignore_eos": True, **more}


def text_of(reply: dict[str, Any]) -> str:
    text: str = reply["choices"][0]["text"]
    return text


def open_request(server: LiveServer, payload: dict[str, Any]) -> socket.socket:
    """A raw connection on which a request was sent."""
    data = json.dumps(payload).encode()
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=30)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}"
    connection.sendall(head.encode() + b"\r\n\r\n" + data)
    return connection


def exchange(server: LiveServer, data: bytes) -> bytes:
    """All bytes that the server sends in reply before it closes the connection."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        answer = b""
        try:
            connection.sendall(data)
            while part := connection.recv(65536):
                answer += part
        except (ConnectionResetError, BrokenPipeError):
            pass
        return answer


# ---- clients


def test_a_hundred_clients_killed_in_mid_stream_leave_nothing_behind():
    with live(make(step_seconds=0.002, max_sequences=16), ByteTokenizer(), 512) as server:
        survivor = threading.Thread(target=lambda: survivors.append(server.post("/v1/completions", body("zz"))[1]))
        survivors: list[Any] = []
        survivor.start()

        def killed(i: int) -> None:
            with open_request(server, body(f"prompt {i}", stream=True, max_tokens=400)) as connection:
                assert connection.recv(64).startswith(b"HTTP/1.1 200")  # the answer has started
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # close with a reset

        with ThreadPoolExecutor(25) as pool:
            list(pool.map(killed, range(100)))
        survivor.join(30)
        server.check_clean()
        assert server.metrics()["vllm:request_success_total{finished_reason=abort}"] == 100
    assert text_of(survivors[0]) == offline("zz", max_tokens=60, seed=1, ignore_eos=True)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_place_within_a_step(stream):
    engine = make(step_seconds=0.05)
    with live(engine, ByteTokenizer(), 512) as server:
        connection = open_request(server, body(max_tokens=400, stream=stream))
        wait_until(lambda: bool(engine.scheduler.running) and engine.scheduler.running[0].num_output > 0)
        forwards = runner_of(engine).num_forwards
        connection.close()
        wait_until(lambda: not engine.scheduler.running)
        # One step may be running when the client disconnects, and one more before the engine sees it.
        assert runner_of(engine).num_forwards - forwards <= 3
        server.check_clean()


def test_a_waiting_client_that_leaves_is_forgotten():
    engine = make(step_seconds=0.02, max_sequences=1)
    with live(engine, ByteTokenizer(), 512) as server:
        first = open_request(server, body(max_tokens=300, stream=True))
        wait_until(lambda: bool(engine.scheduler.running))
        second = open_request(server, body("cd", max_tokens=300))
        wait_until(lambda: bool(engine.scheduler.waiting))
        second.close()
        wait_until(lambda: not engine.scheduler.waiting)
        first.close()
        server.check_clean()


def test_a_slow_reader_gets_everything_and_holds_nobody_up():
    engine = make(max_context=1100, cache_tokens=4096)
    long_answer = body("slow", max_tokens=1000, stream=True, logprobs=5)
    with live(engine, ByteTokenizer(), 1100) as server:
        slow = open_request(server, long_answer)
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        began = time.monotonic()
        others = [text_of(server.post("/v1/completions", body(f"quick {i}"))[1]) for i in range(5)]
        server.wait_until_idle()  # the engine finishes although the slow client has read nothing
        assert time.monotonic() - began < 20
        received = b""
        while b"[DONE]" not in received:
            part = slow.recv(65536)
            assert part, "the stream ended early"
            received += part
        slow.close()
        server.check_clean()
    assert others == [offline(f"quick {i}", max_tokens=60, seed=1, ignore_eos=True) for i in range(5)]
    events = [json.loads(line[6:]) for line in received.split(b"\n") if line.startswith(b"data: {")]
    assert len("".join(event["choices"][0]["text"] for event in events)) > 500
    assert sum(len(event["choices"][0]["logprobs"]["tokens"]) for event in events) == 1000


def test_a_reader_that_never_reads_is_given_up_after_the_timeout():
    engine = make(max_context=4096, cache_tokens=8192)
    with live(engine, ByteTokenizer(), 4096, request_timeout=1.0) as server:
        # Enough logprobs to fill every buffer between server and client.
        stalled = open_request(server, body(max_tokens=4000, stream=True, logprobs=20))
        server.wait_until_idle()
        wait_until(lambda: server.metrics().get("outpace_http_responses_total{route=/v1/completions,status=200}") == 1)
        stalled.close()
        server.check_clean()


def test_an_answer_that_takes_too_long_ends_with_a_sentence():
    with live(make(step_seconds=0.05), ByteTokenizer(), 512, request_timeout=0.5) as server:
        status, reply, _ = server.post("/v1/completions", body(max_tokens=400))
        assert status == 504 and reply["error"]["type"] == "timeout_error"
        stream = server.client().completions.create(
            model="fake", prompt="ab", max_tokens=400, stream=True, extra_body={"ignore_eos": True}
        )
        with pytest.raises(openai.APIError, match=r"longer than the 0\.5 seconds"):
            list(stream)
        server.check_clean()


def test_a_full_queue_says_when_to_come_back():
    engine = make(step_seconds=0.02, max_sequences=1)
    with live(engine, ByteTokenizer(), 512, max_queued=2) as server:
        held = [open_request(server, body(f"{i}", max_tokens=200)) for i in range(3)]
        wait_until(lambda: server.async_engine.num_open == 3)
        status, reply, headers = server.post("/v1/completions", body())
        assert status == 429 and reply["error"]["type"] == "rate_limit_error" and int(headers["retry-after"]) >= 1
        with pytest.raises(openai.RateLimitError):
            server.client().completions.create(model="fake", prompt="ab")
        assert server.get("/health")[0] == 200
        status, reply, _ = server.post("/v1/completions", body(n=4))
        assert status == 400 and "at most 3 fit" in reply["error"]["message"]  # waiting would not help
        for connection in held:
            connection.close()
        server.check_clean()
        assert server.post("/v1/completions", body(max_tokens=2))[0] == 200


# ---- bytes


@pytest.fixture(scope="module")
def guarded() -> Iterator[LiveServer]:
    with live(make(), ByteTokenizer(), 512, api_keys=("first", "second"), max_request_bytes=100_000) as server:
        yield server
        server.check_clean()


KEY = {"authorization": "Bearer second"}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"{not json", "not valid JSON"),
        (b"", "one JSON object"),
        (b"[1, 2]", "one JSON object"),
        (b'{"prompt": "\xff\xfe"}', "parsing the body"),
        (b"\x00\x01\x02", "not valid JSON"),
        (b"[" * 50_000, "parsing the body"),
        (b'{"prompt": "a", "temperature": NaN}', "temperature"),
        (b'{"prompt": "a", "seed": ' + b"9" * 4000 + b"}", "seed"),
        (b'{"prompt": "a", "seed": ' + b"9" * 9000 + b"}", "the body"),
    ],
)
def test_malformed_bodies_hear_what_is_wrong(guarded, data, words):
    status, reply, _ = guarded.post("/v1/completions", data, KEY)
    assert status == 400 and words in reply["error"]["message"], reply


def test_large_bodies_are_refused_by_their_length_and_by_their_size(guarded):
    status, reply, _ = guarded.post("/v1/completions", b"x" * 10_000_000, KEY)
    assert status == 413 and "--max-request-bytes" in reply["error"]["message"]
    head = (
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer first\r\ntransfer-encoding: chunked\r\n\r\n"
    )
    chunk = b"4000\r\n" + b"y" * 0x4000 + b"\r\n"
    assert exchange(guarded, head + chunk * 640 + b"0\r\n\r\n").startswith(b"HTTP/1.1 413")


def test_header_floods_and_broken_requests_do_not_get_through(guarded):
    flood = b"GET /health HTTP/1.1\r\nhost: x\r\n" + b"".join(b"x-%d: %s\r\n" % (i, b"y" * 1000) for i in range(1000))
    assert exchange(guarded, flood + b"\r\n").startswith(b"HTTP/1.1 400")
    assert exchange(guarded, b"\x16\x03\x01\x02\x00 this is not HTTP\r\n\r\n").startswith(b"HTTP/1.1 400")
    assert guarded.get("/health")[0] == 200


def test_api_keys(guarded):
    for headers in (
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": "Basic second"},
        {"authorization": "second"},
    ):
        status, reply, _ = guarded.post("/v1/completions", body(), headers)
        assert status == 401 and reply["error"]["code"] == "invalid_api_key"
        assert guarded.post("/tokenize", {"prompt": "a"}, headers)[0] == 401
    for key in ("first", "second"):
        assert guarded.client(api_key=key).models.list().data
    with pytest.raises(openai.AuthenticationError):
        guarded.client(api_key="third").models.list()
    assert guarded.get("/health")[0] == guarded.get("/metrics")[0] == 200


def test_clients_with_other_keys_or_salts_share_no_cache():
    engine = make(cache_tokens=4096)
    with live(engine, ByteTokenizer(), 512, api_keys=("first", "second")) as server:

        def num_computed(key: str, **fields: object) -> int:
            before = runner_of(engine).num_computed
            headers = {"authorization": f"Bearer {key}"}
            assert server.post("/v1/completions", body("x" * 200, max_tokens=2, **fields), headers)[0] == 200
            return runner_of(engine).num_computed - before

        whole = num_computed("first")
        assert whole >= 200
        assert num_computed("first") < 20
        assert num_computed("second") == whole
        assert num_computed("second") < 20
        assert num_computed("second", cache_salt="group") == whole
        assert num_computed("first", cache_salt="group") == whole  # a salt does not join keys
        assert num_computed("second", cache_salt="group") < 20
        status, reply, _ = server.post("/v1/completions", body(cache_salt=""), {"authorization": "Bearer first"})
        assert status == 400 and "cache_salt" in reply["error"]["message"]
        server.check_clean()


def test_other_origins_are_allowed_only_where_asked(guarded):
    ask = {"origin": "https://page.example", "access-control-request-method": "POST"}
    assert "access-control-allow-origin" not in guarded.get("/health", ask)[2]
    with live(make(), ByteTokenizer(), 512, allowed_origins=("https://page.example",)) as server:
        assert server.get("/health", ask)[2]["access-control-allow-origin"] == "https://page.example"
        assert server.ask("OPTIONS", "/v1/completions", None, ask)[0] == 200
        other = ask | {"origin": "https://other.example"}
        assert "access-control-allow-origin" not in server.get("/health", other)[2]


# ---- the engine


def ask_all(server: LiveServer, prompts: list[str]) -> list[tuple[int, Any]]:
    with ThreadPoolExecutor(len(prompts)) as pool:
        return [reply[:2] for reply in pool.map(lambda p: server.post("/v1/completions", body(p)), prompts)]


def wrong_answers(replies: list[tuple[int, Any]], prompts: list[str]) -> list[str]:
    return [
        prompt
        for (status, reply), prompt in zip(replies, prompts, strict=True)
        if status != 200 or text_of(reply) != offline(prompt, max_tokens=60, seed=1, ignore_eos=True)
    ]


@pytest.mark.parametrize("where", ["forward", "draft", "verify", "commit"])
def test_a_request_that_breaks_steps_fails_alone(monkeypatch, where):
    """Whichever part fails on the request, the others in its batch are not affected and the server continues."""
    engine = make(step_seconds=0.001, speculation="on", method="ngram")

    def check(*contexts: Any) -> None:
        if any(MARK in tokens for tokens in contexts):
            raise RuntimeError("broken on purpose")

    def before(part: object, name: str, contexts: Callable[[Any], Any]) -> None:
        whole = getattr(part, name)

        def checked(*args: Any, **named: Any) -> Any:
            check(*contexts(args[0]))
            return whole(*args, **named)

        monkeypatch.setattr(part, name, checked)

    if where == "forward":
        held = runner_of(engine).sequences
        before(runner_of(engine), "forward", lambda plan: [held.get(row.seq, ()) for row in plan.rows])
    elif where == "draft":
        before(engine._proposers["ngram"], "propose", lambda asks: [ask.request.tokens for ask in asks])
    elif where == "verify":
        assert isinstance(engine._forward_and_verify, HostExecutor)
        before(engine._forward_and_verify.verifier, "verify", lambda cases: [case.request.tokens for case in cases])
    else:
        before(engine.policy, "learn", lambda decision: [request.tokens for request in decision.requests])
    prompts = [*(f"prompt {i}" for i in range(5)), "with ! in it"]
    with live(engine, ByteTokenizer(), 512) as server:
        replies = ask_all(server, prompts)
        status, reply = replies.pop()
        assert (
            status == 500 and reply["error"]["type"] == "server_error" and "RuntimeError" in reply["error"]["message"]
        )
        assert wrong_answers(replies, prompts[:-1]) == []
        assert server.get("/health")[0] == 200
        assert server.metrics()["outpace_engine_faults_total"] >= 1
        assert wrong_answers(ask_all(server, prompts[:2]), prompts[:2]) == []
        server.check_clean()


def test_a_fault_that_does_not_come_back_costs_nobody_anything():
    engine = make(step_seconds=0.001)
    faults = iter([False] * 15 + [True] + [False] * 50 + [True])

    def sometimes(_: StepPlan) -> None:
        if next(faults, False):
            raise RuntimeError("a hiccup")

    on_forward(engine, sometimes)
    prompts = [f"prompt {i}" for i in range(6)]
    with live(engine, ByteTokenizer(), 512) as server:
        assert wrong_answers(ask_all(server, prompts), prompts) == []
        assert server.metrics()["outpace_engine_faults_total"] == 2
        server.check_clean()


def test_a_fault_in_mid_stream_is_an_error_the_client_raises():
    engine = make(step_seconds=0.01)
    breaks = threading.Event()

    def check(plan: StepPlan) -> None:
        if breaks.is_set() and any(MARK in runner_of(engine).sequences.get(row.seq, ()) for row in plan.rows):
            raise RuntimeError("broken on purpose")

    on_forward(engine, check)
    with live(engine, ByteTokenizer(), 512) as server:
        stream = server.client().completions.create(
            model="fake", prompt="a!", max_tokens=300, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        breaks.set()
        with pytest.raises(openai.APIError, match="the engine failed on this request"):
            list(stream)
        server.check_clean()


def test_an_engine_that_cannot_be_brought_back_ends_the_server():
    engine = make(step_seconds=0.005)
    broken = threading.Event()

    def check(_: StepPlan) -> None:
        if broken.is_set():
            raise RuntimeError("the device is gone")

    on_forward(engine, check)
    server = LiveServer(engine, ByteTokenizer(), 512, shutdown_timeout=0.0)
    server.server.end = lambda: None  # type: ignore[method-assign]
    server.async_engine.on_death = lambda: None  # keep running, so that /health can be read
    prompts = [f"prompt {i}" for i in range(3)]
    with ThreadPoolExecutor(3) as pool:
        pending = [pool.submit(server.post, "/v1/completions", body(prompt, max_tokens=400)) for prompt in prompts]
        wait_until(lambda: len(engine.scheduler.running) == 3)
        broken.set()
        assert {future.result()[0] for future in pending} <= {500, 503}
    wait_until(lambda: server.async_engine.failure is not None)
    status, health, _ = server.get("/health")
    assert status == 503 and health["status"] == "failed" and "RuntimeError" in health["reason"]
    assert server.post("/v1/completions", body())[0] == 503
    server.stop()


# ---- stopping

SERVE = """
import sys, time
from outpace.server import launch, logs
from outpace.server.config import ServerConfig
from tests.server.test_faults import make, on_forward
from tests.fakes import ByteTokenizer, fake_config

class SlowTokenizer(ByteTokenizer):
    def pieces(self, text, **options):
        time.sleep(3 if "~" in text else 0)
        yield from super().pieces(text, **options)

class Fake:
    engine = make(step_seconds=0.01)
    tokenizer = SlowTokenizer()
    config = fake_config(max_context=512)

def check(plan):
    if any(ord("!") in row.tokens for row in plan.rows):
        Fake.broken = True
    if getattr(Fake, "broken", False):
        raise RuntimeError("the device is gone")

on_forward(Fake.engine, check)
logs.configure("info", "json")
launch._LAST_EVENTS_SECONDS = float(sys.argv[2])
config = ServerConfig(port=0, model_names=("fake",), shutdown_timeout=float(sys.argv[1]))
sys.exit(launch.serve(Fake, config))
"""


@contextmanager
def process(shutdown_timeout: float, last_events: float = 5.0) -> Iterator[tuple[subprocess.Popen[str], LiveServer]]:
    """The server in its own process, and a LiveServer that only sends requests to it."""
    running = subprocess.Popen(
        [sys.executable, "-c", SERVE, str(shutdown_timeout), str(last_events)],
        stderr=subprocess.PIPE,
        text=True,
        env=dict(os.environ),
    )
    assert running.stderr is not None
    lines = []
    for line in running.stderr:
        lines.append(line)
        if found := re.search(r"http://127.0.0.1:(\d+)", line):
            break
    else:
        raise AssertionError("".join(lines))
    asking = LiveServer.__new__(LiveServer)
    asking.port, asking.url = int(found[1]), f"http://127.0.0.1:{found[1]}"
    try:
        wait_until(lambda: can_connect(asking.port))
        yield running, asking
    finally:
        if running.poll() is None:
            running.kill()
        running.wait(10)
        running.stderr.close()


def can_connect(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_sigterm_lets_answers_finish_and_takes_no_more():
    with process(shutdown_timeout=20) as (running, server), ThreadPoolExecutor(8) as pool:
        pending = [pool.submit(server.post, "/v1/completions", body(f"p {i}", max_tokens=100)) for i in range(8)]
        wait_until(lambda: server.metrics()["vllm:num_requests_running"] == 8)
        running.send_signal(signal.SIGTERM)
        wait_until(lambda: not can_connect(server.port))
        replies = [future.result() for future in pending]
        assert running.wait(20) == 0
    wanted = [offline(f"p {i}", max_tokens=100, seed=1, ignore_eos=True) for i in range(8)]
    assert [text_of(reply) for _, reply, _ in replies] == wanted


def test_sigterm_ends_late_streams_with_a_sentence():
    with process(shutdown_timeout=0.3) as (running, server):
        stream = server.client().completions.create(
            model="fake", prompt="ab", max_tokens=500, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        running.send_signal(signal.SIGTERM)
        with pytest.raises(openai.APIError, match="shutting down"):
            list(stream)
        assert running.wait(20) == 0


def test_sigterm_while_a_prompt_is_tokenised_is_no_error():
    with process(shutdown_timeout=0.0, last_events=0.5) as (running, server), ThreadPoolExecutor(4) as pool:
        # The threads that tokenise are busy with two of these; two wait. Small bodies are tokenised on the event loop.
        large = body("~", user="x" * 4000)
        pending = [pool.submit(server.post, "/v1/completions", large) for _ in range(4)]
        time.sleep(0.5)
        running.send_signal(signal.SIGTERM)
        replies = [future.result() for future in pending]
        assert running.stderr is not None
        lines = running.stderr.read()
        assert running.wait(20) == 0
    assert "Traceback" not in lines, lines
    assert {status for status, _, _ in replies} == {503}
    assert all("shutting down" in reply["error"]["message"] for _, reply, _ in replies)


def test_a_dead_engine_ends_the_process_with_status_1():
    with process(shutdown_timeout=1) as (running, server):
        status, reply, _ = server.post("/v1/completions", body("boom!"))
        assert status in (500, 503), reply
        assert running.wait(20) == 1


# ---- requests that ask for more than anybody may have, and lines that are not the log's own


def test_many_completions_are_refused_before_anything_is_made_of_them(monkeypatch):
    """20,000 prompts of 128 completions are 80 kB; making anything of each would block the event loop for seconds."""
    encoded: list[str] = []
    encode = ByteTokenizer.encode

    def counted(self: ByteTokenizer, text: str, **options: Any) -> list[int]:
        encoded.append(text)
        return encode(self, text, **options)

    with live(fake_engine(), ByteTokenizer(), 256) as server:
        monkeypatch.setattr(ByteTokenizer, "encode", counted)
        body = {"prompt": ["a"] * 20_000, "n": 128, "max_tokens": 1, "seed": 1}
        status, reply, _ = server.post("/v1/completions", body)
        assert status == 400 and "2560000 completions were requested at once" in reply["error"]["message"]
        assert not encoded


@pytest.mark.parametrize("text", ["/x\nERROR forged", "/\x1b[31mred", "/\r overwritten", "/\x00\x07"])
def test_a_client_cannot_write_lines_of_its_own_into_the_log(text: str):
    record = logging.LogRecord("outpace", logging.INFO, "", 0, "request", (), None)
    record.facts = {"path": text}
    line = TextFormatter().format(record)
    assert line.isprintable() and "path=/" in line


def test_a_traceback_keeps_its_lines():
    try:
        raise ValueError("broken\nin two")
    except ValueError:
        record = logging.LogRecord("outpace", logging.ERROR, "", 0, "it failed", (), sys.exc_info())
    assert len(TextFormatter().format(record).splitlines()) > 3
