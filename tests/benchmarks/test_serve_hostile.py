"""The figures of `serve_load hostile`, and that its abusers and its good clients do what they are for."""

from __future__ import annotations

import pytest

from benchmarks import hostile_client, serve_client
from benchmarks.serve_hostile import ratio_interval
from tests.fakes import ByteTokenizer, fake_engine
from tests.server_helper import live


def rounds(factor: float) -> list[dict[str, list[float]]]:
    """Ten rounds of 100 answers; the slowest ones of a round take 1.0 to 1.09 seconds, times `factor` under abuse."""
    times = [[0.1 + i / 1000 for i in range(95)] + [1.0 + number / 100] * 5 for number in range(10)]
    return [{"well-behaved": each, "abusive": [factor * value for value in each]} for each in times]


@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_the_ratio_is_of_the_slowest_answers_and_its_bars_contain_it(factor: float):
    ratio, low, high = ratio_interval(rounds(factor))
    assert ratio == pytest.approx(factor) and low <= ratio <= high


def test_one_bad_round_widens_the_bars():
    mixed = rounds(1.0)[:9] + rounds(3.0)[9:]
    _, low, high = ratio_interval(mixed)
    assert low < 1.5 < 2.5 < high


def test_every_kind_of_abuser_attacks_and_the_server_survives():
    with live(fake_engine(), ByteTokenizer(), 256) as server:
        outcomes = hostile_client.run(hostile_client.Job(port=server.port, seconds=0.3, clients=4))["outcomes"]
        server.check_clean()
        assert server.get("/health")[0] == 200
    assert {outcome.partition(":")[0] for outcome in outcomes} == {"slow", "huge", "vanishing", "malformed"}
    assert not [outcome for outcome in outcomes if outcome.endswith("500")]


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nda",
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\ndata: {}\n\n",
    ],
)
def test_an_answer_that_is_cut_off_counts_as_lost(raw: bytes):
    exchange = serve_client.Exchange(connection=None, body=3, sent_at=0.0, raw=bytearray(raw))  # type: ignore[arg-type]
    answer = serve_client.answer(exchange)
    assert answer["text"] is None and answer["body"] == 3 and "not a whole answer" in answer["error"]
