"""The contract again with a real model: SmolLM2 behind the real OpenAI client, compared with the offline engine."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from outpace import LLM, SamplingParams
from tests.server_helper import LiveServer, live

pytestmark = pytest.mark.model

QUESTION: list[Any] = [{"role": "user", "content": "Name three colours and say where they occur."}]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    # One thread: a model's threads wait for each other by spinning, which other tests on the same cores would pay for.
    with LLM(threads=1, max_context=1024, cache_tokens=4096, max_sequences=8) as llm:
        if llm.config.backend != "native":
            pytest.skip("answers are compared to the bit, which only the native backend promises")
        llm.engine.calibrate()
        yield llm


@pytest.fixture(scope="module")
def server(llm: LLM) -> Iterator[LiveServer]:
    with live(llm.engine, llm.tokenizer, 1024, model_names=("SmolLM2-135M-Instruct",)) as server:
        yield server
        server.check_clean()


def chat(server: LiveServer, messages: list[Any] = QUESTION, **options: Any) -> Any:
    return server.client().chat.completions.create(model="SmolLM2-135M-Instruct", messages=messages, **options)


def offline(server: LiveServer, llm: LLM, messages: list[Any] = QUESTION, **params: Any) -> list[str]:
    """By the server's own engine, while it serves nobody."""
    server.wait_until_idle()
    return [output.text for output in server.aside(lambda: llm.chat(messages, SamplingParams(**params)))[0].outputs]


def test_chat_equals_the_offline_answer_streamed_or_not(server, llm):
    wanted = offline(server, llm, temperature=0.0, max_tokens=48)[0]
    whole = chat(server, temperature=0, max_tokens=48)
    chunks = list(chat(server, temperature=0, max_tokens=48, stream=True))
    assert whole.choices[0].message.content == wanted
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == wanted
    assert whole.choices[0].finish_reason == chunks[-1].choices[0].finish_reason


def test_three_completions_of_one_seed(server, llm):
    wanted = offline(server, llm, temperature=0.9, seed=3, n=3, max_tokens=24)
    answer = chat(server, temperature=0.9, seed=3, n=3, max_tokens=24)
    assert [choice.message.content for choice in answer.choices] == wanted and len(set(wanted)) == 3
    assert answer.usage.prompt_tokens_details.cached_tokens >= 0


def test_a_seed_replays_with_speculation_on_off_and_auto(server):
    ask: dict[str, Any] = {"temperature": 0.7, "seed": 5, "max_tokens": 48}
    answers = [
        chat(server, **ask, extra_body={"speculation": how})
        for how in (
            {"mode": "off"},
            {"mode": "auto"},
            {"mode": "on", "method": "suffix"},
            {"mode": "on", "method": "ngram"},
        )
    ]
    assert len({answer.choices[0].message.content for answer in answers}) == 1
    assert answers[0].usage.model_extra["speculation"]["drafted"] == 0


def test_a_natural_end_is_stop(server):
    answer = chat(server, [{"role": "user", "content": "Say hello."}], temperature=0, max_tokens=200)
    assert answer.choices[0].finish_reason == "stop" and answer.usage.completion_tokens < 200


def test_a_stop_string_across_token_borders(server):
    whole = chat(server, temperature=0, max_tokens=40).choices[0].message.content
    stop = whole[15:27]  # words and spaces: several tokens, beginning inside one
    cut = chat(server, temperature=0, max_tokens=40, stop=stop)
    assert cut.choices[0].message.content == whole[: whole.index(stop)] and cut.choices[0].finish_reason == "stop"


def test_logprobs_spell_the_answer(server):
    answer = chat(server, temperature=0, max_tokens=10, logprobs=True, top_logprobs=2)
    entries = answer.choices[0].logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in entries).decode() == answer.choices[0].message.content
    assert all(entry.logprob == entry.top_logprobs[0].logprob for entry in entries)


def test_emoji_and_a_long_prompt(server, llm):
    messages = [{"role": "user", "content": "Repeat: 🦜🌍 żółw 日本語. " + "The sea is wide. " * 120}]
    answer = chat(server, messages, temperature=0, max_tokens=24, stream=True)
    pieces = [chunk.choices[0].delta.content or "" for chunk in answer]
    assert "".join(pieces) == offline(server, llm, messages, temperature=0.0, max_tokens=24)[0]
    assert "�" not in "".join(pieces[:-1])


def test_concurrent_streams_each_get_their_own_answer(server, llm):
    topics = ["rivers", "bread", "clocks", "foxes", "maps", "glass", "tides", "bells", "chess", "ice", "ink", "moss"]
    conversations: list[list[Any]] = [[{"role": "user", "content": f"Tell me about {topic}."}] for topic in topics]
    wanted = [
        offline(server, llm, conversation, temperature=0.8, seed=i, max_tokens=24)[0]
        for i, conversation in enumerate(conversations)
    ]

    def streamed(i: int) -> str:
        chunks = chat(server, conversations[i], temperature=0.8, seed=i, max_tokens=24, stream=True)
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

    with ThreadPoolExecutor(12) as pool:
        assert list(pool.map(streamed, range(12))) == wanted
