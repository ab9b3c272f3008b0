"""A grammar for answers with calls: Lark, as llguidance reads it, with each function's schema for its arguments.

Calls are written exactly as in the syntax, so most of their text is forced, and can be drafted. Text before a call is
free; where the text of an opener appears in it, or its control token, a call must follow. After its first call an
answer has only calls.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from outpace.models.tool_calls.syntax import CallSyntax
from outpace.models.tool_calls.tools import Tool

MAX_CALLS = 32  # in one answer; a small model may repeat a call without end
_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_EMPTY_OBJECT_FIELDS = {"type", "properties", "required", "title", "description", "$schema"}


def call_grammar(
    syntax: CallSyntax,
    tools: Sequence[Tool],
    *,
    is_required: bool,
    max_calls: int = MAX_CALLS,
    content: str | None = None,
    controls: Mapping[str, int],
) -> str:
    """Calls of these tools; without `is_required` there may be text before them, or only text.

    `content` is a rule for answers without calls, if they may not be any text; no text precedes calls then.
    `controls` are the ids of the model's control tokens, except those that end an answer.
    """
    rules: dict[str, str] = {}
    for i, tool in enumerate(tools):
        rules[f"arguments_{i}"] = _arguments(tool)
        rules[f"call_{i}"] = f"{_literal(_head(syntax, tool))} arguments_{i}"
    rules["call"] = " | ".join(f"call_{i}" for i in range(len(tools)))
    if is_required or content is not None:
        is_bare = syntax.begins_bare and is_required  # beside other JSON, the opener tells calls from it
        opener = "" if is_bare else _opener(syntax, controls)
        calls = f"{opener} {_after_opener(syntax, controls, max_calls)}"
        rules["start"] = calls if is_required else f"{calls} | {content}"
    else:
        rules |= _text_and_calls(syntax, tools, controls, max_calls)
    return "".join(f"{name}: {rule}\n" for name, rule in rules.items())


def _text_and_calls(
    syntax: CallSyntax, tools: Sequence[Tool], controls: Mapping[str, int], max_calls: int
) -> dict[str, str]:
    after = _after_opener(syntax, controls, max_calls)
    answers = ["TEXT"]
    rules = {"TEXT": "/(.|\\n)*/"}
    if syntax.opener in controls:
        answers.append(f"TEXT {_opener(syntax, controls)} {after}")
    else:
        rules["opening[lazy]"] = f"TEXT {_literal(syntax.opener)}"
        answers.append(f"opening {_literal(syntax.space)} {after}")
    if syntax.begins_bare:
        for i, tool in enumerate(tools):
            rules[f"head_{i}[lazy]"] = _literal(_head(syntax, tool))
            answers.append(f"head_{i} arguments_{i} {_more(syntax, controls, max_calls)}")
    others = {token for text, token in controls.items() if text not in (syntax.opener, syntax.closer)}
    before = f"(TEXT <[{_ranges(others)}]>)*" if others else ""  # such as those around a model's thoughts
    rules["start"] = f"{before} ({' | '.join(answers)})"
    return rules


def _opener(syntax: CallSyntax, controls: Mapping[str, int]) -> str:
    if syntax.opener in controls:
        return f"<[{controls[syntax.opener]}]> {_literal(syntax.space)}"
    return _literal(syntax.opener + syntax.space)


def _closer(syntax: CallSyntax, controls: Mapping[str, int]) -> str:
    if syntax.closer in controls:
        return f"{_literal(syntax.space)} <[{controls[syntax.closer]}]>"
    return _literal(syntax.space + syntax.closer)


def _after_opener(syntax: CallSyntax, controls: Mapping[str, int], max_calls: int) -> str:
    """The calls after the opener of the first, to the end of the answer."""
    closer = _closer(syntax, controls)
    if syntax.is_list:
        following = _repeated('", " call', max_calls - 1)
        return f'"[" call {following} "]" {closer}'
    return f"call {closer} {_more(syntax, controls, max_calls)}"


def _more(syntax: CallSyntax, controls: Mapping[str, int], max_calls: int) -> str:
    """What may follow the first call of a syntax without lists."""
    if syntax.separator:
        return _repeated(f"{_literal(syntax.separator)} call", max_calls - 1)
    following = _repeated(f'"\\n" {_opener(syntax, controls)} call {_closer(syntax, controls)}', max_calls - 1)
    return f'{following} "\\n"?'


def _repeated(rule: str, times: int) -> str:
    return f"({rule}){{0,{times}}}" if times else ""


def _head(syntax: CallSyntax, tool: Tool) -> str:
    return f'{{"name": "{tool.name}", "{syntax.arguments_key}": '


def _arguments(tool: Tool) -> str:
    """The rest of a call: its arguments by their schema, and the closing brace."""
    schema = {**tool.parameters, "type": "object", "x-guidance": {"lenient": not tool.strict}}
    if not schema.get("properties") and set(tool.parameters) <= _EMPTY_OBJECT_FIELDS:
        schema["additionalProperties"] = False
    return f'{json_rule(schema)} "}}"'


def json_rule(schema: Mapping[str, Any]) -> str:
    """JSON by a schema, on one line, with a space after ":" and ",", as most models write it."""
    return f"%json {json.dumps({**schema, 'x-guidance': {**_JSON_STYLE, **schema.get('x-guidance', {})}})}"


def _literal(text: str) -> str:
    return json.dumps(text) if text else ""


def _ranges(tokens: Collection[int]) -> str:
    """Token ids as llguidance lists them: 3-5,9."""
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in _runs(sorted(tokens)))


def _runs(tokens: Sequence[int]) -> Iterator[tuple[int, int]]:
    low = high = tokens[0]
    for token in tokens[1:]:
        if token > high + 1:
            yield low, high
            low = token
        high = token
    yield low, high
