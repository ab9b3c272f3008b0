"""Runs batches of ragged rows in the native library, on KV cache pages allocated by `kv/blocks.py`.

The engine counts single tokens; a page holds `outpace_page_tokens` of them. A sequence can waste part of its last page
and, if it was forked in the middle of a page, part of the copied page. The pool therefore has two extra pages per
sequence, so every reservation that the engine has counted succeeds.
"""

from __future__ import annotations

import ctypes as c
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from outpace.backends.base import Capabilities, Capacity, LoadedModel
from outpace.backends.logits import logits_at
from outpace.backends.memory import available_bytes
from outpace.backends.native.executor import NativeExecutor
from outpace.backends.native.head import NativeHead
from outpace.backends.native.library import load_library
from outpace.backends.native.model_file import HeadFile, ModelFile
from outpace.backends.native.verifier import NativeVerifier
from outpace.core import StepPlan
from outpace.errors import BackendError
from outpace.kv.blocks import BlockPool
from outpace.models.gguf_model import Unsupported
from outpace.models.gguf_tokenizer import LlamaTokenizer
from outpace.models.llama_library import Library as LlamaLibrary


class NativeModel:
    """A model file that the native backend can run, and its tokenizer. `start` reads the weights."""

    def __init__(self, path: Path, llama: LlamaLibrary, head: Path | None = None) -> None:
        """`head`: the file of a draft head for this model."""
        self.library = load_library()
        self.isa = self.library.isa
        self.file = ModelFile(path, self.library)
        self._head_file = HeadFile(head, self.library, self.file) if head is not None else None
        self.has_head = head is not None
        self.drafts_trees = False
        # The tokenizer is llama.cpp's; it loads only the vocabulary.
        self.tokenizer = LlamaTokenizer(path, llama)
        architecture = self.file.description.architecture
        if self.tokenizer.vocab_size != architecture.vocab_size:
            raise Unsupported(f"it has {self.tokenizer.vocab_size} tokens and embeddings for {architecture.vocab_size}")
        self.train_context = architecture.context

    def start(self, capacity: Capacity, threads: int) -> LoadedModel:
        num_pages = pages_needed(capacity, self.library.page_tokens())
        self._check_memory(num_pages)
        with ExitStack() as undo:  # frees what was loaded if a later step fails
            handle = self.file.load(threads)
            undo.callback(self.library.destroy, handle)
            head = None
            if self._head_file is not None:
                head = NativeHead(self.library, self._head_file, handle, threads)
                undo.callback(head.close)
            self.library.check(self.library.start(handle, num_pages, capacity.max_step_tokens))
            runner = NativeRunner(self, handle, capacity, num_pages, threads, head)
            undo.pop_all()
        return LoadedModel(
            runner=runner,
            tokenizer=self.tokenizer,
            description=f"{self.file.name} (native, {self.isa})",
            num_parameters=self.file.description.num_parameters,
            size_bytes=self.library.packed_size(handle) + (head.size_bytes if head is not None else 0),
        )

    def _check_memory(self, num_pages: int) -> None:
        a = self.file.description.architecture
        weights, token_bytes = self.file.packed_bytes, 2 * a.cache_elements_per_token
        if self._head_file is not None:
            weights += self._head_file.packed_bytes
            token_bytes += 2 * self._head_file.description.cache_elements_per_token
        cache = num_pages * self.library.page_tokens() * token_bytes
        available = available_bytes()
        if available is not None and weights + cache > available:
            raise BackendError(
                f"{self.file.path.name} needs {_format_bytes(weights)} for its weights and {_format_bytes(cache)} for "
                f"its cache, but only {_format_bytes(available)} of memory are available; set a smaller "
                "cache_tokens or max_context"
            )

    def close(self) -> None:
        pass  # the tokenizer keeps its vocabulary, and weights belong to the runner


def pages_needed(capacity: Capacity, page_tokens: int) -> int:
    return -(-capacity.cache_tokens // page_tokens) + 2 * capacity.max_sequences


def _format_bytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB"


BANDWIDTH_BYTES = 256 << 20  # read to measure the bandwidth: more than any cache holds


class NativeRunner:
    """A started model: weights, cache pages, and the page table of each sequence."""

    def __init__(
        self,
        model: NativeModel,
        handle: c.c_void_p,
        capacity: Capacity,
        num_pages: int,
        threads: int,
        head: NativeHead | None = None,
    ) -> None:
        self._model = model
        self._lib = library = model.library
        self._handle: c.c_void_p | None = handle
        self.capacity = capacity
        self.vocab_size = model.tokenizer.vocab_size
        self._verifier = NativeVerifier(library, self.vocab_size, threads)
        self.capabilities = Capabilities(
            can_rewind=True,
            exact_to_the_bit=True,
            verifier=self._verifier,
            executor=NativeExecutor(self, self._verifier),
            states=self.states,
            state_width=model.file.description.architecture.width,
            head=head,
            floor_seconds=lambda: self._floor_seconds(threads),
        )
        self._head = head
        self.bytes_per_step: int = library.bytes_per_step(handle)  # weights that any step must read
        page_tokens = library.page_tokens()
        self.pool = BlockPool(num_pages, page_tokens)
        self._open: set[int] = set()
        # The library reads and writes these arrays in place; every step reuses them.
        self._rows = np.zeros((capacity.max_sequences, 4), np.int32)
        self._tokens = np.zeros(capacity.max_step_tokens, np.int32)
        self.tables = np.zeros((capacity.max_sequences, -(-capacity.max_context // page_tokens) + 1), np.int32)
        self._likeliest = (c.c_int32 * capacity.max_step_tokens)()
        self._logits = c.c_void_p()
        self._view = (0, logits_at(0, 0, self.vocab_size))  # address of the latest logits, and the array over them
        self._pointers = (
            self._rows.ctypes.data, self._tokens.ctypes.data, self.tables.ctypes.data, self.tables.shape[1],
            c.addressof(self._logits), c.addressof(self._likeliest),
        )  # fmt: skip
        if head is not None:
            head.start(self, num_pages)

    def _floor_seconds(self, threads: int) -> float | None:
        bytes_per_second = self._lib.read_bandwidth(threads, BANDWIDTH_BYTES)
        return self.bytes_per_step / bytes_per_second if bytes_per_second else None

    def forward(self, plan: StepPlan) -> NDArray[np.float32]:
        if self._handle is None:
            raise BackendError("the model is closed; load it again to use it")
        at = num_outputs = 0
        for i, row in enumerate(plan.rows):
            count = len(row.tokens)
            self.reserve(row.seq, row.start, count)
            self._rows[i] = (row.seq, row.start, count, row.num_logits)
            self._tokens[at : at + count] = row.tokens
            at += count
            num_outputs += row.num_logits
        rows, *others = self._pointers
        self._lib.check(self._lib.forward(self._handle, rows, len(plan.rows), *others))
        for row in plan.rows:
            self.pool.advance(row.seq, len(row.tokens))
        return self._logits_view(self._logits.value or 0, num_outputs)

    def states(self, begin: int, end: int) -> NDArray[np.float32]:
        """Hidden states after the final norm, of these lines of the latest logits: a copy."""
        return logits_at(self._lib.states(self._handle), end, self.capabilities.state_width)[begin:end].copy()

    def likeliest(self, num_outputs: int) -> list[int]:
        """The argmax of each row of the latest logits, found by the threads that computed them."""
        return self._likeliest[:num_outputs]

    def _logits_view(self, address: int, num_outputs: int) -> NDArray[np.float32]:
        """The logits as an array. Their address changes only when the library's buffer grows."""
        if self._view[0] != address or len(self._view[1]) != num_outputs:
            self._view = (address, logits_at(address, num_outputs, self.vocab_size))
        return self._view[1]

    def reserve(self, seq: int, start: int, count: int) -> None:
        """Reserve `count` tokens at the end of a sequence and update its page table."""
        if seq not in self._open:
            self.pool.open(seq)
            self._open.add(seq)
        length = self.pool.length(seq)
        if start != length:
            raise BackendError(f"a row starts at {start}, but the cache of its sequence holds {length} tokens")
        size = self.pool.block_size
        copies = self.pool.reserve(seq, count)
        if copies is None:
            raise BackendError(f"the cache has no room for {count} more tokens of a sequence that holds {length}")
        for source, target in copies:
            self._lib.check(self._lib.copy_page(self._handle, source, target))
            if self._head is not None:
                self._head.copy_page(source, target)
        if copies or (length - 1) // size != (length + count - 1) // size:
            blocks = self.pool.blocks(seq)
            self.tables[seq, length // size : len(blocks)] = blocks[length // size :]

    def truncate(self, seq: int, num_tokens: int) -> None:
        self.pool.rewind(seq, num_tokens)
        if self._head is not None:
            self._head.entries.truncate(seq, num_tokens)

    def fork(self, source: int, target: int, num_tokens: int) -> None:
        self.free(target)
        self.pool.fork(source, target, num_tokens)
        self._open.add(target)
        blocks = self.pool.blocks(target)
        self.tables[target, : len(blocks)] = blocks
        if self._head is not None:
            self._head.entries.fork(source, target, num_tokens)

    def free(self, seq: int) -> None:
        if seq in self._open:
            self.pool.close(seq)
            self._open.discard(seq)
            if self._head is not None:
                self._head.entries.free(seq)

    def close(self) -> None:
        if self._handle is not None:
            if self._head is not None:
                self._head.close()  # before its target
            self._lib.destroy(self._handle)
            self._handle = None
            self._verifier.close()
            self._model.close()
