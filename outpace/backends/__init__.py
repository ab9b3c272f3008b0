"""Backends and the one function that loads a model with the right one."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from outpace.backends.base import Capacity, LoadedModel, OpenModel
from outpace.config import BackendName, EngineConfig, ResolvedConfig
from outpace.errors import BackendError, ModelError

if TYPE_CHECKING:
    from outpace.backends.llamacpp.library import Library

MAX_SEQUENCES = 256  # compiled into libllama

log = logging.getLogger("outpace.backends")


@dataclass(frozen=True, slots=True)
class Loaded:
    target: LoadedModel
    draft: LoadedModel | None
    config: ResolvedConfig


def load(config: EngineConfig, model_path: Path, draft_path: Path | None) -> Loaded:
    """Load the target and, if there is one, its draft; checks that they speak the same vocabulary."""
    from outpace.backends.llamacpp.library import load_library
    from outpace.speculation.draft_model import check_same_vocabulary

    library = load_library(config.llama_library)
    with ExitStack() as undo:  # what was opened is closed again if a later part cannot be
        target, backend = _open(config.backend, model_path, library)
        undo.callback(target.close)
        resolved = config.resolve(
            model_context=target.train_context,
            model_path=str(model_path),
            draft_path=str(draft_path) if draft_path else None,
            backend=backend,
        )
        capacity = Capacity(
            # As many again as may run, so that finished requests' prefixes can be kept for a while.
            max_sequences=min(2 * resolved.max_sequences, MAX_SEQUENCES),
            cache_tokens=resolved.cache_tokens,
            max_context=resolved.max_context,
            max_step_tokens=resolved.max_step_tokens,
        )
        draft = None
        if draft_path is not None:
            # A draft is free to run on another backend than its target: whatever runs it best.
            draft, _ = _open("llamacpp" if config.backend == "llamacpp" else "auto", draft_path, library)
            undo.callback(draft.close)
            check_same_vocabulary(target.tokenizer, draft.tokenizer)
        loaded_target = target.start(capacity, resolved.threads)
        undo.callback(loaded_target.runner.close)
        loaded_draft = draft.start(capacity, resolved.threads) if draft else None
        undo.pop_all()
    return Loaded(loaded_target, loaded_draft, resolved)


def _open(wanted: BackendName, path: Path, library: Library) -> tuple[OpenModel, BackendName]:
    """The model on the backend asked for; with "auto", on the native one where it can run there."""
    from outpace.backends.llamacpp.runner import LlamaModel

    if wanted != "llamacpp":
        from outpace.backends.native.runner import NativeModel
        from outpace.backends.native.weights import Unsupported

        try:
            model = NativeModel(path, library)
            log.info("%s runs on the native backend (%s)", path.name, model.isa)
            return model, "native"
        except Unsupported as reason:
            if wanted == "native":
                raise ModelError(
                    f"the native backend cannot run {path}: {reason}; use backend 'llamacpp' or 'auto'"
                ) from reason
            log.info("%s runs on llama.cpp, because the native backend cannot run it: %s", path.name, reason)
        except BackendError as reason:
            if wanted == "native":
                raise
            log.info("%s runs on llama.cpp: %s", path.name, reason)
    return LlamaModel(path, library), "llamacpp"
