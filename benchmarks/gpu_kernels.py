"""Kernels on a GPU: each against its reference on random shapes, and how fast each way of configuring it is."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.gpu_models import median_ms, random_caches, random_weights, shape_config, uniform_step
from outpace.backends.torch.kernels import attention as attention_kernels
from outpace.backends.torch.kernels import elementwise
from outpace.backends.torch.kernels.base import Cache, Next, Normed
from outpace.backends.torch.kernels.linear import LinearConfig, Scratch, stream_linear
from outpace.backends.torch.kernels.reference import ReferenceOps, rms_norm, swiglu
from outpace.backends.torch.kernels.triton_ops import TritonOps
from outpace.backends.torch.model import Model
from outpace.backends.torch.runner import PAGE_TOKENS
from outpace.backends.torch.step import PADDING, HostStep, StepInputs, StepShape, views

REFERENCE = ReferenceOps()
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 8e-3}  # of the norm; tf32 would show in float32
SHARED_MEMORY = 227 << 10  # of a multiprocessor
_PAGES = 128  # in the caches that checks use
ROTATED_BYTES = 400 << 20  # weights cycled through while timing, so that none is found in the L2 cache


def relative_error(found: Tensor, expected: Tensor) -> float:
    if not bool(torch.isfinite(found).all()):
        return float("nan")
    return float((found.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30))


@dataclass(frozen=True)
class Product:
    """One of a layer's products: what is fused into it decides which kernel is compiled."""

    name: str
    n: int
    k: int
    norm: bool = False
    residual: bool = False
    swiglu: bool = False
    wide: bool = False  # float32 results

    @property
    def weight_rows(self) -> int:
        return self.n * (2 if self.swiglu else 1)

    def tensors(self, num_tokens: int, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
        def rand(*shape: int) -> Tensor:
            return torch.randn(shape, device=device, dtype=dtype)

        out = torch.full((num_tokens, self.n), torch.nan, device=device, dtype=torch.float32 if self.wide else dtype)
        residual = rand(num_tokens, self.n) if self.residual else None
        return {
            "x": rand(num_tokens, self.k) * 3,
            "weight": rand(self.weight_rows, self.k) * self.k**-0.5,
            "out": out if residual is None else residual,
            "residual": residual,
            "norm": 1 + 0.1 * rand(self.k) if self.norm else None,
            "next_norm": 1 + 0.1 * rand(self.n) if self.residual else None,
        }

    def run(self, tensors: dict[str, Any], scratch: Scratch, config: LinearConfig, num_sms: int) -> Tensor:
        x = tensors["x"]
        if tensors["norm"] is not None:
            if "normed" not in tensors:  # as the product before would have left it
                squares = x.float().square().view(len(x), -1, 32).sum(-1)
                tensors["normed"] = Normed((x.float() * tensors["norm"].float()).to(x.dtype), squares)
            x = tensors["normed"]
        next_norm = tensors["next_norm"]
        normed = stream_linear(
            x, tensors["weight"], tensors["out"], scratch, config, num_sms,
            epsilon=1e-5, residual=tensors["residual"], next_norm=next_norm, swiglu=self.swiglu,
        )  # fmt: skip
        tensors["next"] = normed
        out: Tensor = tensors["out"]
        return out

    def reference(self, tensors: dict[str, Any]) -> Tensor:
        """In float32 throughout."""
        x, weight = tensors["x"].float(), tensors["weight"].float()
        if tensors["norm"] is not None:
            x = rms_norm(x, tensors["norm"].float(), 1e-5)
        y = functional.linear(x, weight)
        y = swiglu(y) if self.swiglu else y
        return y if tensors["residual"] is None else y + tensors["residual"].float()


def products(shape: str) -> list[Product]:
    c = shape_config(shape)
    return [
        Product("qkv", c.q_size + 2 * c.kv_size, c.width, norm=True),
        Product("out", c.width, c.q_size, residual=True),
        Product("gate_up", c.hidden, c.width, norm=True, swiglu=True),
        Product("down", c.width, c.hidden, residual=True),
        Product("head", c.vocab_size, c.width, norm=True, wide=True),
    ]


def check_kernels(workers: int) -> list[dict[str, Any]]:
    """Every kernel on random shapes. Most of the time goes into compiling, so several processes share the cases."""
    dtypes = (torch.bfloat16, torch.float32)
    cases: list[tuple[Any, ...]] = []
    for n, k in ((960, 576), (3072, 2048), (1000, 1024), (4096, 14336)):
        cases += [("linear", *case, n, k) for case in itertools.product(dtypes, (True, False), (1, 5, 16, 32))]
    rows = ([(1000, 1)], [(700, 1), (31, 8), (2048, 3), (5, 5)], [(300, 300), (1024, 1)])
    for heads in ((32, 8, 128), (32, 8, 64), (9, 3, 64), (14, 2, 64), (16, 8, 128)):
        cases += [("attention", *case, *heads) for case in itertools.product(dtypes, (True, False), rows)]
    cases += [("elementwise", *case) for case in itertools.product(dtypes, (576, 2048, 4096))]
    random.Random(0).shuffle(cases)
    return [check for found in _spread(_check, cases, workers) for check in found]


def _spread(work: Callable[[Any], Any], jobs: Sequence[Any], workers: int) -> list[Any]:
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        return list(pool.map(work, jobs))


def _check(case: tuple[Any, ...]) -> list[dict[str, Any]]:
    kind, dtype, *rest = case
    checks: dict[str, Callable[..., list[tuple[str, float]]]] = {
        "linear": _check_linear, "attention": _check_attention, "elementwise": _check_elementwise,
    }  # fmt: skip
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        found = checks[kind](dtype, *rest)
    except Exception as error:
        print(f"{case}: {error!r:.500}", flush=True)
        found = [(kind, float("nan"))]
    return [
        {"kernel": kernel, "case": str(case), "error": error, "passed": error < TOLERANCE[dtype]}
        for kernel, error in found
    ]


def _check_linear(dtype: torch.dtype, dependent: bool, num_tokens: int, n: int, k: int) -> list[tuple[str, float]]:
    """Fresh random inputs for every check; outputs poisoned before."""
    device = torch.device("cuda")
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    scratch = Scratch(device)
    config = LinearConfig(32, 64, 4, 3, 1 + num_tokens % 2, int(dependent), dependent)
    found = []
    for product in (
        Product("linear norm", n, k, norm=True),
        Product("linear add", n, k, residual=True),
        Product("linear swiglu", n, k, norm=True, swiglu=True),
        Product("linear logits", n, k, norm=True, wide=True),
    ):
        tensors = product.tensors(num_tokens, device, dtype)
        expected = product.reference(tensors)
        found.append((product.name, relative_error(product.run(tensors, scratch, config, num_sms), expected)))
        if product.residual:
            out, normed, norm = tensors["out"].float(), tensors["next"], tensors["next_norm"].float()
            found.append(("begun norm", relative_error(normed.x, out * norm)))
            found.append(("begun norm", relative_error(normed.squares.sum(1), out.square().sum(1))))
        if not product.residual:  # the same bits every time, however the parts of a tile were timed
            first = tensors["out"].clone()
            same = torch.equal(product.run(tensors, scratch, config, num_sms), first)
            found.append(("linear repeated", 0.0 if same else float("nan")))
    return found


def _check_attention(
    dtype: torch.dtype, dependent: bool, rows: list[tuple[int, int]], num_heads: int, num_kv_heads: int, dim: int
) -> list[tuple[str, float]]:
    device = torch.device("cuda")
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count

    def rand(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    step = ragged_step(rows, 32, device)
    real = step.positions >= 0
    cache = Cache(rand(_PAGES, num_kv_heads, 32, dim), rand(_PAGES, num_kv_heads, 32, dim))
    expected_cache = Cache(cache.keys.clone(), cache.values.clone())
    qkv = rand(step.shape.num_tokens, (num_heads + 2 * num_kv_heads) * dim)
    angles = torch.rand((2048, dim // 2), device=device) * 6.28
    rope = torch.cat([angles.cos(), angles.sin()], 1)
    q_norm, k_norm = (rand(dim), rand(dim)) if num_heads == 16 else (None, None)
    rotation = attention_kernels.Rotation(rope, q_norm, k_norm, 1e-5)
    expected = REFERENCE.attend(qkv, expected_cache, step, rope, q_norm, k_norm, 1e-5, Next(rope))
    found = []
    for splits in (None, 1, 8):
        mine = Cache(cache.keys.clone(), cache.values.clone())
        mixed = attention_kernels.attend(qkv, mine, step, rotation, num_sms, num_splits=splits, dependent=dependent)
        found += [
            ("attention", relative_error(mixed[real], expected[real])),
            ("store keys", relative_error(mine.keys, expected_cache.keys)),
            ("store values", relative_error(mine.values, expected_cache.values)),
        ]
    return found


def _check_elementwise(dtype: torch.dtype, width: int) -> list[tuple[str, float]]:
    x, weight = (torch.randn(shape, device="cuda", dtype=dtype) for shape in ((7, width), (width,)))
    return [
        ("rms_norm", relative_error(elementwise.rms_norm(x, weight, 1e-5), rms_norm(x, weight, 1e-5))),
        ("swiglu", relative_error(elementwise.swiglu(x), swiglu(x))),
    ]


def ragged_step(rows: list[tuple[int, int]], page_tokens: int, device: torch.device) -> StepInputs:
    """Rows of (context, new tokens) with a gap of one token after each, on pages drawn at random."""
    width = max(-(-context // page_tokens) for context, _ in rows) + 1
    num_tokens = sum(length + 1 for _, length in rows)
    shape = StepShape(num_tokens, len(rows), num_tokens, max(length for _, length in rows), width)
    host = HostStep(shape, pinned=False)
    host.positions.fill(PADDING)
    free, at = random.sample(range(_PAGES), _PAGES), 0
    for i, (context, length) in enumerate(rows):
        host.begins[i], host.lengths[i], host.contexts[i] = at, length, context
        host.positions[at : at + length] = range(context - length, context)
        host.token_rows[at : at + length + 1] = i
        host.tables[i, : -(-context // page_tokens)] = [free.pop() for _ in range(-(-context // page_tokens))]
        at += length + 1
    return views(host.buffer.to(device), shape)


def candidates(product: Product, block_m: int) -> list[LinearConfig]:
    """Ways to stream a product that fit in shared memory and keep enough of it in flight."""
    found = []
    for block_n, block_k, num_warps, num_stages, per_sm in itertools.product(
        (16, 32, 64), (128, 256, 512), (2, 4), (3, 4, 6), (1, 2, 3)
    ):
        weights = block_n * (2 if product.swiglu else 1) * block_k * 2
        buffers = (weights + block_m * block_k * 2) * (num_stages - 1) + (2 << 10)
        in_flight = weights * (num_stages - 1) * per_sm
        fits = buffers <= SHARED_MEMORY // per_sm and 44 << 10 <= in_flight <= 130 << 10
        if fits and product.k % block_k == 0 and num_warps >= block_n // 16:
            found.append(LinearConfig(block_n, block_k, num_warps, num_stages, per_sm))
    return found


def compile_ahead(jobs: list[tuple[Product, int, LinearConfig]], workers: int) -> None:
    """Into Triton's cache on disk, by several processes; what fails here fails again, and is reported, when timed."""
    _spread(_compile, [jobs[i :: 4 * workers] for i in range(4 * workers)], workers)


def _compile(jobs: list[tuple[Product, int, LinearConfig]]) -> None:
    device = torch.device("cuda")
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    for product, num_tokens, config in jobs:
        with suppress(Exception):
            product.run(product.tensors(num_tokens, device), Scratch(device), config, num_sms)
            torch.cuda.synchronize()


def compile_steps_ahead(
    jobs: list[tuple[str, dict[tuple[int, int, int], LinearConfig]]], context: int, workers: int
) -> None:
    """Whole steps of two layers, for kernels that depend on what comes after them."""
    _spread(_compile_step, [(*job, context) for job in jobs], workers)


def _compile_step(job: tuple[str, dict[tuple[int, int, int], LinearConfig], int]) -> None:
    shape, configs, context = job
    device = torch.device("cuda")
    config = replace(shape_config(shape), num_layers=2)
    model = Model(config, random_weights(config, device), TritonOps(device, configs=configs), 2 * context)
    step = uniform_step(1, 1, context, config.vocab_size, device)
    model.forward(step, random_caches(config, -(-context // PAGE_TOKENS), device))
    torch.cuda.synchronize()


def time_product(
    product: Product, num_tokens: int, config: LinearConfig | None, device: torch.device
) -> dict[str, Any]:
    """Microseconds of one product among many in a graph, each over other weights; None: the library's product."""
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    scratch = Scratch(device)
    first = product.tensors(num_tokens, device)
    size = first["weight"].nbytes
    sets = [first, *(product.tensors(num_tokens, device) for _ in range(max(1, ROTATED_BYTES // size)))]

    def ours() -> None:
        assert config is not None
        for tensors in sets:
            product.run(tensors, scratch, config, num_sms)

    def library() -> None:
        for tensors in sets:
            x = tensors["x"] if tensors["norm"] is None else elementwise.rms_norm(tensors["x"], tensors["norm"], 1e-5)
            if product.residual:
                torch.addmm(tensors["residual"], x, tensors["weight"].T)
            elif product.swiglu:
                elementwise.swiglu(functional.linear(x, tensors["weight"]))
            elif product.wide:
                torch.mm(x, tensors["weight"].T, out_dtype=torch.float32)
            else:
                functional.linear(x, tensors["weight"])

    us = 1e3 * median_ms(library if config is None else ours, replays=4, rounds=5) / len(sets)
    return {
        "product": product.name, "n": product.n, "k": product.k, "tokens": num_tokens, "us": us,
        "tb_per_s": size / us / 1e6, "config": None if config is None else asdict(config),
    }  # fmt: skip


def compile_attention_ahead(jobs: list[tuple[Any, ...]], workers: int) -> None:
    _spread(_compile_attention, jobs, workers)


def _compile_attention(job: tuple[Any, ...]) -> None:
    with suppress(Exception):
        _attention_work(*job, num_layers=1)()


def attention_candidates(num_rows: int) -> list[dict[str, Any]]:
    splits = {1: (8, 16, 32), 32: (1, 2, 4)}.get(num_rows, (1, 2))
    return [
        {"num_splits": s, "block_kv": b, "num_stages": n, "dependent": True}
        for s, b, n in itertools.product(splits, (32, 64, 128), (2, 3))
    ]


def time_attention(
    shape: str, num_rows: int, row_tokens: int, context: int, options: dict[str, Any], device: torch.device
) -> float:
    """Microseconds of attention alone, over the caches of several layers in turn."""
    num_layers = 8
    work = _attention_work(shape, num_rows, row_tokens, context, options, num_layers=num_layers, device=device)
    return 1e3 * median_ms(work, replays=4, rounds=5) / num_layers


def _attention_work(
    shape: str,
    num_rows: int,
    row_tokens: int,
    context: int,
    options: dict[str, Any],
    *,
    num_layers: int,
    device: torch.device | None = None,
) -> Callable[[], None]:
    device = device or torch.device("cuda")
    config = shape_config(shape)
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    caches = random_caches(config, num_rows * -(-context // 32), device, num_layers)
    step = uniform_step(num_rows, row_tokens, context, 1000, device)
    width = config.q_size + 2 * config.kv_size
    qkv = torch.randn((num_rows * row_tokens, width), device=device, dtype=torch.bfloat16)
    rotation = attention_kernels.Rotation(torch.rand((2048, config.head_dim), device=device), None, None, 1e-5)

    def work() -> None:
        for cache in caches:
            attention_kernels.attention(qkv, cache, step, num_sms, rotation=rotation, **options)

    return work
