"""How one request uses tools: which it may or must call, and what follows for its sampling and its answer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from outpace.backends.base import Tokenizer
from outpace.errors import UsageError
from outpace.models.tool_calls.grammar import MAX_CALLS, call_grammar, json_rule
from outpace.models.tool_calls.reader import CallReader, Found
from outpace.models.tool_calls.syntax import CallSyntax
from outpace.models.tool_calls.tools import Tool
from outpace.structured import StructuredOutput

if TYPE_CHECKING:
    from outpace.config import SamplingParams


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

    def read(self, text: str) -> Found:
        """The calls in a whole answer, and the rest of it."""
        reader = self.reader()
        return reader.feed(text).joined(reader.finish())

    def constrain(self, params: SamplingParams, tokenizer: Tokenizer) -> SamplingParams:
        """The parameters of a request for the answer that this use allows."""
        structured = self._structured(tokenizer, params.structured)
        return replace(params, structured=structured, visible_tokens=self._visible_tokens(tokenizer))

    def _structured(self, tokenizer: Tokenizer, content: StructuredOutput | None) -> StructuredOutput:
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

    def _visible_tokens(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        """The control tokens with which a call begins or ends, which the reader has to see."""
        marks = (self.syntax.opener, self.syntax.closer)
        return tuple(token.id for token in tokenizer.specials.controls.tokens if token.text in marks)


def tool_use(
    tools: tuple[Tool, ...], choice: str | Mapping[str, Any] | None, *, is_parallel: bool = True, syntax: CallSyntax
) -> ToolUse | None:
    """`choice` as in OpenAI's API: none, auto, required, or an object that names a function. None: no call at all."""
    if choice not in (None, "none", "auto", "required") and not isinstance(choice, Mapping):
        raise _wrong_choice()
    named = _named(choice, tools) if isinstance(choice, Mapping) else None
    if not tools and choice == "required":
        raise UsageError("tool_choice is required, but there are no tools; send some")
    if not tools or choice == "none":
        return None
    return ToolUse(
        tools=tools,
        allowed=tools if named is None else (named,),
        syntax=syntax,
        is_required=choice == "required" or named is not None,
        is_parallel=is_parallel and named is None,
    )


def _named(choice: Mapping[str, Any], tools: Sequence[Tool]) -> Tool:
    function = choice.get("function")
    name = function.get("name") if isinstance(function, Mapping) and set(function) == {"name"} else None
    if choice.get("type") != "function" or set(choice) != {"type", "function"} or not isinstance(name, str):
        raise _wrong_choice()
    for tool in tools:
        if tool.name == name:
            return tool
    raise UsageError("tool_choice names a function that is not in tools; send it there")


def _wrong_choice() -> UsageError:
    return UsageError("tool_choice must be none, auto, required or {'type': 'function', 'function': {'name': ...}}")


def _rule_of(content: StructuredOutput) -> str:
    """A structured output as a part of a grammar."""
    if content.json_schema is not None or content.json_object:
        schema = json.loads(str(content.json_schema)) if content.json_schema is not None else {"type": "object"}
        return json_rule({} if schema is True else schema)
    if content.choice is not None:
        return " | ".join(map(json.dumps, content.choice))
    raise UsageError("a regex or a grammar does not go together with tools; give a JSON schema, or tool_choice none")
