"""Finds the entries of `outpace/backends/torch/kernels/measured.py`: the fastest kernel configuration by matrix shape.

    python -m benchmarks.gpu_tune OUT.json [--tokens 1 8] [--shapes 8B 1B]
    python -m benchmarks.gpu_tune OUT.json --shapes 8B --format fp8      # for `kernels/measured_quantised.py`

A product is timed inside eight layers of its model, because the time of a kernel depends on the kernels before and
after it. Products are tuned one after the other: each gets its fastest candidate while the others stay fixed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks import gpu_formats
from benchmarks.gpu_kernels import Product, products, spread
from benchmarks.gpu_models import median_ms, random_caches, random_weights, shape_config, uniform_step
from benchmarks.gpu_quantised import random_model
from outpace.backends.torch.execution.pages import PAGE_TOKENS
from outpace.backends.torch.kernels.gemv import GemvConfig
from outpace.backends.torch.kernels.linear import LinearConfig, block_rows
from outpace.backends.torch.kernels.skinny_gemm import MAX_TOKENS, SkinnyConfig
from outpace.backends.torch.kernels.triton_ops import Config, TritonOps
from outpace.backends.torch.model.model import Model
from outpace.config import usable_cores

CONTEXT = 1024
NUM_LAYERS = 8
MAX_CANDIDATES = 40
SHARED_MEMORY = 227 << 10  # bytes per multiprocessor
WORKERS = max(1, min(14, usable_cores() - 1))  # processes that compile kernels
Key = tuple[int, int, int]


def candidates(product: Product, num_tokens: int, kind: str) -> list[Config]:
    if kind != "bf16":
        quantised = gpu_formats.candidates(kind, product, num_tokens)
        if kind not in ("fp8", "int8") or num_tokens == 1:
            return quantised
        # Kernels for dense weights take these as well, and half as many bytes are in flight.
        return quantised + candidates(product, num_tokens, "bf16")[:: MAX_CANDIDATES // 14][:14]
    found: list[Config] = []
    few: list[Config] = []
    width = 2 if product.swiglu else 1
    if num_tokens == 1:
        for block_n, block_k, warps in itertools.product((1, 2, 4, 8, 16), (1024, 2048, 4096), (2, 4, 8)):
            numbers = block_n * block_k * width // (32 * warps)  # values per thread
            if 16 <= numbers <= 128 and block_k <= max(product.k, 1024):
                found.append(GemvConfig(block_n, block_k, warps))
    else:
        for block_n, block_k, warps, stages, per_sm in itertools.product(
            (16, 32, 64, 128), (64, 128, 256, 512), (2, 4, 8), (3, 4, 5, 6), (0, 1, 2, 3)
        ):
            weights = block_n * width * block_k * 2
            needed = (weights + 16 * block_k * 2) * (stages - 1) + (2 << 10)
            at_once = per_sm or SHARED_MEMORY // needed
            fits = 0 < needed * at_once <= SHARED_MEMORY
            is_enough = 40 << 10 <= weights * (stages - 1) * at_once <= 160 << 10  # bytes in flight
            if fits and is_enough and product.k % block_k == 0 and block_n // 16 <= warps <= max(4, block_n // 16):
                found.append(LinearConfig(block_n, block_k, warps, stages, per_sm, prefetch=1))
        few = _few_candidates(product, width) if num_tokens <= MAX_TOKENS else []
    random.Random(0).shuffle(found)
    return (few + found)[:MAX_CANDIDATES]


def _few_candidates(product: Product, width: int) -> list[Config]:
    return [
        SkinnyConfig(block_n, block_k, warps)
        for block_n, block_k, warps in itertools.product((16, 32), (64, 128, 256), (2, 4, 8))
        if block_n * block_k * width <= 128 * 32 and product.k % (block_k * warps) == 0  # values per thread
    ]


def step_of(
    shape: str, kind: str, num_tokens: int, num_layers: int
) -> Callable[[dict[Key, Config]], Callable[[], object]]:
    """A function that builds a step of `num_layers` layers with the given configurations."""
    device, config = torch.device("cuda"), replace(shape_config(shape), num_layers=num_layers)
    weights = random_weights(config, device) if kind == "bf16" else random_model(config, kind, device)
    step = uniform_step(1, num_tokens, CONTEXT, config.vocab_size, device)
    caches = random_caches(config, -(-CONTEXT // PAGE_TOKENS), device)

    def with_configs(configs: dict[Key, Config]) -> Callable[[], object]:
        model = Model(config, weights, TritonOps(device, configs=configs), 2 * CONTEXT)
        return lambda: model.forward(step, caches)

    return with_configs


def compile_one(job: tuple[str, str, int, Key, Config]) -> None:
    """Compile into Triton's cache on disk. Errors are ignored: they come again when the candidate is timed."""
    shape, kind, num_tokens, key, config = job
    with suppress(Exception):
        step_of(shape, kind, num_tokens, 2)({key: config})()
        torch.cuda.synchronize()


def tune(shape: str, kind: str, num_tokens: int) -> dict[str, object]:
    tried = {product: candidates(product, num_tokens, kind) for product in products(shape)}
    rows = 1 if num_tokens == 1 else block_rows(num_tokens)
    keys: dict[Product, Key] = {product: (product.weight_rows, product.k, rows) for product in tried}
    jobs = [(shape, kind, num_tokens, keys[product], config) for product, each in tried.items() for config in each]
    spread(compile_one, jobs, WORKERS)
    with_configs = step_of(shape, kind, num_tokens, NUM_LAYERS)
    chosen: dict[Key, Config] = {}
    first = best = median_ms(with_configs(chosen))
    for product, options in tried.items():
        for config in options:
            with suppress(Exception):
                ms = median_ms(with_configs(chosen | {keys[product]: config}), 8, 3)
                if ms < best and (ms := median_ms(with_configs(chosen | {keys[product]: config}))) < best:
                    best, chosen[keys[product]] = ms, config
        print(f"  {shape}, {kind}, {num_tokens} tokens, {product.name}: {1e3 * best:.1f} us, {1e3 * first:.1f} before",
              flush=True)  # fmt: skip
    found = [{"rows": key[0], "columns": key[1], "config": repr(config)} for key, config in chosen.items()]
    for entry in found:
        print(f"    {entry}", flush=True)
    return {
        "shape": shape,
        "format": kind,
        "tokens": num_tokens,
        "before_us": 1e3 * first,
        "after_us": 1e3 * best,
        "better": found,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--shapes", nargs="+", default=["8B", "1B"])
    parser.add_argument("--format", default="bf16", metavar="FORMAT", help="of the weights (default: %(default)s)")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks.gpu_tune needs a CUDA GPU, and torch sees none", file=sys.stderr)
        return 2
    results = [tune(shape, options.format, num_tokens) for shape in options.shapes for num_tokens in options.tokens]
    options.out.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
