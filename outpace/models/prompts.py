"""Turns a conversation into prompt tokens with the model's own template and tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from outpace.backends.base import Tokenizer
from outpace.errors import UsageError
from outpace.models.chat_template import render_chat


def render(tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> str:
    """A conversation as the text the model was trained to continue."""
    if tokenizer.chat_template is None:
        raise UsageError(
            "this model has no chat template; use generate (or /v1/completions) with a prompt in the format it was "
            "trained on"
        )
    return render_chat(
        tokenizer.chat_template,
        messages,
        bos_token=tokenizer.bos_text,
        eos_token=tokenizer.eos_text,
        add_generation_prompt=add_generation_prompt,
    )


def encode_rendered(tokenizer: Tokenizer, text: str) -> list[int]:
    # A template may write the beginning-of-text token itself; do not add a second one.
    has_bos = bool(tokenizer.bos_text) and text.startswith(tokenizer.bos_text)
    return tokenizer.encode(text, add_special=not has_bos)
