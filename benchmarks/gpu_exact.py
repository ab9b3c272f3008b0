"""Compares speculation with plain decoding with a real model on a GPU, in float32 and in bfloat16.

Every proposer drafts for the same requests, greedy and with seeds. In float32 all tokens must be equal. In bfloat16, a
step that verifies several tokens rounds differently from a step that decodes one, so two tokens with almost equal
logits can swap. For the first different token of every request, the gap between the two best logits is reported.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu_models import Letters
from outpace.backends.base import Capacity, LoadedModel
from outpace.backends.torch.device import TorchOptions
from outpace.backends.torch.runner import TorchModel
from outpace.config import DtypeName, EngineConfig, Method, SamplingParams
from outpace.core import Row, StepPlan
from outpace.engine.engine import Engine
from outpace.speculation.costs.curves import Costs
from outpace.speculation.proposers.base import NoDraft, Proposer
from outpace.speculation.proposers.draft_model import DraftModelProposer
from outpace.speculation.proposers.ngram import NgramProposer
from outpace.speculation.proposers.suffix import SuffixProposer

NUM_PROMPTS, NEW_TOKENS, MAX_CONTEXT = 16, 128, 1024
METHODS: tuple[Method, ...] = ("ngram", "suffix", "draft")
DEPTH = 5
CAPACITY = Capacity(NUM_PROMPTS + 1, (NUM_PROMPTS + 1) * MAX_CONTEXT, MAX_CONTEXT, 2048)
# In bfloat16, logits between 16 and 32 have a spacing of 1/8, and the rounding of all layers adds up to a few of that.
LARGEST_GAP = 0.5


@dataclass
class Generated:
    texts: list[list[int]]
    num_accepted: int


def compare(model: Path, prompts: list[list[int]], say: Callable[[str], None]) -> list[dict[str, Any]]:
    chosen = [prompt for prompt in prompts if len(prompt) < 400][:NUM_PROMPTS]
    found = []
    types: tuple[tuple[DtypeName, DtypeName], ...] = (("float32", "bfloat16"), ("bfloat16", "float32"))
    for dtype, draft_dtype in types:
        pair = Pair(_load(model, dtype), _load(model, draft_dtype))
        for label, features in (("greedy", {"temperature": 0.0}), ("seeded", {"temperature": 1.0})):
            plain, again = (pair.generate(chosen, None, features) for _ in range(2))
            for method in METHODS:
                other = pair.generate(chosen, method, features)
                gaps = [pair.gap(*texts) for texts in zip(chosen, plain.texts, other.texts, strict=True)]
                different = [gap for gap in gaps if gap is not None]
                row = {
                    "dtype": dtype, "sampling": label, "method": method, "requests": len(chosen),
                    "accepted": other.num_accepted, "equal": len(chosen) - len(different),
                    "plain_replays": again.texts == plain.texts, "gaps": different,
                }  # fmt: skip
                is_fine = not different if dtype == "float32" else max(different, default=0.0) < LARGEST_GAP
                row["passed"] = bool(row["plain_replays"] and other.num_accepted and (is_fine or label == "seeded"))
                found.append(row)
                shown = f"; top-2 gaps at the first difference: {', '.join(f'{gap:.3f}' for gap in different)}"
                say(
                    f"  {dtype:8} {label} {method:6} {row['equal']:3} of {len(chosen)} requests equal plain decoding, "
                    f"{other.num_accepted} tokens accepted{shown if different and label == 'greedy' else ''}"
                    f"{'' if row['passed'] else ' FAILED'}"
                )
        pair.close()
    return found


def _load(model: Path, dtype: DtypeName) -> LoadedModel:
    opened = TorchModel(model, TorchOptions("auto", dtype), tokenizer=Letters(49_152))
    return opened.start(CAPACITY, 1)


class Pair:
    def __init__(self, target: LoadedModel, draft: LoadedModel) -> None:
        self._target, self._draft = target, draft
        self._costs: Costs | None = None  # measured by the first engine

    def generate(self, prompts: list[list[int]], method: Method | None, features: dict[str, Any]) -> Generated:
        config = EngineConfig(
            draft="itself", speculation="off" if method is None else "on", method=method,
            depth=None if method is None else DEPTH, max_sequences=NUM_PROMPTS, max_context=MAX_CONTEXT,
            cache_tokens=CAPACITY.cache_tokens, prefix_reuse=False,
        ).resolve(model_context=8192, model_path="model", draft_path="itself", backend="torch")  # fmt: skip
        drafter = DraftModelProposer(self._draft, self._target.runner.vocab_size)
        proposers: list[Proposer] = [NoDraft(), NgramProposer(2, 4), SuffixProposer(65536), drafter]
        engine = Engine(self._target, {proposer.name: proposer for proposer in proposers}, config, draft=self._draft)
        if self._costs is not None:
            engine.policy.use_costs(self._costs)
        requests = [
            engine.submit(prompt, SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True, seed=i, **features))
            for i, prompt in enumerate(prompts)
        ]
        self._costs = engine.costs
        while engine.has_requests:
            engine.step()
        return Generated(
            [request.tokens[len(request.prompt) :] for request in requests],
            sum(request.spec.num_accepted for request in requests),
        )

    def gap(self, prompt: list[int], plain: list[int], other: list[int]) -> float | None:
        """The gap between the two best logits at the first different token; None if all tokens are equal."""
        if plain == other:
            return None
        at = next(i for i, tokens in enumerate(zip(plain, other, strict=True)) if tokens[0] != tokens[1])
        logits = self._target.runner.forward(StepPlan([Row(0, 0, [*prompt, *plain[:at]], 1)]))
        self._target.runner.free(0)
        second, best = np.sort(logits[0])[-2:]
        return float(best - second)

    def close(self) -> None:
        for loaded in (self._target, self._draft):
            loaded.runner.close()
