"""Structured output through the real OpenAI client, over the fake model."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field

from outpace.decoding.constraints import Constraints
from tests.fakes import ByteTokenizer, fake_engine
from tests.server.test_contract import HELLO, MODES
from tests.server_helper import LiveServer, live

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green"]}, "size": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["colour", "size"],
    "additionalProperties": False,
}


class Pet(BaseModel):
    kind: Literal["cat", "dog"]
    age: Annotated[int, Field(ge=0, le=30)]


class Home(BaseModel):
    pets: Annotated[list[Pet], Field(max_length=2)]
    has_garden: bool | None
    rooms: Annotated[int, Field(ge=1, le=9)]


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    engine = fake_engine(max_context=512, cache_tokens=4096)
    engine.calibrate()
    with live(engine, ByteTokenizer(), 512) as server:
        yield server
        server.check_clean()


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Any:
    return server.client()


@pytest.mark.parametrize("speculation", MODES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_clients_parse_returns_the_pydantic_object(client, speculation, temperature):
    answer = client.chat.completions.parse(
        model="fake",
        messages=HELLO,
        response_format=Home,
        temperature=temperature,
        max_tokens=300,
        extra_body={"speculation": speculation},
    )
    choice = answer.choices[0]
    assert isinstance(choice.message.parsed, Home) and choice.finish_reason == "stop"


def test_a_streamed_answer_is_parsed_by_the_client(client):
    with client.chat.completions.stream(
        model="fake", messages=HELLO, response_format=Home, max_tokens=300, seed=4
    ) as stream:
        final = stream.get_final_completion()
    whole = client.chat.completions.parse(model="fake", messages=HELLO, response_format=Home, max_tokens=300, seed=4)
    assert final.choices[0].message.parsed == whole.choices[0].message.parsed


def test_a_cut_answer_says_length(client):
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(model="fake", messages=HELLO, response_format=Home, max_tokens=8)


@pytest.mark.parametrize("strict", [True, False, None])
def test_a_schema_is_enforced_with_and_without_strict(client, strict):
    named = {"name": "thing", "schema": SCHEMA} | ({} if strict is None else {"strict": strict})
    answer = client.chat.completions.create(
        model="fake", messages=HELLO, n=3, response_format={"type": "json_schema", "json_schema": named}
    )
    for choice in answer.choices:
        jsonschema.validate(json.loads(choice.message.content), SCHEMA)


def test_free_text_is_the_default_and_can_be_asked_for(client):
    wanted: dict[str, Any] = {"model": "fake", "messages": HELLO, "max_tokens": 20, "seed": 1}
    plain = client.chat.completions.create(**wanted)
    as_text = client.chat.completions.create(**wanted, response_format={"type": "text"})
    assert as_text.choices[0].message.content == plain.choices[0].message.content


def test_a_json_object_begins_as_one(client):
    answer = client.chat.completions.create(
        model="fake", messages=HELLO, max_tokens=60, response_format={"type": "json_object"}, logit_bias={"125": 8}
    )
    text, reason = answer.choices[0].message.content, answer.choices[0].finish_reason
    assert text.startswith("{") and (reason == "length" or isinstance(json.loads(text), dict))


@pytest.mark.parametrize(
    ("field", "pattern"),
    [
        ({"guided_regex": "[ab]{2,5}!"}, "[ab]{2,5}!"),
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"guided_json": {"type": "integer", "minimum": 10, "maximum": 99}}, "[1-9][0-9]"),
        ({"guided_json": '{"enum": ["x", "y"]}'}, '"[xy]"'),
        ({"guided_grammar": 'start: "<" ("a" | "b") ">"'}, "<[ab]>"),
        ({"structured_outputs": {"regex": "[ab]{2,5}!"}}, "[ab]{2,5}!"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"structured_outputs": {"json": {"type": "boolean"}}}, "true|false"),
        ({"structured_outputs": {"grammar": 'start: "<" ("a" | "b") ">"'}}, "<[ab]>"),
        ({"structured_outputs": {"json_object": True}}, r"\{.*"),
    ],
)
@pytest.mark.parametrize("is_chat", [True, False])
def test_the_fields_of_vllm_do_the_same(client, field, pattern, is_chat):
    if is_chat:
        answer = client.chat.completions.create(model="fake", messages=HELLO, max_tokens=40, extra_body=field)
        text = answer.choices[0].message.content
    else:
        answer = client.completions.create(model="fake", prompt="hello", max_tokens=40, extra_body=field)
        text = answer.choices[0].text
    assert re.fullmatch(pattern, text, re.DOTALL), text


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "needs"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, None, "needs"),
        ({"guided_json": {"type": "foo"}}, "guided_json", "Invalid type"),
        ({"guided_json": "{"}, "guided_json", "not valid JSON"),
        ({"guided_json": False}, "guided_json", "allows no output"),
        ({"guided_json": {"$ref": "#"}}, "guided_json", "nothing satisfies"),
        ({"guided_json": {"type": "integer", "minimum": 3, "maximum": 1}}, "guided_json", "Unsatisfiable"),
        ({"guided_regex": "("}, "guided_regex", "unclosed group"),
        ({"guided_regex": ""}, "guided_regex", "non-empty"),
        ({"guided_choice": []}, "guided_choice", "at least 1"),
        ({"guided_grammar": "start: x"}, "guided_grammar", "unknown name"),
        ({"structured_outputs": {}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {"regexp": "a"}}, "structured_outputs.regexp", "unrecognized"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_regex", "send one of them"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "response_format", "send one of them"),
    ],
)
def test_what_cannot_be_enforced_is_refused_in_one_sentence(server, fields, param, words):
    status, reply, _ = server.post("/v1/chat/completions", {"messages": HELLO, **fields})
    assert status == 400 and words in reply["error"]["message"], reply
    assert reply["error"]["type"] == "invalid_request_error"
    if param is not None:
        assert reply["error"]["param"] == param, reply


def test_compiling_blocks_neither_the_event_loop_nor_the_engine(server, client, monkeypatch):
    threads: list[str] = []
    compiled = Constraints._parser

    def noting(self: Constraints, structured: Any) -> Any:
        threads.append(threading.current_thread().name)
        return compiled(self, structured)

    callers: list[str] = []
    compile_ = Constraints.compile

    def noting_caller(self: Constraints, structured: Any) -> Any:
        callers.append(threading.current_thread().name)
        return compile_(self, structured)

    monkeypatch.setattr(Constraints, "_parser", noting)
    monkeypatch.setattr(Constraints, "compile", noting_caller)
    client.chat.completions.create(model="fake", messages=HELLO, n=4, extra_body={"guided_regex": "never seen [ab]"})
    assert len(threads) == 1, "n completions share one"
    assert callers and all(name.startswith("outpace-text") for name in callers)
