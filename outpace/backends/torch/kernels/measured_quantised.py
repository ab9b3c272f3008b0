"""The fastest kernel configs for quantised weights, measured on one H200 by `benchmarks/gpu_quantised.py`.

Keys are (format, rows, columns, most tokens: 1, 16, 32 or 128) of a product of an 8B's shape. Only configs that were at
least 5% faster than the default are listed. Each product was measured alone, not in whole steps.
"""

from __future__ import annotations

from outpace.backends.torch.kernels.gemv import GemvConfig
from outpace.backends.torch.kernels.linear import LinearConfig
from outpace.backends.torch.kernels.planar_gemm import PlanarConfig

QUANTISED_CONFIGS: dict[tuple[str, int, int, int], GemvConfig | LinearConfig | PlanarConfig] = {
    ("Q4_K", 4096, 14336, 1): PlanarConfig(16, 8, num_warps=8, num_stages=3),
    ("Q4_K", 4096, 14336, 16): PlanarConfig(16, 8, num_warps=8, num_stages=3),
    ("Q4_K", 4096, 14336, 32): PlanarConfig(32, 4, num_warps=4, num_stages=3),
    ("Q4_K", 28672, 4096, 1): PlanarConfig(32, 4, num_warps=4, num_stages=4),
    ("Q4_K", 28672, 4096, 16): PlanarConfig(32, 4, num_warps=4, num_stages=4),
    ("Q4_K", 28672, 4096, 128): PlanarConfig(64, 1, num_warps=8, num_stages=3),
    ("Q4_K", 4096, 4096, 1): PlanarConfig(16, 8, num_warps=8, num_stages=4),
    ("Q4_K", 4096, 4096, 16): PlanarConfig(16, 8, num_warps=8, num_stages=3),
    ("Q4_K", 4096, 4096, 32): PlanarConfig(32, 4, num_warps=4, num_stages=3),
    ("Q4_K", 6144, 4096, 32): PlanarConfig(32, 4, num_warps=4, num_stages=3),
    ("Q6_K", 128256, 4096, 1): PlanarConfig(32, 1, num_warps=2, num_stages=4),
    ("Q6_K", 128256, 4096, 16): PlanarConfig(32, 1, num_warps=2, num_stages=4),
    ("FP8", 4096, 14336, 16): LinearConfig(32, 256, num_warps=4, num_stages=4, programs_per_sm=0, prefetch=1),
    ("FP8", 28672, 4096, 1): GemvConfig(2, 4096, num_warps=4),
    ("FP8", 28672, 4096, 16): LinearConfig(64, 128, num_warps=4, num_stages=5, programs_per_sm=0, prefetch=1),
    ("FP8", 28672, 4096, 32): LinearConfig(128, 128, num_warps=8, num_stages=4, programs_per_sm=0, prefetch=1),
    ("FP8", 128256, 4096, 1): GemvConfig(4, 2048, num_warps=4),
    ("FP8", 128256, 4096, 16): LinearConfig(64, 256, num_warps=4, num_stages=4, programs_per_sm=0, prefetch=1),
    ("FP8", 128256, 4096, 32): LinearConfig(128, 128, num_warps=4, num_stages=4, programs_per_sm=0, prefetch=1),
    ("FP8", 4096, 4096, 1): GemvConfig(16, 1024, num_warps=4),
    ("FP8", 4096, 4096, 16): LinearConfig(16, 1024, num_warps=2, num_stages=3, programs_per_sm=2, prefetch=1),
    ("FP8", 6144, 4096, 16): LinearConfig(32, 512, num_warps=4, num_stages=3, programs_per_sm=0, prefetch=1),
    ("FP8", 6144, 4096, 32): LinearConfig(64, 128, num_warps=4, num_stages=4, programs_per_sm=0, prefetch=1),
    ("int4 in groups of 32", 4096, 14336, 16): PlanarConfig(32, 4, num_warps=4, num_stages=4),
    ("int4 in groups of 32", 4096, 14336, 32): PlanarConfig(32, 4, num_warps=4, num_stages=3),
    ("int4 in groups of 32", 4096, 14336, 128): PlanarConfig(64, 1, num_warps=4, num_stages=4),
    ("int4 in groups of 32", 4096, 4096, 1): PlanarConfig(16, 4, num_warps=4, num_stages=5),
    ("int4 in groups of 32", 4096, 4096, 16): PlanarConfig(16, 4, num_warps=4, num_stages=5),
    ("int4 in groups of 32", 4096, 4096, 32): PlanarConfig(32, 4, num_warps=4, num_stages=3),
    ("int4 in groups of 32", 4096, 4096, 128): PlanarConfig(64, 1, num_warps=4, num_stages=4),
    ("int4 in groups of 32", 6144, 4096, 1): PlanarConfig(16, 4, num_warps=4, num_stages=5),
    ("int4 in groups of 32", 6144, 4096, 16): PlanarConfig(32, 8, num_warps=8, num_stages=3),
    ("int4 in groups of 32", 6144, 4096, 32): PlanarConfig(32, 4, num_warps=4, num_stages=3),
    ("int4 in groups of 32", 6144, 4096, 128): PlanarConfig(128, 1, num_warps=8, num_stages=3),
    ("int4 in groups of 128", 4096, 14336, 1): PlanarConfig(32, 4, num_warps=4, num_stages=4),
    ("int4 in groups of 128", 4096, 14336, 16): PlanarConfig(32, 4, num_warps=4, num_stages=4),
    ("int4 in groups of 128", 4096, 14336, 32): PlanarConfig(32, 4, num_warps=4, num_stages=3),
    ("int4 in groups of 128", 28672, 4096, 1): PlanarConfig(64, 1, num_warps=4, num_stages=4),
    ("int4 in groups of 128", 28672, 4096, 16): PlanarConfig(64, 1, num_warps=4, num_stages=4),
    ("int4 in groups of 128", 4096, 4096, 1): PlanarConfig(16, 4, num_warps=4, num_stages=5),
    ("int4 in groups of 128", 4096, 4096, 16): PlanarConfig(32, 8, num_warps=8, num_stages=3),
    ("int4 in groups of 128", 4096, 4096, 32): PlanarConfig(32, 4, num_warps=4, num_stages=3),
    ("int4 in groups of 128", 4096, 4096, 128): PlanarConfig(64, 1, num_warps=4, num_stages=4),
    ("int4 in groups of 128", 6144, 4096, 1): PlanarConfig(16, 4, num_warps=4, num_stages=5),
    ("int4 in groups of 128", 6144, 4096, 16): PlanarConfig(32, 8, num_warps=8, num_stages=3),
    ("int4 in groups of 128", 6144, 4096, 128): PlanarConfig(64, 1, num_warps=4, num_stages=4),
}
