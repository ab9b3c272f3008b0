"""Batches of texts with a fixed number of tokens each, so that compiled code sees one shape.

A batch is [rows, length] with rows * length the same for all batches; the length is the smallest one that fits. Text
is on the left and padding on the right, where causal attention never looks back from the text.

Entry t of a text is what a draft starts from: the target's features of position t and the token after it. The drafts
that matter are those inside the answer: their first token is t + 2, for t from one before the answer on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Tokens = NDArray[np.integer]
_UNIT = 32  # lengths are multiples of it


@dataclass(frozen=True, slots=True)
class Texts:
    """Prompts with their answers, one after the other."""

    tokens: Tokens  # of all texts
    offsets: NDArray[np.int64]  # [num_texts + 1]
    prompt_lengths: NDArray[np.int64]  # [num_texts]

    def __len__(self) -> int:
        return len(self.prompt_lengths)

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self.offsets)

    @property
    def num_answer_tokens(self) -> int:
        return int((self.lengths - self.prompt_lengths).sum())

    def answer(self, i: int) -> Tokens:
        return self.tokens[self.offsets[i] + self.prompt_lengths[i] : self.offsets[i + 1]]

    def is_answer(self) -> NDArray[np.bool_]:
        """Which of all tokens are in an answer."""
        inside = np.arange(len(self.tokens)) - np.repeat(self.offsets[:-1], self.lengths)
        found: NDArray[np.bool_] = inside >= np.repeat(self.prompt_lengths, self.lengths)
        return found

    def take(self, chosen: Sequence[int]) -> Texts:
        parts = [self.tokens[self.offsets[i] : self.offsets[i + 1]] for i in chosen]
        return join(parts, self.prompt_lengths[list(chosen)])


def join(parts: Sequence[Tokens], prompt_lengths: Sequence[int] | NDArray[np.int64]) -> Texts:
    offsets = np.concatenate([[0], np.cumsum([len(part) for part in parts], dtype=np.int64)])
    tokens = np.concatenate(parts) if len(parts) else np.zeros(0, np.int64)
    return Texts(tokens, offsets.astype(np.int64), np.asarray(prompt_lengths, np.int64))


@dataclass(frozen=True, slots=True)
class Batch:
    tokens: Tensor  # int64 [rows * length]
    length: int
    entries: Tensor  # int64 [n]: places in `tokens` where drafts start; n is a multiple of the chunk
    weights: Tensor  # float32 [num_steps, n]: 1 where the draft's token of this step is in the answer
    num_drafted: tuple[int, ...]  # sums of the weights
    texts: tuple[int, ...]  # which texts, row by row
    counts: tuple[int, ...]  # entries of each text
    num_tokens: int  # without padding

    @property
    def num_rows(self) -> int:
        return len(self.tokens) // self.length

    def shifted(self, distance: int) -> Tensor:
        """For each place, the token this far after it in its row; 0 beyond the row's end."""
        rows = self.tokens.view(-1, self.length)
        return torch.nn.functional.pad(rows[:, distance:], (0, distance)).reshape(-1)

    def positions(self) -> Tensor:
        return torch.arange(self.length, device=self.tokens.device).repeat(self.num_rows)


@dataclass(frozen=True, slots=True)
class BatchShape:
    num_tokens: int = 32 * 720  # 720 has many divisors, so that a length close to the text's is among them
    chunk: int = 2048  # entries are padded to a multiple of it
    num_steps: int = 4

    @property
    def lengths(self) -> list[int]:
        units = self.num_tokens // _UNIT
        return [_UNIT * n for n in range(1, units + 1) if units % n == 0]


def plan_batches(texts: Texts, shape: BatchShape, seed: int | None = None) -> list[tuple[int, list[int]]]:
    """Length and texts of each batch; with a seed, in random order. Texts longer than a batch are left out."""
    order = np.arange(len(texts)) if seed is None else np.random.default_rng(seed).permutation(len(texts))
    lengths = np.asarray(shape.lengths)
    fitting = np.searchsorted(lengths, texts.lengths[order])
    order, fitting = order[fitting < len(lengths)], fitting[fitting < len(lengths)]
    longest_first = order[np.argsort(-fitting, kind="stable")]
    plans: list[tuple[int, list[int]]] = []
    at = 0
    while at < len(longest_first):
        length = int(lengths[np.searchsorted(lengths, texts.lengths[longest_first[at]])])
        chosen = longest_first[at : at + shape.num_tokens // length]
        plans.append((length, [int(each) for each in chosen]))
        at += len(chosen)
    if seed is not None:
        plans = [plans[i] for i in np.random.default_rng(seed).permutation(len(plans))]
    return plans


def make_batch(texts: Texts, length: int, chosen: Sequence[int], shape: BatchShape, device: torch.device) -> Batch:
    rows = np.asarray(chosen)
    lengths, prompts = texts.lengths[rows], texts.prompt_lengths[rows]
    inside = np.arange(length) < lengths[:, None]
    places = np.minimum(texts.offsets[rows][:, None] + np.arange(length), len(texts.tokens) - 1)
    tokens = np.zeros((shape.num_tokens // length, length), np.int64)
    tokens[: len(rows)] = np.where(inside, texts.tokens[places], 0)
    counts = np.maximum(lengths - prompts - 1, 0)
    rank = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)  # of an entry in its text
    first = np.arange(len(rows)) * length + prompts - 1
    num_entries = -(-max(len(rank), 1) // shape.chunk) * shape.chunk
    entries = np.zeros(num_entries, np.int64)
    entries[: len(rank)] = np.repeat(first, counts) + rank
    weights = np.zeros((shape.num_steps, num_entries), np.float32)
    for step in range(shape.num_steps):
        weights[step, : len(rank)] = rank + step < np.repeat(counts, counts)
    drafted = tuple(int(each) for each in weights.sum(1))

    def moved(array: NDArray[np.generic]) -> Tensor:
        tensor = torch.from_numpy(array)
        return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)

    return Batch(
        moved(tokens.reshape(-1)), length, moved(entries), moved(weights), drafted,
        tuple(int(each) for each in rows), tuple(int(each) for each in counts), int(lengths.sum()),
    )  # fmt: skip


def epochs(texts: Texts, shape: BatchShape, seed: int, skip: int, device: torch.device) -> Iterator[Batch]:
    """Batches without end, each epoch in another order, after the first `skip` batches."""
    epoch = 0
    while True:
        plans = plan_batches(texts, shape, seed + epoch)
        for length, chosen in plans[skip:]:
            yield make_batch(texts, length, chosen, shape, device)
        skip = max(skip - len(plans), 0)
        epoch += 1
