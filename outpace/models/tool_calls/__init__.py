"""Calls of functions: the syntaxes that models were trained on, and which one a chat template uses."""

from __future__ import annotations

from outpace.errors import UsageError
from outpace.models.tool_calls.hermes import HERMES
from outpace.models.tool_calls.llama3_json import LLAMA3_JSON
from outpace.models.tool_calls.mistral import MISTRAL
from outpace.models.tool_calls.smollm2 import SMOLLM2
from outpace.models.tool_calls.syntax import CallSyntax

SYNTAXES = {syntax.name: syntax for syntax in (HERMES, LLAMA3_JSON, MISTRAL, SMOLLM2)}


def syntax_for(template: str | None, name: str = "auto") -> CallSyntax | None:
    """The named syntax; for 'auto' the one that the template's text shows, None if it shows none that is known.

    A template that does not mention tools shows no syntax; for it Hermes' is taken, the most widespread.
    """
    if name != "auto":
        if name not in SYNTAXES:
            raise UsageError(f"there is no tool call parser {name!r}; use auto, {', '.join(SYNTAXES)}")
        return SYNTAXES[name]
    template = template or ""
    for syntax in SYNTAXES.values():
        if syntax.knows(template):
            return syntax
    return None if "tool" in template else HERMES
