"""The training loop. Read this file first.

Each step takes a batch of texts that the target wrote itself and asks from every place in an answer: what would the
head draft here, and how far is its distribution from the target's? As in use, the second drafted token is made from
the head's own output for the first, and so on ("training-time test"), but for all places at once.

The clock decides the learning rate, so a run takes the minutes it was given on any machine, and the last fifth of the
time trains with weights rounded as they will be served.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outpace.training.batches import Batch, BatchShape, Texts, epochs
from outpace.training.evaluate import num_hits, tokens_a_step
from outpace.training.head import Head
from outpace.training.loss import DraftLoss
from outpace.training.target import Target


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSettings:
    seconds: float  # of training in all, over all calls
    learning_rate: float = 1.5e-3
    step_decay: float = 0.85  # weight of each further drafted token
    warm_up: float = 0.04  # of the time
    rounded_from: float = 0.8  # of the time
    seed: int = 0
    shape: BatchShape = field(default_factory=BatchShape)


@dataclass(slots=True)
class Progress:
    """How far training is; kept in the checkpoint."""

    seconds: float = 0.0
    steps: int = 0
    tokens: int = 0  # token passes, prompts included
    quick: float = 0.0  # tokens a step at QUICK_DEPTH over a few held-out prompts


QUICK_DEPTH = 3
QUICK_TEXTS = 64
_LOG_EVERY = 50  # steps; reading a loss waits for the device


class Trainer:
    def __init__(
        self, target: Target, head: Head, kept: Tensor, settings: TrainSettings, progress: Progress, *, compile: bool
    ) -> None:
        self.target, self.head, self.kept, self.settings, self.progress = target, head, kept, settings, progress
        self.loss = DraftLoss(settings.shape.chunk, compile=compile)
        self.output = target.weights.dense_head[kept].contiguous()
        for parameter in head.parameters.values():
            parameter.requires_grad_()
        self.optimizer = torch.optim.AdamW(
            list(head.parameters.values()), lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.0,
            fused=target.device.type == "cuda",
        )  # fmt: skip
        self._resumed_at = progress.seconds

    def run(self, texts: Texts, seconds: float, *, tick: Callable[[Progress, float], None]) -> None:
        """Train until all of the time is over, or `seconds` of this call. `tick` hears of every step."""
        begin, earlier = time.monotonic(), self.progress.seconds
        batches = epochs(texts, self.settings.shape, self.settings.seed, self.progress.steps, self.target.device)
        loss = math.nan
        while self.progress.seconds < self.settings.seconds and self.progress.seconds - earlier < seconds:
            found = self.step(next(batches))
            if self.progress.steps % _LOG_EVERY == 0 or self.progress.steps < 3:
                loss = float(found)
            self.progress.seconds = earlier + time.monotonic() - begin
            tick(self.progress, loss)

    def step(self, batch: Batch) -> Tensor:
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate()
        loss = self.batch_loss(batch)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.head.parameters.values(), 1.0)
        self.optimizer.step()
        self.progress.steps += 1
        self.progress.tokens += batch.num_tokens
        return loss.detach()

    def batch_loss(self, batch: Batch) -> Tensor:
        features = self.target.features(batch, self.head.config.taps)
        num_steps = self.settings.shape.num_steps
        # Row r is the target's distribution after entry r's token; the draft's step k is compared with row r + k.
        rows = (batch.entries + 1).clamp(max=len(batch.tokens) - 1)
        probs = self.loss.target_probs(features.last, rows, self.output, num_steps)
        chains = self.head.begin(features, batch, rounded=self.is_rounded)
        total = torch.zeros((), device=self.target.device)
        for step in range(num_steps):
            drafted = chains.step(batch.shifted(1 + step), batch.entries)
            weights = batch.weights[step] / max(batch.num_drafted[step], 1)
            loss = self.loss(drafted, chains.output, probs[step : step + len(drafted)], weights)
            total = total + self.settings.step_decay**step * loss
        return total

    @property
    def is_rounded(self) -> bool:
        return self.progress.seconds >= self.settings.rounded_from * self.settings.seconds

    def learning_rate(self) -> float:
        """A cosine over all of the time, after a warm-up. Resuming warms up again, because AdamW starts anew."""
        s, done = self.settings, self.progress.seconds
        since = (done - self._resumed_at) / (s.warm_up * s.seconds)
        cosine = 0.5 * (1 + math.cos(math.pi * min(done / s.seconds, 1.0)))
        return s.learning_rate * min(since + 0.01, 1.0) * max(cosine, 0.01)

    def quick_figure(self, texts: Texts) -> float:
        hits = num_hits(
            self.target, self.head, self.kept, texts, self.settings.shape, rounded=self.is_rounded,
            max_depth=QUICK_DEPTH,
        )  # fmt: skip
        self.progress.quick = tokens_a_step(list(hits.values()), QUICK_DEPTH)
        return self.progress.quick
