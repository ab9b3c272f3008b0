"""Masks: bits, members, and their application to logits and probabilities."""

from __future__ import annotations

import numpy as np
import pytest

from outpace.decoding.masks import (
    Masking,
    MaskMemory,
    allows,
    is_empty,
    mask_of,
    mask_of_all,
    num_members,
    without_forbidden,
)


@pytest.mark.parametrize("num_tokens", [1, 31, 32, 33, 258, 1000])
def test_a_mask_has_its_members_and_applies_them(num_tokens: int):
    rng = np.random.default_rng(num_tokens)
    members = set(rng.integers(0, num_tokens, size=num_tokens // 2 + 1).tolist())
    mask = mask_of(members, num_tokens)
    assert num_members(mask) == len(members)
    assert [allows(mask, token) for token in range(num_tokens)] == [token in members for token in range(num_tokens)]
    logits = rng.normal(size=num_tokens).astype(np.float32)
    logits[0] = -0.0
    masked = Masking()(logits, mask)
    expected = [value if token in members else -np.inf for token, value in enumerate(logits)]
    assert masked.tobytes() == np.array(expected, np.float32).tobytes(), "allowed logits keep their bits"
    kept = without_forbidden(logits, mask)
    assert np.flatnonzero(kept).tolist() == sorted(token for token in members if logits[token])


@pytest.mark.parametrize(("size", "members"), [(41, [2, 40]), (3, [2])])
def test_a_row_may_be_shorter_than_its_mask(size: int, members: list[int]):
    masked = Masking()(np.zeros(size, np.float32), mask_of([2, 40], 50))
    assert np.flatnonzero(np.isfinite(masked)).tolist() == members


@pytest.mark.parametrize("num_tokens", [1, 32, 33, 258])
def test_the_mask_of_all_allows_each_token_and_no_other_bit(num_tokens: int):
    assert mask_of_all(num_tokens).tolist() == mask_of(range(num_tokens), num_tokens).tolist()


def test_masks_from_one_memory_are_apart_and_at_their_addresses():
    memory, taken = MaskMemory(5), []
    for i in range(20):
        mask, address = memory.take()
        assert address == mask.ctypes.data and mask.size == 5
        mask[:] = i
        taken.append(mask)
    assert [mask.tolist() for mask in taken] == [[i] * 5 for i in range(20)]


def test_a_mask_without_tokens_is_empty():
    assert is_empty(mask_of([], 100))
    for token in (0, 50, 99):
        assert not is_empty(mask_of([token], 100))
