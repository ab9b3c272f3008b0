"""Selects a backend for a model and loads the model with it."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from outpace.backends.base import Capacity, LoadedModel, OpenModel
from outpace.config import BackendName, EngineConfig, Quantization, ResolvedConfig
from outpace.errors import BackendError, ModelError, UsageError
from outpace.models.embedded import own_head
from outpace.models.head_formats import find_head
from outpace.models.llama_library import MAX_SEQUENCES as MOST_OF_LLAMA
from outpace.models.vocabulary import vocabulary_difference

log = logging.getLogger("outpace.backends")
_MOST_KEPT_PREFIXES = 128  # finished requests whose prefixes are kept; each takes up to three pages of cache more
_told: set[str] = set()  # why the native library is missing


@dataclass(frozen=True, slots=True)
class Loaded:
    target: LoadedModel
    draft: LoadedModel | None
    config: ResolvedConfig
    has_other_vocabulary: bool = False  # the draft


def load(config: EngineConfig, model_path: Path, draft_path: Path | None) -> Loaded:
    """Load the target and, if there is one, its draft."""
    if config.backend != "torch" and not (config.backend == "auto" and model_path.is_dir()):
        _reject_torch_settings(config)
    with ExitStack() as undo:  # closes what was opened if a later step fails
        head_path = find_head(draft_path) if draft_path is not None else own_head(model_path)
        if config.self_draft is not None:
            head_path = None
        target, backend = _open(config, config.backend, model_path, head_path, quantization=config.quantization)
        undo.callback(target.close)
        if config.batch_invariant and backend == "llamacpp":
            raise UsageError(
                "batch_invariant is set, and llama.cpp runs this model, whose sums depend on the batch; use backend "
                "'native' or 'torch', or leave it out"
            )
        drafting: Path | str | None = draft_path or (head_path if target.has_head else None)
        if config.self_draft is not None:
            drafting = f"self:{config.self_draft}"
        resolved = config.resolve(
            model_context=target.train_context,
            model_path=str(model_path),
            draft_path=str(drafting) if drafting else None,
            is_head=target.has_head,
            drafts_trees=target.drafts_trees,
            backend=backend,
        )
        difference, runs_llama = None, backend == "llamacpp"
        draft = _self_draft(target, backend, config.self_draft) if config.self_draft is not None else None
        if draft_path is not None and head_path is None:
            # A draft may run on another backend than its target.
            wanted: BackendName = backend if backend == "torch" or config.backend == "llamacpp" else "auto"
            # On the first rank; and a draft's own rounding changes no answer.
            whole = replace(config, tensor_parallel_size=1, batch_invariant=False)
            draft, draft_backend = _open(whole, wanted, draft_path, quantization=config.draft_quantization)
            undo.callback(draft.close)
            runs_llama = runs_llama or draft_backend == "llamacpp"
            difference = vocabulary_difference(target.tokenizer, draft.tokenizer)
            if difference is not None:
                log.info("the draft model has another vocabulary: %s", difference)
        if backend == "torch" and config.cache_tokens is None:
            resolved = _fit_cache_to_device(resolved, target, draft)
        capacity = _capacity(resolved, runs_llama=runs_llama)
        loaded_target = target.start(capacity, resolved.threads)
        undo.callback(loaded_target.runner.close)
        loaded_draft = draft.start(capacity, resolved.threads) if draft else None
        undo.pop_all()
    return Loaded(loaded_target, loaded_draft, resolved, has_other_vocabulary=difference is not None)


def _self_draft(target: OpenModel, backend: BackendName, kind: str) -> OpenModel:
    if backend != "torch":
        raise UsageError(
            "draft 'self' is a rounded copy of the model's weights, which only the torch backend makes, and the "
            f"{backend} backend runs this model; set backend 'torch', or name another draft"
        )
    from outpace.backends.torch.runner import TorchModel
    from outpace.backends.torch.self_draft import SelfDraft

    assert isinstance(target, TorchModel)
    return SelfDraft(target, kind)


def _reject_torch_settings(config: EngineConfig) -> None:
    """Reject torch settings for other backends. "cpu" is accepted, because they all run on it, and "none", because they
    round no weights."""
    unset = EngineConfig()
    names = (
        "device", "dtype", "quantization", "draft_quantization", "kv_cache_dtype", "gpu_memory_utilization",
        "tensor_parallel_size",
    )  # fmt: skip
    for name in names:
        value = getattr(config, name)
        if value not in (getattr(unset, name), "cpu", "none"):
            raise UsageError(
                f"{name} is {value!r}, a setting of the torch backend, and another backend runs this model; "
                f"set backend 'torch' or remove {name}"
            )


def _capacity(resolved: ResolvedConfig, *, runs_llama: bool = False) -> Capacity:
    running = resolved.max_sequences
    slots = running + min(running, _MOST_KEPT_PREFIXES)  # more than may run, to keep prefixes of finished requests
    if runs_llama:
        if running > MOST_OF_LLAMA:
            raise UsageError(
                f"max_sequences is {running}, and llama.cpp runs at most {MOST_OF_LLAMA} at once; lower it, or use "
                "backend 'native' or 'torch'"
            )
        slots = min(slots, MOST_OF_LLAMA)
    return Capacity(
        max_sequences=slots,
        cache_tokens=resolved.cache_tokens,
        max_context=resolved.max_context,
        max_step_tokens=resolved.max_step_tokens,
    )


def _fit_cache_to_device(resolved: ResolvedConfig, target: OpenModel, draft: OpenModel | None) -> ResolvedConfig:
    """Set cache_tokens to what all requests need at full length, limited by free GPU memory."""
    from outpace.backends.torch.runner import TorchModel, fitting_cache_tokens
    from outpace.backends.torch.self_draft import SelfDraft

    models = [model for model in (target, draft) if isinstance(model, TorchModel | SelfDraft)]
    fitting = fitting_cache_tokens(models, _capacity(resolved), resolved.gpu_memory_utilization)
    if fitting is None:
        return resolved
    wanted = resolved.max_sequences * resolved.max_context
    return replace(resolved, cache_tokens=max(resolved.max_context, min(wanted, fitting)))


def _open(
    config: EngineConfig, wanted: BackendName, path: Path, head: Path | None = None, *, quantization: Quantization
) -> tuple[OpenModel, BackendName]:
    """Open the model. "auto" uses torch for a folder, and for a GGUF file native if it can run it, else llama.cpp."""
    if wanted == "torch" or (wanted == "auto" and path.is_dir()):
        return _open_torch(config, path, head, quantization), "torch"
    if path.is_dir():
        raise ModelError(f"the {wanted} backend runs GGUF files and {path} is a folder; use backend 'torch'")
    if head is not None and head.is_dir():
        raise UsageError(
            f"the draft head {head} is in a format that only the torch backend reads; use backend 'torch', or train a "
            "head for this backend: outpace distill"
        )
    from outpace.backends.llamacpp.runner import LlamaModel
    from outpace.models.llama_library import load_library

    library = load_library(config.llama_library)
    if wanted != "llamacpp":
        from outpace.backends.native.runner import NativeModel
        from outpace.models.gguf_model import Unsupported

        try:
            model = NativeModel(path, library, head)
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
            _tell_of_missing_library(path, reason)
    _reject_head(config, head)
    from outpace.backends.native.verifier import native_verifier

    return LlamaModel(path, library, native_verifier), "llamacpp"


def _tell_of_missing_library(path: Path, reason: BackendError) -> None:
    """Warn once, not for each model, and only where the library can be built."""
    from outpace.backends.native.build import IS_SUPPORTED
    from outpace.backends.native.library import BENEFITS

    if str(reason) in _told or not IS_SUPPORTED:
        log.info("%s runs on llama.cpp: %s", path.name, reason)
    else:
        _told.add(str(reason))
        log.warning("%s runs on llama.cpp: %s; %s", path.name, reason, BENEFITS)


def _reject_head(config: EngineConfig, head: Path | None) -> None:
    """Reject a head that the user named. One that comes with the model is left out."""
    if head is not None and config.draft is not None:
        raise UsageError(
            f"the draft head {head} needs the target's hidden states, which the llama.cpp backend does not give; "
            "leave out the draft, or run the model on the native or the torch backend"
        )


def _open_torch(config: EngineConfig, path: Path, head: Path | None, quantization: Quantization) -> OpenModel:
    try:
        from outpace.backends.torch.device import TorchOptions
        from outpace.backends.torch.runner import TorchModel
    except ImportError as error:
        raise BackendError(
            f"the torch backend needs {error.name or 'torch'}, which is not installed; pip install 'outpace[torch]'"
        ) from error
    options = TorchOptions(
        config.device,
        config.dtype,
        config.gpu_memory_utilization,
        config.tensor_parallel_size,
        quantization=quantization,
        head_quantization=config.draft_quantization,
        kv_cache_dtype=config.kv_cache_dtype,
        batch_invariant=config.batch_invariant,
    )
    return TorchModel(path, options, head=head)
