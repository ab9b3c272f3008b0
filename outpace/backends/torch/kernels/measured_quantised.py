"""The fastest kernel configs for quantised weights, measured on one H200 by `benchmarks/gpu_quantised.py`.

Keys are (format, rows, columns, most tokens: 1, 16, 32 or 128) of a product of an 8B's shape. Only configs that were at
least 3% faster than the default are listed. Each product was measured alone; but those of FP8 with 2 to 16 tokens in
whole steps (`benchmarks/gpu_tune.py`), and those of Q4_K and Q6_K with more than 16 tokens by a kernel that also
brought weights into the L2 cache ahead, which made others slower.
"""

from __future__ import annotations

from outpace.backends.torch.kernels.fp8 import RoundedConfig
from outpace.backends.torch.kernels.gemv import GemvConfig
from outpace.backends.torch.kernels.planar_gemm import PlanarConfig

QUANTISED_CONFIGS: dict[tuple[str, int, int, int], GemvConfig | PlanarConfig | RoundedConfig] = {
    ("FP8", 4096, 4096, 1): GemvConfig(16, 1024, num_warps=4),
    ("FP8", 4096, 14336, 1): PlanarConfig(16, 32, num_warps=8),
    ("FP8", 28672, 4096, 1): GemvConfig(2, 4096, num_warps=4),
    ("FP8", 128256, 4096, 1): GemvConfig(4, 2048, num_warps=4),
    ("FP8", 4096, 4096, 16): PlanarConfig(16, 32, num_warps=8),
    ("FP8", 4096, 14336, 16): RoundedConfig(64, 256, num_warps=4, num_stages=3, splits=2, terms=2),
    ("FP8", 6144, 4096, 16): RoundedConfig(64, 128, num_warps=4, num_stages=4, splits=4, terms=2),
    ("FP8", 28672, 4096, 16): RoundedConfig(128, 128, num_warps=8, num_stages=4, terms=2),
    ("FP8", 128256, 4096, 16): RoundedConfig(128, 128, num_warps=8, num_stages=4, terms=2),
    ("FP8", 4096, 4096, 32): RoundedConfig(64, 128, num_warps=4, num_stages=4, splits=4, terms=2),
    ("FP8", 4096, 14336, 32): RoundedConfig(64, 128, num_warps=4, num_stages=4, splits=4, terms=2),
    ("FP8", 6144, 4096, 32): RoundedConfig(64, 256, num_warps=4, num_stages=3, splits=2, terms=2),
    ("FP8", 28672, 4096, 32): RoundedConfig(64, 128, num_warps=4, num_stages=4, terms=2),
    ("FP8", 128256, 4096, 32): RoundedConfig(128, 128, num_warps=8, num_stages=4, terms=2),
    ("FP8", 4096, 4096, 128): RoundedConfig(64, 128, num_warps=4, num_stages=6),
    ("FP8", 4096, 14336, 128): RoundedConfig(64, 256, num_warps=4, num_stages=3, splits=2),
    ("FP8", 6144, 4096, 128): RoundedConfig(64, 128, num_warps=4, num_stages=6),
    ("FP8", 28672, 4096, 128): RoundedConfig(128, 128, num_warps=8, num_stages=4),
    ("FP8", 128256, 4096, 128): RoundedConfig(64, 128, num_warps=4, num_stages=4, terms=2),
    ("Q4_K", 4096, 4096, 1): PlanarConfig(16, 16, num_warps=4),
    ("Q4_K", 6144, 4096, 1): PlanarConfig(16, 8, num_warps=4),
    ("Q4_K", 28672, 4096, 1): PlanarConfig(32, 4, num_warps=8, bands=2),
    ("Q4_K", 4096, 4096, 16): PlanarConfig(16, 16, num_warps=4),
    ("Q4_K", 6144, 4096, 16): PlanarConfig(16, 8, num_warps=4),
    ("Q4_K", 28672, 4096, 16): PlanarConfig(32, 4, num_warps=8, bands=2),
    ("Q4_K", 4096, 4096, 32): PlanarConfig(32, 8, num_warps=8, unroll=1),
    ("Q4_K", 4096, 14336, 32): PlanarConfig(32, 8, num_warps=8, unroll=1),
    ("Q4_K", 6144, 4096, 32): PlanarConfig(128, 1, num_warps=4, splits=4, bands=4, unroll=1),
    ("Q4_K", 28672, 4096, 32): PlanarConfig(64, 1, num_warps=4, bands=4, unroll=1),
    ("Q4_K", 4096, 4096, 128): PlanarConfig(128, 1, num_warps=4, splits=4, bands=4, unroll=1),
    ("Q4_K", 4096, 14336, 128): PlanarConfig(128, 1, num_warps=4, splits=4, bands=4, unroll=1),
    ("Q4_K", 6144, 4096, 128): PlanarConfig(128, 1, num_warps=4, splits=4, bands=4, unroll=1),
    ("Q4_K", 28672, 4096, 128): PlanarConfig(64, 2, num_warps=8, bands=4, unroll=1),
    ("Q6_K", 128256, 4096, 1): PlanarConfig(32, 4, num_warps=4),
    ("Q6_K", 128256, 4096, 16): PlanarConfig(32, 4, num_warps=4),
    ("Q6_K", 128256, 4096, 32): PlanarConfig(128, 1, num_warps=4, bands=4, unroll=1),
    ("Q6_K", 128256, 4096, 128): PlanarConfig(128, 1, num_warps=4, bands=4, unroll=1),
    ("int4 in groups of 32", 4096, 4096, 1): PlanarConfig(16, 16, num_warps=8),
    ("int4 in groups of 32", 4096, 14336, 1): PlanarConfig(16, 16, num_warps=8),
    ("int4 in groups of 32", 6144, 4096, 1): PlanarConfig(16, 8, num_warps=4),
    ("int4 in groups of 32", 28672, 4096, 1): PlanarConfig(16, 4, num_warps=4),
    ("int4 in groups of 32", 4096, 4096, 16): PlanarConfig(16, 16, num_warps=8),
    ("int4 in groups of 32", 4096, 14336, 16): PlanarConfig(16, 16, num_warps=8),
    ("int4 in groups of 32", 6144, 4096, 16): PlanarConfig(16, 8, num_warps=4),
    ("int4 in groups of 32", 28672, 4096, 16): PlanarConfig(16, 4, num_warps=4),
    ("int4 in groups of 32", 4096, 4096, 32): PlanarConfig(128, 1, num_warps=8, splits=4, bands=8, unroll=1),
    ("int4 in groups of 32", 4096, 14336, 32): PlanarConfig(32, 8, num_warps=8, unroll=1),
    ("int4 in groups of 32", 6144, 4096, 32): PlanarConfig(64, 1, num_warps=4, splits=4, bands=4, unroll=1),
    ("int4 in groups of 32", 28672, 4096, 32): PlanarConfig(64, 1, num_warps=4, bands=4),
    ("int4 in groups of 32", 4096, 4096, 128): PlanarConfig(128, 2, num_warps=8, bands=4, unroll=1),
    ("int4 in groups of 32", 4096, 14336, 128): PlanarConfig(128, 2, num_warps=8, bands=4, unroll=1),
    ("int4 in groups of 32", 6144, 4096, 128): PlanarConfig(64, 1, num_warps=4, bands=4, unroll=1),
    ("int4 in groups of 32", 28672, 4096, 128): PlanarConfig(64, 1, num_warps=4, bands=4),
}
