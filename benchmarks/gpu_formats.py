"""Random weights in every storage, checks of their products against float32, and the time of single products."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from dataclasses import dataclass, replace
from multiprocessing import get_context
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_kernels import Product, products, relative_error
from benchmarks.gpu_models import median_ms
from outpace.backends.torch.kernels.base import Hidden, Normed
from outpace.backends.torch.kernels.fp8 import RoundedConfig
from outpace.backends.torch.kernels.gemv import GemvConfig
from outpace.backends.torch.kernels.linear import block_rows
from outpace.backends.torch.kernels.planar_gemm import PlanarConfig
from outpace.backends.torch.kernels.reference import ReferenceOps
from outpace.backends.torch.kernels.triton_ops import MAX_SCALED_TOKENS, Config, TritonOps
from outpace.backends.torch.storage import Weight, dense
from outpace.backends.torch.storage.planar import (
    Q4_0,
    Q4_1,
    Q4_K,
    Q5_K,
    Q6_K,
    Q8_0,
    Planar,
    PlanarFormat,
    allocate,
    fp8,
    int4,
)
from outpace.backends.torch.storage.rounding import KINDS, quantise
from outpace.backends.torch.storage.scaled import Scaled

PLANAR: dict[str, PlanarFormat] = {
    "int4": int4(32), "int4-64": int4(64), "int4-128": int4(128), "int4-128-zeros": int4(128, has_zeros=True),
    "fp8-128": fp8(128), "fp8-256": fp8(256), "Q4_0": Q4_0, "Q4_1": Q4_1, "Q8_0": Q8_0,
    "Q4_K": Q4_K, "Q5_K": Q5_K, "Q6_K": Q6_K,
}  # fmt: skip
FORMATS = (*PLANAR, "fp8", "int8", "bf16")
_EPSILON = 1e-5
_SWEPT_BYTES = 256 << 20  # of weights in turn, so that the cache does not hold them
_DEVICE = torch.device("cuda")


def random_weight(kind: str, rows: int, columns: int, device: torch.device = _DEVICE) -> Weight:
    """Values near 0.02 in size, as in a model."""
    if kind == "bf16":
        return torch.empty((rows, columns), dtype=torch.bfloat16, device=device).normal_(0.0, 0.02)
    if kind in ("fp8", "int8"):
        if rows * columns > 1 << 28:  # an output head: rounding it in float32 would take gigabytes
            parts = [random_weight(kind, part, columns, device) for part in _parts(rows, 8)]
            return Scaled(*(torch.cat(each) for each in zip(*(part.tensors for part in parts), strict=True)))  # type: ignore[union-attr]
        return quantise(torch.empty((rows, columns), device=device).normal_(0.0, 0.02), KINDS[kind])
    return random_planar(PLANAR[kind], rows, columns, device)


def _parts(total: int, num: int) -> Iterator[int]:
    return (total * (i + 1) // num - total * i // num for i in range(num))


def random_planar(f: PlanarFormat, rows: int, columns: int, device: torch.device) -> Planar:
    weight = allocate(f, rows, columns, device)
    weight.units.random_(-(1 << 15), 1 << 15)
    if weight.high is not None:
        weight.high.random_(0, 256)
    size = 0.02 / (0.3 * (1 << f.bits))  # of a scale, for values of about 0.02
    if f.is_fp8:
        weight.units.bitwise_and_(0xBFBF - (1 << 16))  # no NaN, and no value above 2
        size = 0.02
    if weight.block_scales is not None:
        weight.scales.random_(16, 64)
        weight.block_scales.uniform_(0.8 * size / 40, 1.2 * size / 40)
    else:
        weight.scales.uniform_(0.8 * size, 1.2 * size)
    middle = (1 << f.bits) / 2
    if weight.minima is not None and weight.block_minima is not None and weight.block_scales is not None:
        weight.minima.copy_(weight.scales)
        weight.block_minima.copy_(weight.block_scales * (middle - 0.5))
    elif weight.minima is not None and f.has_zeros:
        weight.minima.random_(int(middle) - 2, int(middle) + 2)
    elif weight.minima is not None:
        weight.minima.copy_(weight.scales * (middle - 0.5))
    return weight


# Checks.


Case = tuple[str, int, int, int, Config | None]


def check_cases() -> list[Case]:
    """(format, tokens, rows, columns, config), with sizes that no block divides; None: the default config."""
    found: list[Case] = []
    for tokens in (1, 8, 33):
        sizes = [(16, 32, 8), (32, 4, 8, 1, 2), (16, 8, 8, 2)] if tokens < 33 else [(64, 2, 4, 2, 2), (128, 1, 8, 4, 8)]
        found += [(kind, tokens, 520, 768, PlanarConfig(*size)) for kind in ("int4", "Q4_K", "fp8") for size in sizes]
        once = replace(PlanarConfig(*sizes[0]), unroll=1)
        found += [(kind, tokens, 520, 768, once) for kind in ("int4", "Q4_K", "fp8")]
    for tokens, terms in ((8, 2), (33, 2), (64, 2), (100, 1), (300, 1)):
        found += [("fp8", tokens, 528, 768, RoundedConfig(64, 128, 4, 4, splits, terms)) for splits in (1, 3)]
    for kind in FORMATS[:-1]:
        step = 256 if kind in ("Q4_K", "Q5_K", "Q6_K") else 64
        for tokens, rows in ((1, 200), (3, 1000), (8, 520), (16, 1000), (33, 520), (64, 200), (100, 520), (300, 200)):
            found.append((kind, tokens, rows, step * (9 if tokens < 9 else 12), None))
    return found


def check(case: Case) -> list[dict[str, Any]]:
    """Compare every fused product of a layer with float32 arithmetic on the same weights and inputs."""
    kind, num_tokens, rows, columns, config = case
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        found = _check(kind, num_tokens, rows, columns, config)
    except Exception as error:
        found = [(f"{kind}: {error!r:.400}", float("nan"))]
    limit = 6e-2 if kind == "fp8" and num_tokens > MAX_SCALED_TOKENS else 8e-3  # tokens are rounded too
    return [
        {"format": kind, "product": name, "case": str(case), "error": error, "passed": error < limit}
        for name, error in found
    ]


def _check(kind: str, num_tokens: int, rows: int, columns: int, config: Config | None) -> list[tuple[str, float]]:
    bucket = 1 if num_tokens == 1 else block_rows(num_tokens)
    configs = {} if config is None else {(n, columns, bucket): config for n in (columns, rows, 2 * rows)}
    ops, reference = TritonOps(_DEVICE, configs=configs), ReferenceOps()
    norm = (1 + 0.1 * torch.randn(columns, device=_DEVICE)).bfloat16()

    def rand(*shape: int) -> Tensor:
        return torch.randn(shape, device=_DEVICE, dtype=torch.bfloat16)

    found = []
    for has_bias in (False, True):
        bias, bias2 = (rand(rows), rand(2 * rows)) if has_bias else (None, None)
        first, weight, double = (random_weight(kind, n, columns) for n in (columns, rows, 2 * rows))
        x, residual = rand(num_tokens, columns), rand(num_tokens, columns)
        expected = residual.float() + x.float() @ dense(first, torch.float32).T
        h = ops.linear_add(x, first, None, Hidden(residual.clone()), norm)
        found.append(("add", relative_error(h.residual, expected)))
        wide = Hidden(h.residual.float())

        def plain(matrix: Weight) -> Tensor:
            return dense(matrix, torch.float32)

        def wider(vector: Tensor | None) -> Tensor | None:
            return None if vector is None else vector.float()

        wide_norm = norm.float()
        found.append((
            "norm", relative_error(ops.norm_linear(h, norm, _EPSILON, weight, bias),
                                   reference.norm_linear(wide, wide_norm, _EPSILON, plain(weight), wider(bias))),
        ))  # fmt: skip
        found.append((
            "swiglu", relative_error(ops.norm_swiglu(h, norm, _EPSILON, double, bias2),
                                     reference.norm_swiglu(wide, wide_norm, _EPSILON, plain(double), wider(bias2))),
        ))  # fmt: skip
        if not has_bias:
            logits = ops.norm_logits(h, norm, _EPSILON, weight)
            again = ops.norm_logits(h, norm, _EPSILON, weight)
            found.append((
                "logits",
                relative_error(logits, reference.norm_logits(wide, wide_norm, _EPSILON, plain(weight)))
                if torch.equal(logits, again) else float("nan"),
            ))  # fmt: skip
    return found


# Times of single products, by configuration.


@dataclass(frozen=True)
class Trial:
    kind: str
    product: Product
    num_tokens: int
    config: Config | None  # None: the default

    @property
    def key(self) -> tuple[int, int, int]:
        tokens = 1 if self.num_tokens == 1 else block_rows(self.num_tokens)
        return self.product.weight_rows, self.product.k, tokens


def trials(kinds: Sequence[str], token_counts: Sequence[int]) -> list[Trial]:
    found = []
    for num_tokens, kind in itertools.product(token_counts, kinds):
        for product in products("8B"):
            stored = head_kind(kind) if product.name == "head" else kind
            for config in [None, *candidates(stored, product, num_tokens)]:
                found.append(Trial(stored, product, num_tokens, config))
    return list(dict.fromkeys(found))


def head_kind(kind: str) -> str:
    """How the output head is stored: 4 bits are too few for it."""
    return {"Q4_K": "Q6_K", "Q5_K": "Q6_K"}.get(kind, "fp8" if kind.startswith("int4") else kind)


def candidates(kind: str, product: Product, num_tokens: int) -> list[Config]:
    """Beside the default. Logits are not of tokens in one term."""
    found: list[Config] = []
    if kind == "fp8" and num_tokens > 1:
        sizes = [(64, 128, 4, 4), (64, 128, 4, 4, 4), (64, 128, 4, 6), (64, 256, 4, 3), (64, 256, 4, 3, 2),
                 (128, 128, 4, 4), (128, 128, 8, 4), (128, 128, 8, 4, 2)]  # fmt: skip
        terms = 1 if num_tokens > MAX_SCALED_TOKENS and not product.wide else 2
        found += [replace(RoundedConfig(*size), terms=terms) for size in sizes]
    if kind == "fp8" and num_tokens > 16:
        return [*found, PlanarConfig(128, 2, 8, bands=4)] if product.wide else found
    if num_tokens <= 16:
        rows = [(16, 4, 4), (16, 8, 4), (16, 8, 8), (16, 16, 4), (16, 16, 8), (16, 32, 8), (32, 4, 4), (32, 4, 8, 1, 2),
                (32, 8, 8)]  # fmt: skip
    else:
        rows = [(32, 8, 8), (64, 1, 4, 1, 4), (64, 1, 4, 4, 4), (64, 2, 8, 1, 4), (64, 2, 8, 2, 4), (128, 1, 8, 1, 8),
                (128, 1, 8, 4, 8), (128, 2, 8, 1, 4), (128, 1, 4, 1, 4), (128, 1, 4, 4, 4)]  # fmt: skip
    found += [replace(PlanarConfig(*size), unroll=unroll) for size in rows for unroll in (1, 2)]
    if kind in ("fp8", "int8") and num_tokens == 1:
        found += [GemvConfig(*size) for size in ((1, 4096, 4), (2, 4096, 4), (4, 2048, 4), (16, 1024, 4))]
    return found


def call(trial: Trial, copies: int) -> Callable[[], None]:
    """A function that computes the product once with each of several weights."""
    p, num_tokens = trial.product, trial.num_tokens
    ops = TritonOps(_DEVICE, configs={trial.key: trial.config} if trial.config is not None else None)
    weights = [random_weight(trial.kind, p.weight_rows, p.k) for _ in range(copies)]
    return lambda: run_products(ops, p, weights, num_tokens)


_inputs: dict[tuple[int, int, int], tuple[Tensor, ...]] = {}


def run_products(ops: TritonOps, p: Product, weights: Sequence[Weight], num_tokens: int) -> None:
    key = (num_tokens, p.k, p.n)
    if key not in _inputs:
        made = [torch.randn(shape, device=_DEVICE, dtype=torch.bfloat16)
                for shape in ((num_tokens, p.k), (num_tokens, p.n), (p.k,), (p.n,))]  # fmt: skip
        _inputs[key] = (*made, torch.rand((num_tokens, p.k // 32), device=_DEVICE))
    x, residual, norm, next_norm, squares = _inputs[key]
    h = Hidden(x, Normed(x, squares) if num_tokens <= 16 else None)
    for weight in weights:
        if p.residual:
            ops.linear_add(x, weight, None, Hidden(residual), next_norm)
        elif p.swiglu:
            ops.norm_swiglu(h, norm, _EPSILON, weight, None)
        elif p.wide:
            ops.norm_logits(h, norm, _EPSILON, weight)
        else:
            ops.norm_linear(h, norm, _EPSILON, weight, None)


def measured_source(best: Mapping[tuple[str, tuple[int, int, int]], Config]) -> list[str]:
    """Lines for `kernels/measured_quantised.py`, by format and (rows, columns, most tokens)."""
    names = {kind: f.name for kind, f in PLANAR.items()} | {kind: f.name for kind, f in KINDS.items()}
    return sorted(
        f"    ({names[kind]!r}, {rows}, {columns}, {tokens}): {config!r},"
        for (kind, (rows, columns, tokens)), config in best.items()
    )


def compile_one(trial: Trial) -> Trial | None:
    """Compile into Triton's cache on disk; None if that fails."""
    try:
        call(trial, 1)()
        torch.cuda.synchronize()
    except Exception as error:
        print(f"  {trial.kind} {trial.product.name} {trial.num_tokens} {trial.config}: {error!r:.300}", flush=True)
        return None
    return trial


def compile_all(found: Sequence[Trial], workers: int, seconds: float) -> list[Trial]:
    """Those that compiled in time, in order."""
    end = time.perf_counter() + seconds
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"))
    futures = [pool.submit(compile_one, trial) for trial in found]
    wait(futures, max(0.0, end - time.perf_counter()))
    done = [
        future.result() for future in futures if future.done() and not future.cancelled() and not future.exception()
    ]
    pool.shutdown(wait=False, cancel_futures=True)
    return [trial for trial in done if trial is not None]


class Sweep:
    """Times trials; weights are kept as long as the product stays the same."""

    def __init__(self) -> None:
        self._for: tuple[str, Product] | None = None
        self._weights: list[Weight] = []

    def microseconds(self, trial: Trial) -> float:
        p = trial.product
        if self._for != (trial.kind, p):
            self._for, self._weights = (trial.kind, p), []
            torch.cuda.empty_cache()
            self._weights = [random_weight(trial.kind, p.weight_rows, p.k)]
            while sum(weight.nbytes for weight in self._weights) < _SWEPT_BYTES:
                self._weights.append(random_weight(trial.kind, p.weight_rows, p.k))
        ops = TritonOps(_DEVICE, configs={trial.key: trial.config} if trial.config is not None else None)
        ms = median_ms(lambda: run_products(ops, p, self._weights, trial.num_tokens), 3, 5)
        return 1e3 * ms / len(self._weights)

    @property
    def weight_bytes(self) -> int:
        return self._weights[0].nbytes
