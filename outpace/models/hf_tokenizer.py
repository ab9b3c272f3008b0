"""The tokenizer of a Hugging Face folder: tokenizer.json in the `tokenizers` library, and the chat template."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Tokenizers

from outpace.errors import ModelError, UsageError

_NORMAL, _UNUSED, _CONTROL = 1 << 2, 1 << 1, 1 << 3  # llama.cpp's attributes, to compare vocabularies
_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")


class HFTokenizer:
    def __init__(self, folder: Path, vocab_size: int) -> None:
        """`vocab_size`: number of the model's embeddings, which may include padding after the last token."""
        path = folder / "tokenizer.json"
        try:
            self._tokenizer = Tokenizers.from_file(str(path))
        except Exception as error:  # the library raises nothing more specific
            raise ModelError(f"{path} is missing or damaged ({error}); download it again") from error
        if self._tokenizer.get_vocab_size() > vocab_size:
            raise ModelError(
                f"{path} has {self._tokenizer.get_vocab_size()} tokens and the model {vocab_size} embeddings; "
                "the files do not belong together, download them again"
            )
        self.vocab_size = vocab_size
        settings = _read_json(folder / "tokenizer_config.json")
        self.bos_text = _text(settings.get("bos_token"))
        self.eos_text = _text(settings.get("eos_token"))
        self.chat_template = _chat_template(folder, settings)
        self._added = self._tokenizer.get_added_tokens_decoder()
        self.end_ids = self._find_end_ids(folder)
        self._is_byte_level = '"ByteLevel"' in json.dumps(json.loads(self._tokenizer.to_str()).get("decoder"))
        self._pieces: dict[int, bytes] = {}

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UsageError(
                f"the prompt is not valid Unicode text ({error.reason}); remove lone surrogates"
            ) from error
        self._tokenizer.encode_special_tokens = not parse_special
        return list(self._tokenizer.encode(text, add_special_tokens=add_special).ids)

    def token_bytes(self, token: int) -> bytes:
        piece = self._pieces.get(token)
        if piece is None:
            piece = self._pieces[token] = self._piece(token)
        return piece

    def vocabulary(self) -> list[tuple[bytes, int]]:
        return [self._entry(token) for token in range(self.vocab_size)]

    def _entry(self, token: int) -> tuple[bytes, int]:
        text = self._tokenizer.id_to_token(token)
        if text is None:
            return b"", _UNUSED
        added = self._added.get(token)
        return text.encode(), _CONTROL if added is not None and added.special else _NORMAL

    def _piece(self, token: int) -> bytes:
        added = self._added.get(token)
        if added is not None:
            return b"" if added.special else added.content.encode()
        text = self._tokenizer.id_to_token(token)
        if text is None:
            return b""
        if self._is_byte_level and _BYTE_OF_CHARACTER.keys() >= set(text):
            return bytes(_BYTE_OF_CHARACTER[character] for character in text)
        byte = _BYTE_PIECE.fullmatch(text)
        return bytes([int(byte[1], 16)]) if byte else text.replace("\u2581", " ").encode()

    def _find_end_ids(self, folder: Path) -> frozenset[int]:
        ids: set[int] = set()
        for name in ("generation_config.json", "config.json"):
            value = _read_json(folder / name).get("eos_token_id")
            ids |= {value} if isinstance(value, int) else {each for each in value or () if isinstance(each, int)}
        eos = self._tokenizer.token_to_id(self.eos_text) if self.eos_text else None
        return frozenset(ids if eos is None else ids | {eos})


def _byte_of_character() -> dict[str, int]:
    """GPT-2's map from visible characters to bytes: a visible byte is itself, the others use characters from 256 on."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_of_character()


def _read_json(path: Path) -> dict[str, Any]:
    """Read an optional settings file; empty if there is none."""
    try:
        values = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read ({error}); download it again") from error
    return values if isinstance(values, dict) else {}


def _text(token: Any) -> str:
    """The text of a special token, which is a string or an object with `content`."""
    return str(token.get("content") or "") if isinstance(token, dict) else str(token or "")


def _chat_template(folder: Path, settings: dict[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text()
    template = settings.get("chat_template") or _read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {each.get("name"): each.get("template") for each in template if isinstance(each, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None
