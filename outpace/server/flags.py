"""The flags of `outpace serve`, with vLLM's names and meanings, and the setting that each one changes.

Tables: flags for the engine's configuration, flags for the server's, flags whose feature this build lacks, which stop
with an error, flags without effect here, and other names of flags, which `outpace run` has too. No flag has an argparse
default, so that a flag that was given differs from one that was not; the defaults are in `EngineConfig` and
`ServerConfig`.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import get_args

from outpace.config import (
    DEFAULT_AUTO_DEPTH,
    DEFAULT_CONTEXT,
    DEFAULT_DEPTH,
    MAX_SEQUENCES,
    Acceptance,
    BackendName,
    DeviceName,
    DtypeName,
    EngineConfig,
    KVCacheDtype,
    Method,
    Pooling,
    Quantization,
    SpeculationMode,
)
from outpace.config import SpeculationParams as Speculation
from outpace.models.reasoning import PARSERS
from outpace.models.tool_calls import SYNTAXES
from outpace.server.config import LogFormat, LogLevel, SchedulingPolicy, ServerConfig

ENGINE_FIELDS = {
    "model": "model",
    "speculative_model": "draft",
    "backend": "backend",
    "device": "device",
    "dtype": "dtype",
    "quantization": "quantization",
    "speculative_model_quantization": "draft_quantization",
    "kv_cache_dtype": "kv_cache_dtype",
    "batch_invariant": "batch_invariant",
    "gpu_memory_utilization": "gpu_memory_utilization",
    "tensor_parallel_size": "tensor_parallel_size",
    "threads": "threads",
    "llama_library": "llama_library",
    "max_model_len": "max_context",
    "kv_cache_tokens": "cache_tokens",
    "max_num_seqs": "max_sequences",
    "max_num_batched_tokens": "max_step_tokens",
    "enable_prefix_caching": "prefix_reuse",
    "speculation": "speculation",
    "method": "method",
    "num_speculative_tokens": "depth",
    "speculative_disable_by_batch_size": "disable_by_batch_size",
    "allowed_loss": "allowed_loss",
    "suffix_store_tokens": "suffix_store_tokens",
    "ngram_prompt_lookup_min": "ngram_min",
    "ngram_prompt_lookup_max": "ngram_max",
    "chat_template": "chat_template",
    "seed": "default_seed",
}

SERVER_FIELDS = {
    "host": "host",
    "port": "port",
    "max_queued_requests": "max_queued",
    "max_connections": "max_connections",
    "max_output_tokens": "max_output_tokens",
    "max_request_bytes": "max_request_bytes",
    "request_timeout": "request_timeout",
    "allow_control_tokens": "allow_control_tokens",
    "tool_call_parser": "tool_call_parser",
    "reasoning_parser": "reasoning_parser",
    "shutdown_timeout": "shutdown_timeout",
    "log_level": "log_level",
    "log_format": "log_format",
    "log_interval": "log_interval",
    "log_prompts": "log_prompts",
    "root_path": "root_path",
    "scheduling_policy": "scheduling_policy",
    "pooling": "pooling",
    "enable_force_include_usage": "always_include_usage",
    "page": "page",
}

# Flags about replicas, and the field of `outpace.ray.application.Replicas` that each one sets
RAY_FLAGS = {
    "replicas": "number",
    "min_replicas": "least",
    "max_replicas": "most",
    "upscale_delay": "add_after",
    "downscale_delay": "remove_after",
    "replica_cpus": "num_cpus",
    "replica_gpus": "num_gpus",
    "ray_address": "",
}

# vLLM's short names, and those that `outpace run` had first
ALIASES = {
    "--speculative-model": ("--spec-model", "--draft"),
    "--num-speculative-tokens": ("--spec-tokens", "--depth"),
    "--method": ("--spec-method",),
    "--max-model-len": ("--max-context",),
}


@dataclass(frozen=True, slots=True)
class Lacking:
    """A flag of vLLM whose feature this build lacks. `harmless` values do not need the feature and are accepted."""

    harmless: tuple[str, ...]
    sentence: str


LACKING = {
    "pipeline_parallel_size": Lacking(
        ("1",),
        "this build splits a model by --tensor-parallel-size only; leave out --pipeline-parallel-size or set it to 1",
    ),
    "speculative_draft_tensor_parallel_size": Lacking(
        ("1",),
        "a draft model or head runs whole on the first rank, which sends its tokens to the others; leave out "
        "--speculative-draft-tensor-parallel-size or set it to 1",
    ),
    "load_format": Lacking(
        ("auto", "gguf", "safetensors"), "this build loads GGUF and safetensors files only; leave out --load-format"
    ),
}  # fmt: skip

# Flags that vLLM command lines contain, and why they change nothing here. A log line says so.
WITHOUT_EFFECT = {
    "use_v2_block_manager": "it selects a component of vLLM",
    "enable_auto_tool_choice": "a request with tools may always call them",
    "enable_reasoning": "thinking is separated where the model shows its tags; see --reasoning-parser",
    "enforce_eager": "it turns off CUDA graphs in vLLM",
    "enable_chunked_prefill": "prompts are always computed in chunks",
    "trust_remote_code": "no code from a model's folder is ever run",
    "disable_log_requests": "prompts are not logged unless --log-prompts is set",
    "disable_log_stats": "set --log-interval 0 to log nothing about the engine",
    "enable_prompt_tokens_details": "usage always has the cached tokens of the prompt",
    "enable_request_id_headers": "every reply has its x-request-id",
    "enable_tokenizer_info_endpoint": "/tokenizer_info is always there",
    "exclude_tools_when_tool_choice_none": "with tool_choice none the model never hears of tools",
    "async_scheduling": "it selects a component of vLLM",
    "disable_frontend_multiprocessing": "the server is one process",
    "disable_uvicorn_access_log": "the server logs requests itself; see --log-level",
}
# The same for flags with a value.
VALUES_WITHOUT_EFFECT = {
    "attention_backend": "each backend has its own kernels",
    "block_size": "the cache's pages have a fixed size",
    "swap_space": "a preempted request is computed again",
    "guided_decoding_backend": "llguidance enforces structured output",
    "structured_outputs_config": "llguidance enforces structured output",
    "chat_template_content_format": "a template gets contents as text",
    "uvicorn_log_level": "see --log-level",
}

ACCEPTANCE: dict[str, Acceptance] = {"rejection_sampler": "exact", "typical_acceptance_sampler": "typical"}


def spellings(flag: str) -> tuple[str, ...]:
    """The flag and its other names."""
    return flag, *ALIASES.get(flag, ())


_MODEL = (
    "a GGUF file, a Hugging Face folder, or a name on its hub: owner/name, or owner/name:Q4_K_M for a GGUF file "
    "(default: the embedded SmolLM2-135M-Instruct)"
)


def replica_count(given: str) -> int | str:
    return given if given == "auto" else int(given)


def quantization_name(given: str) -> str:
    """vLLM names the format of a checkpoint that is quantised already; here its files say so."""
    return "auto" if given in ("gguf", "awq", "gptq", "compressed-tensors") else given


def kv_cache_name(given: str) -> str:
    """Our name of a format that vLLM names differently."""
    return {"fp8_e4m3": "fp8"}.get(given, given)


def method_name(given: str) -> str:
    """Our name of a method that vLLM names differently."""
    return {"draft_model": "draft"}.get(given, given)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """All flags of `outpace serve`."""
    parser.add_argument("model_argument", nargs="?", metavar="MODEL", default=argparse.SUPPRESS, help=_MODEL)
    add_model_flags(parser, "the same as MODEL")
    add_answer_flags(parser)
    _add_server_flags(parser)


def add_model_flags(parser: argparse.ArgumentParser, model: str = _MODEL) -> None:
    """The flags about the engine and its models. `model`: the help of --model."""
    engine, speculation = EngineConfig(), Speculation()
    flags = _Group(parser.add_argument_group("models"))
    flags.add("--model", model, metavar="FILE")
    flags.add("--served-model-name", "the name that clients send; several may be given (default: the file's name)",
              metavar="NAME", nargs="+")  # fmt: skip
    flags.add("--backend", "the backend that runs the model", engine.backend, choices=get_args(BackendName))
    flags.add("--device", "the device of the torch backend", engine.device, choices=get_args(DeviceName))
    flags.add("--dtype", "the torch backend's number format", engine.dtype, choices=get_args(DtypeName))
    flags.add("--quantization", "how the torch backend keeps the weights: stored: as in the file; none: in --dtype; "
              "int4, int4-128, fp8, int8: rounded when they are loaded; auto: stored on a GPU, else none",
              engine.quantization, choices=get_args(Quantization), type=quantization_name)  # fmt: skip
    flags.add("--kv-cache-dtype", "how the torch backend keeps keys and values: fp8, int8: 8 bits and a scale for each "
              "token and head; auto: in --dtype", engine.kv_cache_dtype, choices=get_args(KVCacheDtype),
              type=kv_cache_name)  # fmt: skip
    flags.add("--batch-invariant", "greedy and seeded answers do not depend on what shares the step, to the bit: "
              "always so on the native backend, by slower kernels on torch", engine.batch_invariant,
              action=argparse.BooleanOptionalAction)  # fmt: skip
    flags.add("--gpu-memory-utilization", "the share of a GPU's memory that may be used",
              engine.gpu_memory_utilization, metavar="SHARE", type=float)  # fmt: skip
    flags.add("--tensor-parallel-size", "GPUs that share the model; see docs/scale.md", engine.tensor_parallel_size,
              metavar="N", type=int)  # fmt: skip
    flags.add("--threads", "CPU threads (default: all usable cores)", metavar="N", type=int)
    flags.add("--max-model-len", f"most tokens of one request (default: the model's, at most {DEFAULT_CONTEXT})",
              metavar="N", type=int)  # fmt: skip
    flags.add("--kv-cache-tokens", f"KV cache for all running requests together (default: {DEFAULT_CONTEXT}, or "
              "--max-model-len if that is more)", metavar="N", type=int)  # fmt: skip
    flags.add("--max-num-seqs", f"completions that run at once, at most {MAX_SEQUENCES}", engine.max_sequences,
              metavar="N", type=int)  # fmt: skip
    flags.add("--max-num-batched-tokens", "most tokens of one forward pass", engine.max_step_tokens,
              metavar="N", type=int)  # fmt: skip
    flags.add("--enable-prefix-caching", "compute a shared prefix once", engine.prefix_reuse,
              action=argparse.BooleanOptionalAction)  # fmt: skip
    flags.add("--llama-library", "a libllama to use instead of the installed one", metavar="FILE")
    flags.add("--chat-template", "a file with a Jinja template, or the template itself, instead of the model's",
              metavar="FILE")  # fmt: skip

    flags = _Group(parser.add_argument_group("speculation"))
    flags.add("--speculation", "auto: when it is faster; on: always; off: plain decoding", engine.speculation,
              choices=get_args(SpeculationMode))  # fmt: skip
    flags.add("--method", "the proposer (default: head or draft where there is one, else suffix)",
              choices=get_args(Method), type=method_name)  # fmt: skip
    flags.add("--speculative-model", "a smaller draft model, or a draft head; self or self:fp8: the model itself, "
              "rounded to int4 or another format, on the torch backend; '[ngram]' stands for --method ngram",
              metavar="FILE")  # fmt: skip
    flags.add("--speculative-model-quantization", "the same as --quantization for the draft model or the draft head",
              engine.draft_quantization, choices=get_args(Quantization), type=quantization_name)  # fmt: skip
    flags.add("--speculative-config", "the same in vLLM's JSON, such as {\"method\": \"eagle3\", \"model\": \"DIR\", "
              "\"num_speculative_tokens\": 3}", metavar="JSON")  # fmt: skip
    flags.add("--num-speculative-tokens", "draft tokens per step, with auto at most (default: "
              f"{DEFAULT_DEPTH}, with auto {DEFAULT_AUTO_DEPTH})", metavar="K", type=int)  # fmt: skip
    flags.add("--speculative-disable-by-batch-size", "no drafts while this many requests or more run (default: "
              "no limit)", metavar="N", type=int)  # fmt: skip
    flags.add("--allowed-loss", "how much slower than plain decoding auto may get before it drafts less",
              engine.allowed_loss, metavar="SHARE", type=float)  # fmt: skip
    flags.add("--suffix-store-tokens", "tokens of earlier answers that the suffix method keeps and shares between "
              "requests; 0: none", engine.suffix_store_tokens, metavar="N", type=int)  # fmt: skip
    flags.add("--ngram-prompt-lookup-min", "shortest repetition the ngram method looks for", engine.ngram_min,
              metavar="N", type=int)  # fmt: skip
    flags.add("--ngram-prompt-lookup-max", "longest repetition the ngram method looks for", engine.ngram_max,
              metavar="N", type=int)  # fmt: skip
    flags.add("--spec-decoding-acceptance-method", "typical_acceptance_sampler is LOSSY: answers are no longer the "
              "target's own", "rejection_sampler", choices=tuple(ACCEPTANCE))  # fmt: skip
    flags.add("--typical-acceptance-sampler-posterior-threshold", "for typical_acceptance_sampler",
              speculation.posterior_threshold, metavar="P", type=float)  # fmt: skip
    flags.add("--typical-acceptance-sampler-posterior-alpha", "for typical_acceptance_sampler",
              speculation.posterior_alpha, metavar="P", type=float)  # fmt: skip


def add_answer_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that change answers, besides the model."""
    server = ServerConfig()
    flags = _Group(parser.add_argument_group("answers"))
    flags.add("--default-chat-template-kwargs", "variables of the chat template for requests that do not set them, as "
              "in '{\"enable_thinking\": false}'", metavar="JSON")  # fmt: skip
    flags.add("--generation-config", "sampling settings for requests without their own: auto (the model's), vllm "
              "(neutral ones) or a folder with generation_config.json", "auto", metavar="WHICH")  # fmt: skip
    flags.add("--override-generation-config", "replace some of these settings, as in '{\"temperature\": 0.5}'",
              metavar="JSON")  # fmt: skip
    flags.add("--max-output-tokens", "most tokens of one completion (default: the rest of the context)",
              metavar="N", type=int)  # fmt: skip
    flags.add("--allow-control-tokens", "control tokens in messages have their effect, and any role is accepted "
              "(default: they are plain text)", action="store_true")  # fmt: skip
    flags.add("--tool-call-parser", "how the model writes calls of functions; auto: as its chat template shows",
              server.tool_call_parser, choices=("auto", *SYNTAXES))  # fmt: skip
    flags.add("--pooling", "what /v1/embeddings makes of the last hidden states: that of the last token, as vLLM does "
              "for models that generate, or the mean of all", server.pooling, choices=get_args(Pooling))  # fmt: skip
    flags.add("--reasoning-parser", "the tags around the model's thinking, which replies separate from the content; "
              "auto: those of its chat template or vocabulary; none: thinking is content", server.reasoning_parser,
              choices=("auto", "none", *PARSERS))  # fmt: skip


def _add_server_flags(parser: argparse.ArgumentParser) -> None:
    server = ServerConfig()

    def group(title: str) -> _Group:
        return _Group(parser.add_argument_group(title))

    flags = group("network and limits")
    flags.add("--host", "the address to listen on; 0.0.0.0 for all", server.host, metavar="H")
    flags.add("--port", "the port to listen on; 0 for any free one", server.port, metavar="P", type=int)
    flags.add("--root-path", "the path under which a proxy offers this server, such as /llm", metavar="PATH")
    flags.add("--api-key", "a key clients must send; repeatable (default: none needed)", metavar="KEY", action="append")
    flags.add("--api-key-file", "a file with one key per line, so that the process list shows none", metavar="FILE")
    flags.add("--allowed-origins", "origins whose pages may call the server; * for all (default: none)",
              metavar="ORIGIN", nargs="+")  # fmt: skip
    flags.add("--max-queued-requests", "completions that may wait; one more is refused with status 429",
              server.max_queued, metavar="N", type=int)  # fmt: skip
    flags.add("--scheduling-policy", "which waiting request starts first: by the request's priority, then by arrival; "
              "fcfs: by arrival alone", server.scheduling_policy, choices=get_args(SchedulingPolicy))  # fmt: skip
    flags.add("--max-connections", "requests answered at once; one more is refused with status 503",
              server.max_connections, metavar="N", type=int)  # fmt: skip
    flags.add("--max-request-bytes", "largest request body", server.max_request_bytes, metavar="N", type=int)
    flags.add("--seed", "a seed for requests that have none: after a restart, the same requests in the same order get "
              "the same answers (default: random)", metavar="S", type=int)  # fmt: skip
    flags.add("--enable-force-include-usage", "streams end with their usage even if a request does not ask for it",
              server.always_include_usage, action=argparse.BooleanOptionalAction)  # fmt: skip
    flags.add("--page", "the page at / with a chat, a comparison and a live view of the engine", server.page,
              action=argparse.BooleanOptionalAction)  # fmt: skip
    flags.add("--request-timeout", "seconds an answer may take", server.request_timeout, metavar="S", type=float)
    flags.add("--shutdown-timeout", "seconds that running answers may take after SIGTERM", server.shutdown_timeout,
              metavar="S", type=float)  # fmt: skip

    flags = group("replicas, by Ray Serve; see docs/scale.md")
    flags.add("--replicas", "engines behind one address, or auto: as many as the open requests need", metavar="N",
              type=replica_count)  # fmt: skip
    flags.add("--min-replicas", "with --replicas auto, at least so many (default: 1)", metavar="N", type=int)
    flags.add("--max-replicas", "with --replicas auto, at most so many (default: 4)", metavar="N", type=int)
    flags.add("--upscale-delay", "with --replicas auto, seconds of too many open requests before one is added "
              "(default: 30)", metavar="S", type=float)  # fmt: skip
    flags.add("--downscale-delay", "the same for too few, before one is removed (default: 600)", metavar="S",
              type=float)  # fmt: skip
    flags.add("--replica-cpus", "CPU cores of each (default: 1)", metavar="N", type=float)
    flags.add("--replica-gpus", "GPUs of each (default: 0)", metavar="N", type=float)
    flags.add("--ray-address", "a Ray cluster to join, such as auto or HOST:6379 (default: start one here)",
              metavar="ADDRESS")  # fmt: skip

    flags = group("logs and configuration")
    flags.add("--log-level", "the lowest level to write", server.log_level, choices=get_args(LogLevel))
    flags.add("--log-format", "text lines or JSON lines", server.log_format, choices=get_args(LogFormat))
    flags.add("--log-interval", "seconds between log lines about the engine; 0: none", server.log_interval,
              metavar="S", type=float)  # fmt: skip
    flags.add("--log-prompts", "write prompts to the log (default: never)", action="store_true")
    flags.add("--config", "a YAML or TOML file with these flags as keys", metavar="FILE")

    flags = group("vLLM flags, accepted only with values that need no missing feature")
    for name, lacking in LACKING.items():
        flags.add(_flag(name), f"only {' or '.join(lacking.harmless)}", metavar="X")
    for name, reason in WITHOUT_EFFECT.items():
        flags.add(_flag(name), f"has no effect: {reason}", action=argparse.BooleanOptionalAction)
    for name, reason in VALUES_WITHOUT_EFFECT.items():
        flags.add(_flag(name), f"has no effect: {reason}", metavar="X")


class _Group:
    def __init__(self, group: argparse._ArgumentGroup) -> None:
        self._group = group

    def add(self, flag: str, meaning: str, default: object = None, **options: object) -> None:
        shown = "" if default is None else f" (default: {_shown(default)})"
        self._group.add_argument(*spellings(flag), default=argparse.SUPPRESS, help=meaning + shown, **options)  # type: ignore[arg-type]


def _shown(default: object) -> object:
    return {True: "yes", False: "no"}[default] if isinstance(default, bool) else default


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
