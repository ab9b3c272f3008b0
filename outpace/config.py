"""The user's settings, validated on construction.

Three frozen classes: `SpeculationParams` and `SamplingParams` belong to one request, `EngineConfig` to an engine.
`None` means "choose for me". `EngineConfig.resolve` makes all choices and returns a `ResolvedConfig`, which is printed
and stored with results.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

from outpace.errors import UsageError
from outpace.structured import StructuredOutput

SpeculationMode = Literal["auto", "off", "on"]
Method = Literal["none", "grammar", "ngram", "suffix", "prediction", "draft", "head", "tree"]
Acceptance = Literal["exact", "rejection", "block", "typical", "threshold"]
Pooling = Literal["last", "mean"]
Workload = Literal["code", "json", "narrative", "chat"]
BackendName = Literal["auto", "native", "llamacpp", "torch"]
DeviceName = Literal["auto", "cuda", "cpu"]
DtypeName = Literal["auto", "bfloat16", "float16", "float32"]
Quantization = Literal["auto", "stored", "none", "int4", "int4-128", "fp8", "int8"]
KVCacheDtype = Literal["auto", "fp8", "int8"]

ROUNDED: tuple[Quantization, ...] = ("int4", "int4-128", "fp8", "int8")
LOSSY: frozenset[str] = frozenset({"typical", "threshold"})
LOOKUPS: tuple[Method, ...] = ("grammar", "prediction", "suffix", "ngram")
MAX_DEPTH = 64
MAX_SEQUENCES = 512
MAX_BAD_WORDS = 1000  # far fewer than a vocabulary has tokens, so some token is always possible
DEFAULT_DEPTH = 4  # for speculation `on`
DEFAULT_AUTO_DEPTH = 16  # the limit for `auto` where no depth is given


def _check(ok: bool, sentence: str) -> None:
    if not ok:
        raise UsageError(sentence)


def _check_choice(name: str, value: object, choices: Any) -> None:
    names = get_args(choices)
    _check(value in names, f"{name} must be one of {', '.join(names)}; got {value!r}")


def _check_number(name: str, value: object, low: float, high: float, *, meaning: str = "") -> None:
    """Reject NaN, numbers outside the range, and values that are not numbers."""
    # Comparing with NaN is false. Comparing with a huge int is exact, where converting it to float could overflow.
    ok = isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high
    bounds = f"between {low:g} and {high:g}" if math.isfinite(high) else f"at least {low:g}"
    _check(ok, f"{name} must be a number {bounds}{meaning}; got {value!r}")


def _check_kind(name: str, value: object, kind: type | tuple[type, ...], what: str) -> None:
    _check(isinstance(value, kind), f"{name} must be {what}; got {value!r}")


def _check_consistent(mode: str | None, method: str | None, depth: int | None) -> None:
    """Reject contradictions; the same rules hold for an engine and for a request."""
    _check(
        not (mode == "off" and depth),
        f"speculation is off but depth is {depth}; leave out the depth or set speculation to 'on'",
    )
    _check(
        not (mode == "off" and method not in (None, "none")),
        f"speculation is off but method is {method!r}; leave out the method or set speculation to 'on'",
    )
    _check(
        not (mode == "on" and (depth == 0 or method == "none")),
        "speculation is on but depth 0 or method 'none' means plain decoding; set speculation to 'off'",
    )


def _bad_word(word: object) -> str | tuple[int, ...]:
    _check_kind("a bad word", word, (str, list, tuple), "a string or a list of token ids")
    assert isinstance(word, str | list | tuple)
    _check(len(word) > 0, "a bad word must not be empty; leave it out")
    if isinstance(word, str):
        return word
    if not all(type(token) is int and token >= 0 for token in word):
        _check(False, f"a bad word must be a string or a list of token ids; got {word!r:.100}")
    return tuple(word)


def _check_int(name: str, value: object, low: int, high: int | None = None, *, meaning: str = "") -> None:
    ok = isinstance(value, int) and not isinstance(value, bool) and value >= low and (high is None or value <= high)
    bounds = f"at least {low}" if high is None else f"between {low} and {high}"
    _check(ok, f"{name} must be a whole number {bounds}{meaning}; got {value!r}")


@dataclass(frozen=True, slots=True)
class WorkloadPreset:
    """What to expect of a kind of text before the first token."""

    log_odds: float  # added to the prior acceptance of a draft token, until there is evidence
    threshold: float  # for acceptance 'threshold', which is lossy and never a default


# Code and JSON often repeat the prompt, and a wrong token breaks them. Prose has many good continuations.
WORKLOADS: Mapping[str, WorkloadPreset] = {
    "code": WorkloadPreset(0.4, 0.75),
    "json": WorkloadPreset(0.6, 0.75),
    "narrative": WorkloadPreset(-0.4, 0.5),
    "chat": WorkloadPreset(-0.2, 0.6),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationParams:
    """Speculation settings of one request. Unset fields follow the engine's settings."""

    mode: SpeculationMode | None = None
    method: Method | None = None
    max_depth: int | None = None
    workload: Workload | None = None
    """The kind of text to expect: sets the prior of `auto`, and the default threshold of `threshold` acceptance."""
    acceptance: Acceptance = "exact"
    threshold: float | None = None
    """`threshold` acceptance always accepts a draft token to which the target gives at least this probability."""
    posterior_threshold: float = 0.09
    posterior_alpha: float = 0.3
    """`typical` accepts a token whose probability exceeds min(posterior_threshold, posterior_alpha * exp(-entropy))."""

    def __post_init__(self) -> None:
        if self.mode is not None:
            _check_choice("speculation mode", self.mode, SpeculationMode)
        if self.method is not None:
            _check_choice("speculation method", self.method, Method)
        if self.max_depth is not None:
            _check_int("max_depth", self.max_depth, 0, MAX_DEPTH, meaning=" draft tokens a step")
        _check_consistent(self.mode, self.method, self.max_depth)
        if self.workload is not None:
            _check_choice("workload", self.workload, Workload)
        _check_choice("acceptance", self.acceptance, Acceptance)
        if self.acceptance == "threshold" and self.threshold is None and self.workload is not None:
            object.__setattr__(self, "threshold", WORKLOADS[self.workload].threshold)
        if self.acceptance == "threshold":
            _check(self.threshold is not None, "acceptance 'threshold' needs a threshold between 0 and 1, such as 0.75")
        if self.threshold is not None:
            _check_number("threshold", self.threshold, 0.0, 1.0)
            _check(
                self.acceptance == "threshold",
                f"a threshold was given with acceptance {self.acceptance!r}; set acceptance='threshold' to use it",
            )
        _check_number("posterior_threshold", self.posterior_threshold, 0.0, 1.0)
        _check_number("posterior_alpha", self.posterior_alpha, 0.0, 1.0)

    @property
    def is_lossy(self) -> bool:
        return self.acceptance in LOSSY


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling settings of one request. Temperature 0 is greedy."""

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0  # 0 and -1: all tokens
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    max_tokens: int = 256
    min_tokens: int = 0
    bad_words: Sequence[str | Sequence[int]] = ()  # never produced: texts, or token ids
    ignore_eos: bool = False
    skip_special_tokens: bool = True  # the text has no control tokens
    include_stop_str_in_output: bool = False  # the text ends with the stop string or stop token
    logprobs: int | None = None  # how many alternatives to report per token; None: no logprobs
    prompt_logprobs: int | None = None  # the same for the tokens of the prompt
    pooling: Pooling | None = None
    """The output is an embedding of the prompt, made of its last hidden states: that of the last token, or the mean of
    all. `max_tokens` must be 0."""
    visible_tokens: Sequence[int] = ()  # control tokens whose text is part of the output
    structured: StructuredOutput | None = None  # the form that the output must have
    prediction: str | None = None
    """A text that the output will resemble, such as a file before an edit. Drafts come from it; the output is the same
    without it. As much of it as fits the context is read."""
    speculation: SpeculationParams = field(default_factory=SpeculationParams)

    def __post_init__(self) -> None:
        _check_int("n", self.n, 1, 128, meaning=" completions")
        _check_number("temperature", self.temperature, 0.0, 100.0)
        _check_int("top_k", self.top_k, -1)
        _check_number("top_p", self.top_p, 0.0, 1.0)
        _check(self.top_p > 0, f"top_p must be above 0, or no token is left; got {self.top_p!r}")
        _check_number("min_p", self.min_p, 0.0, 1.0)
        _check_number("repetition_penalty", self.repetition_penalty, 0.0, 10.0)
        # Smaller values turn logits into infinities, which give no valid distribution.
        _check(self.repetition_penalty >= 0.01, "repetition_penalty must be at least 0.01; 1 leaves logits alone")
        _check_number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_kind("logit_bias", self.logit_bias, Mapping, "a mapping of token ids to biases")
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))  # the caller may change its own mapping later
        for token, bias in self.logit_bias.items():
            _check_int("a logit_bias token id", token, 0)
            _check_number(f"the logit_bias of token {token}", bias, -100.0, 100.0)
        if self.seed is not None:
            _check_int("seed", self.seed, 0, 2**64 - 1)
        _check_kind("stop", self.stop, Sequence, "a string or a list of strings")
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        for text in self.stop:
            _check(isinstance(text, str) and text != "", f"a stop string must be a non-empty string; got {text!r}")
        _check_kind("stop_token_ids", self.stop_token_ids, Sequence, "a list of token ids")
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        for token in self.stop_token_ids:
            _check_int("a stop token id", token, 0)
        _check_kind("visible_tokens", self.visible_tokens, Sequence, "a list of token ids")
        object.__setattr__(self, "visible_tokens", tuple(self.visible_tokens))
        for token in self.visible_tokens:
            _check_int("a visible token id", token, 0)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), 0, 100, meaning=" alternatives")
        if self.pooling is not None:
            _check_choice("pooling", self.pooling, Pooling)
            _check(
                self.max_tokens == 0 and self.prompt_logprobs is None,
                "a request with pooling has no answer and no prompt_logprobs; set max_tokens=0 and leave those out",
            )
        # 0: only the prompt is scored or embedded
        _check_int("max_tokens", self.max_tokens, 1 if self.prompt_logprobs is None and self.pooling is None else 0)
        _check_int("min_tokens", self.min_tokens, 0)
        _check(
            self.min_tokens <= self.max_tokens,
            f"min_tokens ({self.min_tokens}) is larger than max_tokens ({self.max_tokens})",
        )
        _check_kind("bad_words", self.bad_words, (list, tuple), "a list of strings or of lists of token ids")
        # A text becomes two sequences of token ids.
        num_sequences = sum(2 if isinstance(word, str) else 1 for word in self.bad_words)
        _check(num_sequences <= 2 * MAX_BAD_WORDS, f"there are too many bad words; give at most {MAX_BAD_WORDS}")
        object.__setattr__(self, "bad_words", tuple(_bad_word(word) for word in self.bad_words))
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output"):
            _check_kind(name, getattr(self, name), bool, "True or False")
        if self.structured is not None:
            _check_kind("structured", self.structured, StructuredOutput, "a StructuredOutput")
            _check(
                not self.bad_words,
                "structured output and bad_words together may leave no token to choose; leave out one",
            )
        _check_kind("prediction", self.prediction, (str, type(None)), "a string")
        _check_kind("speculation", self.speculation, SpeculationParams, "a SpeculationParams")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What to load, how much memory to give it, and how to speculate."""

    model: str | None = None  # a GGUF file or a Hugging Face folder; None: the embedded SmolLM2-135M-Instruct
    draft: str | None = None
    """A smaller model, best with the same vocabulary, or a head that was trained for the model. "self": the model
    itself, its weights rounded to int4; "self:fp8" and the like: to another format. That needs the torch backend."""
    backend: BackendName = "auto"
    speculation: SpeculationMode = "auto"
    method: Method | None = None
    depth: int | None = None
    ngram_min: int = 2
    ngram_max: int = 4
    suffix_store_tokens: int = 65536  # output of earlier requests that the suffix proposer keeps
    disable_by_batch_size: int | None = None  # no speculation from this many running requests on
    allowed_loss: float = 0.02  # how much slower than plain decoding `auto` may get; beyond it, `auto` only probes
    max_context: int | None = None  # longest prompt plus output of one request
    cache_tokens: int | None = None  # room for all running requests together
    max_sequences: int = 8  # requests running at once, at most MAX_SEQUENCES; llama.cpp runs at most 256
    max_step_tokens: int = 512  # most tokens in one forward pass; also the largest prefill chunk
    prefix_reuse: bool = True  # compute a shared prompt prefix once
    threads: int | None = None
    llama_library: str | None = None  # a libllama to use instead of the installed one
    device: DeviceName = "auto"  # of the torch backend
    dtype: DtypeName = "auto"  # of the torch backend's weights and cache, unless these are quantised
    quantization: Quantization = "auto"
    """How the torch backend keeps the weights. stored: as the file has them; none: in `dtype`; int4 (groups of 32
    weights), int4-128 (groups of 128), fp8, int8: rounded when they are loaded; auto: stored on a GPU, else none."""
    draft_quantization: Quantization = "auto"  # the same for the draft model or the draft head
    kv_cache_dtype: KVCacheDtype = "auto"
    """How the torch backend keeps keys and values. fp8, int8: 8 bits and a scale for each token and head; auto: in
    `dtype`."""
    batch_invariant: bool = False
    """A request's greedy and seeded answers do not depend on what shares its steps, to the bit. So it is always on the
    native backend; torch has kernels for it, which are slower; llama.cpp has none."""
    gpu_memory_utilization: float = 0.9  # the share of a GPU's memory that Outpace may fill
    tensor_parallel_size: int = 1  # GPUs, or for tests processes, that share the model; of the torch backend
    chat_template: str | None = None  # a file or the template itself, instead of the model's
    default_seed: int | None = None  # of requests without a seed; each gets another one derived from it

    def __post_init__(self) -> None:
        if self.default_seed is not None:
            _check_int("default_seed", self.default_seed, 0, 2**64 - 1)
        for name in ("model", "draft", "llama_library", "chat_template"):
            _check_kind(name, getattr(self, name), (str, os.PathLike, type(None)), "the path of a file")
        _check_kind("prefix_reuse", self.prefix_reuse, bool, "True or False")
        _check_kind("batch_invariant", self.batch_invariant, bool, "True or False")
        _check_choice("backend", self.backend, BackendName)
        _check_choice("device", self.device, DeviceName)
        _check_choice("dtype", self.dtype, DtypeName)
        _check_choice("quantization", self.quantization, Quantization)
        _check_choice("draft_quantization", self.draft_quantization, Quantization)
        _check_choice("kv_cache_dtype", self.kv_cache_dtype, KVCacheDtype)
        _check_number("gpu_memory_utilization", self.gpu_memory_utilization, 0.01, 1.0)
        _check_int("tensor_parallel_size", self.tensor_parallel_size, 1, 64)
        _check_choice("speculation", self.speculation, SpeculationMode)
        if self.method is not None:
            _check_choice("method", self.method, Method)
        if self.depth is not None:
            _check_int("depth", self.depth, 0, MAX_DEPTH, meaning=" draft tokens a step")
        _check_int("ngram_min", self.ngram_min, 1)
        _check_int("ngram_max", self.ngram_max, self.ngram_min, meaning=" (ngram_min)")
        _check_int("suffix_store_tokens", self.suffix_store_tokens, 0)
        _check_number("allowed_loss", self.allowed_loss, 0.0, 1.0)
        for name in ("max_context", "cache_tokens", "threads", "disable_by_batch_size"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), 1)
        _check_int("max_sequences", self.max_sequences, 1, MAX_SEQUENCES, meaning=" requests at once")
        _check_int("max_step_tokens", self.max_step_tokens, 1)
        _check(
            self.max_step_tokens >= self.max_sequences,
            f"max_step_tokens ({self.max_step_tokens}) must be at least max_sequences ({self.max_sequences}), "
            "or not every running request could take a step",
        )
        if self.max_context is not None and self.cache_tokens is not None:
            _check(
                self.cache_tokens >= self.max_context,
                f"cache_tokens ({self.cache_tokens}) must be at least max_context ({self.max_context}), "
                "or the longest request could never run",
            )
        _check(
            not (self.method == "draft" and self.draft is None),
            "method 'draft' needs a draft model; name one (draft=, --draft) or choose suffix or ngram",
        )
        _check_consistent(self.speculation, self.method, self.depth)
        self_draft_kind(self.draft, self.draft_quantization)

    @property
    def self_draft(self) -> str | None:
        """The format of the draft, if the draft is the target's own rounded copy."""
        return self_draft_kind(self.draft, self.draft_quantization)

    def resolve(
        self,
        *,
        model_context: int,
        model_path: str,
        draft_path: str | None,
        is_head: bool = False,
        drafts_trees: bool = False,
        backend: BackendName = "llamacpp",
    ) -> ResolvedConfig:
        """Fill in the unset fields, from the properties of the loaded model. `is_head`: the draft is a head.
        `drafts_trees`: it drafts trees, too, where they can pay."""
        if self.max_context is not None:
            max_context = self.max_context
            _check(
                max_context <= model_context,
                f"max_context is {max_context}, but the model was made for at most {model_context} tokens; lower it",
            )
        else:
            max_context = min(model_context, self.cache_tokens or DEFAULT_CONTEXT)
        drafting: Method | None = None if draft_path is None else "head" if is_head else "draft"
        if self.method in ("draft", "head", "tree") and {"tree": "head"}.get(self.method, self.method) != drafting:
            has = f"a {'head' if is_head else 'model'} is loaded as the draft" if drafting else "no draft is loaded"
            _check(False, f"method {self.method!r} cannot be used, because {has}; name another draft or method")
        method: Method = self.method or drafting or "suffix"
        trees: tuple[Method, ...] = ("head", "tree")  # `auto` chooses between trees and chains
        drafts: tuple[Method, ...] = () if drafting is None else trees if is_head and drafts_trees else (drafting,)
        names = set(ResolvedConfig.__dataclass_fields__) & set(EngineConfig.__dataclass_fields__)
        settled: dict[str, Any] = {name: getattr(self, name) for name in names}
        settled |= {
            "model": model_path,
            "draft": draft_path,
            "backend": backend,
            # Set even if speculation is off: a request may turn it on for itself.
            "method": method,
            "methods": (*LOOKUPS, *drafts) if self.method is None else trees if method == "tree" else (method,),
            "depth": DEFAULT_DEPTH if self.depth is None else self.depth,
            "auto_depth": DEFAULT_AUTO_DEPTH if self.depth is None else self.depth,
            "max_context": max_context,
            "cache_tokens": max(self.cache_tokens or DEFAULT_CONTEXT, max_context),
            "threads": self.threads or usable_cores(),
        }
        return ResolvedConfig(**settled)


DEFAULT_CONTEXT = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig:
    """An EngineConfig with every field set."""

    model: str
    draft: str | None
    backend: BackendName
    speculation: SpeculationMode
    method: Method  # for speculation `on`
    methods: tuple[Method, ...]  # for speculation `auto`, which chooses among them
    depth: int
    auto_depth: int
    disable_by_batch_size: int | None
    allowed_loss: float
    ngram_min: int
    ngram_max: int
    suffix_store_tokens: int
    max_context: int
    cache_tokens: int
    max_sequences: int
    max_step_tokens: int
    prefix_reuse: bool
    threads: int
    llama_library: str | None
    device: DeviceName
    dtype: DtypeName
    quantization: Quantization
    draft_quantization: Quantization
    kv_cache_dtype: KVCacheDtype
    batch_invariant: bool
    gpu_memory_utilization: float
    tensor_parallel_size: int
    chat_template: str | None
    default_seed: int | None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def self_draft_kind(draft: str | os.PathLike[str] | None, draft_quantization: Quantization = "auto") -> str | None:
    """How to round the target's own weights for drafting, if `draft` is self, or self:int4 and the like; else None."""
    if not isinstance(draft, str) or draft.split(":")[0] != "self":
        return None
    kind = draft.partition(":")[2]
    names = ", ".join(f"self:{each}" for each in ROUNDED)
    _check(draft == "self" or kind in ROUNDED, f"there is no draft {draft!r:.80}; use self, or one of {names}")
    chosen = draft_quantization if draft_quantization in ROUNDED else None
    _check(
        not kind or draft_quantization == "auto" or kind == chosen,
        f"draft {draft!r} and draft_quantization {draft_quantization!r} disagree; leave out one of them",
    )
    _check(
        draft_quantization not in ("stored", "none"),
        f"draft_quantization {draft_quantization!r} would make draft 'self' as slow as the target; leave it out",
    )
    return kind or chosen or ROUNDED[0]


def usable_cores() -> int:
    """Cores this process may run on; a container or taskset may limit them."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
