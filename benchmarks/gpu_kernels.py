"""Checks GPU kernels on random shapes against their references, and the sampling kernel against the host."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.gpu_models import shape_config
from outpace.backends.torch.execution import following, graphs, staging
from outpace.backends.torch.execution.following import Verified
from outpace.backends.torch.execution.pages import Pages
from outpace.backends.torch.execution.step import DRAFTED, PADDING, HostStep, StepInputs, StepShape, views
from outpace.backends.torch.kernels import attention as attention_kernels
from outpace.backends.torch.kernels import drawing, elementwise
from outpace.backends.torch.kernels.base import Cache, Normed
from outpace.backends.torch.kernels.fixed_gemm import fixed_linear
from outpace.backends.torch.kernels.gemv import GemvConfig, gemv_linear
from outpace.backends.torch.kernels.linear import LinearConfig, Scratch, stream_linear
from outpace.backends.torch.kernels.reference import ReferenceOps, rms_norm, swiglu
from outpace.backends.torch.kernels.rotation import Rotation
from outpace.backends.torch.kernels.skinny_gemm import SkinnyConfig, skinny_linear
from outpace.backends.torch.kernels.triton_ops import Config
from outpace.backends.torch.sampling.draws import NUM_FIELDS
from outpace.backends.torch.sampling.noise import signed
from outpace.backends.torch.storage.scaled import round_to_scaled
from outpace.config import SamplingParams
from outpace.core import Row
from outpace.decoding.sampling import Shaper, choose

REFERENCE = ReferenceOps()
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 8e-3}  # relative to the norm; tf32 would exceed it in float32
_PAGES = 128  # in the KV caches of the checks
_VOCAB = 128_256
_FEATURES: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {},
    {"temperature": 0.6},
    {"temperature": 2.0},
    {"top_k": 40},
    {"temperature": 0.8, "top_p": 0.95},
    {"min_p": 0.05},
    {"temperature": 0.9, "top_k": 100, "top_p": 0.9, "min_p": 0.01},
]


def relative_error(found: Tensor, expected: Tensor) -> float:
    if not bool(torch.isfinite(found).all()):
        return float("nan")
    return float((found.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30))


@dataclass(frozen=True)
class Product:
    """One matrix product of a layer. The operations fused into it decide which kernel is compiled."""

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

    def run(self, tensors: dict[str, Any], scratch: Scratch, config: Config, num_sms: int) -> Tensor:
        x = tensors["x"]
        if tensors["norm"] is not None:
            if "normed" not in tensors:  # the output of the previous product
                squares = x.float().square().view(len(x), -1, 32).sum(-1)
                tensors["normed"] = Normed((x.float() * tensors["norm"].float()).to(x.dtype), squares)
            x = tensors["normed"]
        fused = {"residual": tensors["residual"], "next_norm": tensors["next_norm"], "swiglu": self.swiglu}
        if isinstance(config, GemvConfig):
            normed = gemv_linear(x, tensors["weight"], tensors["out"], config, epsilon=1e-5, dependent=True, **fused)
        elif isinstance(config, SkinnyConfig):
            normed = skinny_linear(x, tensors["weight"], tensors["out"], config, epsilon=1e-5, dependent=True, **fused)
        else:
            assert isinstance(config, LinearConfig)
            normed = stream_linear(
                x, tensors["weight"], tensors["out"], scratch, config, num_sms, epsilon=1e-5, **fused
            )  # fmt: skip
        tensors["next"] = normed
        out: Tensor = tensors["out"]
        return out

    def reference(self, tensors: dict[str, Any]) -> Tensor:
        """The same product, computed in float32."""
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
    """Check every kernel on random shapes, in several processes because compiling takes most of the time."""
    dtypes = (torch.bfloat16, torch.float32)
    cases: list[tuple[Any, ...]] = []
    for n, k in ((960, 576), (3072, 2048), (1000, 1024), (4096, 14336)):
        cases += [("linear", *case, n, k) for case in itertools.product(dtypes, (True, False), (1, 5, 16, 32))]
        cases += [("vector", dtype, n, k, *config) for dtype in dtypes for config in ((1, 1024, 2), (16, 2048, 8))]
        cases += [("few", torch.bfloat16, num_tokens, n, k, warps) for num_tokens, warps in ((2, 1), (7, 2), (8, 4))
                  if k % (64 * warps) == 0]  # fmt: skip
        cases += [("fixed", dtype, num_tokens, n, k) for dtype in dtypes for num_tokens in (1, 70, 300)]
    rows = ([(1000, 1)], [(700, 1), (31, 8), (2048, 3), (5, 5)], [(300, 300), (1024, 1)])
    for heads in ((32, 8, 128), (32, 8, 64), (9, 3, 64), (14, 2, 64), (16, 8, 128)):
        cases += [("attention", *case, *heads) for case in itertools.product(dtypes, (True, False), rows)]
        kinds = (torch.int8, torch.float8_e4m3fn)
        cases += [("rounded cache", *case, *heads) for case in itertools.product(dtypes, kinds, rows)]
    cases += [("elementwise", *case) for case in itertools.product(dtypes, (576, 2048, 4096))]
    cases += [("drawing", torch.float32, features) for features in _FEATURES]
    cases += [("load_step", torch.float32, is_packed) for is_packed in (False, True)]
    cases += [("follow", torch.float32, *case) for case in itertools.product((2, 4, 8), (False, True))]
    random.Random(0).shuffle(cases)
    return [check for found in spread(_check, cases, workers) for check in found]


def spread(work: Callable[[Any], Any], jobs: Sequence[Any], workers: int) -> list[Any]:
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        return list(pool.map(work, jobs))


def _check(case: tuple[Any, ...]) -> list[dict[str, Any]]:
    kind, dtype, *rest = case
    checks: dict[str, Callable[..., list[tuple[str, float]]]] = {
        "linear": _check_linear, "vector": _check_vector, "few": _check_few, "fixed": _check_fixed,
        "attention": _check_attention, "rounded cache": _check_rounded_cache,
        "elementwise": _check_elementwise, "drawing": _check_drawing,
        "load_step": _check_step_loading, "follow": _check_following,
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
    config = LinearConfig(32, 64, 4, 3, num_tokens // 4 % 3, int(dependent), dependent)
    return _check_products("linear", config, dtype, num_tokens, n, k)


def _check_vector(
    dtype: torch.dtype, n: int, k: int, block_n: int, block_k: int, warps: int
) -> list[tuple[str, float]]:
    return _check_products("vector", GemvConfig(block_n, block_k, warps), dtype, 1, n, k)


def _check_few(dtype: torch.dtype, num_tokens: int, n: int, k: int, warps: int) -> list[tuple[str, float]]:
    return _check_products("few", SkinnyConfig(16, 64, warps), dtype, num_tokens, n, k)


def _check_products(
    kind: str, config: Config, dtype: torch.dtype, num_tokens: int, n: int, k: int
) -> list[tuple[str, float]]:
    """Every check has new random inputs, and its output starts as NaN."""
    device = torch.device("cuda")
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    scratch = Scratch(device)
    found = []
    for product in (
        Product(f"{kind} norm", n, k, norm=True),
        Product(f"{kind} add", n, k, residual=True),
        Product(f"{kind} swiglu", n, k, norm=True, swiglu=True),
        Product(f"{kind} logits", n, k, norm=True, wide=True),
    ):
        tensors = product.tensors(num_tokens, device, dtype)
        expected = product.reference(tensors)
        found.append((product.name, relative_error(product.run(tensors, scratch, config, num_sms), expected)))
        if product.residual:
            out, normed, norm = tensors["out"].float(), tensors["next"], tensors["next_norm"].float()
            found.append((f"{kind} begun norm", relative_error(normed.x, out * norm)))
            found.append((f"{kind} begun norm", relative_error(normed.squares.sum(1), out.square().sum(1))))
        if not product.residual:  # the result must not depend on the order in which parts of a tile finish
            first = tensors["out"].clone()
            same = torch.equal(product.run(tensors, scratch, config, num_sms), first)
            found.append((f"{kind} repeated", 0.0 if same else float("nan")))
    return found


def _check_fixed(dtype: torch.dtype, num_tokens: int, n: int, k: int) -> list[tuple[str, float]]:
    """Also that a token has the same bits alone: NaN if not."""
    found = []
    for product in (
        Product("fixed", n, k),
        Product("fixed add", n, k, residual=True),
        Product("fixed swiglu", n, k, swiglu=True),
        Product("fixed logits", n, k, wide=True),
    ):
        tensors = product.tensors(num_tokens, torch.device("cuda"), dtype)
        x, weight, out, residual = (tensors[name] for name in ("x", "weight", "out", "residual"))
        last = None if residual is None else residual[-1:].clone()
        expected = product.reference(tensors)
        fixed_linear(x, weight, out, residual=residual, swiglu=product.swiglu, dependent=True)
        alone = torch.full_like(out[-1:], torch.nan)
        fixed_linear(x[-1:].contiguous(), weight, alone, residual=last, swiglu=product.swiglu, dependent=False)
        found.append((product.name, relative_error(out, expected)))
        found.append((f"{product.name}, alone", 0.0 if torch.equal(alone[0], out[-1]) else float("nan")))
    return found


def _check_rounded_cache(
    dtype: torch.dtype, kind: torch.dtype, rows: list[tuple[int, int]], num_heads: int, num_kv_heads: int, dim: int
) -> list[tuple[str, float]]:
    """Codes near a border between two may round differently: their share is counted, at most one in 500. Attention is
    compared with the reference over the same codes."""
    device = torch.device("cuda")
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    step = ragged_step(rows, 32, device)
    real = step.positions >= 0
    pages = [Pages(1, _PAGES, num_kv_heads, dim, kind, device) for _ in range(3)]
    numbers = torch.randn(pages[0].numbers.shape, device=device)
    rounded = round_to_scaled(numbers.view(-1, dim), kind)
    for each in pages:
        assert each.scales is not None
        each.numbers.copy_(rounded.values.view(numbers.shape))
        each.scales.copy_(rounded.scales.view(each.scales.shape))
    qkv = torch.randn(step.shape.num_tokens, (num_heads + 2 * num_kv_heads) * dim, device=device, dtype=dtype)
    angles = torch.rand((2048, dim // 2), device=device) * 6.28
    rope = torch.cat([angles.cos(), angles.sin()], 1)
    rotation = Rotation(rope, None, None, 1e-5)
    q = REFERENCE.rotate_and_store(qkv, pages[2].caches[0], step, rope, None, None, 1e-5)
    usual = attention_kernels.attend(qkv, pages[0].caches[0], step, rotation, num_sms, dependent=True)
    fixed = attention_kernels.attend_fixed(qkv, pages[1].caches[0], step, rotation, dependent=True)
    name = "fp8 cache" if kind == torch.float8_e4m3fn else "int8 cache"
    found = []
    for mine, mixed in zip(pages[:2], (usual, fixed), strict=True):
        expected = REFERENCE.attention(q, mine.caches[0], step)
        found.append((name, relative_error(mixed[real], expected[real])))
        assert mine.scales is not None and pages[2].scales is not None
        differing = (mine.numbers.float() != pages[2].numbers.float()).float().mean()
        found.append((f"{name} codes", 0.0 if differing < 0.002 else float("nan")))
        found.append((f"{name} scales", relative_error(mine.scales, pages[2].scales)))
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
    rotation = Rotation(rope, q_norm, k_norm, 1e-5)
    expected = REFERENCE.attend(qkv, expected_cache, step, rope, q_norm, k_norm, 1e-5)
    found = []
    for tiling in (None, attention_kernels.Tiling(1, 64, 4), attention_kernels.Tiling(8, 64, 4, num_stages=3)):
        mine = Cache(cache.keys.clone(), cache.values.clone())
        mixed = attention_kernels.attend(qkv, mine, step, rotation, num_sms, tiling=tiling, dependent=dependent)
        found += [
            ("attention", relative_error(mixed[real], expected[real])),
            ("store keys", relative_error(mine.keys, expected_cache.keys)),
            ("store values", relative_error(mine.values, expected_cache.values)),
        ]
    mine = Cache(cache.keys.clone(), cache.values.clone())
    mixed = attention_kernels.attend_fixed(qkv, mine, step, rotation, dependent=dependent)
    found.append(("fixed attention", relative_error(mixed[real], expected[real])))
    return found


def _check_elementwise(dtype: torch.dtype, width: int) -> list[tuple[str, float]]:
    x, weight = (torch.randn(shape, device="cuda", dtype=dtype) for shape in ((7, width), (width,)))
    tokens = torch.randint(0, 7, (20,), device="cuda", dtype=torch.int32)
    found = []
    for dependent in (False, True):
        normed = elementwise.rms_norm(x, weight, 1e-5, dependent=dependent)
        found += [
            ("rms_norm", relative_error(normed, rms_norm(x, weight, 1e-5))),
            ("swiglu", relative_error(elementwise.swiglu(x, dependent=dependent), swiglu(x))),
            ("embed", relative_error(elementwise.embed(tokens, x, dependent=dependent), x[tokens])),
        ]
    return found


def _check_step_loading(dtype: torch.dtype, is_packed: bool) -> list[tuple[str, float]]:
    """The device reads a step with drafts from host memory; torch on the CPU is the reference."""
    lengths = [3, 1, 9, 4] * 8
    rows = [Row(i, 7 * i, [i] + [DRAFTED] * (length - 1), length) for i, length in enumerate(lengths)]
    host = HostStep(StepShape(288, 32, 288, 9, 5, is_packed=is_packed), pinned=True)
    host.tokens[:] = DRAFTED  # stale values of an earlier step
    staging.fill(host, rows, np.arange(160, dtype=np.int32).reshape(32, 5))
    drafted = torch.randint(0, 2 * _VOCAB, (8, 32), dtype=torch.int32)
    found, expected = (views(torch.zeros_like(host.buffer, device=where), host.shape) for where in ("cuda", "cpu"))
    graphs.load_step(host.buffer, found, drafted.cuda(), _VOCAB - 1)
    graphs.load_step(host.buffer, expected, drafted, _VOCAB - 1)
    return [("load_step", 0.0 if torch.equal(found.words.cpu(), expected.words) else float("nan"))]


def _check_following(dtype: torch.dtype, width: int, by_rejection: bool) -> list[tuple[str, float]]:
    """The device begins a draft from what it has verified; torch on the CPU is the reference."""
    num_rows = 32
    shapes = StepShape(num_rows * width, num_rows, num_rows, width, 5), StepShape(num_rows, num_rows, num_rows, 1, 5)
    counts = [row % (width + 1) - 1 for row in range(num_rows)]  # -1: unused
    drafted = torch.randint(0, _VOCAB, (width - 1, 2, num_rows), dtype=torch.int32)[:, 0]
    own = torch.randint(0, _VOCAB, (2, num_rows * width), dtype=torch.int32)
    for row in range(num_rows):
        num_right = random.randrange(width)
        own[0, row * width : row * width + num_right] = drafted[:num_right, row]
    found = torch.stack([torch.tensor([random.randint(0, max(count, 0)) for count in counts]),
                         *torch.randint(0, _VOCAB, (2, num_rows))], dim=1)  # fmt: skip
    words = [torch.randint(0, 1000, (shape.num_words,), dtype=torch.int32) for shape in shapes]
    draw_words = torch.randint(-(1 << 62), 1 << 62, (NUM_FIELDS, num_rows))
    lines = torch.tensor([[row * width for row in range(num_rows)], counts], dtype=torch.int32)
    results = []
    for where in ("cuda", "cpu"):
        verified = Verified(
            lines[0].tolist(), counts, drafted.to(where), own.to(where), found.to(where) if by_rejection else None,
            _VOCAB,
        )  # fmt: skip
        steps = [views(each.to(where, copy=True), shape) for each, shape in zip(words, shapes, strict=True)]
        drawn_with = draw_words.to(where, copy=True)
        fed = torch.zeros((2, num_rows), dtype=torch.int32, device=where)
        first, later = steps
        following.follow(verified, lines.to(where), first, later, drawn_with, fed, is_independent=by_rejection)
        results.append([each.cpu() for each in (first.words, later.words, drawn_with, fed)])
    same = all(torch.equal(*pair) for pair in zip(*results, strict=True))
    return [("follow", 0.0 if same else float("nan"))]


def _check_drawing(dtype: torch.dtype, features: dict[str, Any]) -> list[tuple[str, float]]:
    """Tokens must equal the host's: NaN if one differs, or if over half the rows were left to the host; else 0."""
    num_rows, params = 32, SamplingParams(**features)
    logits = (torch.randn(num_rows, _VOCAB) * 1.5).scatter(
        1, torch.randint(0, _VOCAB, (num_rows, 20)), torch.rand(num_rows, 20) * 8 + 6
    )
    shaper = Shaper(params, (), frozenset())
    seeds = [random.getrandbits(64) for _ in range(num_rows)]
    expected = [
        shaper.greedy(row, ()) if params.is_greedy else choose(shaper.probs(row, ()), seed, position)
        for position, (row, seed) in enumerate(zip(logits.numpy(), seeds, strict=True))
    ]

    def column(value: float, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.full((num_rows,), value, dtype=dtype, device="cuda")

    rows = drawing.Rows(
        column(float(shaper.sharpness)), column(params.is_greedy, torch.int64), column(params.top_k, torch.int64),
        column(params.top_p), column(params.min_p, torch.float32).double(),
        torch.tensor([signed(seed) for seed in seeds], device="cuda"), torch.arange(num_rows, device="cuda"),
    )  # fmt: skip
    has_filters = params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0
    found = drawing.draw(logits.cuda(), rows, samples=not params.is_greedy, has_filters=has_filters)
    tokens, is_exact = found.tolist()
    wrong = sum(a != b for a, b, exact in zip(tokens, expected, is_exact, strict=True) if exact)
    return [("drawing", float("nan") if wrong or sum(is_exact) < num_rows // 2 else 0.0)]


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
