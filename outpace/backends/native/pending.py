"""One request's rows for the library, until its verdict is found.

A mask takes longer than the sampling of a row. So tokens of requests with a grammar are first picked without a mask.
Such a pick is right if the grammar allows it and the row's likeliest token, and if the library calls it stable (see
`Sampler::pick` in csrc/sampling.cpp). Otherwise the case runs again from that row, which then has its mask. Where the
grammar allows one token only, the library does not read the logits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from outpace.backends.native.library import Case as NativeCase
from outpace.config import SamplingParams
from outpace.core import Case, Request, Verdict
from outpace.decoding.verification import matches_own_tokens

FloatRow = NDArray[np.float32]
LogitRow = tuple[int, int, int]  # OutpaceLogitRow of csrc/capi.h: addresses of logits and mask, and the only token
MATCH_GREEDY, MATCH, REJECT, BLOCK = range(4)
_LARGEST_INT = 2**31 - 1
_NO_MASK, _NOT_ONLY = 0, -1


def native_case(request: Request, rule: int, *, num_emitted: int, num_drafted: int) -> NativeCase:
    """`num_emitted`: tokens assumed to be emitted after `request.tokens`."""
    params = request.params
    return NativeCase(
        request.seed, len(request.tokens) + num_emitted, params.top_p, params.min_p, float(request.shaper.sharpness),
        min(max(params.top_k, 0), _LARGEST_INT), rule, num_drafted,
    )  # fmt: skip


class RowMaker:
    """Makes rows in the library's format, and keeps the arrays that they point to alive."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._alive: list[NDArray[np.float32] | NDArray[np.uint32]] = []

    def row(
        self, request: Request, prefix: Sequence[int], logits: FloatRow, address: int = 0, *, with_mask: bool = True
    ) -> LogitRow:
        """The row of logits after `prefix`. Without a mask only one that has an only token is constrained.

        `address` is that of the logits, if the caller knows it and keeps them: asking numpy for it takes microseconds.
        """
        shaper, matcher = request.shaper, request.matcher
        if matcher is not None and shaper.has_only_mask:  # otherwise the only token might be a forbidden one
            only = matcher.only_token(prefix)
            if only is not None:
                return 0, _NO_MASK, only
        if not address or not shaper.has_only_mask:
            address = self.address_of(shaper.unmasked(logits, prefix))
        if matcher is None or not with_mask:
            return address, _NO_MASK, _NOT_ONLY
        mask = matcher.mask(prefix)
        if 32 * mask.size < self._vocab_size:
            raise ValueError(f"a mask of {32 * mask.size} tokens does not fit a vocabulary of {self._vocab_size}")
        self._alive.append(mask)
        return address, mask.ctypes.data, _NOT_ONLY

    def address_of(self, row: FloatRow) -> int:
        row = np.ascontiguousarray(row, np.float32)
        if row.size != self._vocab_size:
            raise ValueError(f"a row of {row.size} numbers does not fit a vocabulary of {self._vocab_size}")
        self._alive.append(row)
        return row.ctypes.data


class PendingCase:
    """A case without a lossy rule, and how far its verdict is known."""

    def __init__(self, case: Case, logits: FloatRow, first_row: int, address: int) -> None:
        """`logits` are the rows of all cases, contiguous; `address` is that of its first row."""
        self._case, self._logits, self._first_row, self._address = case, logits, first_row, address
        request, params = case.request, case.request.params
        probs = None if matches_own_tokens(params) or case.draft is None else case.draft.probs
        self.draft_probs: Sequence[FloatRow] = []
        if probs is not None:
            self._rule = REJECT if params.speculation.acceptance == "rejection" else BLOCK
            if len(probs) != len(case.tokens):
                raise ValueError(f"a draft of {len(case.tokens)} tokens came with {len(probs)} distributions")
            self.draft_probs = probs
        else:
            self._rule = MATCH_GREEDY if params.is_greedy else MATCH
        self.guesses = request.matcher is not None and probs is None and (params.is_greedy or not _filters(params))
        self._num_settled = 0  # rows whose tokens are known to be accepted draft tokens
        self._is_masked = False  # the first row after those has its mask
        self._rows: list[LogitRow] = []
        self.verdict: Verdict  # as soon as `take` returns True

    @property
    def tokens(self) -> Sequence[int]:
        """The draft tokens that the library has yet to verify."""
        return self._case.tokens[self._num_settled :]

    def native(self) -> NativeCase:
        num_drafted = len(self._case.tokens) - self._num_settled
        return native_case(self._case.request, self._rule, num_emitted=self._num_settled, num_drafted=num_drafted)

    def rows(self, maker: RowMaker) -> list[LogitRow]:
        request, tokens, first = self._case.request, self._case.tokens, self._num_settled
        places, size = range(first, len(tokens) + 1), self._logits.strides[0]
        if request.matcher is None and request.shaper.has_only_mask:  # the library reads the logits as they are
            self._rows = [(self._address + i * size, _NO_MASK, _NOT_ONLY) for i in places]
            return self._rows
        self._rows = []
        for i in places:
            with_mask = not self.guesses or (self._is_masked and i == first)
            logits, address = self._logits[self._first_row + i], self._address + i * size
            self._rows.append(maker.row(request, tokens[:i], logits, address, with_mask=with_mask))
        return self._rows

    def take(self, num_accepted: int, token: int, picked: Sequence[int]) -> bool:
        """Take the library's verdict. False if a pick in it needs a mask, so that the case must run again.

        `picked` has for each row the token, the likeliest token, and whether the pick is stable.
        """
        first, tokens = self._num_settled, self._case.tokens
        for i in range(num_accepted + 1) if self.guesses else ():
            is_guess = self._rows[i][1:] == (_NO_MASK, _NOT_ONLY)
            if is_guess and not self._holds(picked[3 * i : 3 * i + 3], tokens[: first + i]):
                self._num_settled, self._is_masked = first + i, True
                return False
        num_accepted += first
        self.verdict = Verdict([*tokens[:num_accepted], token], len(tokens), num_accepted)
        return True

    def _holds(self, picked: Sequence[int], prefix: Sequence[int]) -> bool:
        token, likeliest, is_stable = picked
        matcher = self._case.request.matcher
        if matcher is None or not is_stable:
            return matcher is None
        # The picked token is asked last: the parser then stands where the request will go on.
        return (token == likeliest or matcher.allows(likeliest, prefix)) and matcher.allows(token, prefix)


def _filters(params: SamplingParams) -> bool:
    """Whether sampling drops tokens. Which ones depends on all allowed tokens, so on the mask."""
    return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0
