"""The options that `outpace run` and `outpace chat` share: models, speculation, sampling; and what they ask for."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from outpace.config import (
    DEFAULT_AUTO_DEPTH,
    DEFAULT_CONTEXT,
    DEFAULT_DEPTH,
    Acceptance,
    BackendName,
    DeviceName,
    DtypeName,
    EngineConfig,
    KVCacheDtype,
    Method,
    Quantization,
    SamplingParams,
    SpeculationMode,
    SpeculationParams,
)
from outpace.server.flags import kv_cache_name, method_name, quantization_name, spellings

if TYPE_CHECKING:
    from outpace.llm import LLM
    from outpace.models.generation_config import GenerationChoice, GenerationDefaults

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed", "stop", "max_tokens")  # options of SamplingParams


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    engine = EngineConfig()
    group = parser.add_argument_group("models")
    group.add_argument("--model", metavar="FILE", help="a GGUF file, a Hugging Face folder, or a name on its hub: "
                       "owner/name, or owner/name:Q4_K_M for a GGUF file (default: the embedded "
                       "SmolLM2-135M-Instruct)")  # fmt: skip
    group.add_argument(*spellings("--speculative-model"), dest="draft", metavar="FILE",
                       help="a smaller GGUF, best of the same vocabulary, or a head; self, self:fp8: the model itself, "
                       "rounded to int4 or another format, on the torch backend")  # fmt: skip
    group.add_argument("--backend", choices=get_args(BackendName), default=engine.backend,
                       help="what runs the model (default: %(default)s)")  # fmt: skip
    group.add_argument("--device", choices=get_args(DeviceName), default=engine.device,
                       help="where the torch backend runs it (default: %(default)s)")  # fmt: skip
    group.add_argument("--dtype", choices=get_args(DtypeName), default=engine.dtype,
                       help="the torch backend's number format (default: %(default)s)")  # fmt: skip
    group.add_argument("--quantization", choices=get_args(Quantization), type=quantization_name,
                       default=engine.quantization,
                       help="how the torch backend keeps the weights; stored: as in the file (default: %(default)s: "
                       "stored on a GPU, else none)")  # fmt: skip
    group.add_argument("--speculative-model-quantization", dest="draft_quantization", choices=get_args(Quantization),
                       type=quantization_name, default=engine.draft_quantization,
                       help="the same for the draft")  # fmt: skip
    group.add_argument("--kv-cache-dtype", choices=get_args(KVCacheDtype), type=kv_cache_name,
                       default=engine.kv_cache_dtype,
                       help="how the torch backend keeps keys and values; fp8, int8: in 8 bits (default: %(default)s: "
                       "in --dtype)")  # fmt: skip
    group.add_argument("--batch-invariant", action="store_true", default=engine.batch_invariant,
                       help="answers do not depend on what shares the step, to the bit; slower on the torch "
                       "backend")  # fmt: skip
    group.add_argument("--tensor-parallel-size", type=int, default=engine.tensor_parallel_size, metavar="N",
                       help="GPUs that share the model, with the torch backend (default: %(default)s)")  # fmt: skip
    group.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: all usable cores)")
    group.add_argument(*spellings("--max-model-len"), dest="max_context", type=int, metavar="N",
                       help=f"most tokens, prompt + output (default: model's, up to {DEFAULT_CONTEXT})")  # fmt: skip
    group.add_argument("--chat-template", metavar="FILE",
                       help="a file with a Jinja template, or the template itself, instead of the model's")  # fmt: skip
    group.add_argument("--llama-library", metavar="FILE", help="a libllama to use instead of the installed one")


def add_speculation_flags(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """The group is returned for the flags that one command alone has."""
    engine = EngineConfig()
    group = parser.add_argument_group("speculation")
    group.add_argument("--speculation", choices=get_args(SpeculationMode), default=engine.speculation,
                       help="auto: where it pays; on: always; off: plain decoding (default: %(default)s)")  # fmt: skip
    group.add_argument(*spellings("--method"), choices=get_args(Method), type=method_name,
                       help="how to draft (default: head or draft where there is one, else suffix)")  # fmt: skip
    group.add_argument(*spellings("--num-speculative-tokens"), dest="depth", type=int, metavar="K",
                       help=f"draft tokens per step (default: {DEFAULT_DEPTH}; "
                       f"with auto: up to {DEFAULT_AUTO_DEPTH})")  # fmt: skip
    group.add_argument("--acceptance", choices=get_args(Acceptance), default="exact",
                       help="typical and threshold are LOSSY: they change the output (default: exact)")  # fmt: skip
    group.add_argument("--threshold", type=float, metavar="P", help="for --acceptance threshold")
    return group


def add_sampling_flags(parser: argparse.ArgumentParser, *, max_tokens: int) -> argparse._ArgumentGroup:
    """`max_tokens` is the command's default. The group is returned for the flags that one command alone has."""
    sampling = SamplingParams()
    group = parser.add_argument_group("sampling")
    group.add_argument("--temperature", type=float, metavar="T",
                       help="0 is greedy: the same answer every time (default: the model's, "
                       f"else {sampling.temperature:g})")  # fmt: skip
    group.add_argument("--top-p", type=float, metavar="P",
                       help="sample from the likeliest tokens that sum to P (default: the model's, "
                       f"else {sampling.top_p:g})")  # fmt: skip
    group.add_argument("--top-k", type=int, metavar="K",
                       help="sample from the K likeliest tokens; 0: from all (default: the model's, "
                       f"else {sampling.top_k})")  # fmt: skip
    group.add_argument("--min-p", type=float, metavar="P",
                       help="drop tokens less likely than P times the likeliest (default: the model's, "
                       f"else {sampling.min_p:g})")  # fmt: skip
    group.add_argument("--generation-config", metavar="WHICH",
                       help="where the model's sampling settings come from: auto, vllm (none of them) or a folder "
                       "(default: auto)")  # fmt: skip
    group.add_argument("--override-generation-config", metavar="JSON",
                       help="replace some of them, as in '{\"temperature\": 0.5}'")  # fmt: skip
    group.add_argument("--seed", type=int, metavar="S",
                       help="the same seed gives the same tokens, with speculation on or off")  # fmt: skip
    group.add_argument("--max-tokens", type=int, metavar="N",
                       help=f"most tokens to generate (default: {max_tokens})")  # fmt: skip
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="stop before this text; repeatable")
    group.add_argument("--system", metavar="TEXT", help="a system message before the prompt")
    return group


@dataclass(frozen=True, slots=True)
class Chosen:
    """What the options ask of the engine and of each request. Wrong usage is reported before a model is loaded."""

    engine: dict[str, Any]  # fields of EngineConfig
    sampling: dict[str, Any]  # fields of SamplingParams
    generation: GenerationChoice

    @classmethod
    def of(cls, options: argparse.Namespace, more: Mapping[str, Any] | None = None) -> Chosen:
        """`more`: fields of SamplingParams that only one command sets."""
        sampling = {name: getattr(options, name) for name in _SAMPLING if getattr(options, name) is not None}
        sampling["speculation"] = SpeculationParams(acceptance=options.acceptance, threshold=options.threshold)
        sampling |= more or {}
        SamplingParams(**sampling)
        engine = {name: getattr(options, name) for name in EngineConfig.__dataclass_fields__ if hasattr(options, name)}
        EngineConfig(**engine)

        from outpace.models.generation_config import GenerationChoice

        choice = GenerationChoice.of(options.generation_config, options.override_generation_config)
        return cls(engine, sampling, choice)

    def settle(self, llm: LLM, defaults: Mapping[str, Any] | None = None) -> tuple[SamplingParams, GenerationDefaults]:
        """The parameters of a request: the user's, else the model's own, else `defaults`, which are the command's."""
        models_own = self.generation.settle(Path(llm.config.model))
        return SamplingParams(**{**(defaults or {}), **models_own.values, **self.sampling}), models_own
