"""Carries text between a target and a draft model that have different tokenizers.

The draft model must have processed the same text as the target, in tokens of its own. Which tokens these are is a
function of the target's tokens alone, so it does not matter in which steps the text grew, or what was drafted and
rejected in between: a cache that was rewound equals a fresh one. The bytes of the target's tokens are cut into segments
at places that depend only on the text, mostly ends of words, and each segment is tokenised by itself. Only the last
segment can change when text is added. Segments are spelled exactly, byte by byte (`ExactTokenizer`): nothing is added
or normalised, and a text may end inside a character.

Control tokens have no text. Those that both models know by the same name, such as <|im_end|>, are exchanged; the draft
model does not see the others.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from outpace.backends.base import Tokenizer
from outpace.decoding.exact_tokenizer import ExactTokenizer

# A segment ends after a letter or mark of punctuation that is followed by a single space or a line break and a letter:
# no tokenizer of words joins these.
_CUT = re.compile(rb"(?<=[A-Za-z.,;:!?)])(?=[ \n][A-Za-z])")
_LONGEST = 256  # bytes of a segment; texts in some scripts have no spaces
ENOUGH_SHARED = 0.5  # of the draft model's tokens; with fewer, restricting its distribution changes it too much


def ways_of(shared: float | None) -> str:
    """In words, which way which requests take; `shared` is the share of the draft's tokens that the target has too."""
    text = "its text is split by the target's tokenizer and offered as it is (string-level exact match)"
    if shared is not None and shared < ENOUGH_SHARED:
        return f"the draft speaks text: {text}, since only {shared:.0%} of its tokens exist in the target"
    which = "the tokens" if shared is None else f"the {shared:.0%} of its tokens"
    return (
        f"for greedy requests, {text}; for sampled ones, the draft draws among {which} that the target has too "
        "(token-level intersection)"
    )


@dataclass(slots=True)
class Bridged:
    """A request's text as the draft model reads it."""

    num_read: int = 0  # tokens of the target
    closed: list[int] = field(default_factory=list)  # tokens of the draft model that no longer change
    tail: bytes = b""  # the text after them
    open: list[int] = field(default_factory=list)  # the tokens of the tail

    @property
    def tokens(self) -> list[int]:
        return self.closed + self.open


class TextBridge:
    def __init__(self, target: Tokenizer, draft: Tokenizer) -> None:
        self._target = target
        self._draft = draft
        self._to_draft = ExactTokenizer(draft)
        self._to_target = ExactTokenizer(target)
        self.begin = draft.encode("", add_special=True)
        theirs = {token.text: token.id for token in draft.specials.controls.tokens}
        shared = [(token.id, theirs[token.text]) for token in target.specials.controls.tokens if token.text in theirs]
        self._control_to_draft = dict(shared)
        self._control_to_target = {theirs: ours for ours, theirs in shared}
        self._controls = {token.id for token in target.specials.controls.tokens}
        self._draft_controls = {token.id for token in draft.specials.controls.tokens}

    def start(self) -> Bridged:
        return Bridged(closed=list(self.begin))

    def read(self, bridged: Bridged, tokens: list[int]) -> None:
        """Go on to the end of the target's tokens."""
        if bridged.num_read == len(tokens):
            return
        for token in tokens[bridged.num_read :]:
            if token in self._controls:
                self._close(bridged, len(bridged.tail))
                known = self._control_to_draft.get(token)
                if known is not None and not (bridged.closed == self.begin and self.begin[-1:] == [known]):
                    bridged.closed.append(known)
            else:
                bridged.tail += self._target.token_bytes(token)
        bridged.num_read = len(tokens)
        end = _last_cut(bridged.tail)
        if end:
            self._close(bridged, end)
        bridged.open = self._to_draft(bridged.tail)

    def _close(self, bridged: Bridged, end: int) -> None:
        text, bridged.tail, bridged.open = bridged.tail[:end], bridged.tail[end:], []
        for segment in segments(text):
            bridged.closed += self._to_draft(segment)

    def draft_bytes(self, token: int) -> bytes | None:
        """The text of a token of the draft model; None for a control token."""
        return None if token in self._draft_controls else self._draft.token_bytes(token)

    def target_bytes(self, token: int) -> bytes:
        return self._target.token_bytes(token)

    def target_control(self, token: int) -> int | None:
        """The target's control token that a control token of the draft model stands for, if there is one."""
        return self._control_to_target.get(token)

    def target_tokens(self, text: bytes) -> list[int]:
        """Text that the draft model has continued with, in the target's tokens."""
        return self._to_target(text)


def segments(text: bytes) -> list[bytes]:
    """The text, cut where that depends only on the text before the cut and the two bytes after it."""
    found: list[bytes] = []
    start = 0
    for end in (*(match.start() for match in _CUT.finditer(text)), len(text)):
        while end - start > _LONGEST:
            middle = _character_start(text, start + _LONGEST)
            found.append(text[start:middle])
            start = middle
        if start < end:
            found.append(text[start:end])
            start = end
    return found


def _character_start(text: bytes, at: int) -> int:
    """The place itself, or the beginning of the character that it is inside of."""
    return next((place for place in range(at, at - 4, -1) if text[place] & 0xC0 != 0x80), at)


def _last_cut(text: bytes) -> int:
    """Where the last segment begins."""
    pieces = segments(text)
    return len(text) - len(pieces[-1]) if len(pieces) > 1 else 0
