"""Calls and their results in a conversation: checked, and written for templates that do not know them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from outpace.errors import UsageError
from outpace.models.tool_calls.syntax import Call, CallSyntax
from outpace.models.tool_calls.tools import MAX_TOOLS, is_deeper_than

_MAX_ARGUMENT_DEPTH = 64
UNKNOWN_SYNTAX = (
    "this model's chat template shows no syntax of function calls that is known here; name one with "
    "--tool-call-parser, or send no tools"
)


def check_tool_fields(where: str, message: Mapping[str, Any]) -> dict[str, Any]:
    """The message, with the arguments of its calls as mappings, which templates expect."""
    fields = dict(message)
    calls = fields.pop("tool_calls", None)
    if calls:
        if fields["role"] != "assistant":
            raise UsageError(f"{where} has tool_calls; only messages of the assistant can have them")
        if not isinstance(calls, list | tuple) or len(calls) > MAX_TOOLS:
            raise UsageError(f"tool_calls of {where} must be a list of at most {MAX_TOOLS} calls")
        fields["tool_calls"] = [_check_call(f"{where}.tool_calls[{i}]", call) for i, call in enumerate(calls)]
    if not isinstance(fields.get("tool_call_id"), str | None):
        raise UsageError(f"tool_call_id of {where} must be a string")
    return fields


def _check_call(where: str, call: object) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise UsageError(f"{where} must be {{'id': ..., 'type': 'function', 'function': {{...}}}}")
    name, identity = function.get("name"), call.get("id")
    if call.get("type", "function") != "function" or not isinstance(name, str) or not isinstance(identity, str | None):
        raise UsageError(f"{where} must be a call of a function, with its name and id as strings")
    found = {"type": "function", "function": {"name": name, "arguments": _arguments(where, function.get("arguments"))}}
    return found if identity is None else {"id": identity, **found}


def _arguments(where: str, given: object) -> Any:
    """The arguments as a mapping. What a model wrote and is no JSON stays a text, so that the model can correct it."""
    if given is None or given == "":
        return {}
    if not isinstance(given, str | Mapping):
        raise UsageError(f"the arguments of {where} must be a string with a JSON object")
    try:
        arguments = json.loads(given) if isinstance(given, str) else given
    except (ValueError, RecursionError):
        return given
    if is_deeper_than(arguments, _MAX_ARGUMENT_DEPTH):
        raise UsageError(f"the arguments of {where} have more than {_MAX_ARGUMENT_DEPTH} levels; send flatter ones")
    return arguments if isinstance(arguments, Mapping) else given


def adapt(
    messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]], syntax: CallSyntax | None, template: str
) -> tuple[list[dict[str, Any]], Sequence[dict[str, Any]]]:
    """Messages and tools for this template: what it does not know is written into the texts of messages."""
    knows_calls = "tool_calls" in template
    if syntax is None:
        if tools or (not knows_calls and any(message.get("tool_calls") for message in messages)):
            raise UsageError(UNKNOWN_SYNTAX)
        return list(messages), ()
    adapted = _with_known_ids(messages, syntax) if knows_calls else _with_written_calls(messages, syntax)
    if "tool" not in template:
        adapted = _with_written_results(adapted)
    if not tools or "tools" in template:
        return adapted, tools
    return _with_system_text(adapted, syntax.describe(tools)), ()


def _with_known_ids(messages: Sequence[dict[str, Any]], syntax: CallSyntax) -> list[dict[str, Any]]:
    def change(fields: dict[str, Any], key: str) -> dict[str, Any]:
        return {**fields, key: syntax.call_id(fields[key])} if isinstance(fields.get(key), str) else fields

    def change_calls(message: dict[str, Any]) -> dict[str, Any]:
        calls = message.get("tool_calls")
        return {**message, "tool_calls": [change(call, "id") for call in calls]} if calls else message

    return [change_calls(change(message, "tool_call_id")) for message in messages]


def _with_written_calls(messages: Sequence[dict[str, Any]], syntax: CallSyntax) -> list[dict[str, Any]]:
    """Calls as the model writes them."""

    def written(message: dict[str, Any]) -> dict[str, Any]:
        calls = message.get("tool_calls")
        if not calls:
            return message
        text = syntax.write([Call(call["function"]["name"], call["function"]["arguments"]) for call in calls])
        content = f"{message['content']}\n{text}" if message["content"] else text
        return {"role": "assistant", "content": content}

    return [written(message) for message in messages]


def _with_written_results(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Results of calls that follow each other as one turn of the user."""
    written: list[dict[str, Any]] = []
    for is_result, group in groupby(messages, lambda message: message["role"] == "tool"):
        if is_result:
            results = [f"<tool_response>\n{message['content']}\n</tool_response>" for message in group]
            written.append({"role": "user", "content": "\n".join(results)})
        else:
            written += group
    return written


def _with_system_text(messages: Sequence[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    if messages[0]["role"] == "system":
        first = {**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}
        return [first, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]
