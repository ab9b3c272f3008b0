"""A GGUF file opened by llama.cpp: its vocabulary and, if llama.cpp runs it, its weights."""

from __future__ import annotations

import os
import weakref
from pathlib import Path

from outpace.errors import ModelError
from outpace.models.checked_file import check_file
from outpace.models.llama_library import Library


class LlamaFile:
    def __init__(self, path: Path, library: Library, *, vocab_only: bool = False) -> None:
        """`vocab_only`: load only the tokenizer; such a file cannot run."""
        self.library = library
        self.path = path
        check_file(path, library.path, vocab_only=vocab_only)
        library.forget_errors()
        params = library.llama_model_default_params()
        params.vocab_only = vocab_only
        self.handle = library.llama_model_load_from_file(os.fsencode(path), params)
        if not self.handle:
            raise ModelError(
                f"{path} cannot be loaded by llama.cpp: {library.first_error()}; "
                "check that the file is complete and of an architecture this llama.cpp supports"
            )
        self._free = weakref.finalize(self, library.llama_model_free, self.handle)
        self._free.atexit = False  # the process frees its memory itself
        if library.llama_model_has_encoder(self.handle):
            self.close()
            raise ModelError(f"{path} is an encoder-decoder model; Outpace runs decoder-only language models")

    def close(self) -> None:
        """Free the memory now. Without this call, it is freed with the object."""
        self._free()
        self.handle = None
