"""The functions that a request offers to the model, checked."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outpace.errors import UsageError

MAX_TOOLS = 128
MAX_SCHEMA_DEPTH = 64  # lists and objects inside each other; llguidance and templates recurse for each
NAME_PATTERN = "[a-zA-Z0-9_-]{1,64}"
_TOOL_FIELDS = {"type", "function"}
_FUNCTION_FIELDS = {"name", "description", "parameters", "strict"}
_NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}


@dataclass(frozen=True, slots=True)
class Tool:
    name: str
    description: str
    parameters: Mapping[str, Any]  # a JSON schema of an object
    strict: bool  # a schema that cannot be enforced is refused

    def as_dict(self) -> dict[str, Any]:
        """As templates and models know it."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


def check_tools(given: object) -> tuple[Tool, ...]:
    """The tools of a request in OpenAI's format. Raises UsageError for the first that is wrong."""
    if not isinstance(given, Sequence) or isinstance(given, str | bytes):
        raise UsageError(f"tools must be a list of functions; got {type(given).__name__}")
    if len(given) > MAX_TOOLS:
        raise UsageError(f"there are {len(given)} tools; at most {MAX_TOOLS} are allowed")
    tools = tuple(_check_tool(f"tools[{i}]", tool) for i, tool in enumerate(given))
    names = [tool.name for tool in tools]
    for i, name in enumerate(names):
        if name in names[:i]:
            raise UsageError(f"tools[{i}] has the name {name!r}, as another tool has; give each its own")
    return tools


def _check_tool(where: str, tool: object) -> Tool:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(tool, Mapping) or tool.get("type") != "function" or not isinstance(function, Mapping):
        raise UsageError(f"{where} must be a function: {{'type': 'function', 'function': {{'name': ...}}}}")
    unknown = sorted(map(str, [*(set(tool) - _TOOL_FIELDS), *(set(function) - _FUNCTION_FIELDS)]))
    if unknown:
        raise UsageError(f"{where} has a field that is not known, {unknown[0][:64]!r}; leave it out")
    name, description = function.get("name"), function.get("description")
    if not isinstance(name, str) or not re.fullmatch(NAME_PATTERN, name):
        raise UsageError(f"{where} needs a name of 1 to 64 letters, digits, underscores and hyphens")
    if not isinstance(description, str | None):
        raise UsageError(f"the description of {where} must be a string")
    strict = function.get("strict")
    if not isinstance(strict, bool | None):
        raise UsageError(f"strict of {where} must be true or false")
    return Tool(name, description or "", _check_parameters(where, function.get("parameters")), bool(strict))


def _check_parameters(where: str, parameters: object) -> Mapping[str, Any]:
    if parameters is None or parameters == {}:
        return _NO_PARAMETERS
    if not isinstance(parameters, Mapping) or parameters.get("type", "object") != "object":
        raise UsageError(f"the parameters of {where} must be a JSON schema of an object, such as {{'type': 'object'}}")
    if is_deeper_than(parameters, MAX_SCHEMA_DEPTH):
        raise UsageError(f"the parameters of {where} have more than {MAX_SCHEMA_DEPTH} levels; use a flatter schema")
    return parameters


def is_deeper_than(value: object, levels: int) -> bool:
    """Whether lists and objects are nested deeper than this."""
    layer = [value]
    for _ in range(levels + 1):
        inner: list[object] = []
        for part in layer:
            if isinstance(part, Mapping):
                inner += part.values()
            elif isinstance(part, list | tuple):
                inner += part
        if not inner:
            return False
        layer = inner
    return True
