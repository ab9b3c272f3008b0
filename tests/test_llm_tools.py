"""Tools from Python: `LLM.chat` gives back calls that satisfy the schemas of their functions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from outpace import LLM, SamplingParams
from outpace.errors import UsageError

pytestmark = pytest.mark.model

LIGHT = {
    "type": "function",
    "function": {
        "name": "light",
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
MESSAGES: list[Any] = [{"role": "user", "content": "Make the attic bright."}]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(threads=1, max_context=1024) as llm:
        yield llm


def test_a_named_function_is_called_in_every_conversation(llm):
    named = {"type": "function", "function": {"name": "light"}}
    outputs = llm.chat([MESSAGES, MESSAGES], SamplingParams(seed=1, n=2), tools=[LIGHT], tool_choice=named)
    for completion in (completion for output in outputs for completion in output.outputs):
        [call] = completion.tool_calls
        arguments = json.loads(call.arguments)
        assert call.name == "light" and set(arguments) == {"room", "level"} and 0 <= arguments["level"] <= 5
        assert completion.text == "" and completion.finish_reason == "stop"


def test_without_tools_nothing_is_different(llm):
    params = SamplingParams(temperature=0.0, max_tokens=20)
    [plain], [none] = llm.chat(MESSAGES, params), llm.chat(MESSAGES, params, tools=[LIGHT], tool_choice="none")
    assert plain.outputs[0].text == none.outputs[0].text and not plain.outputs[0].tool_calls


def test_wrong_tools_are_usage_errors(llm):
    for tools, choice, words in (([{}], "auto", "must be a function"), ([LIGHT], "any", "tool_choice must be")):
        with pytest.raises(UsageError, match=words):
            llm.chat(MESSAGES, tools=tools, tool_choice=choice)
