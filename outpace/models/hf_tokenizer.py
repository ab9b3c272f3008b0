"""The tokenizer of a Hugging Face folder: tokenizer.json in the `tokenizers` library, and the chat template."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from functools import cached_property
from pathlib import Path

from tokenizers import Tokenizer as Tokenizers

from outpace.errors import ModelError
from outpace.models import hf_schema
from outpace.models.byte_level import token_text
from outpace.models.special_tokens import SpecialToken, SpecialTokens
from outpace.models.text_pieces import WHOLE_CHARS, added_around, check_unicode, cut, keeps_words_apart

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
        return [t for piece in self.pieces(text, add_special=add_special, parse_special=parse_special) for t in piece]

    def pieces(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> Iterator[list[int]]:
        """The same tokens, piece by piece; for a long text in several pieces."""
        check_unicode(text)
        if len(text) <= WHOLE_CHARS or not self._keeps_words_apart:
            yield self._tokenize(text, add_special, parse_special)
            return
        before, after = self._added_around if add_special else ([], [])
        yield before
        for piece in cut(text, (), between_words=True):
            yield self._tokenize(piece, False, parse_special)
        yield after

    @cached_property
    def specials(self) -> SpecialTokens:
        normalizer = self._tokenizer.normalizer
        is_normalized = normalizer is not None and any(added.normalized for added in self._added.values())
        tokens = (
            SpecialToken(token, added.content, added.special, strips_left=added.lstrip, strips_right=added.rstrip)
            for token, added in self._added.items()
        )
        return SpecialTokens(tokens, normalizer.normalize_str if is_normalized else None)

    @cached_property
    def longest_token(self) -> int | None:
        """Bytes of text that one token can stand for; None: no limit is known."""
        drops_text = self._tokenizer.normalizer is not None or not self._is_byte_level
        if drops_text or any(token.strips_left or token.strips_right for token in self.specials.tokens):
            return None
        added = max((len(token.text.encode()) for token in self.specials.tokens), default=1)
        return max(added, *(len(self._piece(token)) for token in range(self.vocab_size)))

    @cached_property
    def _added_around(self) -> tuple[list[int], list[int]]:
        return added_around(lambda text, add: self._tokenize(text, add, False))

    @cached_property
    def _keeps_words_apart(self) -> bool:
        if self._tokenizer.truncation is not None or self._tokenizer.padding is not None:
            return False  # they count the tokens of a whole text
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        return keeps_words_apart(vocabulary, self.specials.tokens, lambda text: self._tokenize(text, False, True))

    @cached_property
    def _without_controls(self) -> Tokenizers:
        """A second tokenizer: the setting is the object's, and other threads may be encoding."""
        made = Tokenizers.from_str(self._tokenizer.to_str())
        made.encode_special_tokens = True
        return made

    def _tokenize(self, text: str, add_special: bool, parse_special: bool) -> list[int]:
        tokenizer = self._tokenizer if parse_special else self._without_controls
        return list(tokenizer.encode(text, add_special_tokens=add_special).ids)

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
        spelled = token_text(text) if self._is_byte_level else None
        if spelled is not None:
            return spelled
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
