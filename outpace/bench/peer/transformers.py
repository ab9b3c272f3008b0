"""Hugging Face transformers on the same GGUF, which it dequantises: plain, prompt lookup, assisted generation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from outpace.bench.peer.base import Answer, Models


class TransformersPeer:
    def __init__(self, models: Models) -> None:
        logging: Any = transformers.utils.logging
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        torch.set_num_threads(models.threads)
        self._tokenizer: Any = AutoTokenizer.from_pretrained(str(models.target.parent), gguf_file=models.target.name)
        self._model = _load(models.target)
        self._end_ids = sorted(models.end_ids)
        self._options: dict[str, dict[str, Any]] = {
            "plain": {},
            "prompt lookup": {"prompt_lookup_num_tokens": models.depth},
        }
        if models.draft is not None:
            assistant = _load(models.draft)
            assistant.generation_config.num_assistant_tokens = models.depth
            assistant.generation_config.num_assistant_tokens_schedule = "constant"
            self._options["assisted"] = {"assistant_model": assistant}
        self.variants = tuple(self._options)

    def answer(self, variant: str, tokens: Sequence[int], max_tokens: int) -> Answer:
        prompt = torch.tensor([list(tokens)])
        with torch.inference_mode():
            output = self._model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=max_tokens,
                do_sample=False,
                eos_token_id=self._end_ids,
                pad_token_id=self._end_ids[0],
                **self._options[variant],
            )
        token_ids = output[0, prompt.shape[1] :].tolist()
        return Answer(self._tokenizer.decode(token_ids, skip_special_tokens=True), len(token_ids))

    def close(self) -> None:
        del self._model
        self._options.clear()


def _load(path: Path) -> Any:
    # bfloat16 needs half the memory traffic of float32 and is the fastest type on current CPUs.
    model: Any = AutoModelForCausalLM.from_pretrained(str(path.parent), gguf_file=path.name, dtype=torch.bfloat16)
    return model.eval()
