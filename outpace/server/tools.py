"""Tools in requests: which functions the model may or must call, and what follows for prompt, sampling and answer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema

from outpace.backends.base import Tokenizer
from outpace.errors import UsageError
from outpace.models.tool_calls.grammar import MAX_CALLS, call_grammar, json_rule
from outpace.models.tool_calls.reader import CallReader
from outpace.models.tool_calls.syntax import CallSyntax
from outpace.models.tool_calls.tools import MAX_TOOLS, NAME_PATTERN, Tool, check_tools
from outpace.server.errors import ApiError
from outpace.structured import StructuredOutput

_FUNCTION = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": f"^{NAME_PATTERN}$"},
        "description": {"type": ["string", "null"]},
        "parameters": {"type": ["object", "null"], "description": "A JSON schema of an object."},
        "strict": {"type": ["boolean", "null"]},
    },
    "required": ["name"],
    "additionalProperties": False,
}
_TOOL = {
    "type": "object",
    "properties": {"type": {"const": "function"}, "function": _FUNCTION},
    "required": ["type", "function"],
    "additionalProperties": False,
}
_NAMED = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "properties": {"name": {"type": "string"}},
            "required": ["name"],
            "additionalProperties": False,
        },
    },
    "required": ["type", "function"],
    "additionalProperties": False,
}
# Checked by check_tools, in the thread that renders the prompt: schemas can be large.
ToolField = Annotated[dict[str, Any], WithJsonSchema(_TOOL)]
Tools = Annotated[list[ToolField], Field(fail_fast=True, max_length=MAX_TOOLS)]
NamedChoice = Annotated[dict[str, Any], WithJsonSchema(_NAMED)]
ToolChoice = Literal["none", "auto", "required"] | NamedChoice


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a request that may call some."""

    tools: tuple[Tool, ...]  # all that the prompt describes
    allowed: tuple[Tool, ...]  # those that may be called
    syntax: CallSyntax
    is_required: bool  # the answer is a call, and nothing else
    is_parallel: bool  # it may have several

    def reader(self) -> CallReader:
        names = [tool.name for tool in self.allowed]
        return CallReader(self.syntax, names, max_calls=None if self.is_parallel else 1)

    def structured(self, tokenizer: Tokenizer, content: StructuredOutput | None = None) -> StructuredOutput:
        """The form of the answer: calls that satisfy the schemas, or text, with calls after it, unless one is required.

        With `content` it is calls, or what that describes.
        """
        ends = tokenizer.end_ids
        return StructuredOutput(
            grammar=call_grammar(
                self.syntax,
                self.allowed,
                is_required=self.is_required,
                max_calls=MAX_CALLS if self.is_parallel else 1,
                content=None if content is None else _rule_of(content),
                controls={token.text: token.id for token in tokenizer.specials.controls.tokens if token.id not in ends},
            )
        )

    def visible_tokens(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        """The control tokens with which a call begins or ends, which the reader has to see."""
        marks = (self.syntax.opener, self.syntax.closer)
        return tuple(token.id for token in tokenizer.specials.controls.tokens if token.text in marks)


def _rule_of(content: StructuredOutput) -> str:
    """A structured output as a part of a grammar."""
    if content.json_schema is not None or content.json_object:
        schema = json.loads(str(content.json_schema)) if content.json_schema is not None else {"type": "object"}
        return json_rule({} if schema is True else schema)
    if content.choice is not None:
        return " | ".join(map(json.dumps, content.choice))
    message = "a regex or a grammar does not go together with tools; send a JSON schema, or tool_choice none"
    raise ApiError(400, message, param="tools", code="unsupported_parameter")


def tool_use(
    tools: Sequence[Mapping[str, Any]] | None,
    choice: str | Mapping[str, Any] | None,
    parallel: bool | None,
    syntax: CallSyntax | None,
) -> ToolUse | None:
    """What a request says about tools; None if the model may call none."""
    checked = checked_tools(tools)
    if choice == "none":
        return None
    named = _named(choice, checked) if isinstance(choice, Mapping) else None
    if not checked:
        if choice == "required":
            raise ApiError(400, "tool_choice is required, but there are no tools; send some", param="tool_choice")
        return None
    if syntax is None:
        message = (
            "this model's chat template shows no syntax of function calls that is known here; the server needs "
            "--tool-call-parser for tools"
        )
        raise ApiError(400, message, param="tools", code="unsupported_parameter")
    return ToolUse(
        tools=checked,
        allowed=checked if named is None else (named,),
        syntax=syntax,
        is_required=choice == "required" or named is not None,
        is_parallel=parallel is not False and named is None,
    )


def checked_tools(tools: Sequence[Mapping[str, Any]] | None) -> tuple[Tool, ...]:
    try:
        return check_tools(tools or ())
    except UsageError as error:
        raise ApiError(400, str(error), param="tools", code="invalid_value") from None


def _named(choice: Mapping[str, Any], tools: Sequence[Tool]) -> Tool:
    function = choice.get("function")
    name = function.get("name") if isinstance(function, Mapping) and set(function) == {"name"} else None
    if choice.get("type") != "function" or set(choice) != {"type", "function"} or not isinstance(name, str):
        message = "tool_choice must be none, auto, required or {'type': 'function', 'function': {'name': ...}}"
        raise ApiError(400, message, param="tool_choice", code="invalid_value")
    for tool in tools:
        if tool.name == name:
            return tool
    raise ApiError(
        400,
        "tool_choice names a function that is not in tools; send it there",
        param="tool_choice",
        code="invalid_value",
    )
