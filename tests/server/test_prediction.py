"""OpenAI's predicted outputs, through the real client: answers are the same, and usage says what was predicted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.fakes import ByteTokenizer, FakeModel, fake_engine
from tests.server.test_tokenising import SlowTokenizer, send
from tests.server_helper import LiveServer, live, wait_until

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
FORCED = {"speculation": {"mode": "on", "method": "prediction", "max_depth": 8}}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    # A sharp model writes only letters, so its answer can be sent as a text.
    engine = fake_engine(FakeModel(sharpness=30.0), max_context=256, cache_tokens=2048)
    engine.calibrate()
    with live(engine, ByteTokenizer(), 256) as server:
        yield server
        server.check_clean()


def chat(server: LiveServer, predicted: Any = None, **options: Any) -> Any:
    prediction = {} if predicted is None else {"prediction": {"type": "content", "content": predicted}}
    asked = {"model": "fake", "messages": HELLO, "max_tokens": 80, "seed": 1} | prediction | options
    return server.client().chat.completions.create(**asked)


def counts(usage: Any) -> tuple[int, int]:
    details = usage.completion_tokens_details
    return details.accepted_prediction_tokens, details.rejected_prediction_tokens


def test_a_right_prediction_is_accepted_and_the_answer_is_the_same(server):
    plain = chat(server, extra_body={"speculation": {"mode": "off"}})
    text = plain.choices[0].message.content
    assert counts(plain.usage) == (0, 0)
    answer = chat(server, text, extra_body=FORCED)
    assert answer.choices[0].message.content == text
    assert counts(answer.usage) == (80, 0)
    speculation = answer.usage.model_extra["speculation"]
    assert speculation["accepted"] == speculation["drafted"] > 60


def test_a_prediction_with_edits_counts_what_is_in_the_answer(server):
    text = chat(server).choices[0].message.content
    edited = text[:20] + "SOMETHING ELSE" + text[20:60]
    answer = chat(server, edited, extra_body=FORCED)
    assert answer.choices[0].message.content == text
    assert counts(answer.usage) == (60, len("SOMETHING ELSE"))


def test_parts_are_one_text_and_a_stream_says_the_same(server):
    text = chat(server).choices[0].message.content
    parts = [{"type": "text", "text": text[:31]}, {"type": "text", "text": text[31:]}]
    stream = list(chat(server, parts, stream=True, stream_options={"include_usage": True}, extra_body=FORCED))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices) == text
    assert counts(stream[-1].usage) == (80, 0)


def test_each_of_n_completions_follows_the_prediction_on_its_own(server):
    wanted = chat(server, n=3, temperature=1.5)
    texts = [choice.message.content for choice in wanted.choices]
    answer = chat(server, texts[1], n=3, temperature=1.5, extra_body=FORCED)
    assert [choice.message.content for choice in answer.choices] == texts and len(set(texts)) == 3
    accepted, rejected = counts(answer.usage)
    assert accepted >= 80 and accepted + rejected == 3 * 80


@pytest.mark.parametrize("predicted", ["", "quite unrelated to it", "longer than the context " * 200, "ünïcödé 🙂"])
def test_any_text_may_be_predicted(server, predicted):
    wanted = chat(server).choices[0].message.content
    for how in ({}, FORCED, {"speculation": {"mode": "off"}}):
        answer = chat(server, predicted, extra_body=how)
        assert answer.choices[0].message.content == wanted
        assert sum(counts(answer.usage)) <= min(len(predicted.encode()), 256)


@pytest.mark.parametrize(
    ("prediction", "param", "words"),
    [
        ("text", "prediction", "valid dictionary"),
        ({"content": "a"}, "prediction", "needs prediction.type"),
        ({"type": "content"}, "prediction", "needs prediction.content"),
        ({"type": "file", "content": "a"}, "prediction.type", "'content'"),
        ({"type": "content", "content": 1}, "prediction.content", "valid string"),
        ({"type": "content", "content": [{"type": "image_url"}]}, "prediction.content", "'text'"),
        ({"type": "content", "content": "\ud800"}, None, "valid Unicode"),
    ],
)
def test_a_wrong_prediction_hears_one_sentence(server, prediction, param, words):
    status, reply, _ = server.post("/v1/chat/completions", {"messages": HELLO, "prediction": prediction})
    assert status == 400, reply
    assert words in reply["error"]["message"] and (param is None or reply["error"]["param"].startswith(param)), reply


def test_a_long_prediction_is_tokenised_in_a_thread_and_dropped_if_the_client_leaves():
    tokenizer = SlowTokenizer()
    engine = fake_engine(max_context=4096, cache_tokens=8192, max_sequences=2)
    engine._tokenizer = tokenizer
    with live(engine, ByteTokenizer(), 4096) as server:
        prediction = {"type": "content", "content": "x" * 4000}
        gone = send(server, "/v1/chat/completions", {"messages": HELLO, "prediction": prediction, "max_tokens": 1})
        wait_until(lambda: tokenizer.num_begun == 1)
        assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 1})[0] == 200, "the event loop goes on"
        gone.close()
        wait_until(lambda: server.async_engine.num_open == 0)
        tokenizer.go_on.set()
        wait_until(lambda: tokenizer.num_ended == 1)
        assert tokenizer.num_pieces <= 2, "of 17"
        server.check_clean()
