"""The engine's worker, run without a thread: what it posts, and when."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from outpace.config import SamplingParams
from outpace.engine import worker as worker_module
from outpace.engine.generation import Generation, Order, Piece
from outpace.engine.worker import Abort, Parcel, Stop, Submit, Worker
from outpace.metrics import EngineMetrics
from tests.fakes import ByteTokenizer, fake_engine

PARAMS = SamplingParams(max_tokens=12, ignore_eos=True, seed=1)


def answers(
    *streams: bool, abort_after: int | None = None
) -> tuple[list[Generation], list[list[Parcel]], EngineMetrics]:
    """The posts for one request per entry, streamed or not. After `abort_after` posts, all requests are aborted."""
    prompt = ByteTokenizer().encode("a prompt")
    posts: list[list[Parcel]] = []
    unfinished = len(streams)

    def post(parcels: Sequence[Parcel]) -> None:
        nonlocal unfinished
        posts.append(list(parcels))
        unfinished -= sum(piece.is_last for _, piece in parcels)
        if len(posts) == abort_after:
            worker.inbox.put(Abort([ticket for each in generations for ticket in each.tickets]))
        if not unfinished or len(posts) == abort_after:
            worker.inbox.put(Stop())

    metrics = EngineMetrics()
    worker = Worker(fake_engine(max_sequences=8, speculation="off", prefix_reuse=False), metrics, post)
    generations = [Generation([Order(prompt, PARAMS)], lambda _: None, stream=stream) for stream in streams]
    for generation in generations:
        worker.inbox.put(Submit(generation.tickets))
    worker.run()
    assert not worker.tickets
    return generations, posts, metrics


def pieces_of(generation: Generation, posts: list[list[Parcel]]) -> list[Piece]:
    return [piece for post in posts for receiver, piece in post if receiver is generation]


def test_first_and_last_words_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "EVENTS_PER_SECOND", 1e-9)
    monkeypatch.setattr(worker_module, "LONGEST_PAUSE", float("inf"))
    generations, posts, _ = answers(True, True)
    for generation in generations:
        first, last = pieces_of(generation, posts)
        assert len(first.token_ids) == 1 and not first.is_last
        assert len(last.token_ids) == PARAMS.max_tokens - 1 and last.finish_reason == "length"


def test_readers_are_served_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "LONGEST_PAUSE", 0.0)
    generations, posts, metrics = answers(True, True, True)
    assert len(posts) == metrics.num_steps == PARAMS.max_tokens
    assert all({generation for generation, _ in post} == set(generations) for post in posts)


def test_nobody_gets_a_token_twice_or_misses_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "LONGEST_PAUSE", 0.0)
    (streamed, whole), posts, metrics = answers(True, False)
    parts, (answer,) = pieces_of(streamed, posts), pieces_of(whole, posts)
    assert len(parts) == len(answer.token_ids) == PARAMS.max_tokens
    assert [token for part in parts for token in part.token_ids] == answer.token_ids
    assert "".join(part.text for part in parts) == answer.text
    assert metrics.num_generated_tokens == 2 * PARAMS.max_tokens


def test_who_leaves_hears_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "LONGEST_PAUSE", 0.0)
    generations, posts, metrics = answers(True, True, abort_after=3)
    assert [len(pieces_of(generation, posts)) for generation in generations] == [3, 3]
    assert metrics.finished == {"abort": 2}
