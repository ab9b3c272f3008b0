"""The shapes of well-known models, by name. Sources: the config.json that each model was published with.

Checked against other tables: litgpt's config.py (Lightning-AI/litgpt, commit 2685705) has 49 of them, with the same
layers, widths, heads, key heads, hidden sizes and experts. It differs in the context of nine, where it has the base
model's or its own limit and this table the instruction-tuned model's, and in the vocabulary of Gemma 3, which this
table has with its padding. gpt-oss is as in transformers' GptOssConfig; parameters of all are the hub's counts.

A name is found in any usual spelling: `Llama-3.1-70B`, `meta-llama/Meta-Llama-3.1-70B-Instruct`, `llama3.1:70b`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from difflib import SequenceMatcher, get_close_matches
from typing import Any

from outpace.plan.shapes import Experts, Latent, Shape


@dataclass(frozen=True, slots=True)
class KnownModel:
    name: str
    family: str  # models of one family were trained on similar texts
    tokenizer: str  # models of one tokenizer have the same token ids
    nominal: float  # parameters as people round them, in billions
    shape: Shape
    hub: str  # the name of its usual instruction-tuned version on the hub
    precision: str = "bf16"  # as published


def _llama(
    layers: int, width: int, hidden: int, heads: int, kv: int, vocab: int, context: int, **more: object
) -> Shape:
    sizes: dict[str, Any] = {"head_dim": width // heads, **more}
    return Shape(
        layers=layers, width=width, hidden=hidden, heads=heads, kv_heads=kv, vocab_size=vocab, context=context, **sizes
    )  # fmt: skip


def _qwen2(layers: int, width: int, hidden: int, heads: int, kv: int, vocab: int = 152064, **more: object) -> Shape:
    return _llama(layers, width, hidden, heads, kv, vocab, 32768, qkv_bias=True, **more)


def _qwen3(layers: int, width: int, hidden: int, heads: int, kv: int = 8, **more: object) -> Shape:
    return _llama(layers, width, hidden, heads, kv, 151936, 40960, head_dim=128, qk_norm=True, **more)


def _gemma(layers: int, width: int, hidden: int, heads: int, kv: int, head_dim: int, **more: object) -> Shape:
    options: dict[str, object] = {"vocab": 256_000, "context": 8192} | more
    vocab, context = options.pop("vocab"), options.pop("context")
    assert isinstance(vocab, int) and isinstance(context, int)
    return _llama(layers, width, hidden, heads, kv, vocab, context, head_dim=head_dim, tied=True, **options)


def _gemma3(layers: int, width: int, hidden: int, heads: int, kv: int, head_dim: int = 256, **more: object) -> Shape:
    """Five of six layers attend to a window."""
    options: dict[str, object] = {"vocab": 262_208, "context": 131_072, "window": 1024} | more
    return _gemma(layers, width, hidden, heads, kv, head_dim, qk_norm=True, norms_per_layer=4,
                  windowed_layers=layers - layers // 6, **options)  # fmt: skip


def _gpt_oss(layers: int, experts: int) -> Shape:
    return Shape(
        layers=layers, width=2880, hidden=2880, heads=64, kv_heads=8, head_dim=64, vocab_size=201_088, context=131_072,
        qkv_bias=True, out_bias=True, has_sinks=True, window=128, windowed_layers=layers // 2,
        experts=Experts(experts, 4, 2880, has_bias=True),
    )  # fmt: skip


_LLAMA2_7B = _llama(32, 4096, 11008, 32, 32, 32000, 4096)
_LLAMA3_8B = _llama(32, 4096, 14336, 32, 8, 128256, 8192)
_LLAMA3_70B = _llama(80, 8192, 28672, 64, 8, 128256, 8192)
_LLAMA31_8B, _LLAMA31_70B = (replace(shape, context=131072) for shape in (_LLAMA3_8B, _LLAMA3_70B))
_MISTRAL_7B = _llama(32, 4096, 14336, 32, 8, 32000, 32768)
_QWEN2_05B = _qwen2(24, 896, 4864, 14, 2, 151936, tied=True)
_QWEN2_15B = _qwen2(28, 1536, 8960, 12, 2, 151936, tied=True)
_QWEN2_7B, _QWEN2_72B = _qwen2(28, 3584, 18944, 28, 4), _qwen2(80, 8192, 29568, 64, 8)
_QWEN25_3B = _qwen2(36, 2048, 11008, 16, 2, 151936, tied=True)
_QWEN25_14B, _QWEN25_32B = _qwen2(48, 5120, 13824, 40, 8), _qwen2(64, 5120, 27648, 40, 8)
_MLA = Latent(kv_rank=512, rope_dim=64, nope_dim=128, value_dim=128)
_DEEPSEEK_V3 = Shape(
    layers=61, width=7168, hidden=18432, heads=128, kv_heads=128, head_dim=192, vocab_size=129_280, context=163_840,
    experts=Experts(256, 8, 2048, shared=1, dense_layers=3), latent=replace(_MLA, q_rank=1536),
)  # fmt: skip
_DEEPSEEK_V2_LITE = Shape(
    layers=27, width=2048, hidden=10944, heads=16, kv_heads=16, head_dim=192, vocab_size=102_400, context=163_840,
    experts=Experts(64, 6, 1408, shared=2, dense_layers=1), latent=_MLA,
)  # fmt: skip

KNOWN: dict[str, KnownModel] = {
    each.name: each
    for each in (
        KnownModel("llama-2-7b", "llama-2", "llama-2", 7, _LLAMA2_7B, "meta-llama/Llama-2-7b-chat-hf"),
        KnownModel("llama-2-13b", "llama-2", "llama-2", 13, _llama(40, 5120, 13824, 40, 40, 32000, 4096),
                   "meta-llama/Llama-2-13b-chat-hf"),
        KnownModel("llama-2-70b", "llama-2", "llama-2", 70, _llama(80, 8192, 28672, 64, 8, 32000, 4096),
                   "meta-llama/Llama-2-70b-chat-hf"),
        KnownModel("llama-3-8b", "llama-3", "llama-3", 8, _LLAMA3_8B, "meta-llama/Meta-Llama-3-8B-Instruct"),
        KnownModel("llama-3-70b", "llama-3", "llama-3", 70, _LLAMA3_70B, "meta-llama/Meta-Llama-3-70B-Instruct"),
        KnownModel("llama-3.1-8b", "llama-3", "llama-3", 8, _LLAMA31_8B, "meta-llama/Llama-3.1-8B-Instruct"),
        KnownModel("llama-3.1-70b", "llama-3", "llama-3", 70, _LLAMA31_70B, "meta-llama/Llama-3.1-70B-Instruct"),
        KnownModel("llama-3.1-405b", "llama-3", "llama-3", 405, _llama(126, 16384, 53248, 128, 8, 128256, 131072),
                   "meta-llama/Llama-3.1-405B-Instruct"),
        KnownModel("llama-3.2-1b", "llama-3", "llama-3", 1, _llama(16, 2048, 8192, 32, 8, 128256, 131072, tied=True),
                   "meta-llama/Llama-3.2-1B-Instruct"),
        KnownModel("llama-3.2-3b", "llama-3", "llama-3", 3, _llama(28, 3072, 8192, 24, 8, 128256, 131072, tied=True),
                   "meta-llama/Llama-3.2-3B-Instruct"),
        KnownModel("llama-3.3-70b", "llama-3", "llama-3", 70, _LLAMA31_70B, "meta-llama/Llama-3.3-70B-Instruct"),
        KnownModel("qwen2-0.5b", "qwen2", "qwen2", 0.5, _QWEN2_05B, "Qwen/Qwen2-0.5B-Instruct"),
        KnownModel("qwen2-1.5b", "qwen2", "qwen2", 1.5, _QWEN2_15B, "Qwen/Qwen2-1.5B-Instruct"),
        KnownModel("qwen2-7b", "qwen2", "qwen2", 7, _QWEN2_7B, "Qwen/Qwen2-7B-Instruct"),
        KnownModel("qwen2-72b", "qwen2", "qwen2", 72, _QWEN2_72B, "Qwen/Qwen2-72B-Instruct"),
        KnownModel("qwen2.5-0.5b", "qwen2.5", "qwen2", 0.5, _QWEN2_05B, "Qwen/Qwen2.5-0.5B-Instruct"),
        KnownModel("qwen2.5-1.5b", "qwen2.5", "qwen2", 1.5, _QWEN2_15B, "Qwen/Qwen2.5-1.5B-Instruct"),
        KnownModel("qwen2.5-3b", "qwen2.5", "qwen2", 3, _QWEN25_3B, "Qwen/Qwen2.5-3B-Instruct"),
        KnownModel("qwen2.5-7b", "qwen2.5", "qwen2", 7, _QWEN2_7B, "Qwen/Qwen2.5-7B-Instruct"),
        KnownModel("qwen2.5-14b", "qwen2.5", "qwen2", 14, _QWEN25_14B, "Qwen/Qwen2.5-14B-Instruct"),
        KnownModel("qwen2.5-32b", "qwen2.5", "qwen2", 32, _QWEN25_32B, "Qwen/Qwen2.5-32B-Instruct"),
        KnownModel("qwen2.5-72b", "qwen2.5", "qwen2", 72, _QWEN2_72B, "Qwen/Qwen2.5-72B-Instruct"),
        KnownModel("qwen2.5-coder-0.5b", "qwen2.5-coder", "qwen2", 0.5, _QWEN2_05B, "Qwen/Qwen2.5-Coder-0.5B-Instruct"),
        KnownModel("qwen2.5-coder-1.5b", "qwen2.5-coder", "qwen2", 1.5, _QWEN2_15B, "Qwen/Qwen2.5-Coder-1.5B-Instruct"),
        KnownModel("qwen2.5-coder-3b", "qwen2.5-coder", "qwen2", 3, _QWEN25_3B, "Qwen/Qwen2.5-Coder-3B-Instruct"),
        KnownModel("qwen2.5-coder-7b", "qwen2.5-coder", "qwen2", 7, _QWEN2_7B, "Qwen/Qwen2.5-Coder-7B-Instruct"),
        KnownModel("qwen2.5-coder-14b", "qwen2.5-coder", "qwen2", 14, _QWEN25_14B, "Qwen/Qwen2.5-Coder-14B-Instruct"),
        KnownModel("qwen2.5-coder-32b", "qwen2.5-coder", "qwen2", 32, _QWEN25_32B, "Qwen/Qwen2.5-Coder-32B-Instruct"),
        KnownModel("qwen3-0.6b", "qwen3", "qwen3", 0.6, _qwen3(28, 1024, 3072, 16, tied=True), "Qwen/Qwen3-0.6B"),
        KnownModel("qwen3-1.7b", "qwen3", "qwen3", 1.7, _qwen3(28, 2048, 6144, 16, tied=True), "Qwen/Qwen3-1.7B"),
        KnownModel("qwen3-4b", "qwen3", "qwen3", 4, _qwen3(36, 2560, 9728, 32, tied=True), "Qwen/Qwen3-4B"),
        KnownModel("qwen3-8b", "qwen3", "qwen3", 8, _qwen3(36, 4096, 12288, 32), "Qwen/Qwen3-8B"),
        KnownModel("qwen3-14b", "qwen3", "qwen3", 14, _qwen3(40, 5120, 17408, 40), "Qwen/Qwen3-14B"),
        KnownModel("qwen3-32b", "qwen3", "qwen3", 32, _qwen3(64, 5120, 25600, 64), "Qwen/Qwen3-32B"),
        KnownModel("qwen3-30b-a3b", "qwen3", "qwen3", 30, _qwen3(48, 2048, 6144, 32, 4, experts=Experts(128, 8, 768)),
                   "Qwen/Qwen3-30B-A3B"),
        KnownModel("qwen3-235b-a22b", "qwen3", "qwen3", 235,
                   _qwen3(94, 4096, 12288, 64, 4, experts=Experts(128, 8, 1536)), "Qwen/Qwen3-235B-A22B"),
        KnownModel("mistral-7b", "mistral", "mistral-v3", 7, replace(_MISTRAL_7B, vocab_size=32768),
                   "mistralai/Mistral-7B-Instruct-v0.3"),
        KnownModel("mistral-7b-v0.1", "mistral", "mistral-v1", 7, replace(_MISTRAL_7B, window=4096, windowed_layers=32),
                   "mistralai/Mistral-7B-Instruct-v0.1"),
        KnownModel("mistral-nemo-12b", "mistral", "tekken", 12,
                   _llama(40, 5120, 14336, 32, 8, 131072, 131072, head_dim=128),
                   "mistralai/Mistral-Nemo-Instruct-2407"),
        KnownModel("mistral-small-24b", "mistral", "tekken", 24,
                   _llama(40, 5120, 32768, 32, 8, 131072, 32768, head_dim=128),
                   "mistralai/Mistral-Small-24B-Instruct-2501"),
        KnownModel("mistral-large-123b", "mistral", "mistral-v3", 123, _llama(88, 12288, 28672, 96, 8, 32768, 131072),
                   "mistralai/Mistral-Large-Instruct-2407"),
        KnownModel("mixtral-8x7b", "mixtral", "mistral-v1", 47, replace(_MISTRAL_7B, experts=Experts(8, 2, 14336)),
                   "mistralai/Mixtral-8x7B-Instruct-v0.1"),
        KnownModel("mixtral-8x22b", "mixtral", "mistral-v3", 141,
                   _llama(56, 6144, 16384, 48, 8, 32768, 65536, experts=Experts(8, 2, 16384)),
                   "mistralai/Mixtral-8x22B-Instruct-v0.1"),
        KnownModel("gemma-2b", "gemma", "gemma", 2, _gemma(18, 2048, 16384, 8, 1, 256), "google/gemma-2b-it"),
        KnownModel("gemma-7b", "gemma", "gemma", 7, _gemma(28, 3072, 24576, 16, 16, 256), "google/gemma-7b-it"),
        KnownModel("gemma-2-2b", "gemma-2", "gemma", 2,
                   _gemma(26, 2304, 9216, 8, 4, 256, norms_per_layer=4, window=4096, windowed_layers=13),
                   "google/gemma-2-2b-it"),
        KnownModel("gemma-2-9b", "gemma-2", "gemma", 9,
                   _gemma(42, 3584, 14336, 16, 8, 256, norms_per_layer=4, window=4096, windowed_layers=21),
                   "google/gemma-2-9b-it"),
        KnownModel("gemma-2-27b", "gemma-2", "gemma", 27,
                   _gemma(46, 4608, 36864, 32, 16, 128, norms_per_layer=4, window=4096, windowed_layers=23),
                   "google/gemma-2-27b-it"),
        KnownModel("gemma-3-1b", "gemma-3", "gemma-3", 1,
                   _gemma3(26, 1152, 6912, 4, 1, vocab=262_144, context=32768, window=512), "google/gemma-3-1b-it"),
        KnownModel("gemma-3-4b", "gemma-3", "gemma-3", 4, _gemma3(34, 2560, 10240, 8, 4), "google/gemma-3-4b-it"),
        KnownModel("gemma-3-12b", "gemma-3", "gemma-3", 12, _gemma3(48, 3840, 15360, 16, 8), "google/gemma-3-12b-it"),
        KnownModel("gemma-3-27b", "gemma-3", "gemma-3", 27, _gemma3(62, 5376, 21504, 32, 16, 128),
                   "google/gemma-3-27b-it"),
        KnownModel("smollm2-135m", "smollm2", "smollm2", 0.135, _llama(30, 576, 1536, 9, 3, 49152, 8192, tied=True),
                   "HuggingFaceTB/SmolLM2-135M-Instruct"),
        KnownModel("smollm2-360m", "smollm2", "smollm2", 0.36, _llama(32, 960, 2560, 15, 5, 49152, 8192, tied=True),
                   "HuggingFaceTB/SmolLM2-360M-Instruct"),
        KnownModel("smollm2-1.7b", "smollm2", "smollm2", 1.7, _llama(24, 2048, 8192, 32, 32, 49152, 8192, tied=True),
                   "HuggingFaceTB/SmolLM2-1.7B-Instruct"),
        KnownModel("deepseek-v2-lite", "deepseek", "deepseek-v2", 16, _DEEPSEEK_V2_LITE,
                   "deepseek-ai/DeepSeek-V2-Lite-Chat"),
        KnownModel("deepseek-v3", "deepseek", "deepseek-v3", 671, _DEEPSEEK_V3, "deepseek-ai/DeepSeek-V3", "fp8"),
        KnownModel("deepseek-r1", "deepseek", "deepseek-v3", 671, _DEEPSEEK_V3, "deepseek-ai/DeepSeek-R1", "fp8"),
        KnownModel("gpt-oss-20b", "gpt-oss", "o200k-harmony", 20, _gpt_oss(24, 32), "openai/gpt-oss-20b", "mxfp4"),
        KnownModel("gpt-oss-120b", "gpt-oss", "o200k-harmony", 120, _gpt_oss(36, 128), "openai/gpt-oss-120b", "mxfp4"),
    )
}  # fmt: skip

# Tokenizers with the ids of another, and more tokens after them.
EXTENDED_TOKENIZERS = {"qwen3": "qwen2"}
_ADDED_WORDS = (
    "instruct", "chat", "it", "base", "hf", "pt", "text", "awq", "gptq", "fp8", "fp16", "bf16", "int4", "int8", "gguf",
    "bnb", "4bit", "8bit", "2407", "2411", "2501", "v0.2", "v0.3",
)  # fmt: skip
_QUANTISED = re.compile(r"[-.]i?q[2-8]-.*$")  # as files of llama.cpp are named
_VERSION_FIRST = re.compile(r"^(llama|gemma)(\d)")
_VERSION_APART = re.compile(r"^(qwen|smollm)-(\d)")
_OTHER_NAMES = {
    "mistral-large-2": "mistral-large-123b", "mistral-large": "mistral-large-123b", "mistral-nemo": "mistral-nemo-12b",
    "mistral-small": "mistral-small-24b", "mixtral-8x7b-v0.1": "mixtral-8x7b", "mixtral-8x22b-v0.1": "mixtral-8x22b",
    "deepseek-v3-0324": "deepseek-v3", "deepseek-r1-0528": "deepseek-r1", "smollm2": "smollm2-135m",
}  # fmt: skip


def find_known(name: str) -> KnownModel | None:
    return KNOWN.get(_normal(name))


def similar_names(name: str) -> list[str]:
    return get_close_matches(_normal(name), KNOWN, n=3, cutoff=0.6)


def _normal(name: str) -> str:
    """A name as the table writes it: without its owner, and without words for how it was tuned or packed."""
    word = name.lower().rsplit("/", 1)[-1].removesuffix(".gguf").removeprefix("meta-")
    word = re.sub(r"[ :_]+", "-", word.strip())
    word = _VERSION_APART.sub(r"\1\2", _VERSION_FIRST.sub(r"\1-\2", _QUANTISED.sub("", word)))
    word = "-".join(part for part in word.split("-") if part not in _ADDED_WORDS)
    return _OTHER_NAMES.get(word, word)


def smaller_siblings(known: KnownModel) -> list[KnownModel]:
    """Models of the same tokenizer that are at most a third as large, the largest first; of several with the same
    number of parameters, the one whose name is most like the target's."""
    limit = known.shape.parameters / 3
    same = [each for each in KNOWN.values() if each.tokenizer == known.tokenizer and each.shape.parameters <= limit]
    same.sort(key=lambda each: SequenceMatcher(None, each.name, known.name).ratio())
    found = {each.shape.parameters: each for each in same}
    return sorted(found.values(), key=lambda each: -each.shape.parameters)
