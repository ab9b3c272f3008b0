"""Checks that a draft model has the same vocabulary as its target."""

from __future__ import annotations

from outpace.backends.base import Tokenizer
from outpace.errors import ModelError

_UNUSED_TOKEN = 1 << 1  # llama.cpp's attribute of vocabulary entries that only pad the embedding table


def check_same_vocabulary(target: Tokenizer, draft: Tokenizer) -> None:
    """Drafts are token ids, so every id must mean the same in both models; only unused padding may differ."""
    ours, theirs = target.vocabulary(), draft.vocabulary()
    for token, (our_entry, their_entry) in enumerate(zip(ours, theirs, strict=False)):
        if our_entry[0] != their_entry[0]:
            raise ModelError(
                f"the draft model has a different vocabulary: token {token} is {_shown(our_entry[0])} in the target "
                f"and {_shown(their_entry[0])} in the draft; use a draft of the same model family"
            )
    longer, whose = (ours, "target") if len(ours) > len(theirs) else (theirs, "draft")
    for token in range(min(len(ours), len(theirs)), len(longer)):
        text, attributes = longer[token]
        if not attributes & _UNUSED_TOKEN:
            raise ModelError(
                f"the draft model has a different vocabulary: token {token}, {_shown(text)}, exists only in the "
                f"{whose}; use a draft of the same model family"
            )


def _shown(text: bytes) -> str:
    return repr(text.decode(errors="replace"))
