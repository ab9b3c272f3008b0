"""The fastest kernel configs for quantised weights, measured on one H200 by `benchmarks/gpu_quantised.py`.

Keys are (format, rows, columns, most tokens: 1, 16, 32 or 128) of a product of an 8B's shape. Only configs that were at
least 3% faster than the default are listed. Each product was measured alone, not in whole steps.
"""

from __future__ import annotations

from outpace.backends.torch.kernels.fp8 import RoundedConfig
from outpace.backends.torch.kernels.gemv import GemvConfig
from outpace.backends.torch.kernels.planar_gemm import PlanarConfig

QUANTISED_CONFIGS: dict[tuple[str, int, int, int], GemvConfig | PlanarConfig | RoundedConfig] = {
    ("FP8", 28672, 4096, 1): GemvConfig(2, 4096, num_warps=4),
    ("FP8", 128256, 4096, 1): GemvConfig(4, 2048, num_warps=4),
    ("FP8", 4096, 4096, 1): GemvConfig(16, 1024, num_warps=4),
}
