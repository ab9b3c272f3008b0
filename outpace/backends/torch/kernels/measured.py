"""The fastest kernel configs for common weight shapes, measured in whole steps on one H200 by `benchmarks/gpu_tune.py`.

Keys are (rows, columns) of the weight. Other shapes use the defaults of `gemv.py` and `linear.py`.
"""

from __future__ import annotations

from outpace.backends.torch.kernels.gemv import GemvConfig
from outpace.backends.torch.kernels.linear import LinearConfig
from outpace.backends.torch.kernels.skinny_gemm import SkinnyConfig

# One token.
GEMV_CONFIGS = {
    # Llama 3 8B, and models of its shape
    (6144, 4096): GemvConfig(1, 4096, num_warps=2),
    (4096, 4096): GemvConfig(16, 1024, num_warps=4),
    (28672, 4096): GemvConfig(1, 1024, num_warps=2),
    (4096, 14336): GemvConfig(16, 2048, num_warps=8),
    (128256, 4096): GemvConfig(1, 2048, num_warps=4),
    # Llama 3.2 1B
    (3072, 2048): GemvConfig(2, 2048, num_warps=8),
    (2048, 2048): GemvConfig(4, 2048, num_warps=2),
    (16384, 2048): GemvConfig(1, 1024, num_warps=2),
    (2048, 8192): GemvConfig(16, 2048, num_warps=8),
    (128256, 2048): GemvConfig(4, 2048, num_warps=4),
    # A 1B of width 1024
    (3072, 1024): GemvConfig(2, 1024, num_warps=4),
    (12288, 1024): GemvConfig(4, 1024, num_warps=4),
    (1024, 6144): GemvConfig(4, 4096, num_warps=8),
}

# 2 to 8 tokens, for shapes where this is faster than streaming.
SKINNY_GEMM_CONFIGS = {
    (3072, 1024): SkinnyConfig(16, 256, num_warps=4),
    (1024, 2048): SkinnyConfig(16, 256, num_warps=4),
    (12288, 1024): SkinnyConfig(16, 64, num_warps=4),
}

# 2 to 16 tokens.
STREAMED_CONFIGS = {
    (6144, 4096): LinearConfig(16, 512, num_warps=2, num_stages=3, programs_per_sm=3, prefetch=1),
    (4096, 4096): LinearConfig(16, 512, num_warps=2, num_stages=4, programs_per_sm=2, prefetch=1),
    (28672, 4096): LinearConfig(32, 256, num_warps=4, num_stages=3, programs_per_sm=0, prefetch=1),
    (4096, 14336): LinearConfig(16, 512, num_warps=2, num_stages=4, programs_per_sm=2, prefetch=1),
    (128256, 4096): LinearConfig(64, 128, num_warps=2, num_stages=4, programs_per_sm=0, prefetch=1),
    (3072, 2048): LinearConfig(32, 256, num_warps=4, num_stages=6),
    (2048, 2048): LinearConfig(16, 512, num_warps=2, num_stages=4, prefetch=1),
    (16384, 2048): LinearConfig(64, 256, num_warps=4, num_stages=3, prefetch=1),
    (2048, 8192): LinearConfig(32, 256, num_warps=2, num_stages=3, programs_per_sm=2),
    (128256, 2048): LinearConfig(64, 256, num_warps=4, num_stages=3, programs_per_sm=2, prefetch=2),
    (3072, 1024): LinearConfig(32, 256, num_warps=4, num_stages=6, prefetch=1),
    (12288, 1024): LinearConfig(16, 256, num_warps=2, num_stages=3, programs_per_sm=3, prefetch=1),
    (1024, 6144): LinearConfig(16, 256, num_warps=2, num_stages=4, programs_per_sm=3, prefetch=1),
    (128256, 1024): LinearConfig(64, 128, num_warps=2, num_stages=3, programs_per_sm=0, prefetch=1),
}
