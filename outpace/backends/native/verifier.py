"""Sampling and acceptance in the native library: the same verdicts as `verification.py`, but faster.

The request's `Shaper` applies bias, masks and penalties; the library does everything after them (csrc/verifier.cpp).
Lossy rules and steps with only greedy requests use the reference.
"""

from __future__ import annotations

import ctypes as c
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from outpace.backends.native.library import Case as NativeCase
from outpace.backends.native.library import Library, load_library
from outpace.core import Case, Request, Verdict
from outpace.decoding.verification import HostVerifier, matches_own_tokens
from outpace.errors import BackendError

FloatRow = NDArray[np.float32]
MATCH_GREEDY, MATCH, REJECT, BLOCK = range(4)
_LARGEST_INT = 2**31 - 1


class NativeVerifier:
    def __init__(self, library: Library, vocab_size: int, threads: int) -> None:
        self._lib = library
        self._vocab_size = vocab_size
        self._reference = HostVerifier()
        self._handle: c.c_void_p | None = c.c_void_p()
        library.check(library.verifier_create(vocab_size, threads, c.byref(self._handle)))

    def verify(self, cases: Sequence[Case], logits: FloatRow) -> list[Verdict]:
        if all(case.request.params.is_greedy for case in cases):
            return self._reference.verify(cases, logits)  # numpy's argmax is as fast
        if any(case.request.params.speculation.is_lossy for case in cases):
            return self._verify_one_by_one(cases, logits)
        logits = np.ascontiguousarray(logits, np.float32)
        batch = _Batch(logits)
        for case in cases:
            batch.add(case)
        if logits.shape != (batch.num_rows, self._vocab_size):
            raise ValueError(f"logits of shape {logits.shape} do not fit {batch.num_rows} rows of {self._vocab_size}")
        found = (c.c_int32 * (2 * len(cases)))()
        self._lib.check(self._lib.verify(self._open_handle(), *batch.arguments(), found))
        return [
            Verdict([*case.tokens[: found[2 * i]], found[2 * i + 1]], len(case.tokens), found[2 * i])
            for i, case in enumerate(cases)
        ]

    def own_token(self, request: Request, prefix: Sequence[int], logits: FloatRow) -> int:
        if request.params.is_greedy:
            return self._reference.own_token(request, prefix, logits)
        row = self._adjusted(request, prefix, logits)
        case = native_case(request, MATCH, num_emitted=len(prefix), num_drafted=0)
        rows, found = c.c_uint64(row.ctypes.data), (c.c_int32 * 2)()
        self._lib.check(self._lib.verify(self._open_handle(), c.byref(case), 1, c.byref(rows), None, None, found))
        return found[1]

    def probs(self, request: Request, prefix: Sequence[int], logits: FloatRow) -> FloatRow:
        if request.params.is_greedy:
            return self._reference.probs(request, prefix, logits)
        row = self._adjusted(request, prefix, logits)
        case = native_case(request, MATCH, num_emitted=len(prefix), num_drafted=0)
        probs = np.empty_like(row)
        self._lib.check(self._lib.probs(self._open_handle(), c.byref(case), row.ctypes.data, probs.ctypes.data))
        return probs

    def _adjusted(self, request: Request, prefix: Sequence[int], logits: FloatRow) -> FloatRow:
        return _checked_row(request.shaper.adjusted(logits, prefix), self._vocab_size)

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


def native_case(request: Request, rule: int, *, num_emitted: int, num_drafted: int) -> NativeCase:
    """`num_emitted`: tokens assumed to be emitted after `request.tokens`."""
    params = request.params
    return NativeCase(
        request.seed, len(request.tokens) + num_emitted, params.top_p, params.min_p, float(request.shaper.sharpness),
        min(max(params.top_k, 0), _LARGEST_INT), rule, num_drafted,
    )  # fmt: skip


def _checked_row(row: FloatRow, vocab_size: int) -> FloatRow:
    row = np.ascontiguousarray(row, np.float32)
    if row.size != vocab_size:
        raise ValueError(f"a row of {row.size} numbers does not fit a vocabulary of {vocab_size}")
    return row


class _Batch:
    """Cases in the library's format. Keeps the arrays that it points to alive."""

    def __init__(self, logits: FloatRow) -> None:
        self._logits = logits
        self._address = logits.ctypes.data
        self._cases: list[NativeCase] = []
        self._rows: list[int] = []
        self._drafted: list[int] = []
        self._draft_probs: list[int] = []
        self._alive: list[FloatRow] = []

    def add(self, case: Case) -> None:
        request, tokens = case.request, case.tokens
        params, shaper = request.params, request.shaper
        probs = None if matches_own_tokens(params) or case.draft is None else case.draft.probs
        if probs is not None:
            rule = REJECT if params.speculation.acceptance == "rejection" else BLOCK
            if len(probs) != len(tokens):
                raise ValueError(f"a draft of {len(tokens)} tokens came with {len(probs)} distributions")
            self._draft_probs += [self._address_of(row) for row in probs]
        else:
            rule = MATCH_GREEDY if params.is_greedy else MATCH
        for i in range(len(tokens) + 1):
            at = len(self._rows)
            if shaper.may_adjust:
                self._rows.append(self._address_of(shaper.adjusted(self._logits[at], tokens[:i])))
            else:
                self._rows.append(self._address + at * self._logits.strides[0])
        self._drafted += tokens
        self._cases.append(native_case(request, rule, num_emitted=0, num_drafted=len(tokens)))

    @property
    def num_rows(self) -> int:
        return len(self._rows)

    def _address_of(self, row: FloatRow) -> int:
        row = _checked_row(row, self._logits.shape[1])
        self._alive.append(row)
        return row.ctypes.data

    def arguments(self) -> tuple[object, int, object, object, object]:
        return (
            (NativeCase * len(self._cases))(*self._cases),
            len(self._cases),
            (c.c_uint64 * len(self._rows))(*self._rows),
            (c.c_int32 * len(self._drafted))(*self._drafted),
            (c.c_uint64 * len(self._draft_probs))(*self._draft_probs),
        )
