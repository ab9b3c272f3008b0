"""Tools, calls and results reach the template in the form it expects, or as text where it knows none of them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from outpace.errors import UsageError
from outpace.models.prompts import render
from outpace.models.tool_calls import SYNTAXES
from outpace.models.tool_calls.syntax import CallSyntax
from outpace.models.tool_calls.tools import check_tools
from tests.fakes import ByteTokenizer

CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
CONVERSATION: list[dict[str, Any]] = [
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    {"role": "tool", "tool_call_id": "call_2", "content": "sun"},
]
TOOLS = check_tools([{"type": "function", "function": {"name": "weather", "description": "It \u00e9"}}])
# Each family's own way, in short.
QWEN = (
    '{# {"name": #}'
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}{% for m in messages %}"
    "{{ m.role }}:{{ m.content }}{% for c in m.tool_calls %}<tool_call>{{ c.function.name }} "
    "{{ c.function.arguments | tojson }}</tool_call>{% endfor %}{{ '\n' }}{% endfor %}"
)
LLAMA = (
    "<|start_header_id|>{% if tools is not none %}{{ tools[0].function.name }}{% endif %}{% for m in messages %}"
    "{% if 'tool_calls' in m %}{% set c = m.tool_calls[0].function %}"
    '{"name": "{{ c.name }}", "parameters": {{ c.arguments | tojson }}}{% endif %}{% endfor %}'
)
MISTRAL = (
    "{{ tools | length }}[TOOL_CALLS]{% for m in messages %}{% for c in m.tool_calls or [] %}"
    "{% if c.id | length != 9 %}{{ raise_exception('nine') }}{% endif %}{{ c.id }} {% endfor %}{{ m.tool_call_id }} "
    "{% endfor %}"
)
DEEP = '{"a":' * 80 + "1" + "}" * 80
PLAIN = "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}"


def rendered(
    template: str,
    messages: list[dict[str, Any]] = CONVERSATION,
    tools: Any = TOOLS,
    syntax: CallSyntax | None = None,
) -> str:
    tokenizer = ByteTokenizer()
    tokenizer.chat_template = template
    return render(tokenizer, messages, tools=tools, syntax=syntax).text


def test_a_template_gets_tools_and_calls_with_arguments_as_mappings():
    text = rendered(QWEN)
    first, rest = text.split("\n", 1)
    schema = {"type": "object", "properties": {}}
    assert json.loads(first) == {
        "type": "function",
        "function": {"name": "weather", "description": "It é", "parameters": schema},
    }
    assert rest == ('user:Weather?\nassistant:<tool_call>weather {"city": "Oslo"}</tool_call>\ntool:rain\ntool:sun\n')
    assert rendered(LLAMA) == '<|start_header_id|>weather{"name": "weather", "parameters": {"city": "Oslo"}}'


def test_a_template_without_tools_sees_none():
    assert rendered(LLAMA, CONVERSATION[:1], ()) == "<|start_header_id|>"


def test_ids_are_made_to_fit_where_a_template_is_strict_about_them():
    made, answered, other = rendered(MISTRAL, CONVERSATION).removeprefix("1[TOOL_CALLS]").split()[-3:]
    assert made == answered != other and len(made) == 9 and made.isalnum()
    own = [{"role": "tool", "tool_call_id": "abcDEF123", "content": "x"}]
    assert rendered(MISTRAL, own).split()[-1] == "1[TOOL_CALLS]abcDEF123"


def test_a_template_that_does_not_know_calls_gets_them_as_text():
    assert rendered(PLAIN, CONVERSATION, ()) == (
        'user:Weather?\nassistant:<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>\n'
        "user:<tool_response>\nrain\n</tool_response>\n<tool_response>\nsun\n</tool_response>\n"
    )
    spoken = {"role": "assistant", "content": "Let me see.", "tool_calls": [CALL]}
    assert rendered(PLAIN, [spoken], ()).startswith("assistant:Let me see.\n<tool_call>")


def test_a_template_that_does_not_know_tools_gets_a_system_text():
    text = rendered(PLAIN, CONVERSATION[:1])
    system, user = text.rsplit("\nuser:", 1)
    assert system.startswith("system:You can call functions.") and user == "Weather?\n"
    assert '{"name": "weather", "description": "It é", ' in system and "<tool_call>\n{" in system
    own = rendered("SmolLM" + PLAIN, [{"role": "system", "content": "Be brief."}, *CONVERSATION[:1]])
    assert own.startswith("SmolLMsystem:Be brief.\n\nYou can call functions.") and "<tool_call>[{" in own


def test_a_template_with_a_syntax_nobody_knows_is_no_guess():
    with pytest.raises(UsageError, match="name one with --tool-call-parser"):
        rendered("{{ tools }}" + PLAIN)
    assert rendered("{{ tools }}" + PLAIN, CONVERSATION[:1], ()) == "Noneuser:Weather?\n"
    with pytest.raises(UsageError, match="name one with --tool-call-parser"):
        rendered("{{ tools }}" + PLAIN, CONVERSATION, ())  # its calls would be lost


def test_a_template_that_knows_results_but_no_calls_gets_results_as_they_are():
    template = "{# tool #}" + PLAIN
    text = rendered(template, CONVERSATION, (), SYNTAXES["hermes"])
    assert "<tool_call>" in text and text.endswith("tool:rain\ntool:sun\n")


@pytest.mark.parametrize(
    ("arguments", "seen"),
    [("", "{}"), (None, "{}"), ({"a": 1}, '{"a": 1}'), ("{oops", '"{oops"'), ("[1]", '"[1]"'), ("[" * 9999, '"[[')],
)
def test_arguments_that_are_no_object_stay_as_they_are(arguments, seen):
    call = {"id": "x", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    assert f"weather {seen}" in rendered(QWEN, [{"role": "assistant", "content": None, "tool_calls": [call]}])


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"role": "user", "content": "", "tool_calls": [CALL]}, "only messages of the assistant"),
        ({"role": "assistant", "tool_calls": "f"}, "must be a list of at most 128"),
        ({"role": "assistant", "tool_calls": [CALL] * 129}, "must be a list of at most 128"),
        ({"role": "assistant", "tool_calls": [1]}, r"messages\[0\].tool_calls\[0\] must be"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": 1}}]}, "name and id as strings"),
        ({"role": "assistant", "tool_calls": [{"type": "custom", "function": {"name": "f"}}]}, "call of a function"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 1}}]}, "JSON object"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": DEEP}}]}, "more than 64 levels"),
        ({"role": "assistant", "content": None}, "needs content"),
        ({"role": "assistant", "content": None, "tool_calls": []}, "needs content"),
        ({"role": "tool", "content": "x", "tool_call_id": 5}, "tool_call_id of"),
    ],
)  # fmt: skip
def test_bad_calls_in_the_history_hear_one_sentence(message, words):
    with pytest.raises(UsageError, match=words):
        rendered(QWEN, [message])
