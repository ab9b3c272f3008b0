"""How vocabularies in the manner of GPT-2 spell bytes: every byte has a visible character of its own."""

from __future__ import annotations


def _byte_of_character() -> dict[str, int]:
    """A visible byte is itself; the others use characters from 256 on."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_of_character()


def token_text(token: str) -> bytes | None:
    """The text of a token; None if it has other characters, as added tokens may have."""
    if _BYTE_OF_CHARACTER.keys() >= set(token):
        return bytes(map(_BYTE_OF_CHARACTER.__getitem__, token))
    return None
