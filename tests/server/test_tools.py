"""Tools through the real OpenAI client, over a model that says what each test wants it to say."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import openai
import pytest

from outpace.models.tool_calls import SYNTAXES
from outpace.models.tool_calls.syntax import Call
from tests.scripted_model import scripted

QUESTION: list[Any] = [{"role": "user", "content": "What is the weather in Oslo and Rome?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
TOOLS = [WEATHER, CLOCK]
OSLO, ROME, NOW = Call("weather", {"city": "Oslo"}), Call("weather", {"city": 'Røma "x"', "days": 2}), Call("clock", {})
CONTROLS = {"mistral": ("[TOOL_CALLS]",), "llama3_json": ("<|python_tag|>",)}


def calls_of(message: Any) -> list[Call]:
    assert all(call.id.startswith("call_") and call.type == "function" for call in message.tool_calls or [])
    found = [Call(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or []]
    assert len({call.id for call in message.tool_calls or []}) == len(found)
    return found


def whole(server: Any, **options: Any) -> Any:
    ask = {"model": "fake", "messages": QUESTION, "tools": TOOLS, "max_tokens": 500} | options
    return server.client().chat.completions.create(**ask).choices[0]


def streamed(server: Any, **options: Any) -> Any:
    """The choice that the client's own helper assembles from the deltas."""
    ask = {"model": "fake", "messages": QUESTION, "tools": TOOLS, "max_tokens": 500} | options
    with server.client().chat.completions.stream(**ask) as stream:
        for _ in stream:
            pass
        return stream.get_final_completion().choices[0]


@pytest.mark.parametrize("ask", [whole, streamed])
@pytest.mark.parametrize("name", SYNTAXES)
def test_calls_of_every_syntax_reach_the_client(name, ask):
    answer = SYNTAXES[name].write([OSLO, ROME, NOW])
    with scripted(answer, tool_call_parser=name, controls=CONTROLS.get(name, ())) as server:
        choice = ask(server)
    assert calls_of(choice.message) == [OSLO, ROME, NOW]
    assert choice.finish_reason == "tool_calls" and not choice.message.content


@pytest.mark.parametrize("ask", [whole, streamed])
@pytest.mark.parametrize("name", SYNTAXES)
def test_control_tokens_around_calls_are_seen_only_with_tools(name, ask):
    syntax = SYNTAXES[name]
    marks = [mark for mark in (syntax.opener, syntax.closer) if mark]
    answer = (syntax.opener if syntax.begins_bare else "") + syntax.write([OSLO, NOW])
    with scripted(answer, tool_call_parser=name, controls=marks) as server:
        choice = ask(server)
        assert calls_of(choice.message) == [OSLO, NOW] and not choice.message.content
        plain = whole(server, tools=openai.omit).message.content
    assert "weather" in plain and not any(mark in plain for mark in marks)


@pytest.mark.parametrize("ask", [whole, streamed])
def test_text_before_a_call_is_the_content_and_none_follows(ask):
    call = SYNTAXES["hermes"].write([OSLO])
    with scripted(f"Let me look.\n{call}\n Done.") as server:
        choice = ask(server)
    assert choice.message.content == "Let me look." and calls_of(choice.message) == [OSLO]
    assert choice.finish_reason == "tool_calls"


@pytest.mark.parametrize("ask", [whole, streamed])
@pytest.mark.parametrize("text", ["It <tool_call", "<tool_cal>{}", '{"name": "clock"}', "Sunny. 🌞", " \n a "])
def test_an_answer_without_calls_is_text(text, ask):
    with scripted(text) as server:
        choice = ask(server)
    assert choice.message.content == text and not choice.message.tool_calls and choice.finish_reason == "stop"


def test_a_stream_names_a_call_first_and_then_adds_to_its_arguments():
    with scripted(SYNTAXES["hermes"].write([OSLO, NOW])) as server:
        chunks = list(
            server.client().chat.completions.create(
                model="fake", messages=QUESTION, tools=TOOLS, stream=True, stream_options={"include_usage": True}
            )
        )
        whole_usage = server.client().chat.completions.create(model="fake", messages=QUESTION, tools=TOOLS).usage
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert choices[0].delta.role == "assistant" and choices[0].delta.content is None
    deltas = [call for choice in choices for call in choice.delta.tool_calls or []]
    for index in (0, 1):
        first, *rest = (delta for delta in deltas if delta.index == index)
        assert first.id and first.type == "function" and first.function.name
        assert all(delta.id is None and delta.function.name is None for delta in rest)
    assert [choice.finish_reason for choice in choices] == [None] * (len(choices) - 1) + ["tool_calls"]
    assert chunks[-1].usage.completion_tokens == whole_usage.completion_tokens > 50
    assert chunks[-1].usage.prompt_tokens == whole_usage.prompt_tokens


def test_a_call_that_is_cut_off_says_length():
    with scripted(SYNTAXES["hermes"].write([OSLO])) as server:
        for ask in (whole, streamed):
            try:
                choice = ask(server, max_tokens=50)
            except openai.LengthFinishReasonError:  # the stream helper refuses to parse such an answer
                continue
            assert choice.finish_reason == "length"
            assert choice.message.tool_calls[0].function.name == "weather"
            assert '{"city"'.startswith(choice.message.tool_calls[0].function.arguments)


def test_every_completion_has_calls_of_its_own():
    with scripted(SYNTAXES["hermes"].write([OSLO])) as server:
        answer = server.client().chat.completions.create(model="fake", messages=QUESTION, tools=TOOLS, n=2)
        assert [calls_of(choice.message) for choice in answer.choices] == [[OSLO], [OSLO]]
        first, second = (choice.message.tool_calls[0].id for choice in answer.choices)
    assert first != second


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_count_every_token_of_a_call(stream):
    answer = SYNTAXES["hermes"].write([OSLO])
    with scripted(answer) as server:
        reply = server.client().chat.completions.create(
            model="fake", messages=QUESTION, tools=TOOLS, logprobs=True, stream=stream
        )
        parts = list(reply) if stream else [reply]
    entries = [
        entry for part in parts for choice in part.choices if choice.logprobs for entry in choice.logprobs.content
    ]
    assert b"".join(bytes(entry.bytes) for entry in entries).startswith(answer.encode())


# A model that makes its calls wrong, or none, in schemas that leave it few choices.
LIGHT = {
    "type": "function",
    "function": {
        "name": "light",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {
                "room": {"enum": ["hall", "attic"]},
                "level": {"type": "integer", "minimum": 0, "maximum": 5},
            },
            "required": ["room", "level"],
            "additionalProperties": False,
        },
    },
}
ROOMS = ("hall", "attic")


def is_light(call: Call) -> bool:
    return call.name == "light" and call.arguments["room"] in ROOMS and 0 <= call.arguments["level"] <= 5


@pytest.mark.parametrize("ask", [whole, streamed])
@pytest.mark.parametrize("name", SYNTAXES)
@pytest.mark.parametrize("said", ["I will not.", "call"])
def test_a_required_call_is_made_by_a_model_that_does_not_want_to(said, name, ask):
    wrong = SYNTAXES[name].write([Call("light", {"room": "cellar", "level": "high"})])
    answer = wrong if said == "call" else said
    choices: list[Any] = ["required", {"type": "function", "function": {"name": "light"}}]
    with scripted(answer, tool_call_parser=name, controls=CONTROLS.get(name, ())) as server:
        for choice in choices:
            for temperature in (0, 1):
                found = ask(
                    server, tools=[CLOCK, LIGHT], tool_choice=choice, temperature=temperature, seed=1,
                    parallel_tool_calls=False,
                )  # fmt: skip
                [call] = calls_of(found.message)
                assert is_light(call) or (choice == "required" and call == NOW), call
                assert found.finish_reason == "tool_calls" and found.message.content is None


@pytest.mark.parametrize("name", SYNTAXES)
def test_arguments_of_a_free_call_satisfy_their_schema(name):
    wrong = SYNTAXES[name].write([Call("light", {"room": "cellar", "level": 77})])
    with scripted(f"Light! {wrong}" if name != "llama3_json" else wrong, tool_call_parser=name) as server:
        choice = whole(server, tools=[LIGHT], temperature=0, parallel_tool_calls=False)
    [call] = calls_of(choice.message)
    assert is_light(call)


@pytest.mark.parametrize("name", SYNTAXES)
def test_an_answer_has_the_form_of_response_format_or_is_a_call(name):
    properties = {"sky": {"enum": ["clear", "cloudy"]}}
    schema = {"type": "object", "properties": properties, "required": ["sky"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "sky", "schema": schema}}
    controls = CONTROLS.get(name, ())
    call = (SYNTAXES[name].opener if SYNTAXES[name].begins_bare else "") + SYNTAXES[name].write([OSLO])
    for said, has_call in ((call, True), ('{"sky": "clear"}', False), ("It is clear.", None)):
        with scripted(said, tool_call_parser=name, controls=controls) as server:
            choice = whole(server, response_format=form, parallel_tool_calls=False, temperature=0)
            if choice.message.tool_calls:
                assert choice.message.content is None and has_call is not False
            else:
                jsonschema.validate(json.loads(choice.message.content), schema)
                assert has_call is not True


def test_a_regex_and_tools_are_refused():
    with scripted("x") as server:
        body = {"messages": QUESTION, "tools": TOOLS, "guided_regex": "[a-z]"}
        status, reply, _ = server.post("/v1/chat/completions", body)
        assert status == 400 and "does not go together with tools" in reply["error"]["message"]
        assert server.post("/v1/chat/completions", body | {"tool_choice": "none"})[0] == 200


def test_a_schema_that_cannot_be_enforced_is_refused_if_it_is_strict():
    def ask(**function: Any) -> tuple[int, Any, Any]:
        tools = [{"type": "function", "function": {"name": "f", **function}}]
        return server.post("/v1/chat/completions", {"messages": QUESTION, "tools": tools})

    odd = {"type": "object", "properties": {"a": {"type": "string", "format": "klingon"}}}
    broken = {"type": "object", "properties": {"a": {"type": "klingon"}}}
    with scripted("Hello.") as server:
        assert ask(parameters=odd)[0] == 200
        for refused in (ask(parameters=odd, strict=True), ask(parameters=broken)):
            status, reply, _ = refused
            assert status == 400 and reply["error"]["param"] == "tools"
            assert reply["error"]["message"].startswith("the parameters of the tools cannot be used: "), reply


def test_without_parallel_calls_only_the_first_is_kept():
    with scripted(SYNTAXES["hermes"].write([OSLO, ROME])) as server:
        for ask in (whole, streamed):
            assert calls_of(ask(server, parallel_tool_calls=False).message) == [OSLO]
            assert calls_of(ask(server, parallel_tool_calls=True).message) == [OSLO, ROME]


def test_with_tool_choice_none_the_model_hears_of_no_tools():
    answer = SYNTAXES["hermes"].write([OSLO])
    with scripted(lambda prompt: answer if "weather" in prompt.rpartition("user:")[0] else "No tools.") as server:
        assert calls_of(whole(server).message) == [OSLO]
        choice = whole(server, tool_choice="none")
        assert choice.message.content == "No tools." and choice.message.tool_calls is None


def test_a_history_of_calls_and_results_is_answered():
    """What the client received goes back as it is, with the results."""

    def answer(prompt: str) -> str:
        if "rain in Oslo" not in prompt:
            return SYNTAXES["hermes"].write([OSLO])
        assert SYNTAXES["hermes"].write([OSLO]) in prompt and "<tool_response>\nrain in Oslo\n" in prompt
        return "Take an umbrella."

    with scripted(answer) as server:
        for ask in (whole, streamed):
            message = ask(server).message
            result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "rain in Oslo"}
            choice = ask(server, messages=[*QUESTION, message.to_dict(), result])
            assert choice.message.content == "Take an umbrella." and choice.finish_reason == "stop"


def test_tokenize_counts_the_tools():
    with scripted("x") as server:
        answer = server.client().chat.completions.create(model="fake", messages=QUESTION, tools=TOOLS)
        counted = server.post("/tokenize", {"messages": QUESTION, "tools": TOOLS})[1]["count"]
        assert counted == answer.usage.prompt_tokens > server.post("/tokenize", {"messages": QUESTION})[1]["count"]


def test_tokenize_checks_the_tools_beside_a_prompt_too():
    with scripted("x") as server:
        status, reply, _ = server.post("/tokenize", {"prompt": "a", "tools": [{"type": "function"}]})
    assert status == 400 and reply["error"]["param"] == "tools"


NAMED = {"type": "function", "function": {"name": "weather"}}


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tools": [1]}, "tools.0", "valid dictionary"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools", "needs a name of 1 to 64"),
        ({"tools": [{"type": "function", "function": {"name": "f", "x": 1}}]}, "tools", "not known, 'x'"),
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools", "must be a function"),
        ({"tools": [CLOCK, CLOCK]}, "tools", "has the name 'clock'"),
        ({"tools": [CLOCK] * 129}, "tools", "at most 128"),
        ({"tool_choice": NAMED}, "tool_choice", "not in tools"),
        ({"tools": [CLOCK], "tool_choice": NAMED}, "tool_choice", "not in tools"),
        ({"tools": [CLOCK], "tool_choice": {"type": "function"}}, "tool_choice", "must be none, auto, required or"),
        ({"tools": [CLOCK], "tool_choice": "any"}, "tool_choice", "'required'"),
        ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({"functions": [{"name": "f"}]}, "functions", "use tools"),
        ({"function_call": {"name": "f"}}, "functions", "use tools"),
        ({"messages": [{"role": "user", "content": "", "tool_calls": [{}]}]}, None, "only messages of the assistant"),
        ({"messages": [{"role": "tool", "content": "x", "tool_call_id": 1}]}, None, "must be a string"),
    ],
)
def test_a_bad_request_hears_one_sentence(fields, param, words):
    with scripted("x") as server:
        status, reply, _ = server.post("/v1/chat/completions", {"messages": QUESTION, **fields})
    assert status == 400 and words in reply["error"]["message"], reply
    if param:
        assert reply["error"]["param"] == param


@pytest.mark.parametrize("fields", [{"tools": []}, {"tool_choice": "auto"}, {"functions": [], "function_call": "none"}])
def test_fields_that_ask_for_nothing_are_accepted(fields):
    with scripted("x") as server:
        assert server.post("/v1/chat/completions", {"messages": QUESTION, **fields})[0] == 200


def test_a_template_with_an_unknown_syntax_needs_the_flag():
    template = "{{ tools }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    with scripted("x", template=template) as server:
        status, reply, _ = server.post("/v1/chat/completions", {"messages": QUESTION, "tools": TOOLS})
        assert status == 400 and "--tool-call-parser" in reply["error"]["message"]
        assert server.post("/v1/chat/completions", {"messages": QUESTION})[0] == 200
    with scripted(SYNTAXES["hermes"].write([OSLO]), template=template, tool_call_parser="hermes") as server:
        assert calls_of(whole(server).message) == [OSLO]
