"""Runs jobs on the engine itself, in a closed or open loop, and records results and times."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from time import perf_counter, sleep

from outpace.bench.loads import Closed, Load, arrival_times
from outpace.bench.trials import Job, Run, Trial
from outpace.core import Request
from outpace.engine.engine import Engine
from outpace.errors import UsageError


def run_closed(engine: Engine, jobs: Sequence[Job], concurrency: int) -> Run:
    return run_load(engine, jobs, Closed(concurrency))


def run_load(engine: Engine, jobs: Sequence[Job], load: Load, seed: int = 0) -> Run:
    """The engine must be idle. If the run fails, the engine is reset."""
    try:
        return _EngineRun(engine, jobs, load, seed).finish()
    except BaseException:
        engine.reset()
        raise


class _EngineRun:
    def __init__(self, engine: Engine, jobs: Sequence[Job], load: Load, seed: int) -> None:
        self._engine = engine
        self._jobs = jobs
        self._max_running = load.concurrency if isinstance(load, Closed) else len(jobs)
        due = [0.0] * len(jobs) if isinstance(load, Closed) else arrival_times(load, len(jobs), seed)
        self._is_open_loop = not isinstance(load, Closed)
        self._waiting = deque(enumerate(due))
        self._running: dict[int, tuple[int, float, Request]] = {}  # by request id: job index, due time, request
        self._done: dict[int, Trial] = {}

    def finish(self) -> Run:
        run = Run()
        self._begin = perf_counter()
        while self._waiting or self._running:
            self._submit_due()
            if self._running:
                self._step(run)
            elif self._waiting and self._is_open_loop:
                sleep(max(0.0, self._begin + self._waiting[0][1] - perf_counter()))
        run.seconds = perf_counter() - self._begin
        run.trials = [self._done[index] for index in range(len(self._jobs))]
        return run

    def _submit_due(self) -> None:
        now = perf_counter() - self._begin
        while self._waiting and self._waiting[0][1] <= now and len(self._running) < self._max_running:
            index, due = self._waiting.popleft()
            job = self._jobs[index]
            # In a closed loop a request is due when a slot is free, in an open loop at its arrival time.
            due_at = self._begin + due if self._is_open_loop else perf_counter()
            try:
                request = self._engine.submit(job.tokens, job.params)
            except UsageError as error:
                self._done[index] = failed(job, str(error))
            else:
                self._running[request.id] = index, due_at, request

    def _step(self, run: Run) -> None:
        before = perf_counter()
        deltas = self._engine.step()
        stats = self._engine.stats
        run.num_steps += 1
        if stats.num_decode_rows and not stats.num_prefill_tokens:
            run.decode_seconds += perf_counter() - before
            run.decode_tokens += stats.num_emitted
            run.draft_seconds += stats.draft_seconds
        for delta in deltas:
            if delta.finish_reason:
                index, due_at, request = self._running.pop(delta.request.id)
                self._done[index] = _trial(self._jobs[index], request, due_at)


def _trial(job: Job, request: Request, due_at: float) -> Trial:
    assert request.first_token_at is not None and request.finished_at is not None
    token_ids = request.tokens[len(request.prompt) :]
    return Trial(
        prompt_id=job.prompt_id,
        category=job.category,
        num_prompt=len(request.prompt),
        num_output=len(token_ids),
        text=request.writer.text,
        finish_reason=request.finish_reason,
        time_to_first_token=request.first_token_at - due_at,
        end_to_end=request.finished_at - due_at,
        token_ids=token_ids,
        counts=request.spec,
    )


def failed(job: Job, reason: str) -> Trial:
    return Trial(job.prompt_id, job.category, 0, 0, "", None, 0.0, 0.0, error=reason)
