"""What the gate lets through: web pages of which origins."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fakes import ByteTokenizer
from tests.server.test_faults import body, make
from tests.server_helper import LiveServer, live


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
