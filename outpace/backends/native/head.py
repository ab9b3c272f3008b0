"""Drafts with a head in the native library.

The head's cache uses the target's pages (`kv/entries.py`), so forks, shared prefixes and rewinds need nothing of their
own. The target stores the hidden states that the head reads for every token it computes; entries are computed when a
draft is made, so a request without drafts costs nothing.
"""

from __future__ import annotations

import ctypes as c
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from outpace.backends.base import DraftedTokens, HeadTask
from outpace.backends.native.library import Case, Library
from outpace.backends.native.model_file import HeadFile
from outpace.backends.native.pending import native_case
from outpace.core import MeasuredAcceptance
from outpace.decoding.verification import matches_own_tokens
from outpace.errors import BackendError
from outpace.kv.entries import HeadEntries

if TYPE_CHECKING:
    from outpace.backends.native.runner import NativeRunner

FloatRows = NDArray[np.float32]
_LIKELIEST, _NOISE, _DRAW = range(3)  # Pick in csrc/drafting.h


class NativeHead:
    def __init__(self, library: Library, file: HeadFile, target: c.c_void_p, threads: int) -> None:
        """Load the head; `target` keeps the hidden states that it reads. Neither has been started."""
        self._lib = library
        measured = file.description.measured
        self.measured = None if measured is None else MeasuredAcceptance(*measured)
        self._ids = np.ascontiguousarray(file.description.target_ids, np.int32)
        taps = np.array(file.description.taps, np.int32)
        library.check(library.keep_taps(target, taps.ctypes.data, taps.size))
        self._handle: c.c_void_p | None = file.load(threads)
        try:
            library.check(library.follow(self._handle, target, self._ids.ctypes.data))
        except BaseException:
            self.close()
            raise
        self.size_bytes: int = library.packed_size(self._handle)

    def start(self, runner: NativeRunner, num_pages: int) -> None:
        """Allocate the cache. The target must have been started."""
        self._runner = runner
        self._rooms: list[FloatRows] = []  # by row of a draft; valid until the next draft
        self._lib.check(self._lib.start(self._handle, num_pages, runner.capacity.max_step_tokens))
        self.entries = HeadEntries(runner.capacity.max_sequences)

    def num_uncached(self, seq: int, num_tokens: int) -> int:
        return self.entries.num_uncached(seq, num_tokens)

    def draft(self, tasks: Sequence[HeadTask]) -> list[DraftedTokens]:
        if self._handle is None:
            raise BackendError("the model is closed; load it again to use it")
        rows = np.zeros((len(tasks), 4), np.int32)
        cases: list[Case] = []
        tokens: list[int] = []
        probs: list[FloatRows | None] = [None] * len(tasks)
        for i, task in enumerate(tasks):
            request = task.request
            seq, length = request.seq, len(request.tokens)
            assert seq is not None and request.num_computed == length - 1, "only a decoding request has drafts"
            start = self.entries.take(seq, length)
            self._runner.reserve(seq, length - 1, task.depth)
            rows[i] = (seq, start, length - start, task.depth)
            tokens += request.tokens[start:]
            pick = _LIKELIEST if request.params.is_greedy else _NOISE if matches_own_tokens(request.params) else _DRAW
            if pick == _DRAW:
                probs[i] = self._room(i, task.depth)
            cases.append(native_case(request, pick, num_emitted=0, num_drafted=0))
        drafted, confidence = self._draft(rows, tokens, cases, probs)
        found, at = [], 0
        for task, distributions in zip(tasks, probs, strict=True):
            end = at + task.depth
            kept = None if distributions is None else list(distributions)
            found.append(DraftedTokens(drafted[at:end], confidence[at:end], kept))
            at = end
        return found

    def _room(self, row: int, depth: int) -> FloatRows:
        """Zeros for a row's distributions. Every draft uses the same: those of unknown tokens stay zero."""
        if len(self._rooms) <= row:
            self._rooms += [np.zeros((0, self._runner.vocab_size), np.float32)] * (row + 1 - len(self._rooms))
        if len(self._rooms[row]) < depth:
            self._rooms[row] = np.zeros((depth, self._runner.vocab_size), np.float32)
        return self._rooms[row][:depth]

    def _draft(
        self, rows: NDArray[np.int32], tokens: list[int], cases: list[Case], probs: Sequence[FloatRows | None]
    ) -> tuple[list[int], list[float]]:
        num_drafted = int(rows[:, 3].sum())
        fed = np.array(tokens, np.int32)
        places = (c.c_void_p * len(probs))(*[None if each is None else each.ctypes.data for each in probs])
        drafted, confidence = (c.c_int32 * num_drafted)(), (c.c_float * num_drafted)()
        tables = self._runner.tables
        self._lib.check(
            self._lib.draft(
                self._handle, rows.ctypes.data, len(rows), fed.ctypes.data, tables.ctypes.data, tables.shape[1],
                (Case * len(cases))(*cases), places, drafted, confidence,
            )
        )  # fmt: skip
        return drafted[:], confidence[:]

    def copy_page(self, source: int, target: int) -> None:
        self._lib.check(self._lib.copy_page(self._handle, source, target))

    def close(self) -> None:
        if self._handle is not None:
            self._lib.destroy(self._handle)
            self._handle = None
