"""A tokenizer with tokens of several bytes: a text has many spellings, as with a real vocabulary."""

from __future__ import annotations

from collections.abc import Iterator

from tests.fakes import ByteTokenizer

PIECES = [
    b'{"', b'"}', b'": ', b'":', b' "', b'", "', b'",', b"[1", b"1,", b", ", b"na", b"name", b"am", b"age", b"ge",
    b"tr", b"true", b"fal", b"false", b"nul", b"null", b"12", b"34", b"ab", b"abc", b"bc", b"cd", b"red", b"re",
    b"green", b"blue", b'"a', b'"re', b'd"', b'"]', b"]}", b"\xc3\xa9", b"\xc3",
]  # fmt: skip


class PieceTokenizer(ByteTokenizer):
    """`ByteTokenizer` with more tokens; encoding takes the longest piece that fits."""

    vocab_size = 258 + len(PIECES)
    longest_token: int | None = max(map(len, PIECES))

    def pieces(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> Iterator[list[int]]:
        for tokens in super().pieces(text, add_special=add_special, parse_special=parse_special):
            yield list(self._merged(tokens))

    def _merged(self, tokens: list[int]) -> Iterator[int]:
        at = 0
        while at < len(tokens):
            rest = b"".join(self.token_bytes(token) for token in tokens[at : at + 8])
            fitting = [i for i, piece in enumerate(PIECES) if rest.startswith(piece)]
            best = max(fitting, key=lambda i: len(PIECES[i]), default=None)
            yield tokens[at] if best is None else 258 + best
            at += 1 if best is None else len(PIECES[best])

    def token_bytes(self, token: int) -> bytes:
        return PIECES[token - 258] if token >= 258 else super().token_bytes(token)
