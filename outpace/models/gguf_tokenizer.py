"""The tokenizer of a GGUF file, implemented by llama.cpp."""

from __future__ import annotations

import ctypes as c
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

from outpace.errors import ModelError
from outpace.models.llama_file import LlamaFile
from outpace.models.llama_library import Library
from outpace.models.long_runs import SPLIT_BY_LOOPS, on_deep_stack
from outpace.models.special_tokens import SpecialToken, SpecialTokens
from outpace.models.text_pieces import WHOLE_CHARS, added_around, check_unicode, cut, keeps_words_apart

# llama.cpp's attributes of tokens
_UNKNOWN, _CONTROL, _USER_DEFINED, _LSTRIP, _RSTRIP = 1 << 0, 1 << 3, 1 << 4, 1 << 7, 1 << 8
_SPM, _BPE, _RWKV = 1, 2, 5  # vocabulary types that keep every byte of a text
_SPLITTER_KEY = b"tokenizer.ggml.pre"


class LlamaTokenizer:
    """Keeps its own vocabulary open, so it works after the model was closed."""

    def __init__(self, path: Path, library: Library) -> None:
        self._file = LlamaFile(path, library, vocab_only=True)
        self._lib = library
        model = self._file.handle
        self._vocab = library.llama_model_get_vocab(model)
        self.vocab_size: int = library.llama_vocab_n_tokens(self._vocab)
        if self.vocab_size == 0:
            raise ModelError("the model file has no vocabulary, so text cannot be turned into tokens")
        template = library.llama_model_chat_template(model, None)
        self.chat_template: str | None = _template_text(template) if template else None
        self.bos_text = self._special_text(library.llama_vocab_bos(self._vocab))
        self.eos_text = self._special_text(library.llama_vocab_eos(self._vocab))
        self._pieces: dict[int, bytes] = {}

    @cached_property
    def end_ids(self) -> frozenset[int]:
        is_end, vocab = self._lib.llama_vocab_is_eog, self._vocab
        return frozenset(t for t in range(self.vocab_size) if is_end(vocab, t))

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Tokens of a text. `add_special` adds the special tokens that the model expects at the beginning;
        `parse_special` recognises control tokens in the text, as chat templates write them."""
        return [t for piece in self.pieces(text, add_special=add_special, parse_special=parse_special) for t in piece]

    def pieces(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> Iterator[list[int]]:
        """The same tokens, piece by piece; for a long text in several pieces."""
        check_unicode(text)
        if len(text) <= WHOLE_CHARS:
            yield self._tokenize(text, add_special, parse_special)
            return
        before, after = self._added_around if add_special else ([], [])
        yield before
        specials = self.specials if parse_special else self.specials.others
        for piece in cut(text, specials.cuts(text), between_words=self._keeps_words_apart):
            yield self._tokenize(piece, False, parse_special)
        yield after

    @cached_property
    def specials(self) -> SpecialTokens:
        text, attr, vocab = self._lib.llama_vocab_get_text, self._lib.llama_vocab_get_attr, self._vocab
        attributes = {token: attr(vocab, token) for token in range(self.vocab_size)}
        return SpecialTokens(
            SpecialToken(
                token,
                (text(vocab, token) or b"").decode(errors="surrogateescape"),
                is_control=bool(attributes[token] & (_CONTROL | _UNKNOWN)),
                strips_left=bool(attributes[token] & _LSTRIP),
                strips_right=bool(attributes[token] & _RSTRIP),
            )
            for token in attributes
            if attributes[token] & (_CONTROL | _UNKNOWN | _USER_DEFINED)
        )

    @cached_property
    def longest_token(self) -> int | None:
        """Bytes of text that one token can stand for; None: no limit is known."""
        keeps_all = self._lib.llama_vocab_type(self._vocab) in (_SPM, _BPE, _RWKV)
        if not keeps_all or any(token.strips_left or token.strips_right for token in self.specials.tokens):
            return None
        longest = max((len(token.text.encode(errors="replace")) for token in self.specials.tokens), default=1)
        # A vocabulary spells no token with fewer bytes than it stands for, so only a few have to be decoded.
        spelled = sorted(((len(text), token) for token, (text, _) in enumerate(self.vocabulary())), reverse=True)
        for num_bytes, token in spelled:
            if num_bytes <= longest:
                break
            longest = max(longest, len(self._piece(token, special=False)))
        return longest

    @cached_property
    def _added_around(self) -> tuple[list[int], list[int]]:
        return added_around(lambda text, add: self._tokenize(text, add, False))

    @cached_property
    def _keeps_words_apart(self) -> bool:
        texts = (text.decode(errors="replace") for text, _ in self.vocabulary())
        return keeps_words_apart(texts, self.specials.tokens, lambda text: self._tokenize(text, False, True))

    @cached_property
    def _splits_by_loops(self) -> bool:
        if self._lib.llama_vocab_type(self._vocab) != _BPE:
            return True
        name = c.create_string_buffer(64)
        self._lib.llama_model_meta_val_str(self._file.handle, _SPLITTER_KEY, name, len(name))
        return name.value.decode(errors="replace") in SPLIT_BY_LOOPS

    def _tokenize(self, text: str, add_special: bool, parse_special: bool) -> list[int]:
        data = text.encode()

        def call() -> list[int]:
            room = len(data) + 8
            while True:
                tokens = (c.c_int32 * room)()
                n = self._lib.llama_tokenize(self._vocab, data, len(data), tokens, room, add_special, parse_special)
                if n >= 0:
                    return tokens[:n]
                room = -n

        return call() if self._splits_by_loops else on_deep_stack(text, call)

    def token_bytes(self, token: int) -> bytes:
        piece = self._pieces.get(token)
        if piece is None:
            piece = self._pieces[token] = self._piece(token, special=False)
        return piece

    def vocabulary(self) -> list[tuple[bytes, int]]:
        text, attr, vocab = self._lib.llama_vocab_get_text, self._lib.llama_vocab_get_attr, self._vocab
        return [(text(vocab, t) or b"", attr(vocab, t)) for t in range(self.vocab_size)]

    def _special_text(self, token: int) -> str:
        return self._piece(token, special=True).decode(errors="replace") if token >= 0 else ""

    def _piece(self, token: int, *, special: bool) -> bytes:
        room = 64
        while True:
            buffer = c.create_string_buffer(room)
            n = self._lib.llama_token_to_piece(self._vocab, token, buffer, room, 0, special)
            if n >= 0:
                return buffer.raw[:n]
            room = -n


def _template_text(template: bytes) -> str:
    try:
        return template.decode()
    except UnicodeDecodeError as error:
        raise ModelError(
            f"the model file's chat template is not UTF-8 text ({error.reason}); download or convert the model again"
        ) from error
