"""Backends and the one function that loads a model with the right one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from outpace.backends.base import Capacity, LoadedModel
from outpace.config import EngineConfig, ResolvedConfig


@dataclass(frozen=True, slots=True)
class Loaded:
    target: LoadedModel
    draft: LoadedModel | None
    config: ResolvedConfig


def load(config: EngineConfig, model_path: Path, draft_path: Path | None) -> Loaded:
    """Load the target and, if there is one, its draft; checks that they speak the same vocabulary."""
    from outpace.backends.llamacpp.library import load_library
    from outpace.backends.llamacpp.runner import MAX_SEQUENCES, LlamaModel

    library = load_library(config.llama_library)
    target = LlamaModel(model_path, library)
    resolved = config.resolve(
        model_context=target.train_context,
        model_path=str(model_path),
        draft_path=str(draft_path) if draft_path else None,
    )
    draft = None
    if draft_path is not None:
        from outpace.speculation.draft_model import check_same_vocabulary

        draft = LlamaModel(draft_path, library)
        check_same_vocabulary(target.tokenizer, draft.tokenizer)
    capacity = Capacity(
        # As many again as may run, so that finished requests' prefixes can be kept for a while.
        max_sequences=min(2 * resolved.max_sequences, MAX_SEQUENCES),
        cache_tokens=resolved.cache_tokens,
        max_context=resolved.max_context,
        max_step_tokens=resolved.max_step_tokens,
    )
    return Loaded(
        target=target.start(capacity, resolved.threads),
        draft=draft.start(capacity, resolved.threads) if draft else None,
        config=resolved,
    )
