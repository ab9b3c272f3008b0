"""Compares every Triton kernel with its plain torch reference, in Triton's interpreter, without a GPU."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import warnings
from copy import deepcopy
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed; pip install outpace[torch]")
pytest.importorskip("triton", reason="triton is not installed, so its kernels cannot be interpreted")

import torch

from outpace.backends.torch.execution.pages import Pages
from outpace.backends.torch.execution.step import DRAFTED, PADDING, HostStep, StepInputs, StepShape, views
from outpace.backends.torch.kernels.base import LLAMA, Cache, Hidden, Scores
from outpace.backends.torch.kernels.reference import ReferenceOps, geglu, rms_norm, route, swiglu
from outpace.backends.torch.storage import Format, planar
from outpace.backends.torch.storage.planar import Planar, int4
from outpace.backends.torch.storage.planar import fp8 as fp8_groups
from outpace.backends.torch.storage.rounding import KINDS, quantise
from outpace.backends.torch.storage.scaled import FP8, Scaled, ScaledFormat, round_to_scaled
from outpace.models.architecture import Experts

REFERENCE = ReferenceOps()
SHAPES = [(4, 2, 64), (9, 3, 64), (4, 4, 16), (8, 1, 48)]  # heads, key heads, size of a head
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
needs_interpreter = pytest.mark.skipif(not INTERPRETED, reason="runs in the subprocess that interprets Triton")


def interpreter_works() -> bool:
    """Triton's interpreter converts arrays of one element to numbers, which NumPy 2.4 and later refuses."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            int(np.zeros(1))
    except TypeError:
        return False
    return True


@pytest.mark.skipif(INTERPRETED, reason="already in the subprocess")
@pytest.mark.skipif(not interpreter_works(), reason="this NumPy is too new for Triton's interpreter")
def test_kernels_equal_their_references_in_the_interpreter():
    """Triton chooses its interpreter at import, so these tests run in a separate process."""
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-o", "addopts=", "-x", "-W", "ignore::DeprecationWarning", __file__]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert found.returncode == 0, found.stdout[-4000:]
    assert " passed" in found.stdout


def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(shape) * scale


def ragged_step(rows: list[tuple[int, int]], page_tokens: int, num_pages: int, *, gap: int = 0) -> StepInputs:
    """Rows of (context, new tokens) on random pages, with `gap` unused tokens after each row."""
    width = max(-(-context // page_tokens) for context, _ in rows) + 1
    longest = max(length for _, length in rows)
    num_tokens = sum(length + gap for _, length in rows)
    host = HostStep(StepShape(num_tokens, len(rows), num_tokens, longest, width), pinned=False)
    host.positions.fill(PADDING)
    free = random.sample(range(num_pages), num_pages)
    at = 0
    for i, (context, length) in enumerate(rows):
        host.begins[i], host.lengths[i], host.contexts[i] = at, length, context
        host.positions[at : at + length] = range(context - length, context)
        host.token_rows[at : at + length + gap] = i
        for j in range(-(-context // page_tokens)):
            host.tables[i, j] = free.pop()
        at += length + gap
    return views(host.buffer, host.shape)


def check(found: torch.Tensor, expected: torch.Tensor, most: float = 1e-5) -> None:
    assert torch.isfinite(found).all()
    error = (found - expected).norm() / expected.norm()
    assert error < most, float(error)


@needs_interpreter
@pytest.mark.parametrize("packed", [False, True])
def test_taking_words_from_the_host(packed):
    from outpace.backends.torch.execution.graphs import load_step
    from outpace.backends.torch.kernels import step_loading

    host = HostStep(StepShape(12, 3, 12, 4, 3, is_packed=packed), pinned=False)
    host.buffer.random_(0, 50)
    host.begins[:] = [0, 3, 5] if packed else [0, 4, 8]
    host.token_rows[:] = [0, 0, 0, 1, 1, 2, 2, 2, 2, 1, 0, 2] if packed else np.arange(12) // 4
    host.tokens[[1, 2, 4, 6, 9, 11]] = DRAFTED
    drafted = torch.randint(0, 50, (3, 3), dtype=torch.int32)
    found, expected = (views(torch.full_like(host.buffer, 99), host.shape) for _ in range(2))
    step_loading.load_step(host.buffer, found, drafted, most=40)
    load_step(host.buffer, expected, drafted, most=40)
    assert torch.equal(found.words[: host.shape.num_words], expected.words[: host.shape.num_words])
    assert int(found.tokens.min()) >= 0


@needs_interpreter
def test_embedding():
    from outpace.backends.torch.kernels.elementwise import embed

    tokens, embedding = torch.tensor([5, 0, 7, 5], dtype=torch.int32), normal(9, 1100)
    assert torch.equal(embed(tokens, embedding), embedding[tokens])


FORMATS = (
    *(int4(32), int4(64), int4(128), int4(128, has_zeros=True), int4(32, scale_dtype=torch.float32)),
    *(fp8_groups(128), fp8_groups(256, scale_dtype=torch.float32)),
    *(planar.Q4_0, planar.Q4_1, planar.Q8_0, planar.Q4_K, planar.Q5_K, planar.Q6_K, *KINDS.values()),
)


def stored(format: Format, rows: int, columns: int) -> Planar | Scaled:
    """Random codes and scales."""
    if isinstance(format, ScaledFormat):
        return round_to_scaled(normal(rows, columns, scale=0.02), format.dtype)
    codes = torch.randint(0, 1 << format.bits, (rows, columns))
    if format.is_fp8:
        codes &= 0xBF  # no NaN
    groups, blocks = -(-columns // format.group), -(-columns // format.block)
    if format.has_blocks:
        scales, minima = (torch.randint(1, 64, (rows, groups)) for _ in range(2))
        small = torch.int8 if format.bits == 6 else torch.uint8
        halves = [(torch.rand(rows, blocks) * 1e-3).half() for _ in range(2)]
        return planar.pack(format, codes, scales.to(small), minima.to(small) if format.has_minima else None, halves[0],
                           halves[1] if format.has_minima else None)  # fmt: skip
    scales = (0.01 + torch.rand(rows, groups) * 0.02).to(format.scale_dtype)
    zeros = torch.randint(0, 16, (rows, groups), dtype=torch.uint8)
    offsets = (zeros if format.has_zeros else scales * 7) if format.has_minima else None
    return planar.pack(format, codes, scales, offsets)


@needs_interpreter
@pytest.mark.parametrize("format", FORMATS, ids=lambda format: f"{format.name}, {getattr(format, 'scale_dtype', '')}")
@pytest.mark.parametrize(
    ("num_tokens", "n", "k", "size"),
    [(1, 40, 768, (16, 4, 4)), (9, 40, 1280, (32, 2, 4, 2, 2, 1)), (40, 24, 512, (16, 8, 4))],
)
def test_quantised_products(format, num_tokens, n, k, size):
    """With a residual and the first part of the next norm, then after a norm and with silu; sizes no block divides."""
    from outpace.backends.torch.kernels.base import Normed
    from outpace.backends.torch.kernels.linear import Scratch
    from outpace.backends.torch.kernels.planar_gemm import PlanarConfig, planar_linear, unpack

    torch.manual_seed(n + k)
    config, scratch = PlanarConfig(*size), Scratch(torch.device("cpu"))
    x, residual, next_norm = normal(num_tokens, k), normal(num_tokens, n), 1 + normal(n, scale=0.1)
    weight, out = stored(format, n, k), torch.full((num_tokens, n), torch.nan)
    normed = planar_linear(x, weight, out, scratch, config, residual=residual, next_norm=next_norm)
    expected = residual + x @ weight.dequantise(torch.float32).T
    check(out, expected)
    assert normed is not None
    check(normed.x, expected * next_norm)
    check(normed.squares.sum(1), expected.square().sum(1))
    weight, bias, squares = stored(format, 2 * n, k), normal(2 * n), torch.rand(num_tokens, 3) * k
    planar_linear(Normed(x, squares), weight, out, scratch, config, epsilon=1e-5, bias=bias, swiglu=True)
    rms = torch.rsqrt(squares.sum(1, keepdim=True) / k + 1e-5)
    check(out, swiglu(x @ weight.dequantise(torch.float32).T * rms + bias))
    assert not scratch.counters.any(), "counters must be zero again for the next kernel"
    if isinstance(weight, Planar):
        check(unpack(weight, torch.float32), weight.dequantise(torch.float32), 1e-6)


@needs_interpreter
@pytest.mark.parametrize("terms", [1, 2])
@pytest.mark.parametrize(("num_tokens", "n", "k", "splits"), [(5, 70, 256, 1), (40, 70, 384, 2), (150, 40, 192, 3)])
def test_products_of_rounded_tokens(num_tokens, n, k, splits, terms):
    """Tokens are rounded by torch here, because the interpreter does not round to nearest."""
    from outpace.backends.torch.kernels.fp8 import RoundedConfig, RoundedTokens, rounded_linear
    from outpace.backends.torch.kernels.linear import Scratch

    torch.manual_seed(n + k)
    x, bias, residual = normal(num_tokens, k, scale=3.0), normal(n), normal(num_tokens, n)
    first = round_to_scaled(x, FP8)
    scales = first.scales[:, None]
    rest = (x / scales - first.values.float()) * 16
    values = torch.stack([first.values, rest.to(FP8)][:terms])
    rounded, scratch = RoundedTokens(values, scales), Scratch(torch.device("cpu"))
    kept = (values[0].float() + (values[1].float() / 16 if terms == 2 else 0)) * scales
    check(kept, x, 1e-3 if terms == 2 else 4e-2)  # bfloat16 is within 1.7e-3
    config, weight = RoundedConfig(64, 64, 4, 1, splits, terms), round_to_scaled(normal(n, k), FP8)
    out = residual.clone()
    rounded_linear(rounded, weight, out, scratch, config, bias=bias, residual=out)
    check(out, residual + bias + kept @ weight.dequantise(torch.float32).T)
    weight, out = round_to_scaled(normal(2 * n, k, scale=0.05), FP8), torch.full((num_tokens, n), torch.nan)
    rounded_linear(rounded, weight, out, scratch, config, swiglu=True)
    check(out, swiglu(kept @ weight.dequantise(torch.float32).T))
    assert not scratch.counters.any(), "counters must be zero again for the next kernel"


@needs_interpreter
@pytest.mark.parametrize("programs", [0, 1, 3, 7])
@pytest.mark.parametrize(
    ("num_tokens", "n", "k", "block_n"), [(1, 64, 64, 16), (3, 80, 256, 32), (16, 96, 192, 16), (20, 48, 128, 16)]
)
def test_streamed_products(num_tokens, n, k, block_n, programs):
    """A product with a residual and the first part of the next norm, then products that read its result."""
    from outpace.backends.torch.kernels.linear import LinearConfig, Scratch, stream_linear

    torch.manual_seed(n + programs)
    config = LinearConfig(block_n, 64, num_warps=4, num_stages=1, dependent_launch=False)
    scratch = Scratch(torch.device("cpu"))  # 0 programs: one for each tile
    norm = 1 + normal(k, scale=0.1)
    x, first = normal(num_tokens, 128), normal(k, 128)
    weight, bias = normal(n, k), normal(n)

    def poisoned(*shape: int) -> torch.Tensor:
        return torch.full(shape, torch.nan)

    def run(x: object, w: torch.Tensor, out: torch.Tensor, **options: object) -> object:
        normed = stream_linear(x, w, out, scratch, config, programs, **options)  # type: ignore[arg-type]
        assert not scratch.counters.any(), "counters must be zero again for the next kernel"
        return normed

    residual = normal(num_tokens, k)
    h = REFERENCE.linear_add(x, first, None, Hidden(residual), norm)
    out = residual.clone()
    normed = run(x, first, out, residual=out, next_norm=norm)
    check(out, h.residual)

    out = poisoned(num_tokens, n)
    run(normed, weight, out, epsilon=1e-5, bias=bias)
    check(out, REFERENCE.norm_linear(h, norm, 1e-5, weight, bias))
    fused, fused_bias = normal(2 * n, k), normal(2 * n)
    out = poisoned(num_tokens, n)
    run(normed, fused, out, epsilon=1e-5, bias=fused_bias, swiglu=True)
    check(out, REFERENCE.norm_swiglu(h, norm, 1e-5, fused, fused_bias))
    out = poisoned(num_tokens, n)
    run(rms_norm(h.residual, norm, 1e-5), weight, out)
    check(out, REFERENCE.norm_linear(h, norm, 1e-5, weight, None))


@needs_interpreter
@pytest.mark.parametrize(("num_tokens", "n", "block_n", "num_warps"), [(2, 64, 16, 1), (8, 80, 32, 2), (5, 50, 16, 2)])
def test_products_of_a_few_tokens(num_tokens, n, block_n, num_warps):
    """The same chain as above."""
    from outpace.backends.torch.kernels.skinny_gemm import SkinnyConfig, skinny_linear

    torch.manual_seed(n)
    config = SkinnyConfig(block_n, 32, num_warps)
    norm, x, first = 1 + normal(128, scale=0.1), normal(num_tokens, 64), normal(128, 64)
    residual, first_bias = normal(num_tokens, 128), normal(128)
    h = REFERENCE.linear_add(x, first, first_bias, Hidden(residual), norm)
    out = residual.clone()
    normed = skinny_linear(x, first, out, config, bias=first_bias, residual=out, next_norm=norm)
    assert normed is not None
    check(out, h.residual)

    weight, bias = normal(2 * n, 128), normal(2 * n)
    out = torch.full((num_tokens, 2 * n), torch.nan)
    skinny_linear(normed, weight, out, config, epsilon=1e-5, bias=bias)
    check(out, REFERENCE.norm_linear(h, norm, 1e-5, weight, bias))
    out = torch.full((num_tokens, n), torch.nan)
    skinny_linear(normed, weight, out, config, epsilon=1e-5, bias=bias, swiglu=True)
    check(out, REFERENCE.norm_swiglu(h, norm, 1e-5, weight, bias))


@needs_interpreter
def test_products_with_a_fixed_order_of_sums():
    """Equal to the reference, and to the bit the same for a token alone and among others."""
    from outpace.backends.torch.kernels.fixed_gemm import fixed_linear
    from outpace.backends.torch.storage.scaled import round_to_scaled

    torch.manual_seed(0)
    n, k = 70, 192
    x, weight, bias, residual = normal(37, k), normal(2 * n, k), normal(2 * n), normal(37, n)
    rounded = round_to_scaled(weight[:n], torch.int8)
    cases: list[tuple[Any, dict[str, Any], torch.Tensor]] = [
        (weight[:n].contiguous(), {"residual": residual}, residual + REFERENCE.linear(x, weight[:n])),
        (weight, {"bias": bias, "swiglu": True}, swiglu(torch.nn.functional.linear(x, weight, bias))),
        (rounded, {}, REFERENCE.linear(x, rounded)),
    ]
    for matrix, fused, expected in cases:
        found = torch.full((37, n), torch.nan)
        fixed_linear(x, matrix, found, **fused)
        check(found, expected)
        for at in (0, 20, 36):
            alone = torch.full((1, n), torch.nan)
            mine = {name: value[at : at + 1] if name == "residual" else value for name, value in fused.items()}
            fixed_linear(x[at : at + 1], matrix, alone, **mine)
            assert torch.equal(alone[0], found[at])


@needs_interpreter
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "dim"), SHAPES)
def test_attention_with_a_fixed_order_of_sums(num_heads, num_kv_heads, dim):
    """Equal to the reference, and to the bit the same for the tokens of a row one by one."""
    from outpace.backends.torch.kernels.attention import attend_fixed
    from outpace.backends.torch.kernels.rotation import Rotation

    random.seed(dim)
    torch.manual_seed(dim)
    rotation = Rotation(normal(1024, dim), None, None, 1e-5)
    keys, values = normal(2, 80, num_kv_heads, 16, dim)
    caches = [Cache(keys.clone(), values.clone()) for _ in range(3)]
    step = ragged_step([(600, 6), (40, 1)], 16, 80)
    qkv = normal(step.shape.num_tokens, (num_heads + 2 * num_kv_heads) * dim)
    found = attend_fixed(qkv, caches[0], step, rotation)
    check(found, REFERENCE.attend(qkv, caches[1], step, rotation.rope, None, None, 1e-5))
    for i in range(6):
        host = HostStep(StepShape(1, 1, 1, 1, step.shape.table_width), pinned=False)
        host.lengths[:], host.contexts[:], host.positions[:] = 1, 595 + i, 594 + i
        host.tables[:] = step.tables[:1].numpy()
        token = attend_fixed(qkv[i : i + 1], caches[2], views(host.buffer, host.shape), rotation)
        assert torch.equal(token[0], found[i])


@needs_interpreter
@pytest.mark.parametrize(("n", "k", "block_n", "block_k"), [(64, 64, 4, 64), (80, 144, 16, 64), (50, 192, 4, 256)])
def test_products_of_one_token(n, k, block_n, block_k):
    """The same chain as above."""
    from outpace.backends.torch.kernels.gemv import GemvConfig, gemv_linear

    torch.manual_seed(n)
    config = GemvConfig(block_n, block_k, num_warps=4)
    norm, x, first = 1 + normal(k, scale=0.1), normal(1, 128), normal(k, 128)
    residual, first_bias = normal(1, k), normal(k)
    h = REFERENCE.linear_add(x, first, first_bias, Hidden(residual), norm)
    out = residual.clone()
    normed = gemv_linear(x, first, out, config, bias=first_bias, residual=out, next_norm=norm)
    assert normed is not None
    check(out, h.residual)

    weight, bias = normal(2 * n, k), normal(2 * n)
    out = torch.full((1, 2 * n), torch.nan)
    gemv_linear(normed, weight, out, config, epsilon=1e-5, bias=bias)
    check(out, REFERENCE.norm_linear(h, norm, 1e-5, weight, bias))
    out = torch.full((1, n), torch.nan)
    gemv_linear(normed, weight, out, config, epsilon=1e-5, bias=bias, swiglu=True)
    check(out, REFERENCE.norm_swiglu(h, norm, 1e-5, weight, bias))


@needs_interpreter
def test_layouts_share_whole_tiles_where_that_is_even():
    from outpace.backends.torch.kernels.linear import _layout

    assert _layout(4096, 4096, 32, 256, 132) == (128, 1)
    assert _layout(6144, 4096, 16, 256, 264) == (192, 1)
    assert _layout(576, 576, 32, 64, 132)[1] > 1, "a small product is cut, so that all programs have some of it"


SCORES = [Scores(0.2, 3.0, 7), Scores(window=37)]  # as Gemma has them; windows that begin in rows, tiles and splits


@needs_interpreter
@pytest.mark.parametrize("num_splits", [1, 4])
@pytest.mark.parametrize("rows", [[(5, 5), (40, 1), (33, 3)], [(70, 40), (64, 1)]], ids=str)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "dim"), SHAPES)
def test_rotation_cache_write_and_attention(num_heads, num_kv_heads, dim, normed, rows, num_splits):
    check_attention(num_heads, num_kv_heads, dim, rows, num_splits, normed=normed)


@needs_interpreter
@pytest.mark.parametrize("num_splits", [1, 4])
@pytest.mark.parametrize("rows", [[(5, 5), (40, 1), (33, 3)], [(70, 40), (64, 1)]], ids=str)
@pytest.mark.parametrize("scores", SCORES, ids=str)
def test_scores_with_another_scale_a_cap_and_a_window(scores, rows, num_splits):
    check_attention(4, 2, 64, rows, num_splits, normed=True, scores=scores)


def check_attention(
    num_heads: int,
    num_kv_heads: int,
    dim: int,
    rows: list[tuple[int, int]],
    num_splits: int,
    *,
    normed: bool,
    scores: Scores = LLAMA,
) -> None:
    from outpace.backends.torch.kernels.attention import Tiling, attend
    from outpace.backends.torch.kernels.rotation import Rotation

    random.seed(dim)
    step = ragged_step(rows, 16, 12, gap=2)
    qkv = normal(step.shape.num_tokens, (num_heads + 2 * num_kv_heads) * dim)
    rope = normal(128, dim)
    q_norm, k_norm = (normal(dim), normal(dim)) if normed else (None, None)
    keys, values = normal(12, num_kv_heads, 16, dim), normal(12, num_kv_heads, 16, dim)
    caches = [Cache(keys.clone(), values.clone()) for _ in range(2)]
    tiling = Tiling(num_splits, 64, num_warps=4, share=16)
    found = attend(qkv, caches[0], step, Rotation(rope, q_norm, k_norm, 1e-5), 4, tiling=tiling, scores=scores)
    expected = REFERENCE.attend(qkv, caches[1], step, rope, q_norm, k_norm, 1e-5, scores)
    real = step.positions >= 0
    check(found[real], expected[real])
    check(caches[0].keys, caches[1].keys)
    assert torch.equal(caches[0].values, caches[1].values)


def rounded_pages(num_kv_heads: int, dim: int, kind: torch.dtype) -> Pages:
    pages = Pages(1, 12, num_kv_heads, dim, kind, torch.device("cpu"), page_tokens=16)
    assert pages.scales is not None
    pages.numbers.copy_(normal(*pages.numbers.shape, scale=40).clamp(-127, 127))
    pages.scales.copy_(normal(*pages.scales.shape, scale=0.02).abs())
    return pages


@needs_interpreter
@pytest.mark.parametrize("num_heads", [0, 4], ids=["without queries", "with queries"])
@pytest.mark.parametrize("normed", [False, True])
def test_keys_and_values_alone(num_heads, normed):
    from outpace.backends.torch.kernels.rotation import Rotation, rotate_and_store

    torch.manual_seed(1)
    step = ragged_step([(3, 20), (17, 1), (0, 9)], 16, 24)
    rope, q_norm, k_norm = normal(128, 64), normal(64), normal(64)
    qkv = normal(step.shape.num_tokens, (num_heads + 4) * 64)
    keys, values = normal(24, 2, 16, 64), normal(24, 2, 16, 64)
    caches = [Cache(keys.clone(), values.clone()) for _ in range(2)]
    rotation = Rotation(rope, q_norm if normed else None, k_norm if normed else None, 1e-5)
    rotate_and_store(qkv, caches[0], step, rotation)
    REFERENCE.rotate_and_store(qkv, caches[1], step, rope, rotation.q_norm, rotation.k_norm, 1e-5)
    check(caches[0].keys, caches[1].keys)
    assert torch.equal(caches[0].values, caches[1].values) and not torch.equal(values, caches[0].values)


@needs_interpreter
@pytest.mark.parametrize("num_splits", [1, 4])
@pytest.mark.parametrize("rows", [[(5, 5), (40, 1), (33, 3)], [(70, 40), (64, 1)]], ids=str)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "dim"), [(4, 2, 64), (8, 1, 48)])
def test_a_cache_of_8_bits_is_written_and_read(num_heads, num_kv_heads, dim, rows, num_splits):
    """Short rows, which are written by the attention kernel, and long ones, which are written before it. Not FP8: the
    interpreter rounds 31.9 to 16."""
    from outpace.backends.torch.kernels.attention import Tiling, attend
    from outpace.backends.torch.kernels.rotation import Rotation

    random.seed(dim)
    torch.manual_seed(dim)
    step = ragged_step(rows, 16, 12, gap=2)
    qkv = normal(step.shape.num_tokens, (num_heads + 2 * num_kv_heads) * dim)
    qkv[3] = 0.0  # a token whose scale is the smallest there is
    rope, q_norm, k_norm = normal(128, dim), normal(dim), normal(dim)
    found_pages = rounded_pages(num_kv_heads, dim, torch.int8)
    pages = deepcopy(found_pages)
    tiling = Tiling(num_splits, 64, num_warps=4, share=16)
    found = attend(qkv, found_pages.caches[0], step, Rotation(rope, q_norm, k_norm, 1e-5), 4, tiling=tiling)
    expected = REFERENCE.attend(qkv, pages.caches[0], step, rope, q_norm, k_norm, 1e-5)
    assert found_pages.scales is not None and pages.scales is not None
    assert torch.allclose(found_pages.scales, pages.scales, rtol=1e-6)
    differing = (found_pages.numbers != pages.numbers).float().mean()
    assert differing < 1e-4, "only codes on a border between two may differ"
    real = step.positions >= 0
    check(found[real], expected[real], most=1e-3 if differing else 1e-5)


@needs_interpreter
@pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("num_splits", [1, 4])
@pytest.mark.parametrize("rows", [[(5, 5), (40, 1), (33, 3)], [(70, 40), (64, 1)]], ids=str)
def test_a_cache_of_8_bits_is_read(rows, num_splits, kind):
    from outpace.backends.torch.kernels.attention import Tiling, attention

    random.seed(num_splits)
    step = ragged_step(rows, 16, 12, gap=2)
    cache = rounded_pages(2, 64, kind).caches[0]
    q = normal(step.shape.num_tokens, 4, 64)
    found = attention(q, cache, step, num_sms=4, tiling=Tiling(num_splits, 32, num_warps=4, share=16))
    real = step.positions >= 0
    check(found[real], REFERENCE.attention(q, cache, step)[real])


@needs_interpreter
@pytest.mark.parametrize("share", [1, 48])
@pytest.mark.parametrize("num_splits", [1, 2, 8])
@pytest.mark.parametrize("rows", [[(1, 1)], [(37, 1), (5, 5), (0, 0), (90, 3)], [(70, 40), (64, 1)]], ids=str)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "dim"), SHAPES)
def test_ragged_attention(num_heads, num_kv_heads, dim, rows, num_splits, share):
    from outpace.backends.torch.kernels.attention import Tiling, attention

    random.seed(num_splits)
    step = ragged_step(rows, 16, 24, gap=1)
    cache = Cache(normal(24, num_kv_heads, 16, dim), normal(24, num_kv_heads, 16, dim))
    q = normal(step.shape.num_tokens, num_heads, dim)
    found = attention(q, cache, step, num_sms=4, tiling=Tiling(num_splits, 32, num_warps=4, share=share))
    expected = REFERENCE.attention(q, cache, step)
    real = step.positions >= 0
    check(found[real], expected[real])


@needs_interpreter
@pytest.mark.parametrize("width", [64, 96])
def test_norm_and_swiglu(width):
    from outpace.backends.torch.kernels import elementwise

    x, weight = normal(5, width), normal(width)
    check(elementwise.rms_norm(x, weight, 1e-5), rms_norm(x, weight, 1e-5))
    check(elementwise.swiglu(x), swiglu(x))
    check(elementwise.geglu(3 * x), geglu(3 * x))


@needs_interpreter
@pytest.mark.parametrize("width", [64, 96])
def test_a_norm_that_is_added_and_the_next_one(width):
    from outpace.backends.torch.kernels import elementwise
    from outpace.backends.torch.kernels.linear import LinearConfig, Scratch, stream_linear

    x, weight, residual, following = normal(5, width), normal(width), normal(5, width), normal(width)
    expected = residual + rms_norm(x, weight, 1e-5)
    for next_norm in (None, following):
        mine = residual.clone()
        normed = elementwise.add_normed(x, weight, 1e-5, mine, next_norm)
        check(mine, expected)
    assert normed is not None
    matrix, out = normal(48, width), torch.empty(5, 48)
    config = LinearConfig(16, 32, num_warps=4, num_stages=1, dependent_launch=False)
    stream_linear(normed, matrix, out, Scratch(torch.device("cpu")), config, 1, epsilon=1e-5)
    check(out, REFERENCE.norm_linear(Hidden(expected), following, 1e-5, matrix, None))


@needs_interpreter
@pytest.mark.parametrize("kind", [None, "int8"])
@pytest.mark.parametrize("num_tokens", [1, 3, 30, 200])  # each pair by itself; sorted into small and large blocks
def test_experts(num_tokens, kind):
    from outpace.backends.torch.kernels import experts as kernels

    torch.manual_seed(num_tokens)
    count, width, hidden = 7, 80, 48
    experts = Experts(count, 2, is_normalised=True)
    x, router = normal(num_tokens, width), normal(count, width)
    router[3] = router[4]  # two that are chosen together, and one below that nobody has
    router[5] = 0
    gate_up, down = normal(count * 2 * hidden, width, scale=0.1), normal(count * width, hidden)
    positions = torch.arange(num_tokens, dtype=torch.int32)
    positions[1::5] = PADDING
    first, second = (each if kind is None else quantise(each, KINDS[kind]) for each in (gate_up, down))
    chosen, weights = route(x @ router.T, experts)
    found = kernels.mixed(x, positions, chosen, weights, first, second, count)
    real = positions >= 0
    check(found[real], REFERENCE.experts(x, positions, router, first, second, experts)[real])
    assert torch.isfinite(found).all()
