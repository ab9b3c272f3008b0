"""Calls are found in a model's answer however it is cut into pieces, and all that is no call stays text."""

from __future__ import annotations

import json
import random

import pytest

from outpace.errors import UsageError
from outpace.models.tool_calls import SYNTAXES, syntax_for
from outpace.models.tool_calls.reader import CallReader
from outpace.models.tool_calls.syntax import Call
from outpace.models.tool_calls.tools import MAX_SCHEMA_DEPTH, MAX_TOOLS, check_tools

NAMES = ("weather", "now", "add")
HERMES_CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


def read(syntax: str, pieces: list[str], max_calls: int | None = None) -> tuple[str, list[tuple[str, str]]]:
    """The text and the calls, put together as a client does."""
    reader = CallReader(SYNTAXES[syntax], NAMES, max_calls=max_calls)
    content, names, arguments = "", list[str](), list[str]()
    for found in [*map(reader.feed, pieces), reader.finish()]:
        content += found.content
        for delta in found.calls:
            if delta.name is not None:
                assert delta.index == len(names), "a call begins with its name"
                names.append(delta.name)
                arguments.append("")
            arguments[delta.index] += delta.arguments
    return content, list(zip(names, arguments, strict=True))


WEATHER = ("weather", '{"city": "Oslo"}')
ADD = ("add", '{"x": [1, {"y": "}\\"]"}], "z": 2}')
ADD_JSON = '{"name": "add", "%s": ' + ADD[1] + "}"
CASES = [
    # syntax, answer, text, calls
    ("hermes", HERMES_CALL, "", [WEATHER]),
    ("hermes", f"Let me look.\n{HERMES_CALL}\n", "Let me look.", [WEATHER]),
    ("hermes", f"{HERMES_CALL}\n{HERMES_CALL} And more.", " And more.", [WEATHER, WEATHER]),
    ("hermes", "<tool_call>" + ADD_JSON % "arguments" + "</tool_call>", "", [ADD]),
    ("hermes", '<tool_call>{"arguments": {"city": "Oslo"}, "name": "weather"}</tool_call>', "", [WEATHER]),
    ("hermes", '<tool_call>{"id": "x", "type": "function", "name": "now"}</tool_call>', "", [("now", "{}")]),
    ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}', "", [WEATHER]),
    ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": "Os', "", [("weather", '{"city": "Os')]),
    ("hermes", f"{HERMES_CALL[:-4]}", "", [WEATHER]),
    ("smollm2", f"<tool_call>[{ADD_JSON % 'arguments'}, {ADD_JSON % 'arguments'}]</tool_call>", "", [ADD, ADD]),
    ("smollm2", "<tool_call>[]</tool_call>", "", []),
    ("mistral", f"[TOOL_CALLS] [{ADD_JSON % 'arguments'}]", "", [ADD]),
    ("mistral", f"Yes. [TOOL_CALLS][{ADD_JSON % 'arguments'}] no", "Yes. no", [ADD]),
    ("llama3_json", ADD_JSON % "parameters", "", [ADD]),
    ("llama3_json", "\n\n" + ADD_JSON % "parameters", "", [ADD]),
    ("llama3_json", f"<|python_tag|>{ADD_JSON % 'parameters'}; {ADD_JSON % 'parameters'}", "", [ADD, ADD]),
    ("llama3_json", f"Look: <|python_tag|>{ADD_JSON % 'arguments'}", "Look:", [ADD]),
]
TEXTS = [
    ("hermes", "a < b, <tool, <tool_cal\n <tool_calls> "),
    ("hermes", "  \n"),
    ("hermes", "<tool_call>\nno JSON\n</tool_call>"),
    ("hermes", '<tool_call>{"name": "rm", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "weather", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"name": "weather", "arguments": null}</tool_call>'),
    ("hermes", '<tool_call>{"arguments": {"city": "Oslo"}, "name": "rm"}</tool_call>'),
    ("hermes", '<tool_call>{"arguments": {}, "arguments": {}, "name": "now"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "n\\ow"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "now",}</tool_call>'),
    ("hermes", f'<tool_call>{{"id": "{"x" * 300}", "name": "now"}}</tool_call>'),
    ("hermes", "<tool_call>{}</tool_call>"),
    ("hermes", '<tool_call>{"name": "wea'),
    ("smollm2", '<tool_call>["weather"]</tool_call>'),
    ("mistral", "[TOOL_CALLS is no token] [1, 2]"),
    ("llama3_json", '{"name": "Oslo", "parameters": {}}'),
    ("llama3_json", '{"capital": {"name": "weather", "parameters": {}}}'),
    ("llama3_json", '[{"name": 1}]'),
    ("llama3_json", "<|python_tag|>brave_search.call(query='x')"),
    ("llama3_json", 'So: {"name": "now", "parameters": {}}'),
]


def cuts(text: str) -> list[list[str]]:
    """The text whole, in characters, and in random pieces."""
    rng = random.Random(text)
    found = [[text], list(text)]
    for _ in range(20):
        places = sorted(rng.choices(range(len(text) + 1), k=rng.randrange(1, 8)))
        found.append([text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)])
    return found


@pytest.mark.parametrize(("syntax", "answer", "content", "calls"), CASES)
def test_calls_are_found_in_pieces_of_any_size(syntax, answer, content, calls):
    for pieces in cuts(answer):
        assert read(syntax, pieces) == (content, calls), pieces


@pytest.mark.parametrize(("syntax", "text"), TEXTS)
def test_text_that_only_looks_like_a_call_is_given_back(syntax, text):
    for pieces in cuts(text):
        assert read(syntax, pieces) == (text, []), pieces


def test_a_call_after_one_that_was_none_is_found():
    text = "<tool_call> <tool_call>\nwords <tool_call>"
    for pieces in cuts(text + HERMES_CALL):
        assert read("hermes", pieces) == (text, [WEATHER])


def test_text_after_a_call_without_a_closer_is_complete():
    for pieces in cuts('[TOOL_CALLS]{"name": "now"}[TOOL_CALLS] none'):
        assert read("mistral", pieces) == ("[TOOL_CALLS] none", [("now", "{}")])


def test_what_follows_a_broken_call_is_text():
    broken = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"} oops</tool_call>'
    for pieces in cuts(broken):
        assert read("hermes", pieces) == (" oops</tool_call>", [WEATHER])


def test_only_the_first_calls_are_kept_where_asked():
    for pieces in cuts(f"{HERMES_CALL}\n{HERMES_CALL}\nbye"):
        assert read("hermes", pieces, max_calls=1) == ("\nbye", [WEATHER])


def test_the_name_of_a_call_comes_as_soon_as_its_arguments_begin():
    reader = CallReader(SYNTAXES["hermes"], NAMES)
    assert not reader.feed('<tool_call>{"name": "weather", "arguments": ').calls
    [first] = reader.feed('{"ci').calls
    [second] = reader.feed('ty": ').calls
    assert (first.name, first.arguments, second.name, second.arguments) == ("weather", '{"ci', None, 'ty": ')


@pytest.mark.parametrize("syntax", SYNTAXES.values(), ids=SYNTAXES)
def test_a_syntax_reads_what_it_writes(syntax):
    calls = [Call("weather", {"city": 'Å "quoted" \\ {'}), Call("now", {}), Call("add", {"x": [1, {"y": None}]})]
    for written in (calls, calls[:1]):
        content, found = read(syntax.name, [syntax.write(written)])
        assert content == "" and [Call(name, json.loads(text)) for name, text in found] == written


BITS = [
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", '{"name": "now"}', '{"name": "rm"', "[", "]", ", ",
    '{"name": "weather", "arguments": {"city": "x"}}', '{"arguments": {"q": [1, "}"]}, "name": "add"}', "; ", "\n", " ",
    "words", "{", "}", '"', "\\", "<", "<tool", "é",
]  # fmt: skip


@pytest.mark.parametrize("syntax", SYNTAXES)
def test_any_mixture_is_read_alike_in_any_pieces_and_loses_no_words(syntax):
    rng, num_calls = random.Random(1), 0
    for _ in range(1000):
        text = "".join(rng.choices(BITS, k=rng.randrange(1, 14)))
        content, calls = read(syntax, [text])
        assert all(read(syntax, pieces) == (content, calls) for pieces in cuts(text)[1:4]), text
        for word in ("words", "é"):
            assert content.count(word) + sum(arguments.count(word) for _, arguments in calls) == text.count(word), text
        num_calls += len(calls)
    assert num_calls > 20, "hardly tried"


def test_text_full_of_openers_without_end_is_given_back():
    reader = CallReader(SYNTAXES["hermes"], NAMES)
    text = '<tool_call>{"arguments": {' * 4000
    content = "".join(reader.feed(piece).content for piece in text) + reader.finish().content
    assert content == text


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ tools }} {{ '<tool_call>{\"name\": ' }}{{ tool_call }}</tool_call>", "hermes"),
        ('{{ tools }} {{ "<tool_call>{\\"name\\": <name>}" }}', "hermes"),
        ("{{ tools }} <tool_call>{{ tool_call }}</tool_call>", None),
        ("{{ tools }} <tool_call><function={{ name }}>", None),
        ('{% if tools %}<|start_header_id|>ipython {"name": , "parameters": }', "llama3_json"),
        ("{% if tools %}<|start_header_id|>ipython {parameters}", None),
        ("{{ tools }}[TOOL_CALLS] [", "mistral"),
        ("{{ tools }}[TOOL_CALLS]name[ARGS]{", None),
        ("You are SmolLM{{ messages }}", "smollm2"),
        ("You are SmolLM{{ messages }}{{ message.tool_calls }}", None),
        ("{{ messages }}", "hermes"),
        ("{{ message.tool_calls }}", None),
        ("{{ tools | tojson }}", None),
        (None, "hermes"),
    ],
)
def test_the_syntax_of_a_template(template, name):
    syntax = syntax_for(template)
    assert (syntax.name if syntax else None) == name


def test_a_syntax_can_be_chosen_by_name():
    chosen = syntax_for("You are SmolLM", "mistral")
    assert chosen is SYNTAXES["mistral"]
    with pytest.raises(UsageError, match="no tool call parser 'qwen'; use auto, hermes"):
        syntax_for("", "qwen")


def function(**fields: object) -> dict[str, object]:
    return {"type": "function", "function": {"name": "f", **fields}}


def nested(levels: int) -> dict[str, object]:
    schema: dict[str, object] = {"type": "object"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


@pytest.mark.parametrize(
    ("tools", "words"),
    [
        ("f", "must be a list"),
        ([1], "must be a function"),
        ([{"type": "custom", "custom": {"name": "f"}}], "must be a function"),
        ([function(name="a b")], r"tools\[0\] needs a name"),
        ([function(name="x" * 65)], "needs a name"),
        ([function(name="")], "needs a name"),
        ([function(name="é")], "needs a name"),
        ([function(), function()], r"tools\[1\] has the name 'f'"),
        ([function(parameters=[])], "must be a JSON schema of an object"),
        ([function(parameters={"type": "string"})], "must be a JSON schema of an object"),
        ([function(parameters=nested(MAX_SCHEMA_DEPTH))], "have more than 64 levels"),
        ([function(description=1)], "description"),
        ([function(strict="yes")], "strict"),
        ([function()] * (MAX_TOOLS + 1), "at most 128"),
    ],
)
def test_bad_tools_hear_one_sentence(tools, words):
    with pytest.raises(UsageError, match=words):
        check_tools(tools)


def test_a_function_without_parameters_has_an_empty_object():
    for given in (function(), function(parameters=None), function(parameters={})):
        [tool] = check_tools([given])
        assert tool.parameters == {"type": "object", "properties": {}}
        assert tool.as_dict()["function"]["description"] == ""
