"""/v1/embeddings through the real OpenAI client, and what it refuses."""

from __future__ import annotations

import base64
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from outpace.config import SamplingParams
from tests.engine.test_embeddings import LAST, MEAN, embedding
from tests.fakes import ByteTokenizer, FakeModel, fake_engine
from tests.server_helper import LiveServer, live


@pytest.fixture(scope="module", params=["last", "mean"])
def server(request: pytest.FixtureRequest) -> Iterator[LiveServer]:
    engine = fake_engine(max_context=256, cache_tokens=2048)
    with live(engine, ByteTokenizer(), 256, pooling=request.param) as server:
        yield server
        server.check_clean()


def expected(server: LiveServer, tokens: list[int]) -> Any:
    params: SamplingParams = LAST if server.app.state.outpace.config.pooling == "last" else MEAN
    return embedding(FakeModel(), tokens, params)


@pytest.mark.parametrize(
    ("given", "tokens"),
    [
        ("ab", [[257, 97, 98]]),
        (["ab", "c"], [[257, 97, 98], [257, 99]]),
        ([97, 98, 99], [[97, 98, 99]]),
        ([[97], [98, 99]], [[97], [98, 99]]),
        ("a" * 255, [[257, *[97] * 255]]),  # it fills the context
    ],
    ids=["text", "texts", "tokens", "lists of tokens", "long"],
)
def test_every_kind_of_input_is_embedded(server, given, tokens):
    client = server.client()
    for options in ({}, {"encoding_format": "float"}, {"dimensions": 8}):  # the client asks for base64 by default
        reply = client.embeddings.create(model="fake", input=given, **options)
        assert [each.index for each in reply.data] == list(range(len(tokens)))
        for each, wanted in zip(reply.data, tokens, strict=True):
            np.testing.assert_allclose(each.embedding, expected(server, wanted), atol=1e-6)
        count = sum(map(len, tokens))
        assert (reply.usage.prompt_tokens, reply.usage.total_tokens) == (count, count)


def test_base64_holds_the_same_numbers(server):
    replies = {form: server.post("/v1/embeddings", {"input": "ab", "encoding_format": form})[1] for form in FORMS}
    plain, encoded = (replies[form]["data"][0]["embedding"] for form in FORMS)
    assert np.frombuffer(base64.b64decode(encoded), "<f4").tolist() == plain


FORMS = ("float", "base64")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"input": "a", "dimensions": 4}, "have 8 dimensions and cannot be shortened"),
        ({"input": "a", "dimensions": 0}, "greater than or equal to 1"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": []}, "the prompt is empty"),
        ({"input": ["a", []]}, "input"),
        ({"input": [5000]}, "not in the vocabulary"),
        ({"input": "a" * 300}, "256"),
        ({"input": ["a"] * 1000}, "at most"),
        ({"prompt": "a"}, "input"),
        ({"input": "a", "stream": True}, "stream"),
    ],
)
def test_what_cannot_be_embedded_is_refused_in_a_sentence(server, body, words):
    status, reply, _ = server.post("/v1/embeddings", body)
    assert status == 400 and words in reply["error"]["message"], reply


def test_embeddings_and_completions_share_the_engine(server):
    body = {"prompt": "abc", "max_tokens": 40, "temperature": 0}
    alone = server.post("/v1/completions", body)[1]["choices"][0]["text"]
    found: list[Any] = []

    def work() -> None:
        for _ in range(5):
            found.append(server.post("/v1/completions", body)[1]["choices"][0]["text"])

    thread = threading.Thread(target=work)
    thread.start()
    for _ in range(10):
        reply = server.post("/v1/embeddings", {"input": ["abcdefgh" * 20, "xyz"]})[1]
        np.testing.assert_allclose(reply["data"][1]["embedding"], expected(server, [257, *b"xyz"]), atol=1e-6)
    thread.join()
    assert found == [alone] * 5


def test_embeddings_count_in_the_queue():
    engine = fake_engine(max_context=256, cache_tokens=2048, max_sequences=2)
    with live(engine, ByteTokenizer(), 256, max_queued=2) as one:
        assert one.post("/v1/embeddings", {"input": ["a"] * 4})[0] == 200
        with one.async_engine.reserve(2):
            status, reply, headers = one.post("/v1/embeddings", {"input": ["a"] * 3})
        assert status == 429 and "retry-after" in headers, reply
