"""Compares the vocabulary of a draft model with its target's."""

from __future__ import annotations

from outpace.backends.base import Tokenizer

_UNUSED_TOKEN = 1 << 1  # llama.cpp's attribute of vocabulary entries that only pad the embedding table


def vocabulary_difference(target: Tokenizer, draft: Tokenizer) -> str | None:
    """The first difference; None if every id means the same in both models. Only unused padding may differ."""
    ours, theirs = target.vocabulary(), draft.vocabulary()
    for token, (our_entry, their_entry) in enumerate(zip(ours, theirs, strict=False)):
        if our_entry[0] != their_entry[0]:
            return f"token {token} is {_shown(our_entry[0])} in the target and {_shown(their_entry[0])} in the draft"
    longer, whose = (ours, "target") if len(ours) > len(theirs) else (theirs, "draft")
    for token in range(min(len(ours), len(theirs)), len(longer)):
        text, attributes = longer[token]
        if not attributes & _UNUSED_TOKEN:
            return f"token {token}, {_shown(text)}, exists only in the {whose}"
    return None


def _shown(text: bytes) -> str:
    return repr(text.decode(errors="replace"))
