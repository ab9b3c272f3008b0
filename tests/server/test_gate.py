"""What the gate lets through: web pages of which origins, and large bodies one after the other."""

from __future__ import annotations

import json
import socket
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from outpace.server import gate
from tests.fakes import ByteTokenizer
from tests.server.test_faults import body, make, open_request
from tests.server_helper import LiveServer, live, wait_until


def reset(server: LiveServer, **headers: str) -> tuple[int, Any]:
    return server.post("/reset_prefix_cache", b"", headers)[:2]


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://page.example"},
        {"origin": "null"},
        {"origin": "http://localhost:1"},  # another server on this machine
        {"origin": "http://page.example:8000", "host": "page.example:8000"},  # a name that its owner points to us
        {"origin": "http://[", "host": "["},
    ],
)
def test_pages_of_other_origins_may_change_nothing_without_a_key(headers):
    with live(make(), ByteTokenizer(), 512) as server:
        status, reply = reset(server, **headers)
        assert status == 403 and "--allowed-origins" in reply["error"]["message"]
        assert server.post("/v1/completions", body(), headers)[0] == 403
        assert server.get("/v1/models", {"origin": "https://page.example"})[0] == 200


def test_clients_that_are_no_pages_and_the_servers_own_pages_may():
    with live(make(), ByteTokenizer(), 512) as server:
        assert reset(server)[0] == 200
        assert reset(server, origin=server.url)[0] == 200
        local = f"localhost:{server.port}"
        assert reset(server, origin=f"http://{local}", host=local)[0] == 200


@pytest.mark.parametrize("allowed", ["*", "https://page.example"])
def test_allowed_origins_may(allowed):
    with live(make(), ByteTokenizer(), 512, allowed_origins=(allowed,)) as server:
        assert reset(server, origin="https://page.example")[0] == 200
        assert reset(server, origin="https://other.example")[0] == (200 if allowed == "*" else 403)


def test_with_a_key_the_key_decides():
    with live(make(), ByteTokenizer(), 512, api_keys=("key",)) as server:
        assert reset(server, origin="https://page.example")[0] == 401
        assert reset(server, origin="https://page.example", authorization="Bearer key")[0] == 200


LARGE = {"prompt": "a" * 100_000}


def test_large_bodies_take_turns_and_small_ones_do_not_wait(monkeypatch):
    monkeypatch.setattr(gate, "_PARSED_BYTES_PER_SECOND", 200_000)  # half a second for each
    began = time.monotonic()
    ends: list[tuple[float, int]] = []

    def send(given: dict[str, str]) -> None:
        assert server.post("/tokenize", given)[0] == 200
        ends.append((time.monotonic() - began, len(given["prompt"])))

    with live(make(), ByteTokenizer(), 512) as server, ThreadPoolExecutor(4) as pool:
        large = [pool.submit(send, LARGE) for _ in range(3)]
        time.sleep(0.2)
        send({"prompt": "a"})
        for future in large:
            future.result()
    assert [size for _, size in sorted(ends)][-1] == 100_000
    assert sorted(ends).index(next(end for end in ends if end[1] == 1)) <= 1  # at most one large body before it
    assert max(ends)[0] >= 1.0


def test_clients_that_left_lose_their_turn(monkeypatch):
    monkeypatch.setattr(gate, "_PARSED_BYTES_PER_SECOND", 100_000)
    assert len(json.dumps(body(**LARGE))) > gate._LARGE_BYTES
    with live(make(), ByteTokenizer(), 512) as server:
        for _ in range(5):
            connection = open_request(server, body(**LARGE))
            time.sleep(0.05)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()
        name = "outpace_http_responses_total{route=other,status=499}"  # the first had its turn at once
        wait_until(lambda: server.metrics().get(name) == 4, 10)
