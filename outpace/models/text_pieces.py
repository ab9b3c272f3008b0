"""Cuts a long text into pieces whose tokens, one after the other, are the tokens of the text.

A text is cut after special tokens, and between words where the tokenizer never joins a letter with the white space
after it. Between two pieces the work can stop.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise

from outpace.errors import UsageError
from outpace.models.special_tokens import Place, SpecialToken

WHOLE_CHARS = 2048  # shorter texts are not cut
_PIECE_CHARS = 16384
_PIECE_TOKENS = 64  # special tokens in one piece: llama.cpp's time grows with their square

_WORD_END = re.compile(r"(?<=[A-Za-z])(?=[ \n][A-Za-z])")
# A letter with white space after it, in the spellings of vocabularies.
_JOINED = re.compile("[A-Za-z][ \n\u0120\u010a\u2581]")
_PROBES = (
    "The quick brown fox jumps over the lazy dog",
    "don't stop\nNow I'm here\nWE'LL see",
    "a b c d e F G h",
    "Hello  world\n\n  x y\t z w\r\nend of line",
    "x1 y2 3z a4 b5 c 6 d e7",
    "naïve été à la mode ǅ ok Ωmega fine",
    "中文 text here 字 ends well。And so on",
    "foo_bar baz.qux Quux, (paren theses) [a b]",
)


def check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"the prompt is not valid Unicode text ({error.reason}); remove lone surrogates") from error


def added_around(encode: Callable[[str, bool], list[int]]) -> tuple[list[int], list[int]]:
    """The special tokens that the tokenizer adds before and after a text. `encode` is told whether to add them."""
    plain, whole = encode("a", False), encode("a", True)
    for start in range(len(whole) - len(plain) + 1):
        if whole[start : start + len(plain)] == plain:
            return whole[:start], whole[start + len(plain) :]
    return [], []


def keeps_words_apart(
    vocabulary: Iterable[str], specials: Iterable[SpecialToken], encode: Callable[[str], Sequence[int]]
) -> bool:
    """Whether a text may be cut between words.

    No token may cross the cut, and the tokenizer must not add anything at the beginning of a piece.
    """
    if any(token.strips_right and token.text[-1].isalpha() for token in specials):
        return False
    if any(_JOINED.search(text) for text in vocabulary):
        return False
    return all(_same_in_pieces(probe, encode) for probe in _PROBES)


def _same_in_pieces(text: str, encode: Callable[[str], Sequence[int]]) -> bool:
    cuts = [0, *(match.start() for match in _WORD_END.finditer(text)), len(text)]
    pieces = [text[start:end] for start, end in pairwise(cuts)]
    return [token for piece in pieces for token in encode(piece)] == list(encode(text))


def cut(text: str, places: Sequence[Place], *, between_words: bool) -> Iterator[str]:
    """The pieces of a text with special tokens at these places."""
    start = count = 0
    for place in places:
        for end in _word_ends(text, start, place.start) if between_words else ():
            yield text[start:end]
            start, count = end, 0
        count += 1
        if count == _PIECE_TOKENS or place.end - start > _PIECE_CHARS:
            yield text[start : place.end]
            start, count = place.end, 0
    for end in _word_ends(text, start, len(text)) if between_words else ():
        yield text[start:end]
        start = end
    if start < len(text):
        yield text[start:]


def _word_ends(text: str, start: int, stop: int) -> Iterator[int]:
    """Ends of words, a piece's length apart."""
    while stop - start > _PIECE_CHARS:
        match = _WORD_END.search(text, start + _PIECE_CHARS, stop)
        if match is None:
            return
        start = match.start()
        yield start
