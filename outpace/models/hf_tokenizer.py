"""The tokenizer of a Hugging Face folder: tokenizer.json in the `tokenizers` library, and the chat template."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from pathlib import Path

from tokenizers import Tokenizer as Tokenizers

from outpace.errors import ModelError, UsageError
from outpace.models import hf_schema

_NORMAL, _UNUSED, _CONTROL = 1 << 2, 1 << 1, 1 << 3  # llama.cpp's attributes, to compare vocabularies
_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")


class HFTokenizer:
    def __init__(self, folder: Path, vocab_size: int) -> None:
        """`vocab_size`: number of the model's embeddings, which may include padding after the last token."""
        path = folder / "tokenizer.json"
        self._tokenizer = _open(path)
        most = max(self._tokenizer.get_vocab().values(), default=-1)
        if most >= vocab_size:
            raise ModelError(
                f"{path} has {most + 1} tokens and the model {vocab_size} embeddings; "
                "the files do not belong together, download them again"
            )
        self.vocab_size = vocab_size
        settings = _read(hf_schema.TokenizerSettings, folder / "tokenizer_config.json")
        self.bos_text = _text(settings.bos_token)
        self.eos_text = _text(settings.eos_token)
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
            found = _read(hf_schema.EndTokens, folder / name).ids
            if max(found, default=-1) >= self.vocab_size:
                raise ModelError(
                    f"{folder / name} has an eos_token_id of {max(found)}, but the model has only {self.vocab_size} "
                    "tokens; the files do not belong together, download them again"
                )
            ids |= found
        eos = self._tokenizer.token_to_id(self.eos_text) if self.eos_text else None
        return frozenset(ids if eos is None else ids | {eos})


def _byte_of_character() -> dict[str, int]:
    """GPT-2's map from visible characters to bytes: a visible byte is itself, the others use characters from 256 on."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_of_character()


def _open(path: Path) -> Tokenizers:
    try:
        return Tokenizers.from_str(hf_schema.read_text(path, hf_schema.MAX_TOKENIZER_BYTES))
    except ModelError:
        raise
    # The library raises nothing more specific than Exception, and BaseException where its own code fails.
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        raise ModelError(f"{path} is missing or damaged ({error!s:.200}); download it again") from error


def _read(schema: type[hf_schema.Schema], path: Path) -> hf_schema.Schema:
    """Read an optional settings file; all defaults if there is none."""
    try:
        values = hf_schema.read_json(path)
    except FileNotFoundError:
        values = {}
    return hf_schema.validate(schema, values, str(path))


def _text(token: str | hf_schema.TokenText | None) -> str:
    return (token.content if isinstance(token, hf_schema.TokenText) else token) or ""


def _chat_template(folder: Path, settings: hf_schema.TokenizerSettings) -> str | None:
    with suppress(FileNotFoundError):
        return hf_schema.read_text(folder / "chat_template.jinja", hf_schema.MAX_TEMPLATE_BYTES)
    template = settings.chat_template or _read(hf_schema.TokenizerSettings, folder / "chat_template.json").chat_template
    if isinstance(template, list):  # several, by name
        template = {each.name: each.template for each in template}.get("default")
    return template
