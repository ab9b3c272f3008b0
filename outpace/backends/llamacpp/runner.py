"""Runs batches of ragged rows in llama.cpp.

All sequences share one cache pool (`kv_unified`). Rows of different lengths then share one pass over the weights;
per-sequence streams would need several. A fork shares cells instead of copying them, and the capacity is a number of
tokens. Flash attention skips the cells of other sequences.
"""

from __future__ import annotations

import ctypes as c
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from outpace.backends.base import Capabilities, Capacity, LoadedModel, Verifier
from outpace.backends.logits import logits_at
from outpace.core import StepPlan
from outpace.errors import BackendError
from outpace.models import llama_library as llama
from outpace.models.gguf_tokenizer import LlamaTokenizer
from outpace.models.llama_file import LlamaFile

MakeVerifier = Callable[[int, int], Verifier | None]  # (vocab_size, threads)


class LlamaModel:
    """Weights and vocabulary, before any cache is made for them."""

    has_head = drafts_trees = False

    def __init__(self, path: Path, library: llama.Library, make_verifier: MakeVerifier | None = None) -> None:
        """`make_verifier` makes a verifier for logits in host memory; without it the engine verifies in numpy."""
        self.file = LlamaFile(path, library)
        self.make_verifier = make_verifier
        self.tokenizer = LlamaTokenizer(path, library)
        handle = self.file.handle
        self.train_context: int = library.llama_model_n_ctx_train(handle)
        self.can_rewind = not (library.llama_model_is_recurrent(handle) or library.llama_model_is_hybrid(handle))

    def start(self, capacity: Capacity, threads: int) -> LoadedModel:
        lib, handle = self.file.library, self.file.handle
        description = c.create_string_buffer(256)
        lib.llama_model_desc(handle, description, len(description))
        return LoadedModel(
            runner=LlamaRunner(self, capacity, threads),
            tokenizer=self.tokenizer,
            description=description.value.decode(errors="replace"),
            num_parameters=lib.llama_model_n_params(handle),
            size_bytes=lib.llama_model_size(handle),
        )

    def close(self) -> None:
        self.file.close()


class LlamaRunner:
    """One llama.cpp context: a cache pool and the compute graph over it."""

    def __init__(self, model: LlamaModel, capacity: Capacity, threads: int) -> None:
        self._lib = lib = model.file.library
        self._model = model
        params = lib.llama_context_default_params()
        params.n_ctx = capacity.cache_tokens
        params.n_batch = params.n_ubatch = capacity.max_step_tokens
        params.n_seq_max = min(capacity.max_sequences, llama.MAX_SEQUENCES)
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn_type = llama.FLASH_ATTENTION_ON
        params.kv_unified = True
        lib.forget_errors()
        self._ctx = lib.llama_init_from_model(model.file.handle, params)
        if not self._ctx:
            raise BackendError(
                f"llama.cpp could not set up {capacity.cache_tokens} tokens of cache for {model.file.path} "
                f"({lib.first_error()}); set a smaller cache_tokens or max_context"
            )
        self._memory = lib.llama_get_memory(self._ctx)
        self.capacity = capacity
        self.vocab_size = model.tokenizer.vocab_size
        # One thread: a second pool would compete with llama.cpp's own threads for the cores.
        self._verifier = model.make_verifier(self.vocab_size, 1) if model.make_verifier is not None else None
        self.capabilities = Capabilities(can_rewind=model.can_rewind, verifier=self._verifier)
        self._make_batch(capacity.max_step_tokens)

    def _make_batch(self, size: int) -> None:
        """Allocate the arrays that llama.cpp reads in place; every step reuses them."""
        self._token = np.zeros(size, np.int32)
        self._position = np.zeros(size, np.int32)
        self._wants_logits = np.zeros(size, np.int8)
        self._seq = np.zeros(size, np.int32)
        self._num_seqs = np.ones(size, np.int32)
        self._seq_pointers = self._seq.ctypes.data + self._seq.itemsize * np.arange(size, dtype=np.uintp)
        self._positions_from_zero = np.arange(size, dtype=np.int32)
        self._batch = llama.Batch(
            0, self._token.ctypes.data, None, self._position.ctypes.data, self._num_seqs.ctypes.data,
            self._seq_pointers.ctypes.data, self._wants_logits.ctypes.data,
        )  # fmt: skip

    def forward(self, plan: StepPlan) -> NDArray[np.float32]:
        if not self._ctx:
            raise BackendError("the model is closed; load it again to use it")
        if plan.num_tokens > len(self._token):
            raise BackendError(f"a step has {plan.num_tokens} tokens; the maximum is {len(self._token)}")
        at = num_outputs = 0
        for row in plan.rows:
            end = at + len(row.tokens)
            self._token[at:end] = row.tokens
            self._position[at:end] = self._positions_from_zero[: end - at]
            self._position[at:end] += row.start
            self._seq[at:end] = row.seq
            self._wants_logits[at:end] = 0
            self._wants_logits[end - row.num_logits : end] = 1
            num_outputs += row.num_logits
            at = end
        self._batch.n_tokens = at
        self._lib.forget_errors()
        status = self._lib.llama_decode(self._ctx, self._batch)
        if status != 0:
            raise BackendError(
                f"llama.cpp failed on a step of {at} tokens in {len(plan.rows)} sequences "
                f"(status {status}: {self._lib.first_error()})"
            )
        pointer = self._lib.llama_get_logits(self._ctx)  # also waits for the computation
        return logits_at(pointer, num_outputs, self.vocab_size)

    def truncate(self, seq: int, num_tokens: int) -> None:
        if self._ctx and not self._lib.llama_memory_seq_rm(self._memory, seq, num_tokens, -1):
            raise BackendError(f"llama.cpp cannot rewind the cache of {self._model.file.path} to {num_tokens} tokens")

    def fork(self, source: int, target: int, num_tokens: int) -> None:
        if self._ctx:
            self._lib.llama_memory_seq_cp(self._memory, source, target, 0, num_tokens)

    def free(self, seq: int) -> None:
        if self._ctx:  # a stream can end its request after the model was closed
            self._lib.llama_memory_seq_rm(self._memory, seq, -1, -1)

    def close(self) -> None:
        if self._ctx:
            self._lib.llama_free(self._ctx)
            self._ctx = None
            if self._verifier is not None:
                self._verifier.close()
            self._model.close()
