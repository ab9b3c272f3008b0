"""llama.cpp's own server, inside xllamacpp: plain, with its n-gram proposer, and with a draft model."""

from __future__ import annotations

from collections.abc import Sequence

import httpx
import xllamacpp
from xllamacpp import CommonParams, Server

from outpace.bench.peer.base import Answer, Models

_NGRAM = 4  # as in Outpace; its default of 12 finds almost nothing in prompts of this size
_KINDS = xllamacpp.common_speculative_type


class LlamaCppPeer:
    """One server per variant, because speculation is configured at start."""

    def __init__(self, models: Models) -> None:
        self._servers = {"plain": Server(_params(models))}
        ngram = _params(models)
        ngram.speculative.types = [_KINDS.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE]
        ngram.speculative.ngram_simple.size_m = models.depth
        ngram.speculative.ngram_simple.size_n = _NGRAM
        self._servers["ngram-simple"] = Server(ngram)
        if models.draft is not None:
            draft = _params(models)
            draft.speculative.types = [_KINDS.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
            draft.speculative.draft.mparams.path = str(models.draft)
            draft.speculative.draft.n_max = models.depth
            draft.speculative.draft.cpuparams.n_threads = models.threads
            self._servers["draft"] = Server(draft)
        self.variants = tuple(self._servers)

    def answer(self, variant: str, tokens: Sequence[int], max_tokens: int) -> Answer:
        body = {
            "prompt": list(tokens),
            "n_predict": max_tokens,
            "temperature": 0.0,
            "cache_prompt": False,
            "stream": False,
        }
        reply = httpx.post(f"{self._servers[variant].listening_address}/completion", json=body, timeout=600.0)
        reply.raise_for_status()
        completion = reply.json()
        return Answer(completion["content"], int(completion["tokens_predicted"]))

    def close(self) -> None:
        self._servers.clear()


def _params(models: Models) -> CommonParams:
    params = CommonParams()
    params.model.path = str(models.target)
    params.n_ctx = models.max_context
    params.n_parallel = 1
    params.port = 0
    params.cpuparams.n_threads = models.threads
    params.cpuparams_batch.n_threads = models.threads
    params.verbosity = 0
    return params
