"""What the Responses API accepts: items that become messages, and requests that are refused with one sentence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from outpace.server.responses.request import ResponsesRequest
from tests.scripted_model import scripted
from tests.server_helper import LiveServer

CLOCK: dict[str, Any] = {"type": "function", "name": "clock"}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with scripted("Hello.") as server:
        yield server


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def called(text: str | None, *ids: str) -> dict[str, Any]:
    calls = [{"id": each, "type": "function", "function": {"name": "f", "arguments": "{}"}} for each in ids]
    return {"role": "assistant", "content": text} | ({"tool_calls": calls} if calls else {})


def call_item(call_id: str) -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": "f", "arguments": "{}", "status": "completed"}


def output_item(call_id: str, output: Any = "x") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": output}


def thoughts(*texts: str) -> dict[str, Any]:
    parts = [{"type": "reasoning_text", "text": text} for text in texts]
    return {"type": "reasoning", "id": "r", "summary": [], "content": parts, "status": "completed"}


TEXTS = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
SAID: dict[str, Any] = {"type": "output_text", "text": "a", "annotations": [], "logprobs": None}
RESULT = {"role": "tool", "tool_call_id": "1", "content": "x"}


def read(body: dict[str, Any]) -> list[dict[str, Any]]:
    return ResponsesRequest.model_validate(body).messages().messages


@pytest.mark.parametrize(
    ("items", "messages"),
    [
        ("a", [user("a")]),
        ([user("a")], [user("a")]),
        ([{"type": "message", "role": "user", "content": TEXTS}], [user("ab")]),
        ([system("a"), user("b")], [system("a"), user("b")]),
        ([{"role": "developer", "content": "a"}, system("b"), user("c")], [system("a\n\nb"), user("c")]),
        ([{"type": "message", "id": "m", "role": "assistant", "content": [SAID]}], [called("a")]),
        ([{"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}], [called("no")]),
        ([user("a"), called("b"), call_item("1"), call_item("2")], [user("a"), called("b", "1", "2")]),
        ([user("a"), call_item("1"), output_item("1")], [user("a"), called(None, "1"), RESULT]),
        ([call_item("1"), output_item("1", TEXTS)], [called(None, "1"), RESULT | {"content": "ab"}]),
        (
            [call_item("1"), output_item("1"), call_item("2")],
            [called(None, "1"), RESULT, called(None, "2")],
        ),
        ([user("a"), {"type": "reasoning", "id": "r", "summary": []}, called("b")], [user("a"), called("b")]),
        ([thoughts("h", "m"), called("b")], [called("b") | {"reasoning_content": "hm"}]),
        ([thoughts("h"), thoughts("m"), call_item("1")], [called(None, "1") | {"reasoning_content": "hm"}]),
        (
            [thoughts("h"), called("b"), thoughts("m"), call_item("1"), output_item("1"), called("c")],
            [called("b", "1") | {"reasoning_content": "hm"}, RESULT, called("c")],
        ),
        ([thoughts("h"), user("a"), called("b"), thoughts("m")], [user("a"), called("b")]),
    ],
)
def test_items_become_messages(items, messages):
    assert read({"input": items}) == messages
    first = [system("z\n\n" + messages[0]["content"]), *messages[1:]] if messages[0]["role"] == "system" else None
    assert read({"input": items, "instructions": "z"}) == (first or [system("z"), *messages])


def test_an_error_of_the_conversation_names_the_item_it_came_from(server):
    deep = '{"a":' * 99 + "1" + "}" * 99
    items = [user("a"), {"type": "reasoning"}, call_item("1") | {"arguments": deep}]
    status, reply, _ = server.post("/v1/responses", {"input": items, "instructions": "z"})
    assert status == 400 and reply["error"]["message"].startswith("the arguments of input[2].tool_calls[0] have more")


NUMBER = {"minimum": float("nan")}


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "not supported; nothing is stored here, so send"),
        ({"conversation": {"id": "c"}}, "conversation", "not supported; nothing is stored here, so send"),
        ({"background": True}, "background", "not supported; leave it out"),
        ({"prompt": {"id": "p"}}, "prompt", "not supported; send the text"),
        ({"tools": [{"type": "web_search"}]}, "tools", "'web_search' is not supported in tools; offer a function"),
        ({"tools": [CLOCK, {"type": "custom", "name": "f"}]}, "tools", "'custom' is not supported in tools"),
        ({"tools": [CLOCK, CLOCK]}, "tools", "has the name 'clock'"),
        ({"tools": [CLOCK | {"name": "a b"}]}, "tools.0.name", "should match pattern"),
        ({"tools": [CLOCK | {"parameters": NUMBER}], "tool_choice": "none"}, "tools", "number that is not finite"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice", "'file_search' is not supported in tool_choice"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice", "not in tools"),
        ({"input": [{"type": "item_reference", "id": "m"}]}, "input", "not supported; nothing is stored here"),
        ({"input": [{"type": "computer_call"}]}, "input", "'computer_call' are not supported; send messages"),
        ({"input": [user([{"type": "input_image"}])]}, "input", "'input_image' are not supported; send text"),
        ({"input": [output_item("1", [{"type": "input_file"}])]}, "input", "not supported; send its text"),
        ({"input": [5]}, "input.0", "an item must be an object such as {'role'"),
        ({"input": [user([5])]}, "input.0.content.0", "a part must be an object such as {'type'"),
        ({"input": [user("a"), user(7)]}, "input.1.content", "valid string"),
        ({"input": [{"role": "judge", "content": ""}]}, "input.0.role", "should be 'user'"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input.0.call_id", "needs input.0.call_id"),
        ({"input": []}, "input", "at least 1 item"),
        ({"input": [{"type": "reasoning"}]}, "input", "no message; send at least one"),
        ({"input": [thoughts("hm")]}, "input", "no message; send at least one"),
        ({"input": [{"type": "reasoning", "content": "hm"}, user("a")]}, "input.0.content", "valid list"),
        ({"max_output_tokens": 9999}, "input", "request fewer"),
        ({"max_output_tokens": 2, "min_tokens": 3}, None, "larger than max_output_tokens (2)"),
        ({"top_logprobs": 2}, "top_logprobs", "needs include: ['message.output_text.logprobs']"),
        ({"include": ["everything"]}, "include.0", "input should be"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema", "needs text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "x"}}}}, "text.format", "cannot"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata", "at most 16 entries"),
        ({"metadata": {"a": 1}}, "metadata.a", "valid string"),
        ({"instructions": "\ud800"}, None, "not valid Unicode"),
        ({"user": "\ud800"}, None, "not valid Unicode"),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options", "only allowed when stream is true"),
        ({"n": 2}, "n", "unrecognized request argument"),
    ],
)
def test_what_is_wrong_or_not_supported_hears_one_sentence(server, fields, param, words):
    for stream in (False, True):
        if stream and "stream_options" in fields:
            continue
        status, reply, _ = server.post("/v1/responses", {"input": "a", "stream": stream} | fields)
        assert status == 400 and words in reply["error"]["message"] and reply["error"]["param"] == param, reply


@pytest.mark.parametrize("stream", [False, True])
def test_what_no_answer_can_repeat_is_refused_before_anything_is_generated(server, stream):
    before = server.metrics()["vllm:generation_tokens_total"]
    tools = [CLOCK | {"parameters": NUMBER}]
    for fields in ({"user": "\ud800"}, {"tools": tools, "tool_choice": "none"}):
        assert server.post("/v1/responses", {"input": "a", "stream": stream} | fields)[0] == 400
    server.wait_until_idle()
    assert server.metrics()["vllm:generation_tokens_total"] == before


def test_fields_without_effect_are_accepted(server):
    fields: dict[str, Any] = {
        "previous_response_id": None,
        "background": False,
        "service_tier": "flex",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "prompt_cache_retention": "24h",
        "max_tool_calls": 3,
        "include": ["reasoning.encrypted_content"],
        "reasoning": {"summary": "auto"},
        "tools": [],
        "tool_choice": "auto",
        "stream_options": {"include_obfuscation": False},
        "user": "me",
    }
    response = list(server.client().responses.create(model="fake", input="a", stream=True, **fields))[-1].response
    assert response.output_text == "Hello." and response.user == "me" and response.prompt_cache_key == "k"
