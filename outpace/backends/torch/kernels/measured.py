"""Ways to stream the products of common shapes for up to 16 tokens, as measured on one H200 by `benchmarks/gpu.py`.

By (rows, columns) of the weight. Shapes that are not here use `linear.default_config`.
"""

from __future__ import annotations

from outpace.backends.torch.kernels.linear import LinearConfig

H200 = {
    # Llama 3 8B, and what has its shape
    (6144, 4096): LinearConfig(16, 512, num_warps=2, num_stages=3, programs_per_sm=3, prefetch=1),
    (4096, 4096): LinearConfig(16, 256, num_warps=2, num_stages=6, programs_per_sm=2, prefetch=2),
    (28672, 4096): LinearConfig(32, 256, num_warps=4, num_stages=4, prefetch=1),
    (4096, 14336): LinearConfig(16, 512, num_warps=2, num_stages=4, programs_per_sm=2),
    (128256, 4096): LinearConfig(64, 256, num_warps=4, num_stages=4),
    # Llama 3.2 1B
    (3072, 2048): LinearConfig(32, 256, num_warps=4, num_stages=6),
    (2048, 2048): LinearConfig(16, 512, num_warps=2, num_stages=4, prefetch=1),
    (16384, 2048): LinearConfig(64, 256, num_warps=4, num_stages=3, prefetch=1),
    (2048, 8192): LinearConfig(32, 256, num_warps=2, num_stages=3, programs_per_sm=2),
    (128256, 2048): LinearConfig(64, 256, num_warps=4, num_stages=3, programs_per_sm=2, prefetch=2),
}
