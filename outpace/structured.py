"""What the output of a request must look like: a JSON schema, any JSON object, a regex, a choice or a grammar.

This is only the description, checked for its form. `decoding/constraints.py` turns it into masks for a tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from outpace.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Thinking:
    """Free text before a structured output, between tags. A tag is a text, or the id of a control token."""

    closer: str | int
    opener: str | int | None = None  # with it the output may begin with thinking; None: the prompt has opened it


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutput:
    """Exactly one description. `SamplingParams(structured=StructuredOutput(regex="[0-9]+"))`."""

    json_schema: Mapping[str, Any] | bool | str | None = None  # a string is the schema's JSON; kept as such
    json_object: bool = False  # any JSON object
    regex: str | None = None  # the whole output matches it
    choice: Sequence[str] | None = None  # the output is one of these
    grammar: str | None = None  # Lark, as llguidance reads it
    after: Thinking | None = None  # what is described begins after this

    def __post_init__(self) -> None:
        descriptions = [one.name for one in fields(self) if one.name != "after"]
        given = [name for name in descriptions if getattr(self, name) not in (None, False)]
        if self.json_schema is False:
            raise UsageError("the JSON schema false allows no output at all; give a schema that something satisfies")
        if len(given) != 1:
            names = ", ".join(descriptions)
            found = f"got {' and '.join(given)}" if given else "got none"
            raise UsageError(f"a structured output is described by exactly one of {names}; {found}")
        if self.json_schema is not None:
            object.__setattr__(self, "json_schema", _schema_text(self.json_schema))
        if not isinstance(self.json_object, bool):
            raise UsageError(f"json_object must be True or False; got {self.json_object!r}")
        for name in ("regex", "grammar"):
            text = getattr(self, name)
            if text is not None and (not isinstance(text, str) or not text):
                raise UsageError(f"{name} must be a non-empty string; got {text!r}")
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))


def _schema_text(schema: object) -> str:
    """The schema as canonical JSON, so that equal schemas are compiled once."""
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except ValueError as problem:
            raise UsageError(
                f"json_schema is not valid JSON ({problem}); give a schema such as {{'type': 'object'}}"
            ) from None
    if not isinstance(schema, Mapping | bool):
        raise UsageError(f"json_schema must be a JSON object or true; got {type(schema).__name__}")
    try:
        return json.dumps(schema, separators=(",", ":"), allow_nan=False)  # the order of properties has a meaning
    except (TypeError, ValueError, RecursionError) as problem:
        raise UsageError(f"json_schema cannot be written as JSON: {problem}") from None


def _choices(choices: object) -> tuple[str, ...]:
    if isinstance(choices, str) or not isinstance(choices, Sequence) or not choices:
        raise UsageError(f"choice must be a list of at least one string; got {choices!r}")
    for text in choices:
        if not isinstance(text, str) or not text:
            raise UsageError(f"a choice must be a non-empty string; got {text!r}")
    return tuple(choices)
