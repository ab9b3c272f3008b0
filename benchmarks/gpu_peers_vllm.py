"""vLLM, driven step by step, with the settings of one measurement.

Graphs are captured for the measured sizes alone, which only shortens the start. vLLM rounds sizes up to a multiple of
depth + 1 and captures no draft step for more than `max_num_seqs` requests, so that is rounded up too. The KV cache gets
a fixed size, because several engines are on the GPU at the same time, and vLLM's own measurement of free memory assumes
that it is alone.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

from benchmarks.gpu_peers_settings import CONCURRENCY, CONTEXT, PeerSettings
from benchmarks.gpu_peers_window import Step

_PREFILL_TOKENS = 8192  # of one step


def environment(settings: PeerSettings, cache: Path) -> dict[str, str]:
    """Variables that vLLM reads when it is imported."""
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if settings.in_process else "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",  # FlashInfer is not installed
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "INFO",
        "VLLM_CACHE_ROOT": str(cache),
    }


def engine_settings(settings: PeerSettings, model: Path, head: Path) -> dict[str, Any]:
    """The arguments of `vllm.LLM`."""
    return {
        "model": str(model),
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "quantization": settings.quantization,
        "max_model_len": CONTEXT,
        "max_num_seqs": _rounded(max(CONCURRENCY), settings.depth + 1),
        "max_num_batched_tokens": _PREFILL_TOKENS,
        "gpu_memory_utilization": 0.1,  # only compared with the free memory, since the cache's size is given
        "kv_cache_memory_bytes": settings.cache_bytes,
        "enable_prefix_caching": False,
        "compilation_config": {"cudagraph_capture_sizes": _captured_sizes(settings)},
        "disable_log_stats": True,
        "speculative_config": _speculation(settings, head),
    }


def _captured_sizes(settings: PeerSettings) -> list[int]:
    """Tokens of a step, and requests of a pass of the head."""
    length = settings.depth + 1
    if settings.method == "ngram":  # drafts of any length up to the depth
        return [1, 2, 4, *range(8, 256, 8), *range(256, max(CONCURRENCY) * length + 1, 32)]
    return sorted({size for n in CONCURRENCY for size in (_rounded(n, length), n * length)})


def _rounded(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _speculation(settings: PeerSettings, head: Path) -> dict[str, Any] | None:
    depth = settings.depth
    if settings.method is None:
        return None
    if settings.method == "eagle3":
        return {
            "method": "eagle3", "model": str(head), "num_speculative_tokens": depth,
            "draft_sample_method": settings.draft_sampling,
        }  # fmt: skip
    return {
        "method": settings.method, "num_speculative_tokens": depth, "prompt_lookup_max": 4, "prompt_lookup_min": 2,
    }  # fmt: skip


class DrivenVllm:
    def __init__(self, settings: PeerSettings, model: Path, head: Path) -> None:
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
        from vllm import LLM

        self._engine: Any = LLM(**engine_settings(settings, model, head)).llm_engine
        self._runs = count()
        self._running: dict[str, int] = {}  # the requests' numbers, by their ids

    def describe(self) -> dict[str, Any]:
        import vllm

        config = self._engine.vllm_config
        return {
            "vllm": vllm.__version__,
            "asynchronous_scheduling": bool(config.scheduler_config.async_scheduling),
            "model_runner": 2 if getattr(config, "use_v2_model_runner", False) else 1,
            "captured_sizes": list(config.compilation_config.cudagraph_capture_sizes or []),
        }

    def submit(self, prompts: Sequence[Sequence[int]], temperature: float, max_tokens: int) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=temperature, max_tokens=max_tokens, ignore_eos=True, detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )  # fmt: skip
        run = next(self._runs)
        self._running = {f"{run}-{i}": i for i in range(len(prompts))}
        for name, prompt in zip(self._running, prompts, strict=True):
            self._engine.add_request(name, {"prompt_token_ids": list(prompt)}, params)

    def step(self) -> Step:
        emitted: dict[int, list[int]] = {}
        for output in self._engine.step():
            number = self._running.get(output.request_id)
            if number is not None and output.outputs[0].token_ids:
                emitted.setdefault(number, []).extend(output.outputs[0].token_ids)
        return Step(emitted)

    def abort(self) -> None:
        self._engine.abort_request(list(self._running))
        self._running = {}
