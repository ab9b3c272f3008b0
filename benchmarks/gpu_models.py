"""Models with real shapes and random weights, and a naive torch model as a baseline."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from outpace.backends.torch.execution.pages import PAGE_TOKENS, Pages, bytes_per_token
from outpace.backends.torch.execution.step import HostStep, StepInputs, StepShape, views
from outpace.backends.torch.kernels.base import Cache
from outpace.backends.torch.kernels.reference import rms_norm, swiglu
from outpace.backends.torch.model.weights import Weights, allocate
from outpace.backends.torch.storage import plain_tensor
from outpace.models.architecture import Architecture
from outpace.models.hf_config import parse_config
from outpace.models.special_tokens import SpecialTokens

SHAPES: dict[str, dict[str, Any]] = {
    "8B": {
        "architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "rope_theta": 500000.0,
        "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    },
    "1B": {
        "architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192,
        "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
        "rope_theta": 500000.0, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
    },
}  # fmt: skip


def shape_config(name: str) -> Architecture:
    return parse_config(SHAPES[name])


def random_weights(config: Architecture, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Weights:
    weights = allocate(config, tied=bool(config.tied), dtype=dtype, device=device)
    for tensor in map(plain_tensor, weights.tensors):
        if tensor.dim() == 1:
            tensor.fill_(1.0)
        else:
            tensor.normal_(0.0, 0.02)
    return weights


def random_caches(
    config: Architecture,
    num_pages: int,
    device: torch.device,
    num_layers: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> list[Cache]:
    pages = Pages(num_layers or config.num_layers, num_pages, config.num_kv_heads, config.head_dim, dtype, device)
    for layer in pages.numbers:
        layer.copy_(torch.randn(layer.shape, device=device) * (30 if pages.scales is not None else 1))
    if pages.scales is not None:
        pages.scales.fill_(1 / 30)
    return pages.caches


def uniform_step(num_rows: int, row_tokens: int, context: int, vocab_size: int, device: torch.device) -> StepInputs:
    """Rows of equal length, on pages in random order; `context` counts the new tokens."""
    pages = -(-context // PAGE_TOKENS)
    host = HostStep(
        StepShape(num_rows * row_tokens, num_rows, num_rows * row_tokens, row_tokens, pages + 1), pinned=False
    )
    free = random.sample(range(num_rows * pages), num_rows * pages)
    for i in range(num_rows):
        begin, end = i * row_tokens, (i + 1) * row_tokens
        host.begins[i], host.lengths[i], host.contexts[i] = begin, row_tokens, context
        host.positions[begin:end] = range(context - row_tokens, context)
        host.token_rows[begin:end] = i
        host.tables[i, :pages] = [free.pop() for _ in range(pages)]
    host.tokens[:] = [random.randrange(vocab_size) for _ in host.tokens]
    host.outputs[:] = range(len(host.outputs))
    return views(host.buffer.to(device), host.shape)


def step_floor_bytes(
    config: Architecture, num_rows: int, context: int, itemsize: int = 2, cache_dtype: torch.dtype = torch.bfloat16
) -> int:
    """Bytes that any step must read: every matrix once, and the keys and values of every row."""
    matrices = config.num_layer_parameters + config.vocab_size * config.width
    token = bytes_per_token(config.cache_elements_per_token, config.head_dim, cache_dtype)
    return itemsize * matrices + num_rows * context * token


class NaiveModel:
    """Unoptimised baseline: a torch call per operation, a contiguous KV cache, keys repeated for each group."""

    def __init__(self, config: Architecture, weights: Weights, num_rows: int, context: int) -> None:
        self.config, self.weights = config, weights
        shape = (config.num_layers, 2, num_rows, config.num_kv_heads, context, config.head_dim)
        self._cache = torch.randn(shape, dtype=weights.embedding.dtype, device=weights.embedding.device)
        self._rope = torch.from_numpy(config.rope.table(context)).to(weights.embedding.device)

    @torch.inference_mode()
    def forward(self, tokens: Tensor, context: int) -> Tensor:
        """tokens [rows, n]: the last n tokens of `context`."""
        c, (num_rows, n) = self.config, tokens.shape
        x = functional.embedding(tokens, self.weights.embedding)
        rope = self._rope[context - n : context].to(x.dtype)
        mask = torch.ones(n, context, dtype=torch.bool, device=x.device).tril(context - n)
        for layer, cache in zip(self.weights.layers, self._cache, strict=True):
            h = rms_norm(x, layer.attention_norm, c.epsilon)
            qkv = functional.linear(h, plain_tensor(layer.qkv)).view(num_rows, n, -1, c.head_dim).transpose(1, 2)
            q, k, v = qkv.split([c.num_heads, c.num_kv_heads, c.num_kv_heads], dim=1)
            cache[0, :, :, context - n : context], cache[1, :, :, context - n : context] = _rotate(k, rope), v
            group = c.num_heads // c.num_kv_heads
            keys = cache[0, :, :, :context].repeat_interleave(group, dim=1)
            values = cache[1, :, :, :context].repeat_interleave(group, dim=1)
            mixed = functional.scaled_dot_product_attention(_rotate(q, rope), keys, values, attn_mask=mask)
            x = x + functional.linear(mixed.transpose(1, 2).reshape(num_rows, n, -1), plain_tensor(layer.out))
            h = rms_norm(x, layer.mlp_norm, c.epsilon)
            gate_up = functional.linear(h, plain_tensor(layer.gate_up))
            x = x + functional.linear(swiglu(gate_up), plain_tensor(layer.down))
        return functional.linear(rms_norm(x, self.weights.final_norm, c.epsilon), plain_tensor(self.weights.head))


class Letters:
    """A tokenizer for random weights: every token is a letter."""

    bos_text = eos_text = ""
    chat_template: str | None = None
    end_ids: frozenset[int] = frozenset()
    specials = SpecialTokens([])
    longest_token: int | None = None

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        return [ord(letter) % self.vocab_size for letter in text]

    def pieces(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> Iterator[list[int]]:
        yield self.encode(text)

    def token_bytes(self, token: int) -> bytes:
        return bytes([97 + token % 26])

    def vocabulary(self) -> list[tuple[bytes, int]]:
        return [(b"%d" % token, 0) for token in range(self.vocab_size)]


def _rotate(x: Tensor, rope: Tensor) -> Tensor:
    cosines, sines = rope.chunk(2, dim=-1)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cosines - second * sines, second * cosines + first * sines], dim=-1)


def captured(work: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """Capture `work` in a graph, after warm-up runs that compile its kernels."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def replay_ms(graph: torch.cuda.CUDAGraph, replays: int = 10, rounds: int = 7) -> list[float]:
    """Milliseconds of one replay for each round: the mean of several replays, timed by the device."""
    for _ in range(3):
        graph.replay()
    taken = []
    for _ in range(rounds):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        end.synchronize()
        taken.append(begin.elapsed_time(end) / replays)
    return taken


def median_ms(work: Callable[[], object], replays: int = 10, rounds: int = 7) -> float:
    return statistics.median(replay_ms(captured(work), replays, rounds))
