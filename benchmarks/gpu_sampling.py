"""Sampling and acceptance on a GPU: equal to the CPU and to the host, and what they cost.

    python -m benchmarks.gpu_sampling [OUT_DIR]

Every section stands alone: one that fails says so and the others run. Times are medians of replayed CUDA graphs, beside
the time one read of the logits takes. Needs torch with CUDA, and nothing else of the backend.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outpace.backends.torch import device_acceptance
from outpace.backends.torch.device_acceptance import Drafts, Verdicts, draw_draft
from outpace.backends.torch.device_distributions import (
    DEFAULT_CANDIDATES,
    Distributions,
    RowParams,
    greedy_tokens,
    joined,
)
from outpace.backends.torch.device_noise import gumbels, keys, uniforms
from outpace.backends.torch.device_sampling import draw, draw_fused, sample
from outpace.backends.torch.kernels.contest import draw_whole
from outpace.config import SamplingParams
from outpace.randomness import Purpose
from outpace.randomness import key as host_key
from outpace.randomness import uniform as host_uniform
from outpace.sampling import Shaper, choose
from tests.device_margins import ROUNDING, token_margin

VOCAB = 128_256
ROWS = (1, 9, 32, 128, 128 * 9)
COMPILED_ROWS = (1, 128)
COMPILE_SECONDS = 240.0  # start no further compilation after this
DRAFTS = ((1, 4), (32, 4), (128, 8))  # requests and depth
FEATURES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "plain": {},
    "cool": {"temperature": 0.6},
    "hot": {"temperature": 2.0},
    "top_k": {"top_k": 40},
    "top_p": {"temperature": 0.8, "top_p": 0.95},
    "min_p": {"min_p": 0.05},
    "all": {"temperature": 0.9, "top_k": 100, "top_p": 0.9, "min_p": 0.01},
}
Results = dict[str, Any]


def model_like_logits(num_rows: int, device: str, seed: int = 0) -> Tensor:
    """A few good tokens over a long low tail."""
    generator = torch.Generator(device=device).manual_seed(seed)
    logits = torch.randn(num_rows, VOCAB, generator=generator, device=device) * 1.5
    good = torch.randint(0, VOCAB, (num_rows, 20), generator=generator, device=device)
    return logits.scatter_(1, good, torch.rand(num_rows, 20, generator=generator, device=device) * 8 + 6)


def addresses(num_rows: int, device: str) -> tuple[Tensor, Tensor]:
    seeds = torch.arange(num_rows, device=device) * 0x1234567890ABCDF - 77
    return seeds, torch.arange(num_rows, device=device) * 31 + 5


def check_noise() -> Results:
    seeds, places = addresses(2000, "cuda")
    k = keys(seeds, Purpose.ACCEPT, places, places % 7)
    where = zip(seeds.tolist(), places.tolist(), strict=True)
    expected = [host_key(seed % 2**64, Purpose.ACCEPT, place, place % 7) for seed, place in where]
    equal = [word % 2**64 for word in k.tolist()] == expected
    equal = equal and uniforms(k, 99).tolist() == [host_uniform(word, 99) for word in expected]
    apart = float((gumbels(k).cpu() - gumbels(k.cpu())).abs().max())
    results = {"noise equal to the bit": equal, "largest difference of gumbel noise": apart}
    print(" ", results)
    return results


def check_sampling() -> Results:
    results: Results = {}
    for name, features in FEATURES.items():
        num_rows = 48
        params = SamplingParams(**features)
        logits = model_like_logits(num_rows, "cuda", seed=len(name))
        on_gpu, is_exact = sample(logits, RowParams.of([params] * num_rows, "cuda"), *addresses(num_rows, "cuda"))
        plain = draw(
            logits, RowParams.of([params] * num_rows, "cuda"), *addresses(num_rows, "cuda"), DEFAULT_CANDIDATES
        )
        whole, _ = sample(
            logits, RowParams.of([params] * num_rows, "cuda"), *addresses(num_rows, "cuda"), num_candidates=VOCAB
        )
        seeds, positions = addresses(num_rows, "cpu")
        on_cpu, _ = sample(logits.cpu(), RowParams.of([params] * num_rows), seeds, positions, num_candidates=VOCAB)
        by_host = [
            host_token(row, params, seed % 2**64, position)
            for row, seed, position in zip(logits.cpu().numpy(), seeds.tolist(), positions.tolist(), strict=True)
        ]
        exact = is_exact.cpu()
        drawn = None
        if name in ("greedy", "plain", "cool", "hot"):
            row_params = RowParams.of([params] * num_rows, "cuda")
            inverse, is_greedy = row_params.inv_temperature.double(), row_params.is_greedy.long()
            drawn = draw_whole(logits, inverse, is_greedy, *addresses(num_rows, "cuda"), samples=name != "greedy")
        wrong = [i for i in range(num_rows) if int(whole[i]) != by_host[i]]
        beyond_rounding = [
            i
            for i in wrong
            if token_margin(logits[i].cpu().numpy(), params, int(seeds[i]) % 2**64, int(positions[i])) >= ROUNDING
        ]
        results[name] = {
            "rows": num_rows,
            "exact by candidates": int(exact.sum()),
            "fused unlike op by op": int((on_gpu != plain.tokens).sum() + (is_exact != plain.is_exact).sum()),
            "candidates unlike the whole vocabulary": int((on_gpu != whole).cpu()[exact].sum()),
            "drawn whole unlike the host": None if drawn is None else int((drawn.cpu() != torch.tensor(by_host)).sum()),
            "unlike the CPU": int((whole.cpu() != on_cpu).sum()),
            "unlike the host": len(wrong),
            "unlike the host beyond rounding": len(beyond_rounding),
        }
        print(f"  {name:8}", results[name])
    return results


def host_token(row: np.ndarray[Any, Any], params: SamplingParams, seed: int, position: int) -> int:
    shaper = Shaper(params, (), frozenset())
    return shaper.greedy(row, ()) if params.is_greedy else choose(shaper.probs(row, ()), seed, position)


class Round:
    """A draft loop and the target rows that judge it, on one device, from the same logits on every device."""

    def __init__(self, num_requests: int, depth: int, features: dict[str, Any], device: str) -> None:
        target = model_like_logits(num_requests * (depth + 1), "cpu", seed=1)
        noise = torch.randn(num_requests, depth, VOCAB, generator=torch.Generator().manual_seed(2)) * 0.4
        self.draft_logits = (target.view(num_requests, depth + 1, VOCAB)[:, :depth] + noise).to(device)
        self.target_logits = target.to(device)
        params = SamplingParams(**features)
        self.params = RowParams.of([params] * num_requests, device)
        self.target_params = RowParams.of([params] * target.shape[0], device)
        self.seeds, self.anchors = addresses(num_requests, device)
        self.num_drafted = (torch.arange(num_requests, device=device) + depth) % (depth + 1)
        self.row_of = torch.arange(target.shape[0], device=device).view(num_requests, depth + 1)
        self.target_addresses = addresses(target.shape[0], device)

    def drafted(self) -> tuple[Drafts, Distributions]:
        steps, tokens = [], []
        for i in range(self.draft_logits.shape[1]):
            drawn = draw_fused(
                self.draft_logits[:, i], self.params, self.seeds, self.anchors + i, DEFAULT_CANDIDATES
            ).distributions
            tokens.append(draw_draft(drawn, self.seeds, self.anchors, i))
            steps.append(drawn)
        drafts = Drafts(torch.stack(tokens, dim=1), self.num_drafted, self.row_of, self.seeds, self.anchors)
        return drafts, joined(steps, self.draft_logits)

    def judged(self, rule: str, drafts: Drafts, draft: Distributions) -> Verdicts:
        target = draw_fused(
            self.target_logits, self.target_params, *self.target_addresses, DEFAULT_CANDIDATES
        ).distributions
        judge = device_acceptance.reject if rule == "rejection" else device_acceptance.verify_block
        return judge(drafts, draft, target)


def check_acceptance() -> Results:
    results: Results = {}
    for rule in ("rejection", "block"):
        for name in ("plain", "top_p"):
            packed = []
            for device in ("cuda", "cpu"):
                work = Round(24, 4, FEATURES[name], device)
                drafts, draft = work.drafted()
                verdicts = work.judged(rule, drafts, draft)
                table = verdicts.packed(torch.ones_like(verdicts.num_accepted))
                packed.append(torch.cat([drafts.tokens, table], dim=1).cpu())
            unlike = int((packed[0] != packed[1]).any(dim=1).sum())
            results[f"{rule} {name}"] = {
                "drafts": len(packed[0]),
                "accepted": int(packed[0][:, 4].sum()),
                "unlike the CPU": unlike,
            }
            print(f"  {rule} {name}", results[f"{rule} {name}"])
    return results


def graph_milliseconds(function: Callable[[], Any], repeats: int = 30) -> float:
    """The median time of a replayed graph of the function."""
    cuda: Any = torch.cuda  # some of it has no types
    stream = cuda.Stream()
    stream.wait_stream(cuda.current_stream())
    with cuda.stream(stream):
        for _ in range(3):
            function()
    cuda.current_stream().wait_stream(stream)
    cuda.synchronize()
    graph = cuda.CUDAGraph()
    with cuda.graph(graph):
        function()
    times: list[float] = []
    for _ in range(repeats):
        begin, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return median(times)


def one_read(num_rows: int) -> float:
    """What summing the logits takes, in milliseconds: the floor of one pass."""
    logits = model_like_logits(num_rows, "cuda")
    return graph_milliseconds(lambda: logits.sum(dim=-1))


def whole_time(logits: Tensor, seeds: Tensor, positions: Tensor) -> float:
    inverse, is_greedy = torch.ones_like(seeds, dtype=torch.float64), torch.zeros_like(seeds)
    return graph_milliseconds(partial(draw_whole, logits, inverse, is_greedy, seeds, positions, samples=True))


def time_sampling() -> Results:
    results: Results = {}
    columns = ("rows", "one read", "argmax", "drawn", "plain", "top_p", "op by op", "whole")
    print("  " + "".join(f"{name:>10}" for name in columns), f" ms, vocabulary {VOCAB}")
    for num_rows in ROWS:
        logits = model_like_logits(num_rows, "cuda")
        where = addresses(num_rows, "cuda")

        def sampling(name: str, rows: int = num_rows, x: Tensor = logits, at: Any = where, **options: Any) -> float:
            params = RowParams.of([SamplingParams(**FEATURES[name])] * rows, "cuda")
            return graph_milliseconds(partial(sample, x, params, *at, **options))

        def op_by_op(name: str, rows: int = num_rows, x: Tensor = logits, at: Any = where) -> float:
            params = RowParams.of([SamplingParams(**FEATURES[name])] * rows, "cuda")
            return graph_milliseconds(partial(draw, x, params, at[0], at[1], DEFAULT_CANDIDATES))

        times: Results = {
            "one read": one_read(num_rows),
            "argmax": graph_milliseconds(partial(greedy_tokens, logits)),
            "drawn whole": whole_time(logits, *where),
            "plain": sampling("plain"),
            "top_p": sampling("top_p"),
            "top_p, op by op": op_by_op("top_p"),
        }
        if num_rows <= 32:  # the way out for rows that candidates do not suffice for: always few
            times["whole"] = sampling("plain", num_candidates=VOCAB)
        results[str(num_rows)] = times
        print(f"  {num_rows:10}" + "".join(f"{milliseconds:10.3f}" for milliseconds in times.values()))
    return results


def time_compiled_sampling() -> Results:
    """The torch functions fused by torch.compile, which the kernels should beat."""
    results: Results = {}
    begin = perf_counter()
    for num_rows in COMPILED_ROWS:
        for name in ("plain", "top_p"):
            if perf_counter() - begin > COMPILE_SECONDS:
                return results
            logits, where = model_like_logits(num_rows, "cuda"), addresses(num_rows, "cuda")
            params = RowParams.of([SamplingParams(**FEATURES[name])] * num_rows, "cuda")
            compiled = torch.compile(draw, fullgraph=True, dynamic=False)
            started = perf_counter()
            tokens = compiled(logits, params, *where, DEFAULT_CANDIDATES).tokens
            seconds = perf_counter() - started
            results[f"{num_rows} {name}"] = {
                "ms": graph_milliseconds(partial(compiled, logits, params, *where, DEFAULT_CANDIDATES)),
                "unlike uncompiled": int((tokens != sample(logits, params, *where)[0]).sum()),
                "compilation s": seconds,
            }
            print(f"  {num_rows} rows, {name}", results[f"{num_rows} {name}"])
    return results


def time_acceptance() -> Results:
    results: Results = {}
    for num_requests, depth in DRAFTS:
        for name in ("plain", "top_p"):
            work = Round(num_requests, depth, FEATURES[name], "cuda")
            drafts, draft = work.drafted()
            times = {
                "one read of the target's rows": one_read(num_requests * (depth + 1)),
                "draft loop": graph_milliseconds(work.drafted),
                "rejection": graph_milliseconds(partial(work.judged, "rejection", drafts, draft)),
                "block": graph_milliseconds(partial(work.judged, "block", drafts, draft)),
            }
            results[f"{num_requests} x {depth} {name}"] = times
            print(f"  {num_requests} requests, depth {depth}, {name}:", {k: round(v, 3) for k, v in times.items()})
    return results


SECTIONS: Sequence[tuple[str, Callable[[], Results]]] = (
    ("noise", check_noise),
    ("sampling: equality", check_sampling),
    ("acceptance: equality", check_acceptance),
    ("sampling: time", time_sampling),
    ("acceptance: time", time_acceptance),
    ("sampling, compiled: time", time_compiled_sampling),
)


def main(out_dir: str | Path = ".") -> Results:
    if not torch.cuda.is_available():
        print("this needs a CUDA device; torch sees none")
        return {}
    results: Results = {"torch": torch.__version__, "device": torch.cuda.get_device_name(), "vocabulary": VOCAB}
    for title, section in SECTIONS:
        print(title)
        begin = perf_counter()
        try:
            results[title] = section()
        except Exception:  # a section must not cost the others their one chance on a lent machine
            results[title] = {"failed": traceback.format_exc()}
            traceback.print_exc()
        print(f"  ({perf_counter() - begin:.1f} s)", flush=True)
        torch.cuda.empty_cache()
        path = Path(out_dir) / "gpu_sampling.json"
        path.write_text(json.dumps(results, indent=1) + "\n")
    return results


if __name__ == "__main__":
    main(*sys.argv[1:2])
