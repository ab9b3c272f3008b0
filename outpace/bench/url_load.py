"""Load on a server: streamed requests, closed or open loop, each timed from its due time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from time import perf_counter
from typing import Any

import httpx

from outpace.bench.engine_load import failed
from outpace.bench.loads import Closed, Load, arrival_times
from outpace.bench.trials import Job, Run, Trial
from outpace.core import SpeculationCounts

_TIMEOUT = httpx.Timeout(600.0, connect=10.0)


async def run_requests(
    url: str, headers: dict[str, str], jobs: Sequence[Job], bodies: Sequence[dict[str, Any]], load: Load, seed: int
) -> Run:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(headers=headers, timeout=_TIMEOUT, limits=limits) as client:
        begin = perf_counter()
        if isinstance(load, Closed):
            trials = await _closed(client, url, jobs, bodies, load.concurrency)
        else:
            due = [begin + moment for moment in arrival_times(load, len(jobs), seed)]
            trials = list(
                await asyncio.gather(*(_at(client, url, *each) for each in zip(jobs, bodies, due, strict=True)))
            )
        return Run(trials=trials, seconds=perf_counter() - begin)


async def _closed(
    client: httpx.AsyncClient, url: str, jobs: Sequence[Job], bodies: Sequence[dict[str, Any]], concurrency: int
) -> list[Trial]:
    waiting = iter(enumerate(zip(jobs, bodies, strict=True)))
    done: dict[int, Trial] = {}

    async def worker() -> None:
        for index, (job, body) in waiting:  # shared: each worker takes the next when it is free
            done[index] = await _request(client, url, job, body, perf_counter())

    await asyncio.gather(*(worker() for _ in range(concurrency)))
    return [done[index] for index in range(len(jobs))]


async def _at(client: httpx.AsyncClient, url: str, job: Job, body: dict[str, Any], due: float) -> Trial:
    await asyncio.sleep(max(0.0, due - perf_counter()))
    return await _request(client, url, job, body, due)


async def _request(client: httpx.AsyncClient, url: str, job: Job, body: dict[str, Any], due: float) -> Trial:
    answer = _StreamedAnswer(due)
    try:
        async with client.stream("POST", url, json=body) as reply:
            if reply.status_code != 200:
                detail = (await reply.aread()).decode(errors="replace")[:200]
                return failed(job, f"the server answered {reply.status_code}: {detail}")
            async for line in reply.aiter_lines():
                answer.take(line)
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        return failed(job, f"{type(error).__name__}: {error}")
    return answer.trial(job)


class _StreamedAnswer:
    """One answer, parsed line by line as it arrives."""

    def __init__(self, due: float) -> None:
        self._due = due
        self._first_at: float | None = None
        self._last_at = due
        self._texts: list[str] = []
        self._finish_reason: str | None = None
        self._usage: dict[str, Any] = {}
        self._timings: dict[str, Any] = {}
        self._error: str | None = None

    def take(self, line: str) -> None:
        if not line.startswith("data:") or line.endswith("[DONE]"):
            return
        chunk = json.loads(line.removeprefix("data:"))
        if "error" in chunk:
            self._error = f"the server sent an error in the stream: {chunk['error']}"
            return
        self._usage = chunk.get("usage") or self._usage
        self._timings = chunk.get("timings") or self._timings
        for choice in chunk.get("choices", ()):
            delta = choice.get("delta") or {}
            text = delta.get("content") or delta.get("reasoning_content")
            if text:
                self._texts.append(text)
                self._last_at = perf_counter()
                self._first_at = self._first_at or self._last_at
            self._finish_reason = choice.get("finish_reason") or self._finish_reason

    def trial(self, job: Job) -> Trial:
        if self._error:
            return failed(job, self._error)
        if self._finish_reason is None:
            return failed(job, "the stream ended before the answer was complete")
        # Without usage each chunk counts as one token, which is wrong with drafts; every server here sends usage.
        num_output = int(self._usage.get("completion_tokens", len(self._texts)))
        first_at = self._first_at if self._first_at is not None else self._last_at
        return Trial(
            prompt_id=job.prompt_id,
            category=job.category,
            num_prompt=int(self._usage.get("prompt_tokens", 0)),
            num_output=num_output,
            text="".join(self._texts),
            finish_reason=self._finish_reason,
            time_to_first_token=first_at - self._due,
            end_to_end=self._last_at - self._due,
            counts=self._counts(),
        )

    def _counts(self) -> SpeculationCounts:
        """Draft counts from the answer itself: an Outpace server's usage, llama.cpp's timings."""
        speculation = self._usage.get("speculation") or {}
        drafted = speculation.get("drafted", self._timings.get("draft_n", 0))
        accepted = speculation.get("accepted", self._timings.get("draft_n_accepted", 0))
        return SpeculationCounts(num_drafted=int(drafted), num_accepted=int(accepted))
