"""Sampling and acceptance in the native library: the same verdicts as `verification.py`, but faster.

The request's `Shaper` applies bias and penalties; the library does everything after them (csrc/verifier.cpp) and reads
the bits of masks itself. Lossy rules and steps with only greedy requests without a grammar use the reference.
"""

from __future__ import annotations

import ctypes as c
from collections.abc import Sequence
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from outpace.backends.native.library import Case as NativeCase
from outpace.backends.native.library import Library, load_library
from outpace.backends.native.pending import MATCH, MATCH_GREEDY, PendingCase, RowMaker, native_case
from outpace.core import Case, Request, Verdict
from outpace.decoding.verification import HostVerifier
from outpace.errors import BackendError

FloatRow = NDArray[np.float32]


class NativeVerifier:
    def __init__(self, library: Library, vocab_size: int, threads: int) -> None:
        self._lib = library
        self._vocab_size = vocab_size
        self._reference = HostVerifier()
        self._handle: c.c_void_p | None = c.c_void_p()
        library.check(library.verifier_create(vocab_size, threads, c.byref(self._handle)))

    def verify(self, cases: Sequence[Case], logits: FloatRow) -> list[Verdict]:
        if all(_needs_only_argmax(case.request) for case in cases):
            return self._reference.verify(cases, logits)  # numpy's argmax is as fast
        if any(case.request.params.speculation.is_lossy for case in cases):
            return self._verify_one_by_one(cases, logits)
        logits = np.ascontiguousarray(logits, np.float32)
        num_rows = sum(len(case.tokens) + 1 for case in cases)
        if logits.shape != (num_rows, self._vocab_size):
            raise ValueError(f"logits of shape {logits.shape} do not fit {num_rows} rows of {self._vocab_size}")
        all_pending, at, address = [], 0, logits.ctypes.data
        for case in cases:
            all_pending.append(PendingCase(case, logits, at, address + at * logits.strides[0]))
            at += len(case.tokens) + 1
        self._settle(all_pending)
        return [pending.verdict for pending in all_pending]

    def _settle(self, all_pending: list[PendingCase]) -> None:
        """Run the cases until all have a verdict: once, and again those in which a pick without a mask was wrong."""
        left = self._run(all_pending)
        while left:
            left = self.run_with_masks(left)

    def run_with_masks(self, left: list[PendingCase]) -> list[PendingCase]:
        """The part of verification that requests without a grammar never need."""
        return self._run(left)

    def _run(self, all_pending: list[PendingCase]) -> list[PendingCase]:
        """Run the cases; returns those that must run again."""
        maker = RowMaker(self._vocab_size)
        rows = [pending.rows(maker) for pending in all_pending]
        num_rows = sum(map(len, rows))
        tokens = [token for pending in all_pending for token in pending.tokens]
        probs = [maker.address_of(row) for pending in all_pending for row in pending.draft_probs]
        found = (c.c_int32 * (2 * len(rows)))()
        picked = (c.c_int32 * (3 * num_rows))() if any(pending.guesses for pending in all_pending) else None
        self._lib.check(
            self._lib.verify(
                self._open_handle(),
                (NativeCase * len(rows))(*[pending.native() for pending in all_pending]),
                len(rows),
                (c.c_int64 * (3 * num_rows))(*chain.from_iterable(chain.from_iterable(rows))),
                (c.c_int32 * len(tokens))(*tokens),
                (c.c_uint64 * len(probs))(*probs),
                found,
                picked,
            )
        )
        flat = picked[:] if picked is not None else []
        left, at = [], 0
        for i, pending in enumerate(all_pending):
            end = at + len(rows[i])
            if not pending.take(found[2 * i], found[2 * i + 1], flat[3 * at : 3 * end]):
                left.append(pending)
            at = end
        return left

    def own_token(self, request: Request, prefix: Sequence[int], logits: FloatRow) -> int:
        if _needs_only_argmax(request):
            return self._reference.own_token(request, prefix, logits)
        maker, found = RowMaker(self._vocab_size), (c.c_int32 * 2)()
        row = (c.c_int64 * 3)(*maker.row(request, prefix, logits))
        rule = MATCH_GREEDY if request.params.is_greedy else MATCH
        case = native_case(request, rule, num_emitted=len(prefix), num_drafted=0)
        self._lib.check(self._lib.verify(self._open_handle(), c.byref(case), 1, row, None, None, found, None))
        return found[1]

    def probs(self, request: Request, prefix: Sequence[int], logits: FloatRow) -> FloatRow:
        if request.params.is_greedy:
            return self._reference.probs(request, prefix, logits)
        maker, probs = RowMaker(self._vocab_size), np.empty(self._vocab_size, np.float32)
        row = (c.c_int64 * 3)(*maker.row(request, prefix, logits))
        case = native_case(request, MATCH, num_emitted=len(prefix), num_drafted=0)
        self._lib.check(self._lib.probs(self._open_handle(), c.byref(case), row, probs.ctypes.data))
        return probs

    def _open_handle(self) -> c.c_void_p:
        if self._handle is None:
            raise BackendError("the model is closed; load it again to use it")
        return self._handle

    def _verify_one_by_one(self, cases: Sequence[Case], logits: FloatRow) -> list[Verdict]:
        """Verify each case alone: lossy requests with the reference, the others in the library."""
        verdicts = []
        at = 0
        for case in cases:
            rows = logits[at : at + len(case.tokens) + 1]
            verifier = self._reference if case.request.params.speculation.is_lossy else self
            verdicts += verifier.verify([case], rows)
            at += len(rows)
        return verdicts

    def close(self) -> None:
        if self._handle is not None:
            self._lib.verifier_destroy(self._handle)
            self._handle = None


def native_verifier(vocab_size: int, threads: int) -> NativeVerifier | None:
    """A verifier for other backends with logits in host memory; None if the library was not built."""
    try:
        return NativeVerifier(load_library(), vocab_size, threads)
    except BackendError:
        return None


def _needs_only_argmax(request: Request) -> bool:
    return request.params.is_greedy and request.matcher is None
