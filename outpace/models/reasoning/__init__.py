"""Thinking before an answer: the tags that models write around it, and which of them a model uses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outpace.errors import UsageError
from outpace.models.reasoning.syntax import ReasoningSyntax

if TYPE_CHECKING:
    from outpace.backends.base import Tokenizer

# The names are vLLM's. For 'auto', the first whose tags a model shows is taken.
PARSERS = {
    syntax.name: syntax
    for syntax in (
        ReasoningSyntax(name="qwen3"),
        ReasoningSyntax(name="deepseek_r1", always=True),
        ReasoningSyntax(name="deepseek_v3"),
        ReasoningSyntax(name="glm45"),
        ReasoningSyntax(name="mistral", opener="[THINK]", closer="[/THINK]"),
        ReasoningSyntax(name="seed_oss", opener="<seed:think>", closer="</seed:think>"),
    )
}


def reasoning_for(tokenizer: Tokenizer, name: str = "auto") -> ReasoningSyntax | None:
    """The named syntax; for 'auto' the one whose tags the chat template or the added tokens have; None: no thinking."""
    if name == "none":
        return None
    if name != "auto":
        if name not in PARSERS:
            raise UsageError(f"there is no reasoning parser {name!r}; use auto, none, {', '.join(PARSERS)}")
        return PARSERS[name]
    template = tokenizer.chat_template or ""
    added = {token.text for token in tokenizer.specials.tokens}
    for syntax in PARSERS.values():
        if syntax.closer in template or {syntax.opener, syntax.closer} <= added:
            return syntax
    return None
