"""The server as the real OpenAI client sees it, over the fake model; answers are compared with the offline engine's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from outpace.config import SamplingParams
from outpace.decoding.randomness import child_seed
from outpace.engine.driver import Driver
from outpace.engine.engine import Engine
from outpace.models.prompts import encode, render
from tests.fakes import ByteTokenizer, FakeModel, fake_engine
from tests.server_helper import LiveServer, live

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
MODES = [{"mode": "off"}, {"mode": "on", "method": "draft"}, {"mode": "on", "method": "ngram"}, {"mode": "auto"}]


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    engine = fake_engine(max_context=256, cache_tokens=2048)
    engine.calibrate()
    with live(engine, ByteTokenizer(), 256) as server:
        yield server
        server.check_clean()


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Any:
    return server.client()


def offline(prompt: list[int], *, index: int = 0, engine: Engine | None = None, **params: Any) -> str:
    """The text that the engine generates without the server."""
    engine = engine or fake_engine(max_context=256, cache_tokens=2048)
    wanted = SamplingParams(**params)
    seed = None if wanted.seed is None else child_seed(wanted.seed, index)
    request = engine.submit(prompt, wanted, seed=seed)
    with Driver(engine).submit(lambda: [request]) as stream:
        for _ in stream:
            pass
    return request.writer.text


def chat_tokens(messages: list[Any]) -> list[int]:
    tokenizer = ByteTokenizer()
    return encode(tokenizer, render(tokenizer, messages))


# ---- answers


def test_a_chat_answer_is_the_offline_engines_and_says_so_truthfully(client):
    answer = client.chat.completions.create(model="fake", messages=HELLO, max_tokens=40, seed=7)
    assert answer.choices[0].message.content == offline(chat_tokens(HELLO), max_tokens=40, seed=7)
    assert answer.choices[0].message.role == "assistant" and answer.choices[0].finish_reason == "length"
    assert answer.object == "chat.completion" and answer.model == "fake" and answer.id.startswith("chatcmpl-")
    assert answer.usage.prompt_tokens == len(chat_tokens(HELLO))
    assert answer.usage.completion_tokens == 40 and answer.usage.total_tokens == answer.usage.prompt_tokens + 40


def test_a_stream_says_the_same_as_a_whole_answer(client):
    whole = client.chat.completions.create(model="fake", messages=HELLO, max_tokens=60, seed=3)
    chunks = list(
        client.chat.completions.create(
            model="fake", messages=HELLO, max_tokens=60, seed=3, stream=True, stream_options={"include_usage": True}
        )
    )
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert choices[0].delta.role == "assistant"
    assert "".join(choice.delta.content or "" for choice in choices) == whole.choices[0].message.content
    assert [choice.finish_reason for choice in choices[:-1]] == [None] * (len(choices) - 1)
    assert choices[-1].finish_reason == "length"
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 60
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_a_stream_has_no_usage_unless_asked(client):
    chunks = list(client.completions.create(model="fake", prompt="ab", max_tokens=5, stream=True))
    assert chunks[-1].choices and all(chunk.usage is None for chunk in chunks)


@pytest.mark.parametrize("stream", [False, True])
def test_n_completions_have_seeds_of_their_own_and_indices(client, stream):
    reply = client.completions.create(model="fake", prompt="abc", n=3, seed=5, max_tokens=24, stream=stream)
    texts = ["", "", ""]
    for part in reply if stream else [reply]:
        for choice in part.choices:
            texts[choice.index] += choice.text
    prompt = ByteTokenizer().encode("abc")
    assert texts == [offline(prompt, index=i, seed=5, max_tokens=24) for i in range(3)]
    assert len(set(texts)) == 3


def test_several_prompts_texts_or_tokens(client):
    texts = client.completions.create(model="fake", prompt=["ab", "cd"], max_tokens=8, temperature=0, n=2)
    tokens = client.completions.create(
        model="fake", prompt=[ByteTokenizer().encode("ab"), ByteTokenizer().encode("cd")], max_tokens=8, temperature=0
    )
    assert [choice.index for choice in texts.choices] == [0, 1, 2, 3]
    wanted = [offline(ByteTokenizer().encode(prompt), max_tokens=8, temperature=0.0) for prompt in ("ab", "cd")]
    assert [choice.text for choice in texts.choices] == [wanted[0], wanted[0], wanted[1], wanted[1]]
    assert [choice.text for choice in tokens.choices] == wanted
    assert texts.usage.prompt_tokens == 6 and texts.usage.completion_tokens == 32


def test_a_seed_replays_whatever_speculation_does(client):
    texts = {
        client.chat.completions.create(
            model="fake", messages=HELLO, max_tokens=64, seed=11, temperature=0.8, extra_body={"speculation": how}
        )
        .choices[0]
        .message.content
        for how in MODES
    }
    assert len(texts) == 1


def test_a_negative_seed_is_a_seed(client):
    ask = {"model": "fake", "prompt": "ab", "max_tokens": 16}
    first, again, other = (client.completions.create(seed=seed, **ask).choices[0].text for seed in (-1, -1, -2))
    assert first == again != other


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_across_tokens_ends_the_answer_before_it(client, stream):
    whole = offline(ByteTokenizer().encode("xyz"), max_tokens=64, seed=2)
    stop = whole[20:24]  # four tokens of one byte each
    reply = client.completions.create(
        model="fake", prompt="xyz", max_tokens=64, seed=2, stop=[stop, "never said"], stream=stream
    )
    parts = list(reply) if stream else [reply]
    assert "".join(part.choices[0].text for part in parts) == whole[: whole.index(stop)]
    assert parts[-1].choices[0].finish_reason == "stop"


def test_characters_are_never_split(server):
    """The model emits only a three-byte character, one byte per token."""
    euro = "€".encode()

    class Euro(FakeModel):
        def logits(self, context: Any) -> Any:
            import numpy as np

            row = np.zeros(self.vocab_size, np.float32)
            last = context[-1]
            row[euro[(euro.index(last) + 1) % 3] if last in euro else euro[0]] = 50.0
            return row

    engine = fake_engine(Euro(), speculation="off")
    with live(engine, ByteTokenizer(), 256) as other:
        chunks = other.client().completions.create(model="fake", prompt="a", max_tokens=12, temperature=0, stream=True)
        pieces = [chunk.choices[0].text for chunk in chunks]
        cut = other.client().completions.create(model="fake", prompt="a", max_tokens=4, temperature=0)
    assert "".join(pieces) == "€€€€" and all(set(piece) <= {"€"} for piece in pieces)
    assert cut.choices[0].text == "€�" and cut.usage.completion_tokens == 4


def test_chat_logprobs(client):
    answer = client.chat.completions.create(
        model="fake", messages=HELLO, max_tokens=6, temperature=0, logprobs=True, top_logprobs=3
    )
    entries = answer.choices[0].logprobs.content
    assert "".join(entry.token for entry in entries) == answer.choices[0].message.content
    assert len(entries) == answer.usage.completion_tokens == 6
    for entry in entries:
        assert len(entry.top_logprobs) == 3 and entry.logprob <= 0
        assert entry.top_logprobs[0].token == entry.token  # greedy
        assert bytes(entry.bytes).decode() == entry.token


@pytest.mark.parametrize("stream", [False, True])
def test_completion_logprobs_and_offsets(client, stream):
    reply = client.completions.create(model="fake", prompt="ab", max_tokens=6, temperature=0, logprobs=2, stream=stream)
    parts = list(reply) if stream else [reply]
    found = [part.choices[0].logprobs for part in parts if part.choices[0].logprobs]
    text = "".join(part.choices[0].text for part in parts)
    assert "".join(token for each in found for token in each.tokens) == text
    assert [offset for each in found for offset in each.text_offset] == list(range(6))
    assert all(len(top) == 2 for each in found for top in each.top_logprobs)


def test_echo_repeats_the_prompt(client):
    plain = client.completions.create(model="fake", prompt="ab", max_tokens=6, seed=1).choices[0].text
    for prompt in ("ab", ByteTokenizer().encode("ab")):
        echoed = client.completions.create(model="fake", prompt=prompt, max_tokens=6, seed=1, echo=True)
        assert echoed.choices[0].text == "ab" + plain
    streamed = client.completions.create(model="fake", prompt="ab", max_tokens=6, seed=1, echo=True, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == "ab" + plain


def test_parameters_reach_the_sampler(client):
    prompt = ByteTokenizer().encode("ab")
    asked: list[dict[str, Any]] = [
        {"temperature": 0.3, "top_p": 0.8},
        {"presence_penalty": 1.5, "frequency_penalty": 0.5},
        {"logit_bias": {100: 8.0, 97: -100.0}},
        {"top_k": 2, "min_p": 0.1, "repetition_penalty": 1.3, "min_tokens": 3, "ignore_eos": True},
        {"stop_token_ids": [100]},
    ]
    ours = ("top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos", "stop_token_ids")
    for params in asked:
        theirs = {name: value for name, value in params.items() if name not in ours}
        if "logit_bias" in theirs:
            theirs["logit_bias"] = {str(token): bias for token, bias in theirs["logit_bias"].items()}
        extra = {name: value for name, value in params.items() if name in ours}
        got = client.completions.create(model="fake", prompt="ab", max_tokens=30, seed=4, extra_body=extra, **theirs)
        assert got.choices[0].text == offline(prompt, max_tokens=30, seed=4, **params), params


def test_without_its_own_values_a_request_gets_the_models():
    """The values of `--generation-config`; a request's own come first, also the neutral ones."""
    recommended = {"temperature": 0.3, "top_k": 5, "max_tokens": 9}
    engine = fake_engine(max_context=256, cache_tokens=2048)
    with live(engine, ByteTokenizer(), 256, default_sampling=recommended) as server:
        client = server.client()

        def chat(**body: Any) -> str:
            reply = client.chat.completions.create(model="fake", messages=HELLO, seed=5, **body)
            return str(reply.choices[0].message.content)

        def wanted(**params: Any) -> str:
            return offline(chat_tokens(HELLO), seed=5, **params)

        texts = [chat(), chat(max_tokens=30), chat(max_tokens=30, temperature=1, extra_body={"top_k": -1})]
        assert texts == [
            wanted(temperature=0.3, top_k=5, max_tokens=9),
            wanted(temperature=0.3, top_k=5, max_tokens=30),
            wanted(max_tokens=30),
        ]
        assert len(set(texts)) == 3
        assert client.completions.create(model="fake", prompt="ab").usage.completion_tokens <= 16


def test_limits_of_the_server_hold_without_and_against_a_number():
    with live(fake_engine(speculation="off"), ByteTokenizer(), 256, max_output_tokens=8) as server:
        body = {"prompt": "ab", "ignore_eos": True}
        assert server.post("/v1/completions", body)[1]["usage"]["completion_tokens"] == 8
        status, reply, _ = server.post("/v1/completions", body | {"max_tokens": 9})
        assert status == 400 and "at most 8" in reply["error"]["message"]


def test_a_long_prompt_leaves_the_rest_of_the_context(client):
    answer = client.chat.completions.create(
        model="fake", messages=[{"role": "user", "content": "x" * 180}], extra_body={"ignore_eos": True}
    )
    assert answer.usage.prompt_tokens > 180 and answer.usage.total_tokens == 256
    assert answer.choices[0].finish_reason == "length"


def test_max_completion_tokens_comes_before_max_tokens(client):
    answer = client.chat.completions.create(
        model="fake", messages=HELLO, max_completion_tokens=5, max_tokens=50, extra_body={"ignore_eos": True}
    )
    assert answer.usage.completion_tokens == 5


def test_what_a_client_got_it_may_send_back(client):
    first = client.chat.completions.create(model="fake", messages=HELLO, max_tokens=5, seed=1)
    turn = first.choices[0].message.model_dump()
    messages = [
        {"role": "developer", "content": "short"},
        *HELLO,
        turn,
        {"role": "user", "content": [text_part("more")]},
    ]
    assert client.chat.completions.create(model="fake", messages=messages, max_tokens=5).usage.prompt_tokens > 20


def text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


# ---- what speculation did


def test_usage_says_what_speculation_did(client):
    def speculation(**how: Any) -> dict[str, Any]:
        answer = client.chat.completions.create(
            model="fake", messages=HELLO, max_tokens=64, seed=1, extra_body={"speculation": how}
        )
        found: dict[str, Any] = answer.usage.model_extra["speculation"]
        return found

    on = speculation(mode="on", method="draft", max_depth=3)
    assert on["drafted"] >= on["accepted"] > 0 and on["lossy"] is False and on["estimated_speedup"] > 0
    off = speculation(mode="off")
    assert off == {"drafted": 0, "accepted": 0, "lossy": False, "estimated_speedup": None}
    assert speculation(mode="on", acceptance="threshold", threshold=0.2)["lossy"] is True


@pytest.mark.parametrize(("num_tokens", "is_known"), [(31, False), (32, True)])
def test_usage_estimates_a_speedup_from_32_tokens_on(client, num_tokens, is_known):
    extra = {"speculation": {"mode": "on", "method": "draft", "max_depth": 3}, "ignore_eos": True}
    answer = client.chat.completions.create(
        model="fake", messages=HELLO, max_tokens=num_tokens, seed=1, extra_body=extra
    )
    found = answer.usage.model_extra["speculation"]
    assert answer.usage.completion_tokens == num_tokens and found["drafted"] > 0
    assert (found["estimated_speedup"] is not None) == is_known


def test_a_server_may_be_lossy_by_default_and_a_request_may_refuse():
    from outpace.config import SpeculationParams

    engine = fake_engine(speculation="on", method="draft")
    with live(engine, ByteTokenizer(), 256, default_speculation=SpeculationParams(acceptance="typical")) as server:
        ask = {"model": "fake", "prompt": "ab", "max_tokens": 40, "seed": 1}
        lossy = server.client().completions.create(**ask)
        exact = server.client().completions.create(**ask, extra_body={"speculation": {"acceptance": "exact"}})
        metrics = server.metrics()
    assert lossy.usage.model_extra["speculation"]["lossy"] is True
    assert exact.usage.model_extra["speculation"]["lossy"] is False
    assert exact.choices[0].text == offline(ByteTokenizer().encode("ab"), max_tokens=40, seed=1)
    assert metrics["outpace_lossy_requests_total"] == 1


# ---- other routes


def test_models_tokens_health_version(server, client):
    assert [model.id for model in client.models.list()] == ["fake"]
    assert client.models.retrieve("fake").id == "fake"
    status, tokenized, _ = server.post("/tokenize", {"prompt": "añ", "return_token_strs": True})
    assert status == 200 and tokenized["count"] == 4 and tokenized["tokens"] == [257, 97, 195, 177]
    assert server.post("/detokenize", {"tokens": tokenized["tokens"]})[1] == {"prompt": "añ"}
    rendered = server.post("/tokenize", {"messages": HELLO})[1]["tokens"]
    assert rendered == chat_tokens(HELLO)
    assert server.get("/health")[:2] == (200, {"status": "ok", "reason": None})
    assert server.get("/version")[1]["version"]
    assert "/v1/chat/completions" in server.get("/openapi.json")[1]["paths"]
    assert server.get("/docs")[0] == 200


def test_a_proxy_may_offer_the_server_under_a_path_of_its_own():
    """It may remove its part of the path or leave it; monitoring needs no key in either case."""
    with live(fake_engine(), ByteTokenizer(), 256, root_path="/llm", api_keys=("secret",)) as server:
        for root in ("", "/llm"):
            assert server.get(f"{root}/health")[0] == 200
            assert server.get(f"{root}/v1/models")[0] == 401
            assert server.get(f"{root}/v1/models", {"authorization": "Bearer secret"})[0] == 200
            assert "/v1/chat/completions" in server.get(f"{root}/openapi.json")[1]["paths"]
            assert server.get(f"{root}/docs")[0] == 200
        assert server.get("/llmhealth", {"authorization": "Bearer secret"})[0] == 404
        assert server.get("/llmhealth")[0] == 401
        assert server.get("/openapi.json")[1]["servers"] == [{"url": "/llm"}]


def test_a_request_id_is_given_back_or_made(server):
    body = {"prompt": "ab", "max_tokens": 1}
    _, reply, headers = server.post("/v1/completions", body, {"x-request-id": "mine-1.2"})
    assert headers["x-request-id"] == "mine-1.2" and reply["id"] == "cmpl-mine-1.2"
    for odd in ("two words", "x" * 200, 'in"ject'):
        _, _, headers = server.post("/v1/completions", body, {"x-request-id": odd})
        assert len(headers["x-request-id"]) == 32 and headers["x-request-id"] != odd


# ---- refusals


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"messages": []}, "messages", "at least 1 item"),
        ({}, "messages", "needs messages"),
        ({"messages": HELLO, "temprature": 1}, "temprature", "unrecognized request argument"),
        ({"messages": HELLO, "use_beam_search": True}, "use_beam_search", "is not supported; completions are sampled"),
        ({"messages": HELLO, "temperature": 3}, "temperature", "less than or equal to 2"),
        ({"messages": HELLO, "temperature": "hot"}, "temperature", "valid number"),
        ({"messages": HELLO, "n": 0}, "n", "greater than or equal to 1"),
        ({"messages": HELLO, "top_p": 0}, "top_p", "greater than 0"),
        ({"messages": HELLO, "max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"messages": HELLO, "max_tokens": 1000}, "messages", "the context holds 256"),
        ({"messages": HELLO, "stop": ["x"] * 17}, "stop", "at most 16"),
        ({"messages": HELLO, "logit_bias": {"a": 1}}, "logit_bias", "token ids"),
        ({"messages": HELLO, "logit_bias": {"999": 1}}, None, "not in the vocabulary"),
        ({"messages": HELLO, "top_logprobs": 3}, "top_logprobs", "needs logprobs"),
        ({"messages": HELLO, "tools": [{"type": "function"}]}, "tools", "must be a function"),
        ({"messages": HELLO, "response_format": {"type": "structural_tag"}}, "response_format.type", "'json_schema'"),
        ({"messages": HELLO, "stream_options": {"include_usage": True}}, "stream_options", "stream is true"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, None, "send only text"),
        ({"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]}, None, "tool_calls[0] must be"),
        ({"messages": [{"role": "user", "content": "", "name": [["x"]]}]}, "messages", "must be a string"),
        ({"messages": [{"role": "critic", "content": ""}]}, None, "has a role that is not known"),
        ({"messages": HELLO, "speculation": {"mode": "sometimes"}}, "speculation.mode", "auto"),
        ({"messages": HELLO, "speculation": {"threshold": 0.5}}, None, "acceptance='threshold'"),
        ({"messages": HELLO, "speculation": {"mode": "on", "max_depth": 0}}, None, "set speculation to 'off'"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, None, "valid Unicode"),
        ({"messages": HELLO, "\ud800": 1}, None, "must be one JSON object"),
    ],
)
def test_a_bad_chat_request_hears_one_sentence(server, body, param, words):
    status, reply, _ = server.post("/v1/chat/completions", body)
    assert status == 400, reply
    assert words in reply["error"]["message"], reply
    assert reply["error"]["type"] == "invalid_request_error" and set(reply["error"]) == {
        "message",
        "type",
        "param",
        "code",
    }
    if param:
        assert reply["error"]["param"] == param


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "best_of": 3}, "best_of"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "empty"),
        ({"prompt": [5000]}, "not in the vocabulary"),
        ({"prompt": "a" * 300}, "the context holds 256"),
        ({"prompt": "a", "n": 128, "best_of": 128, "max_tokens": 300}, "the context holds"),
    ],
)
def test_a_bad_completion_request_hears_one_sentence(server, body, words):
    status, reply, _ = server.post("/v1/completions", body)
    assert status == 400 and words in reply["error"]["message"], reply


def test_errors_are_the_clients_exceptions(server, client):
    with pytest.raises(openai.NotFoundError, match="not served here"):
        client.chat.completions.create(model="gpt-4", messages=HELLO)
    with pytest.raises(openai.BadRequestError, match="the context holds"):
        client.chat.completions.create(model="fake", messages=[{"role": "user", "content": "x" * 400}])
    status, reply, _ = server.get("/v1/nothing")
    assert status == 404 and reply["error"]["message"].startswith("there is nothing at")
    assert server.ask("DELETE", "/v1/models", None, {})[0] == 405


def test_refusals_repeat_nothing_of_the_prompt(server, caplog):
    secret = "tell nobody"
    with caplog.at_level("DEBUG"):
        for body in ({"messages": [{"role": 5, "content": secret}]}, {"messages": secret}, {"prompt": secret}):
            assert secret not in json.dumps(server.post("/v1/chat/completions", body)[1])
        server.post("/v1/completions", {"prompt": secret, "max_tokens": 3})
    assert secret not in caplog.text


def test_prompts_are_logged_only_where_asked(caplog):
    with live(fake_engine(), ByteTokenizer(), 256, log_prompts=True) as server, caplog.at_level("INFO"):
        server.post("/v1/completions", {"prompt": "tell everybody", "max_tokens": 3})
    assert "tell everybody" in caplog.text
