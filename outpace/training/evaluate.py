"""How well a head drafts: tokens a step by depth, overlap at temperature 1, coverage of the vocabulary.

Drafts are made from every entry of every answer at once; then decoding is replayed over the answer: a step keeps the
draft's leading tokens that the answer has too, and one token of the target's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from outpace.training.batches import Batch, BatchShape, Texts, make_batch, plan_batches
from outpace.training.head import Head
from outpace.training.target import Features, Target

MAX_DEPTH = 8
OVERLAP_STEPS = 5
ALL = "all"
# Spec-Bench takes MT-Bench's eight categories for one class.
_CLASSES = {
    "conversation": {"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"},
}
_ROWS = 1024  # logits over the whole vocabulary are made for so many entries at once


@dataclass(frozen=True, slots=True)
class Evaluation:
    tokens_a_step: dict[str, list[float]]  # by category, at depth 1, 2, ...; the target's own token included
    overlap: list[float]  # of the two distributions at temperature 1, by depth
    coverage: float  # share of greedy answers' tokens in the draft vocabulary
    num_texts: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def evaluate(
    target: Target, head: Head, kept: torch.Tensor, greedy: Texts, sampled: Texts, categories: Sequence[str],
    shape: BatchShape, *, rounded: bool,
) -> Evaluation:  # fmt: skip
    hits = num_hits(target, head, kept, greedy, shape, rounded=rounded)
    members = {ALL: set(categories)}
    members |= {name: parts for name, parts in _CLASSES.items() if parts <= set(categories)}
    members |= {name: {name} for name in categories}
    chosen = {name: [hits[i] for i in hits if categories[i] in parts] for name, parts in members.items()}
    table = {
        name: [tokens_a_step(each, depth) for depth in range(1, MAX_DEPTH + 1)] for name, each in chosen.items() if each
    }
    said = greedy.tokens[greedy.is_answer()]
    coverage = float(np.isin(said, kept.cpu().numpy()).mean()) if len(said) else 0.0
    overlap = mean_overlaps(target, head, kept, sampled, shape, rounded=rounded)
    return Evaluation(table, overlap, coverage, len(hits))


@torch.no_grad()
def num_hits(
    target: Target, head: Head, kept: torch.Tensor, texts: Texts, shape: BatchShape, *, rounded: bool,
    max_depth: int = MAX_DEPTH,
) -> dict[int, NDArray[np.int64]]:  # fmt: skip
    """By text: for each of its entries, how many leading tokens of a greedy draft are the answer's."""
    found: dict[int, NDArray[np.int64]] = {}
    for batch, features in _batches(target, head, texts, shape, max_depth):
        chains = head.begin(features, batch, rounded=rounded)
        tokens = batch.shifted(1)
        is_hit, num = torch.ones(len(batch.entries), device=target.device), torch.zeros(len(batch.entries)).to(tokens)
        for step in range(max_depth):
            logits = _chunked(chains.step(tokens, batch.entries), chains.output, shape.chunk)
            drafted = kept[logits]
            is_right = (drafted == batch.shifted(2 + step)[batch.entries]).float() * batch.weights[step]
            is_hit = is_hit * is_right
            num += is_hit.long()
            tokens = batch.shifted(2 + step).scatter(0, batch.entries, drafted)
        values, at = num.cpu().numpy(), 0
        for text, count in zip(batch.texts, batch.counts, strict=True):
            if count:
                found[text] = values[at : at + count]
            at += count
    return found


def _chunked(rows: torch.Tensor, output: torch.Tensor, chunk: int) -> torch.Tensor:
    """The likeliest draft token of each row."""
    return torch.cat([(part @ output.T).argmax(-1) for part in rows.split(chunk)])


def tokens_a_step(hits: Sequence[NDArray[np.int64]], depth: int) -> float:
    """Replays decoding with drafts of `depth`. An answer's first token comes with the prompt, so entry 0 drafts the
    second one."""
    num_steps = num_tokens = 0
    for each in hits:
        at, values = 0, np.minimum(each, depth).tolist()
        while at < len(values):
            num_steps += 1
            at += values[at] + 1
        num_tokens += at
    return num_tokens / max(num_steps, 1)


@torch.no_grad()
def mean_overlaps(
    target: Target, head: Head, kept: torch.Tensor, texts: Texts, shape: BatchShape, *, rounded: bool
) -> list[float]:
    """By depth: the share of sampled drafts that rejection sampling accepts, if all before were."""
    sums, counts = torch.zeros(OVERLAP_STEPS, device=target.device), np.zeros(OVERLAP_STEPS)
    output = target.weights.dense_head
    for batch, features in _batches(target, head, texts, shape, OVERLAP_STEPS):
        chains = head.begin(features, batch, rounded=rounded)
        counts += batch.num_drafted
        for step in range(OVERLAP_STEPS):
            rows = chains.step(batch.shifted(1 + step), batch.entries)
            # A place beyond the text is clamped; its weight is 0.
            places = (batch.entries + 1 + step).clamp(max=len(batch.tokens) - 1)
            for at in range(0, len(rows), _ROWS):
                here = slice(at, at + _ROWS)
                target_probs = (features.last[places[here]] @ output.T).float().softmax(-1)[:, kept]
                draft_probs = (rows[here] @ chains.output.T).float().softmax(-1)
                common = torch.minimum(target_probs, draft_probs).sum(-1)
                sums[step] += (common * batch.weights[step, here]).sum()
    return [float(total) / max(count, 1.0) for total, count in zip(sums.tolist(), counts, strict=True)]


def _batches(
    target: Target, head: Head, texts: Texts, shape: BatchShape, num_steps: int
) -> Iterator[tuple[Batch, Features]]:
    enough = -(-int(texts.lengths.max(initial=1)) // shape.num_tokens)  # for the longest text to fit
    longer = BatchShape(enough * shape.num_tokens, shape.chunk, num_steps)
    for length, chosen in plan_batches(texts, longer):
        batch = make_batch(texts, length, chosen, longer, target.device)
        yield batch, target.features(batch, head.config.taps)
