"""Batches by Ray Data: `dataset.map_batches(Predictor, ...)` answers the lines of a batch on many machines.

    import ray
    from outpace.ray import Predictor

    lines = ray.data.read_text("requests.jsonl")
    lines.map_batches(Predictor, fn_constructor_kwargs={"model": "target.gguf"}, batch_size=64, concurrency=2)

Every row has a request in OpenAI's batch format as `text`, and gets its result as `result`, both JSON.
"""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from outpace.batch.answering import Answerer, unlimited
from outpace.batch.lines import BadLine, Line, line_of, parse, refused, seeded
from outpace.llm import LLM
from outpace.models.generation_config import GenerationChoice
from outpace.server.config import ServerConfig


class Predictor:
    """One engine. `seed`: for requests that have none, as with `outpace batch --seed`."""

    def __init__(
        self,
        model: str | None = None,
        *,
        server: ServerConfig | None = None,
        generation: GenerationChoice | None = None,
        seed: int | None = None,
        **engine: Any,
    ) -> None:
        self._seed = seed
        self._llm = LLM(model, **engine)
        defaults = (generation or GenerationChoice.of(None, None)).settle(Path(self._llm.config.model))
        config = replace(unlimited(server or ServerConfig()), default_sampling=defaults.values)
        self._llm.engine.calibrate()
        self._answerer = Answerer(
            self._llm.engine, self._llm.tokenizer, config, max_context=self._llm.config.max_context
        )
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._wait(self._answerer.__aenter__())

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Answer all lines of the batch at once. Raises if the engine has stopped: Ray then tries the batch again."""
        ids = batch.get("id")
        texts = [str(text) for text in batch["text"]]
        lines = [
            Line(number, str(ids[number - 1]), text.encode()) if ids is not None else line_of(number, text.encode())
            for number, text in enumerate(texts, 1)
        ]
        results = self._wait(self._answer_all(lines))
        return {**batch, "result": np.array([json.dumps(each) for each in results], dtype=object)}

    async def _answer_all(self, lines: list[Line]) -> list[dict[str, Any]]:
        return await asyncio.gather(*map(self._answer, lines))

    async def _answer(self, line: Line) -> dict[str, Any]:
        try:
            request = parse(line)
        except BadLine as problem:
            return refused(line, problem)
        if self._seed is not None:
            request = seeded(request, line, self._seed)
        return await self._answerer.answer(line, request)

    def _wait(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()
