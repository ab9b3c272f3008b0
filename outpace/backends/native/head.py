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

from outpace.backends.base import MOST_CONFIDENT, DraftedTokens, DraftStop, HeadTask
from outpace.backends.native.library import Case, Decide, Library
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
_STOPPED, _GOES_ON, _LAST = range(3)  # Fate in csrc/drafting.h


class _Stops:
    """The rules that end the drafts of a step, as the library asks for them."""

    def __init__(self) -> None:
        self.rules: list[DraftStop | None] = []
        self.error: BaseException | None = None
        self.decide = Decide(self._decide)

    def _decide(self, num_rows: int, rows: Sequence[int], confidence: Sequence[float], fates: list[int]) -> None:
        try:
            for i in range(num_rows):
                rule = self.rules[rows[i]]
                if rule is None:
                    fates[i] = _GOES_ON
                elif rule(min(MOST_CONFIDENT, confidence[i])):
                    fates[i] = _LAST if rule.is_over else _GOES_ON
        except BaseException as error:  # the library cannot pass it on
            self.error = error

    def raise_error(self) -> None:
        error, self.error = self.error, None
        if error is not None:
            raise error


class NativeHead:
    has_trees = False
    stops_early = True

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
        self._stops, self._never = _Stops(), Decide()
        self._rooms: list[FloatRows] = []  # by row of a draft; valid until the next draft
        # The library reads and writes these arrays in place; every draft reuses them.
        num_rows, num_tokens = runner.capacity.max_sequences, runner.capacity.max_step_tokens
        self._rows = (c.c_int32 * (4 * num_rows))()
        self._tokens = (c.c_int32 * num_tokens)()
        self._cases, self._counts = (Case * num_rows)(*[Case(top_p=1.0)] * num_rows), (c.c_int32 * num_rows)()
        self._places = (c.c_void_p * num_rows)()  # of the rows' distributions
        self._drafted, self._confidence = (c.c_int32 * num_tokens)(), (c.c_float * num_tokens)()
        self._tables = runner.tables.ctypes.data  # asking numpy takes microseconds
        self._lib.check(self._lib.start(self._handle, num_pages, runner.capacity.max_step_tokens))
        self.entries = HeadEntries(runner.capacity.max_sequences)

    def num_uncached(self, seq: int, num_tokens: int) -> int:
        return self.entries.num_uncached(seq, num_tokens)

    def draft(self, tasks: Sequence[HeadTask]) -> list[DraftedTokens]:
        if self._handle is None:
            raise BackendError("the model is closed; load it again to use it")
        tokens: list[int] = []
        probs: list[FloatRows | None] = [None] * len(tasks)
        for i, task in enumerate(tasks):
            request = task.request
            seq, length = request.seq, len(request.tokens)
            assert seq is not None and request.num_computed == length - 1, "only a decoding request has drafts"
            start = self.entries.take(seq, length)
            self._runner.reserve(seq, length - 1, task.depth)
            self._rows[4 * i : 4 * i + 4] = [seq, start, length - start, task.depth]
            tokens += request.tokens[start:]
            if request.params.is_greedy:
                self._cases[i].rule = _LIKELIEST  # which uses nothing else of the case
                continue
            pick = _NOISE if matches_own_tokens(request.params) else _DRAW
            if pick == _DRAW:
                room = probs[i] = self._room(i, task.depth)
                self._places[i] = room.ctypes.data
            self._cases[i] = native_case(request, pick, num_emitted=0, num_drafted=0)
        self._stops.rules = [task.stop for task in tasks]
        self._draft(len(tasks), tokens, sum([task.depth for task in tasks]))
        counts, confidence = self._counts, self._confidence
        found, at = [], 0
        for i, task in enumerate(tasks):
            count, distributions = counts[i], probs[i]
            # A stopped draft also has the confidence of the token before which it stopped; none is 0.
            num_known = count + (count < task.depth and confidence[at + count] > 0.0) if task.stop is not None else 0
            kept = None if distributions is None else list(distributions[:count])
            found.append(DraftedTokens(self._drafted[at : at + count], confidence[at : at + num_known], kept))
            at += task.depth
        return found

    def _room(self, row: int, depth: int) -> FloatRows:
        """Zeros for a row's distributions. Every draft uses the same: those of unknown tokens stay zero."""
        if len(self._rooms) <= row:
            self._rooms += [np.zeros((0, self._runner.vocab_size), np.float32)] * (row + 1 - len(self._rooms))
        if len(self._rooms[row]) < depth:
            self._rooms[row] = np.zeros((depth, self._runner.vocab_size), np.float32)
        return self._rooms[row][:depth]

    def _draft(self, num_rows: int, tokens: list[int], num_drafted: int) -> None:
        if len(self._tokens) < len(tokens):
            self._tokens = (c.c_int32 * len(tokens))()
        if len(self._drafted) < num_drafted:
            self._drafted, self._confidence = (c.c_int32 * num_drafted)(), (c.c_float * num_drafted)()
        self._tokens[: len(tokens)] = [*tokens]
        c.memset(self._confidence, 0, num_drafted * c.sizeof(c.c_float))  # unknown where the library writes none
        decide = self._never if all(rule is None for rule in self._stops.rules) else self._stops.decide
        self._lib.check(
            self._lib.draft(
                self._handle, self._rows, num_rows, self._tokens, self._tables, self._runner.tables.shape[1],
                self._cases, self._places, self._drafted, self._confidence, self._counts, decide,
            )
        )  # fmt: skip
        self._stops.raise_error()

    def copy_page(self, source: int, target: int) -> None:
        self._lib.check(self._lib.copy_page(self._handle, source, target))

    def close(self) -> None:
        if self._handle is not None:
            self._lib.destroy(self._handle)
            self._handle = None
