"""How a family of models writes calls of functions. Each family is one file of this folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Call:
    name: str
    arguments: Any  # a mapping; in a history also a text that is no JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSyntax:
    """Calls are JSON objects with a name and arguments, between an opener and a closer."""

    name: str
    opener: str  # before a call, or before the list of calls
    closer: str = ""
    begins_bare: bool = False  # an answer may also begin with a call without its opener
    is_list: bool = False  # the calls of an answer are written as one JSON list
    separator: str = ""  # between calls that share an opener and are no list
    space: str = ""  # between the opener, the JSON and the closer
    arguments_key: str = "arguments"
    knows: Callable[[str], bool]  # whether a chat template uses this syntax
    call_id: Callable[[str], str] = str  # the id of a call, as the family's templates accept it

    def write(self, calls: Sequence[Call]) -> str:
        """Calls as the model writes them, for the history of a template that does not know calls."""
        written = [self.write_call(call) for call in calls]
        if self.is_list:
            written = ["[" + ", ".join(written) + "]"]
        if self.separator:
            return self.separator.join(written)
        return "\n".join(f"{self.opener}{self.space}{each}{self.space}{self.closer}" for each in written)

    def write_call(self, call: Call) -> str:
        return to_json({"name": call.name, self.arguments_key: call.arguments})

    def describe(self, tools: Sequence[Mapping[str, Any]]) -> str:
        """The system text for templates that do not know tools."""
        example = self.write([Call("NAME", {"PARAMETER": "VALUE"})])
        listed = "\n".join(to_json(tool["function"]) for tool in tools)
        return (
            "You can call functions. Each line between <tools> and </tools> is one function, its parameters described "
            f"by a JSON schema:\n<tools>\n{listed}\n</tools>\n"
            f"To call functions, answer with nothing else than this, in which you replace the words in capitals:\n"
            f"{example}\n"
            "If no function helps, answer in words."
        )


def to_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def shows_json(template: str) -> bool:
    """Whether a template writes calls, or describes them, as JSON objects that begin with the name."""
    return '{"name": ' in template or '{\\"name\\": ' in template
