"""Fields that ask for structured output: OpenAI's `response_format`, vLLM's `structured_outputs` and `guided_*`.

They all become one `StructuredOutput`. A schema is always enforced: `strict` makes no difference.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from outpace.errors import UsageError
from outpace.server.body import Body
from outpace.server.errors import ApiError
from outpace.structured import StructuredOutput

Choices = Annotated[list[Annotated[str, Field(min_length=1)]], Field(fail_fast=True, min_length=1)]
Schema = dict[str, Any] | bool | str  # a string is the schema's JSON


class NamedSchema(Body):
    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None  # for this type only


class StructuredOutputs(Body):
    """vLLM's object: exactly one of these."""

    json_: Schema | None = Field(None, alias="json")
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None


class StructuredFields(Body):
    """At most one of these."""

    response_format: ResponseFormat | None = None
    # Not in OpenAI's API; as in vLLM
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None

    def structured(self) -> StructuredOutput | None:
        """What the request asks for; None: free text."""
        given = {name: fields for name, fields in self._described().items() if fields is not None}
        if len(given) > 1:
            message = f"{' and '.join(given)} both describe the output; send one of them"
            raise ApiError(400, message, param=next(iter(given)), code="invalid_value")
        for name, fields in given.items():
            try:
                return StructuredOutput(**fields)
            except UsageError as problem:
                raise ApiError(400, f"{name}: {problem}", param=name, code="invalid_value") from None
        return None

    @property
    def structured_field(self) -> str | None:
        """The name of the field that describes the output."""
        return next((name for name, fields in self._described().items() if fields is not None), None)

    def _described(self) -> dict[str, dict[str, Any] | None]:
        """For each field, the arguments of `StructuredOutput`; None where free text is wanted."""
        asked = self.structured_outputs
        return {
            "response_format": _of_format(self.response_format),
            "structured_outputs": None if asked is None else _of_object(asked),
            "guided_json": _one("json_schema", self.guided_json),
            "guided_regex": _one("regex", self.guided_regex),
            "guided_choice": _one("choice", self.guided_choice),
            "guided_grammar": _one("grammar", self.guided_grammar),
        }


def _one(name: str, value: object) -> dict[str, Any] | None:
    return None if value is None else {name: value}


def _of_format(asked: ResponseFormat | None) -> dict[str, Any] | None:
    if asked is None or asked.type == "text":
        return None
    if asked.type == "json_object":
        return {"json_object": True}
    if asked.json_schema is None:
        message = "the request needs response_format.json_schema, with a name and a schema, for this type"
        raise ApiError(400, message, param="response_format.json_schema", code="missing_required_parameter")
    return {"json_schema": asked.json_schema.schema_}


def _of_object(asked: StructuredOutputs) -> dict[str, Any]:
    return {
        "json_schema": asked.json_,
        "regex": asked.regex,
        "choice": asked.choice,
        "grammar": asked.grammar,
        "json_object": bool(asked.json_object),
    }
