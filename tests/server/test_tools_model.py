"""Tools with a real model, whose template knows none: what is required comes by the grammar, valid by its schema."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from outpace import LLM
from tests.server_helper import LiveServer, live

pytestmark = pytest.mark.model

QUESTION: list[Any] = [{"role": "user", "content": "What is the weather in Paris today?"}]
SCHEMAS: dict[str, Any] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 30},
            "unit": {"enum": ["celsius", "fahrenheit"]},
            "days": {"type": "integer", "minimum": 1, "maximum": 14},
        },
        "required": ["city", "unit"],
        "additionalProperties": False,
    },
    "plan_trip": {
        "type": "object",
        "properties": {
            "stops": {"type": "array", "items": {"$ref": "#/$defs/stop"}, "minItems": 1, "maxItems": 2},
        },
        "required": ["stops"],
        "additionalProperties": False,
        "$defs": {
            "stop": {
                "type": "object",
                "properties": {
                    "place": {"type": "string", "maxLength": 20},
                    "nights": {"type": "integer", "maximum": 9},
                },
                "required": ["place", "nights"],
                "additionalProperties": False,
            }
        },
    },
    "now": {"type": "object", "properties": {}},
}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": each}} for name, each in SCHEMAS.items()]


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with LLM(threads=1, max_context=2048, cache_tokens=8192, max_sequences=4) as llm:
        llm.engine.calibrate()
        with live(llm.engine, llm.tokenizer, 2048, model_names=("SmolLM2-135M-Instruct",)) as server:
            yield server
            server.check_clean()


def ask(server: LiveServer, **options: Any) -> Any:
    defaults = {"model": "SmolLM2-135M-Instruct", "messages": QUESTION, "tools": TOOLS, "max_tokens": 400}
    return server.client().chat.completions.create(**(defaults | options))


def check(call: Any) -> None:
    jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("speculation", ["off", "auto"])
def test_a_required_call_is_valid(server, temperature, speculation):
    answer = ask(
        server, tool_choice="required", parallel_tool_calls=False, temperature=temperature, seed=3,
        extra_body={"speculation": {"mode": speculation}},
    )  # fmt: skip
    [call] = answer.choices[0].message.tool_calls
    check(call)
    assert answer.choices[0].finish_reason == "tool_calls" and answer.choices[0].message.content is None


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_named_function_is_called_streamed_or_not(server, name):
    choice = {"type": "function", "function": {"name": name}}
    [call] = ask(server, tool_choice=choice, temperature=0).choices[0].message.tool_calls
    assert call.function.name == name
    check(call)
    with server.client().chat.completions.stream(
        model="SmolLM2-135M-Instruct", messages=QUESTION, tools=TOOLS, tool_choice=choice, temperature=0, max_tokens=400
    ) as stream:
        [streamed] = stream.get_final_completion().choices[0].message.tool_calls
    assert (streamed.function.name, streamed.function.arguments) == (name, call.function.arguments)


def test_several_calls_of_one_answer_are_valid(server):
    answer = ask(server, tool_choice="required", temperature=1, seed=5, n=4)
    for choice in answer.choices:
        calls = choice.message.tool_calls
        for call in calls if choice.finish_reason == "tool_calls" else calls[:-1]:
            check(call)


def test_a_free_answer_is_text_or_valid_calls(server):
    for seed in range(4):
        choice = ask(server, temperature=1, seed=seed, max_tokens=60).choices[0]
        if choice.finish_reason == "tool_calls":
            for call in choice.message.tool_calls:
                check(call)
        else:
            assert choice.message.content


def test_a_result_is_answered(server):
    [call] = ask(server, tool_choice="required", parallel_tool_calls=False, temperature=0).choices[0].message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": "Sunny, 21 degrees."}
    history = [*QUESTION, {"role": "assistant", "content": None, "tool_calls": [call.to_dict()]}, result]
    answer = ask(server, messages=history, tool_choice="none", temperature=0, max_tokens=40)
    assert answer.choices[0].message.content and answer.choices[0].message.tool_calls is None


def test_the_examples_of_the_documentation_run(server, capsys):
    page = (Path(__file__).parents[2] / "docs" / "server.md").read_text(encoding="utf-8")
    [code] = re.findall(r"```python\n(from openai.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {}
    exec(code.replace("http://localhost:8000", server.url), names)
    assert capsys.readouterr().out.startswith('weather {"city": ')
    answer = ask(server, messages=names["messages"], tools=[names["weather"]], max_tokens=20)
    assert answer.choices[0].finish_reason in ("stop", "length", "tool_calls")
    [code] = re.findall(r"```python\n(weather = .*?client\.responses.*?)```", page, re.DOTALL)
    exec(code.replace('"max_output_tokens": 100', '"max_output_tokens": 40'), names)
    assert capsys.readouterr().out.strip() and names["call"].type == "function_call"
