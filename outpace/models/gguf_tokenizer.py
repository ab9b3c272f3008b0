"""The tokenizer of a GGUF file, implemented by llama.cpp."""

from __future__ import annotations

import ctypes as c
from functools import cached_property
from pathlib import Path

from outpace.errors import ModelError, UsageError
from outpace.models.llama_file import LlamaFile
from outpace.models.llama_library import Library


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
        try:
            data = text.encode()
        except UnicodeEncodeError as error:
            raise UsageError(
                f"the prompt is not valid Unicode text ({error.reason}); remove lone surrogates"
            ) from error
        room = len(data) + 8
        while True:
            tokens = (c.c_int32 * room)()
            n = self._lib.llama_tokenize(self._vocab, data, len(data), tokens, room, add_special, parse_special)
            if n >= 0:
                return tokens[:n]
            room = -n

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
