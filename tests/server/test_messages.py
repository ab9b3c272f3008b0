"""Anthropic's Messages API through its real client, over a model that says what each test wants it to say."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import jsonschema
import pytest

from outpace.models.tool_calls import SYNTAXES
from outpace.models.tool_calls.syntax import Call
from tests.scripted_model import scripted
from tests.server_helper import LiveServer

HERMES = SYNTAXES["hermes"]
QUESTION: list[Any] = [{"role": "user", "content": "What is the weather in Oslo and Rome?"}]
WEATHER = {
    "name": "weather",
    "description": "The weather in a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
CLOCK = {"name": "clock", "input_schema": {"type": "object"}}
OSLO, ROME, NOW = Call("weather", {"city": "Oslo"}), Call("weather", {"city": 'Røma "x"', "days": 2}), Call("clock", {})


def client(server: LiveServer, **options: Any) -> anthropic.Anthropic:
    defaults: dict[str, Any] = {"api_key": "none", "max_retries": 0, "timeout": 60}
    return anthropic.Anthropic(base_url=server.url, **(defaults | options))


def whole(server: LiveServer, **options: Any) -> Any:
    ask: dict[str, Any] = {"model": "fake", "messages": QUESTION, "max_tokens": 500}
    return client(server).messages.create(**(ask | options))


def streamed(server: LiveServer, **options: Any) -> Any:
    """The message that the client's own helper assembles from the events."""
    ask: dict[str, Any] = {"model": "fake", "messages": QUESTION, "max_tokens": 500}
    with client(server).messages.stream(**(ask | options)) as stream:
        texts = list(stream.text_stream)
        message = stream.get_final_message()
    assert "".join(texts) == "".join(block.text for block in message.content if block.type == "text")
    return message


def calls_of(message: Any) -> list[Call]:
    blocks = [block for block in message.content if block.type == "tool_use"]
    assert all(block.id.startswith("toolu_") for block in blocks)
    assert len({block.id for block in blocks}) == len(blocks)
    return [Call(block.name, block.input) for block in blocks]


def echo(prompt: str) -> str:
    """The prompt itself, so that a test sees what the model was given."""
    return prompt.removesuffix("\nassistant:").removeprefix("<|bos|>")


@pytest.fixture(scope="module")
def echoing() -> Iterator[LiveServer]:
    with scripted(echo) as server:
        yield server


@pytest.fixture(scope="module")
def greeting() -> Iterator[LiveServer]:
    with scripted("Hello, 🌍! How are you?") as server:
        yield server


# ---- text


@pytest.mark.parametrize("ask", [whole, streamed])
def test_a_text_answer(greeting, ask):
    message = ask(greeting)
    [block] = message.content
    assert (block.type, block.text, message.role, message.model) == (
        "text", "Hello, 🌍! How are you?", "assistant", "fake"
    )  # fmt: skip
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None) and message.id.startswith("msg_")
    counted = client(greeting).messages.count_tokens(model="fake", messages=QUESTION).input_tokens
    assert message.usage.input_tokens + message.usage.cache_read_input_tokens == counted > 30
    assert message.usage.output_tokens == len("Hello, 🌍! How are you?".encode()) + 1


@pytest.mark.parametrize("ask", [whole, streamed])
@pytest.mark.parametrize(
    ("options", "text", "reason", "sequence"),
    [
        ({"max_tokens": 5}, "Hello", "max_tokens", None),
        ({"stop_sequences": ["xx", "How"]}, "Hello, 🌍! ", "stop_sequence", "How"),
        ({"stop_sequences": ["zzz"]}, "Hello, 🌍! How are you?", "end_turn", None),
    ],
)
def test_the_reason_of_the_end(greeting, ask, options, text, reason, sequence):
    message = ask(greeting, **options)
    assert message.content[0].text == text
    assert (message.stop_reason, message.stop_sequence) == (reason, sequence)


@pytest.mark.parametrize("ask", [whole, streamed])
def test_an_empty_answer_has_no_blocks(ask):
    with scripted("") as server:
        assert ask(server).content == []


def test_the_events_of_a_stream(greeting):
    with client(greeting).messages.create(model="fake", messages=QUESTION, max_tokens=9, stream=True) as stream:
        events: list[Any] = list(stream)
    kinds = [event.type for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    assert events[0].message.stop_reason is None and events[0].message.content == []
    assert events[0].message.usage.input_tokens > 30 and events[-2].usage.output_tokens == 9


# ---- what the model is given


@pytest.mark.parametrize("system", ["Be brief.", [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}]])
def test_the_system_text_comes_first(echoing, system):
    said = whole(echoing, system=system).content[0].text
    assert said.split() == ["system:", "Be", "brief.", "user:", *QUESTION[0]["content"].split()]


def test_turns_of_one_role_are_one_turn():
    prompts: list[str] = []

    def answer(prompt: str) -> str:
        prompts.append(prompt)
        return "ok"

    turns: list[Any] = [{"role": "user", "content": "a"}, {"role": "user", "content": [{"type": "text", "text": "b"}]}]
    turns += [
        {"role": "assistant", "content": "c"},
        {"role": "system", "content": "d"},
        {"role": "user", "content": "e"},
    ]
    with scripted(answer) as server:
        whole(server, messages=turns)
    assert prompts[0].endswith("user: a\nb\nassistant: c\nsystem: d\nuser: e\nassistant:")


@pytest.mark.parametrize("ask", [whole, streamed])
def test_a_last_message_of_the_assistant_is_continued(ask):
    with scripted(" The answer is (B).") as server:
        message = ask(server, messages=[*QUESTION, {"role": "assistant", "content": "The answer is ("}])
    assert message.content[0].text == "B)."


def test_sampling_settings_reach_the_model():
    with scripted("abc") as server:
        settings: dict[str, Any] = {"temperature": 0.5, "top_p": 0.25, "top_k": 7, "seed": 3}
        seen = []
        submit = server.async_engine.submit
        server.async_engine.submit = lambda orders, **how: seen.append(orders[0].params) or submit(orders, **how)  # type: ignore
        metadata: Any = {"user_id": "somebody"}
        whole(server, extra_body=settings, metadata=metadata, max_tokens=2)
    [params] = seen
    assert {name: getattr(params, name) for name in settings} == settings and params.max_tokens == 2


@pytest.mark.parametrize(
    ("thinking", "shown"),
    [
        (None, "False False"),
        ({"type": "disabled"}, "False False"),
        ({"type": "enabled", "budget_tokens": 2000}, "True True"),
        ({"type": "adaptive"}, ""),
    ],
)
def test_thinking_is_a_variable_of_the_template(thinking, shown):
    with scripted(echo, template="{{ enable_thinking }} {{ thinking }}") as server:
        options = {} if thinking is None else {"thinking": thinking}
        assert "".join(block.text for block in whole(server, **options).content).strip() == shown


# ---- tools


@pytest.mark.parametrize("ask", [whole, streamed])
def test_calls_are_blocks_after_the_text(ask):
    with scripted("Let me look.\n" + HERMES.write([OSLO, ROME, NOW])) as server:
        message = ask(server, tools=[WEATHER, CLOCK])
    assert [block.type for block in message.content] == ["text", "tool_use", "tool_use", "tool_use"]
    assert message.content[0].text == "Let me look." and calls_of(message) == [OSLO, ROME, NOW]
    assert message.stop_reason == "tool_use"


@pytest.mark.parametrize("ask", [whole, streamed])
def test_the_choice_of_tools(ask):
    with scripted(HERMES.write([OSLO, ROME])) as server:
        assert calls_of(ask(server, tools=[WEATHER, CLOCK])) == [OSLO, ROME]
        for kind in ("auto", "any"):
            one = {"type": kind, "disable_parallel_tool_use": True}
            assert calls_of(ask(server, tools=[WEATHER, CLOCK], tool_choice=one)) == [OSLO]
        named = ask(server, tools=[WEATHER, CLOCK], tool_choice={"type": "tool", "name": "clock"})
        assert calls_of(named) == [NOW] and named.stop_reason == "tool_use"
        none = ask(server, tools=[WEATHER, CLOCK], tool_choice={"type": "none"})
        assert calls_of(none) == [] and none.content[0].text == HERMES.write([OSLO, ROME])
    with scripted("I will not.") as server:
        assert calls_of(ask(server, tools=[CLOCK], tool_choice={"type": "auto"})) == []
        required = ask(server, tools=[CLOCK], tool_choice={"type": "any", "disable_parallel_tool_use": True})
        assert calls_of(required) == [NOW]


@pytest.mark.parametrize("ask", [whole, streamed])
def test_an_agent_loop_ends_with_words(ask):
    def answer(prompt: str) -> str:
        if "rain in Oslo" not in prompt:
            return "Looking.\n" + HERMES.write([OSLO, NOW])
        assert "Looking.\n" + HERMES.write([OSLO, NOW]) in prompt
        assert "<tool_response>\nrain in Oslo\n" in prompt and "<tool_response>\nError: no clock\n" in prompt
        assert prompt.rstrip().endswith("user: And?\nassistant:")
        return "Take an umbrella."

    with scripted(answer) as server:
        first = ask(server, tools=[WEATHER, CLOCK])
        oslo, now = (block for block in first.content if block.type == "tool_use")
        results = [
            {"type": "tool_result", "tool_use_id": oslo.id, "content": [{"type": "text", "text": "rain in Oslo"}]},
            {"type": "tool_result", "tool_use_id": now.id, "content": "no clock", "is_error": True},
            {"type": "text", "text": "And?"},
        ]
        turns = [*QUESTION, {"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
        last = ask(server, tools=[WEATHER, CLOCK], messages=turns)
    assert last.content[0].text == "Take an umbrella." and last.stop_reason == "end_turn"


@pytest.mark.parametrize("ask", [whole, streamed])
def test_a_call_that_is_cut_off_keeps_what_is_complete(ask):
    said = HERMES.write([ROME])
    with scripted(said) as server:
        message = ask(server, tools=[WEATHER], max_tokens=len(said.encode()) - len("}}\n</tool_call>"))
        [block] = message.content
        assert block.input == {"city": 'Røma "x"', "days": 2} and message.stop_reason == "max_tokens"
        [block] = ask(server, tools=[WEATHER], max_tokens=said.index("Røma")).content
        assert block.input == {}


def test_a_format_of_the_output_is_kept(greeting):
    sky = {"sky": {"enum": ["clear", "cloudy"]}}
    schema = {"type": "object", "properties": sky, "required": ["sky"], "additionalProperties": False}
    config = {"format": {"type": "json_schema", "schema": schema}}
    jsonschema.validate(json.loads(whole(greeting, output_config=config).content[0].text), schema)


def test_tokens_are_counted_with_the_tools_that_the_model_hears_of(greeting):
    def count(**options: Any) -> int:
        return client(greeting).messages.count_tokens(model="fake", messages=QUESTION, **options).input_tokens

    assert count(tools=[WEATHER]) > count() + 100 > count(tools=[WEATHER], tool_choice={"type": "none"})
    assert count(system="abc") > count()


# ---- refusals


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": None}, "max_tokens: input should be a valid integer"),
        ({"max_tokens": 0}, "greater than or equal to 1"),
        ({"max_tokens": 5000}, "the context holds 4096 tokens"),
        ({"temprature": 1}, "unrecognized request argument: temprature"),
        ({"messages": []}, "at least 1 item"),
        ({"messages": [{"role": "critic", "content": ""}]}, "'user', 'assistant' or 'system'"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "in a text block"),
        ({"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]}, "in a text block"),
        ({"messages": [{"role": "user", "content": [{"type": "server_tool_use"}]}]}, "send text, tool_use"),
        ({"messages": [{"role": "user", "content": [{"type": 5}]}]}, "type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "needs messages.0.content.0"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]}]},
            "role user has a tool_use block",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "a"}]}]},
            "role assistant has a tool_result block",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "", "name": "", "input": {}}]}]},
            "send their results",
        ),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "send the tool's name, description and input_schema"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "needs a name"),
        ({"tools": [{"name": "a"}]}, "needs tools.0.input_schema"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice has a name"),
        ({"tools": [CLOCK], "tool_choice": {"type": "tool", "name": "x"}}, "not in tools"),
        ({"tool_choice": {"type": "any"}}, "there are no tools"),
        ({"thinking": {"type": "between_tools"}}, "'enabled', 'disabled' or 'adaptive'"),
        ({"stop_sequences": ["x"] * 17}, "at most 16"),
    ],
)
def test_a_bad_request_hears_one_sentence(greeting, fields, words):
    status, reply, _ = greeting.post("/v1/messages", {"messages": QUESTION, "max_tokens": 9, **fields})
    assert status == 400 and words in reply["error"]["message"], reply
    assert set(reply) == {"type", "error", "request_id"} and reply["error"]["type"] == "invalid_request_error"


def test_max_tokens_is_required(greeting):
    status, reply, _ = greeting.post("/v1/messages", {"messages": QUESTION})
    assert status == 400 and reply["error"]["message"] == "the request needs max_tokens"


def test_errors_are_the_clients_exceptions(greeting):
    with pytest.raises(anthropic.NotFoundError, match="not served here") as missing:
        whole(greeting, model="other")
    assert missing.value.type == "not_found_error" and missing.value.request_id
    with pytest.raises(anthropic.BadRequestError, match="the context holds"):
        streamed(greeting, max_tokens=5000)
    with pytest.raises(anthropic.NotFoundError, match="there is nothing at"):
        client(greeting).messages.batches.list()
    with scripted("x") as full:
        room = full.async_engine._max_queued + full.engine.max_running
        with full.async_engine.reserve(room), pytest.raises(anthropic.RateLimitError) as refused:
            whole(full)
        assert refused.value.type == "rate_limit_error"


def test_a_stream_that_fails_late_ends_with_an_error_event():
    with (
        scripted("x" * 3000, request_timeout=0.5) as server,
        pytest.raises(anthropic.APIStatusError, match="took longer than") as failed,
    ):
        streamed(server, max_tokens=3500)
    assert failed.value.type == "timeout_error"


def test_keys_are_read_from_either_header():
    with scripted("x", api_keys=("first", "second")) as server:
        right: list[dict[str, Any]] = [{"api_key": "second"}, {"api_key": None, "auth_token": "first"}]
        for options in right:
            message: Any = client(server, **options).messages.create(model="fake", messages=QUESTION, max_tokens=1)
            assert message.content[0].text == "x"
        assert server.get("/v1/models", {"authorization": "Bearer old", "x-api-key": "second"})[0] == 200
        with pytest.raises(anthropic.AuthenticationError, match="x-api-key"):
            client(server, api_key="wrong").messages.create(model="fake", messages=QUESTION, max_tokens=1)
        assert [model.id for model in client(server, api_key="first").models.list()] == ["fake"]
        for headers in ({"authorization": "second"}, {"authorization": "Basic second"}, {"x-api-key": ""}, {}):
            assert server.get("/v1/models", headers)[0] == 401
