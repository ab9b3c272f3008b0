"""vLLM in this process, where it is installed and can run the file: plain, n-gram, draft model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm import LLM, SamplingParams

from outpace.bench.peer.base import Answer, Models


class VllmPeer:
    """One engine per variant. They share the device, so each gets an equal part of its memory."""

    def __init__(self, models: Models) -> None:
        speculative: dict[str, dict[str, Any] | None] = {
            "plain": None,
            "ngram": {"method": "ngram", "num_speculative_tokens": models.depth, "prompt_lookup_max": 4},
        }
        if models.draft is not None:
            speculative["draft"] = {"model": str(models.draft), "num_speculative_tokens": models.depth}
        self.variants = tuple(speculative)
        self._end_ids = sorted(models.end_ids)
        self._engines = {
            name: LLM(
                str(models.target),
                speculative_config=config,
                max_model_len=models.max_context,
                enable_prefix_caching=False,
                gpu_memory_utilization=0.9 / len(speculative),
            )
            for name, config in speculative.items()
        }

    def answer(self, variant: str, tokens: Sequence[int], max_tokens: int) -> Answer:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, stop_token_ids=self._end_ids)
        (output,) = self._engines[variant].generate([{"prompt_token_ids": list(tokens)}], params, use_tqdm=False)
        completion = output.outputs[0]
        return Answer(completion.text, len(completion.token_ids))

    def close(self) -> None:
        self._engines.clear()
