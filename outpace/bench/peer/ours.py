"""Outpace itself, on one loaded model: plain decoding, and `auto` with its policy."""

from __future__ import annotations

from collections.abc import Sequence

from outpace.bench.peer.base import Answer, Models
from outpace.bench.settings import AUTO, PLAIN
from outpace.config import SamplingParams
from outpace.llm import LLM


class OutpacePeer:
    variants = ("plain", "auto")

    def __init__(self, models: Models) -> None:
        self._settings = {"plain": PLAIN, "auto": AUTO}
        self._llm = LLM(
            str(models.target),
            draft=str(models.draft) if models.draft else None,
            backend=models.backend,
            threads=models.threads,
            max_context=models.max_context,
        )
        self._llm.engine.calibrate()

    def answer(self, variant: str, tokens: Sequence[int], max_tokens: int) -> Answer:
        self._llm.engine.forget()
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, speculation=self._settings[variant].speculation)
        output = self._llm.generate(list(tokens), params, progress=False)[0].outputs[0]
        return Answer(output.text, len(output.token_ids))

    def close(self) -> None:
        self._llm.close()
