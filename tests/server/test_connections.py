"""Clients that hold a connection without finishing a request, or without taking the answer."""

from __future__ import annotations

import http.client
import json
import logging
import select
import signal
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from outpace.server import connections, gate
from outpace.server.launch import listen
from tests import server_helper
from tests.fakes import ByteTokenizer
from tests.server.test_faults import body, exchange, make, offline, open_request, process, text_of
from tests.server_helper import LiveServer, live, wait_until

HALF = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-"
SLOW_BODY = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 50\r\n\r\n{"


@pytest.fixture
def hurried(monkeypatch) -> None:
    """Timeouts that a test can wait for."""
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.4)
    monkeypatch.setattr(connections, "_CHECK_SECONDS", 0.05)


def connect(server: LiveServer, sent: bytes = b"", *, receive_buffer: int | None = None) -> socket.socket:
    connection = socket.socket()
    if receive_buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.settimeout(20)
    connection.connect(("127.0.0.1", server.port))
    connection.sendall(sent)
    return connection


def received(connection: socket.socket) -> bytes:
    """All that comes until the server closes the connection."""
    parts = []
    try:
        while part := connection.recv(1 << 16):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


def num_connections(server: LiveServer) -> int:
    return len(server.server.server_state.connections)


# ---- clients that never finish a request


@pytest.mark.parametrize("sent", [b"", HALF, SLOW_BODY], ids=["silent", "half a head", "half a body"])
def test_connections_without_a_whole_request_lock_nobody_out(monkeypatch, sent):
    monkeypatch.setattr(connections, "SPARE_CONNECTIONS", 2)
    with live(make(), ByteTokenizer(), 512, max_connections=4) as server, ExitStack() as held:
        stuck = [held.enter_context(connect(server, sent)) for _ in range(4 + 2)]
        wait_until(lambda: num_connections(server) == 6)
        for _ in range(3):
            assert text_of(server.post("/v1/completions", body())[1])
        assert num_connections(server) <= 6
        assert received(stuck[0]) == b""  # the oldest made room
        stuck[-1].settimeout(0.1)
        with pytest.raises(TimeoutError):
            stuck[-1].recv(1)


def test_many_requests_at_once_are_read_before_connections_are_closed(monkeypatch):
    monkeypatch.setattr(connections, "SPARE_CONNECTIONS", 2)
    with live(make(), ByteTokenizer(), 512, max_connections=4) as server, ExitStack() as held:
        loop = server.async_engine._loop
        assert loop is not None
        loop.call_soon_threadsafe(time.sleep, 0.5)  # so that it finds all of them together
        request = b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
        many = [held.enter_context(connect(server, request)) for _ in range(40)]
        assert all(received(connection).startswith(b"HTTP/1.1 200") for connection in many)


def test_more_answers_than_connections_are_refused_and_health_answers():
    with live(make(step_seconds=0.02), ByteTokenizer(), 512, max_connections=3) as server, ExitStack() as held:
        for i in range(3):
            held.enter_context(open_request(server, body(f"{i}", max_tokens=400)))
        wait_until(lambda: server.async_engine.num_open == 3)
        status, reply, headers = server.post("/v1/completions", body())
        assert status == 503 and reply["error"]["code"] == "too_many_connections" and headers["retry-after"] == "1"
        assert "3 requests are being answered" in reply["error"]["message"]
        assert server.get("/v1/models")[0] == 503
        assert server.get("/health")[0] == server.get("/metrics")[0] == 200
        held.close()
        server.wait_until_idle()
        wait_until(lambda: server.get("/v1/models")[0] == 200)


def test_the_head_of_a_request_has_a_time_limit(hurried):
    with live(make(), ByteTokenizer(), 512) as server:
        with connect(server) as silent, connect(server, HALF) as half:
            assert received(silent) == b""
            answer = received(half)
        assert answer.startswith(b"HTTP/1.1 408") and b"did not arrive within 0.4 seconds" in answer
        assert num_connections(server) == 0


def test_a_byte_now_and_then_does_not_extend_the_limit(hurried):
    with live(make(), ByteTokenizer(), 512) as server, connect(server) as slow:
        began = time.monotonic()
        with pytest.raises(OSError):  # a reset or a broken pipe
            for byte in b"GET /health HTTP/1.1\r\nx: " + b"y" * 1000:
                slow.send(bytes([byte]))
                time.sleep(0.02)
        assert time.monotonic() - began < 5


def test_the_limit_holds_for_the_next_request_of_a_connection(hurried):
    with live(make(), ByteTokenizer(), 512) as server, connect(server) as connection:
        client = http.client.HTTPConnection("127.0.0.1", server.port)
        client.sock = connection
        for _ in range(8):  # together longer than the limit, which begins anew after each answer
            client.request("GET", "/health")
            assert client.getresponse().read()
            time.sleep(0.1)
        connection.sendall(HALF)
        assert received(connection).startswith(b"HTTP/1.1 408")


def test_a_body_has_a_time_limit(monkeypatch):
    monkeypatch.setattr(gate, "_BODY_SECONDS", 0.3)
    with live(make(), ByteTokenizer(), 512) as server, connect(server, SLOW_BODY) as slow:
        assert received(slow).startswith(b"HTTP/1.1 408")


# ---- clients that do not take their answer


@contextmanager
def large_answer(
    server: LiveServer, *, extra: bytes = b"connection: close\r\n", half_closes: bool = False
) -> Iterator[socket.socket]:
    """A connection whose answer does not fit into the buffers between server and client."""
    data = json.dumps({"prompt": "a" * 900_000, "return_token_strs": True}).encode()
    head = f"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n"
    with connect(server, head.encode() + extra + b"\r\n" + data, receive_buffer=1 << 16) as connection:
        if half_closes:
            connection.shutdown(socket.SHUT_WR)
        assert connection.recv(9, socket.MSG_PEEK) == b"HTTP/1.1 "
        yield connection


@pytest.mark.parametrize("extra", [b"connection: close\r\n", b""], ids=["the last", "with half a head after it"])
def test_an_answer_that_nobody_takes_is_dropped(hurried, extra):
    with live(make(), ByteTokenizer(), 512) as server, large_answer(server, extra=extra) as stalled:
        if not extra:
            stalled.sendall(HALF)
        wait_until(lambda: num_connections(server) == 0, 10)


@pytest.mark.parametrize("half_closes", [False, True])
def test_an_answer_that_is_taken_slowly_arrives_whole(hurried, half_closes):
    extra = b"" if half_closes else b"connection: close\r\n"
    with (
        live(make(), ByteTokenizer(), 512) as server,
        large_answer(server, extra=extra, half_closes=half_closes) as slow,
    ):
        data = b""
        while part := slow.recv(1 << 16):
            data += part
            time.sleep(0.01)
    assert json.loads(data.rpartition(b"\r\n\r\n")[2])["count"] == 900_001


def test_the_connection_of_a_stream_that_was_given_up_ends(hurried, monkeypatch):
    def with_small_buffers(host: str, port: int) -> socket.socket:
        listener = listen(host, port)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # its connections inherit this
        return listener

    monkeypatch.setattr(server_helper, "listen", with_small_buffers)
    with live(make(max_context=4096, cache_tokens=8192), ByteTokenizer(), 4096, request_timeout=1.0) as server:
        with connect(server, receive_buffer=4096) as stalled:
            data = json.dumps(body(max_tokens=4000, stream=True, logprobs=20)).encode()
            head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            stalled.sendall(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
            wait_until(lambda: num_connections(server) == 1)
            wait_until(lambda: num_connections(server) == 0, 15)
        server.check_clean()


# ---- clients that close their sending side


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_half_closes_gets_its_answer(stream):
    with live(make(step_seconds=0.005), ByteTokenizer(), 512) as server:
        connection = open_request(server, body(stream=stream, max_tokens=100))
        connection.shutdown(socket.SHUT_WR)
        response = http.client.HTTPResponse(connection)
        response.begin()  # skips every "100 Continue"
        text = response.read().decode()
        assert response.status == 200
        assert connection.recv(1) == b""  # the server closes its side too
        connection.close()
        server.check_clean()
    choices: list[Any] = [json.loads(text)] if not stream else [
        json.loads(line[6:]) for line in text.split("\n") if line.startswith("data: {")
    ]  # fmt: skip
    whole = "".join(choice["text"] for each in choices for choice in each["choices"])
    assert whole == offline("ab", max_tokens=100, seed=1, ignore_eos=True)


def test_pipelined_requests_before_a_half_close_are_all_answered():
    data = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n" * 3
    with live(make(), ByteTokenizer(), 512) as server, connect(server, data) as connection:
        connection.shutdown(socket.SHUT_WR)
        assert received(connection).count(b"HTTP/1.1 200") == 3


@pytest.mark.skipif(not hasattr(select, "POLLRDHUP"), reason="only Linux tells the end behind unread bytes")
@pytest.mark.parametrize("resets", [False, True], ids=["close", "reset"])
@pytest.mark.parametrize("stream", [False, True])
def test_bytes_after_a_request_do_not_hide_that_the_client_has_left(hurried, stream, resets):
    with live(make(step_seconds=0.05), ByteTokenizer(), 512) as server:
        connection = open_request(server, body(stream=stream, max_tokens=400))
        wait_until(lambda: server.async_engine.num_open == 1)
        [ours] = server.server.server_state.connections
        assert isinstance(ours, connections.Connection)
        while not ours.flow.read_paused:  # as soon as the server listens for the client's end
            connection.sendall(b"GET / ")
            time.sleep(0.05)
        if resets:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()
        wait_until(lambda: server.async_engine.num_open == 0, 5)  # all 400 tokens take 20 seconds
        server.check_clean()


@pytest.mark.parametrize("stream", [False, True])
def test_bytes_after_a_request_of_a_client_that_waits_change_nothing(hurried, stream):
    """The second request is answered after the first, also if the client has closed its sending side by then."""
    with live(make(step_seconds=0.005), ByteTokenizer(), 512) as server:
        connection = open_request(server, body(stream=stream, max_tokens=100))
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        connection.shutdown(socket.SHUT_WR)
        answers = received(connection)
        assert answers.count(b"HTTP/1.1 200") == 2 and (b"[DONE]" in answers) == stream
        connection.close()
        server.check_clean()


# ---- broken HTTP


@pytest.mark.parametrize("method", [b"POST", b"HEAD"])
@pytest.mark.parametrize("path", [b"/v1/completions", b"/none", b"/health"])
@pytest.mark.parametrize("key", [b"", b"authorization: Bearer key\r\n"])
def test_a_broken_chunk_is_refused_without_a_traceback(caplog, method, path, key):
    head = method + b" " + path + b" HTTP/1.1\r\nhost: x\r\n" + key + b"transfer-encoding: chunked\r\n\r\n"
    with live(make(), ByteTokenizer(), 512, api_keys=("key",)) as server, caplog.at_level(logging.WARNING):
        assert exchange(server, head + b"2\r\n{}\r\nZZ\r\n").startswith(b"HTTP/1.1 4")
        with connect(server, head) as connection:
            time.sleep(0.05)  # an answer that needs no body is sent before the broken chunk comes
            connection.sendall(b"ZZ\r\n")
            assert received(connection)[:10] in (b"HTTP/1.1 4", b"HTTP/1.1 2", b"")
    assert not [record for record in caplog.records if record.exc_info or record.levelno >= logging.ERROR]


def test_a_body_of_tiny_chunks_is_refused():
    """Each costs the event loop as much as a kilobyte: a megabyte of them would block it for seconds."""
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    with live(make(), ByteTokenizer(), 512) as server:
        assert exchange(server, head + b"1\r\na\r\n" * 5000).startswith(b"HTTP/1.1 400")
        data = json.dumps(body("ab" * 50)).encode()
        chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in data)
        json_head = head.replace(b"\r\n\r\n", b"\r\ncontent-type: application/json\r\nconnection: close\r\n\r\n")
        assert exchange(server, json_head + chunks + b"0\r\n\r\n").startswith(b"HTTP/1.1 200")


def test_broken_requests_do_not_fill_the_log():
    with process(shutdown_timeout=0.1) as (running, server):
        for _ in range(30):
            assert exchange(server, b"this is not HTTP\r\n\r\n").startswith(b"HTTP/1.1 400")
        running.send_signal(signal.SIGTERM)
        assert running.stderr is not None
        lines = running.stderr.read().splitlines()
        assert running.wait(20) == 0
    assert len([line for line in lines if "valid HTTP" in line]) == 1 and len(lines) < 10, lines
