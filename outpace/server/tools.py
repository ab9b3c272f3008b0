"""The fields of requests that are about tools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema

from outpace.errors import UsageError
from outpace.models.tool_calls.history import UNKNOWN_SYNTAX
from outpace.models.tool_calls.syntax import CallSyntax
from outpace.models.tool_calls.tools import MAX_TOOLS, NAME_PATTERN, Tool, check_tools
from outpace.models.tool_calls.use import ToolUse, tool_use
from outpace.server.errors import ApiError

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


def use_of(
    tools: Sequence[Mapping[str, Any]] | None,
    choice: str | Mapping[str, Any] | None,
    parallel: bool | None,
    syntax: CallSyntax | None,
) -> ToolUse | None:
    """What a request says about tools; None if the model may call none."""
    checked = checked_tools(tools)
    if syntax is None:
        if checked and choice != "none":
            raise ApiError(400, UNKNOWN_SYNTAX, param="tools", code="unsupported_parameter")
        return None
    try:
        return tool_use(checked, choice, is_parallel=parallel is not False, syntax=syntax)
    except UsageError as error:
        raise ApiError(400, str(error), param="tool_choice", code="invalid_value") from None


def checked_tools(tools: Sequence[Mapping[str, Any]] | None) -> tuple[Tool, ...]:
    try:
        return check_tools(tools or ())
    except UsageError as error:
        raise ApiError(400, str(error), param="tools", code="invalid_value") from None
