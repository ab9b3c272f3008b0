"""OpenVINO GenAI, which reads GGUF files of some architectures and quantisations: plain, prompt lookup, draft model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import openvino
import openvino_genai as genai

from outpace.bench.peer.base import Answer, Models


class OpenVinoPeer:
    """One pipeline per variant, because speculation is configured at creation."""

    def __init__(self, models: Models) -> None:
        self._depth = models.depth
        self._end_ids = set(models.end_ids)
        options: dict[str, Any] = {"INFERENCE_NUM_THREADS": models.threads}
        path = str(models.target)
        self._pipelines = {
            "plain": genai.LLMPipeline(path, "CPU", **options),
            "prompt lookup": genai.LLMPipeline(path, "CPU", prompt_lookup=True, **options),
        }
        if models.draft is not None:
            draft = genai.draft_model(str(models.draft), "CPU")
            self._pipelines["draft"] = genai.LLMPipeline(path, "CPU", draft_model=draft, **options)
        self.variants = tuple(self._pipelines)

    def answer(self, variant: str, tokens: Sequence[int], max_tokens: int) -> Answer:
        config = genai.GenerationConfig()
        config.max_new_tokens = max_tokens
        config.do_sample = False
        config.apply_chat_template = False
        config.stop_token_ids = self._end_ids
        if variant != "plain":
            config.num_assistant_tokens = self._depth
        if variant == "prompt lookup":
            config.max_ngram_size = 3
        prompt = openvino.Tensor(np.array([list(tokens)], np.int64))
        pipeline = self._pipelines[variant]
        output = pipeline.generate(prompt, config)
        token_ids = list(output.tokens[0])
        return Answer(pipeline.get_tokenizer().decode(token_ids), len(token_ids))

    def close(self) -> None:
        self._pipelines.clear()
