"""A closed loop on the engine itself: so many requests run at once until all are done; what came of each, and when."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter

from outpace.config import SamplingParams
from outpace.core import Request, SpeculationCounts
from outpace.engine.engine import Engine


@dataclass(frozen=True, slots=True)
class Job:
    """One request to make. `prompt_id` says which prompt it is, so that runs can be compared."""

    prompt_id: int
    category: str
    tokens: Sequence[int]
    params: SamplingParams


@dataclass(slots=True)
class Trial:
    """One request as it went. Times in seconds, from when the request should have begun."""

    prompt_id: int
    category: str
    num_prompt: int
    token_ids: list[int]
    finish_reason: str | None
    time_to_first_token: float
    end_to_end: float
    counts: SpeculationCounts

    @property
    def num_output(self) -> int:
        return len(self.token_ids)

    @property
    def time_per_output_token(self) -> float | None:
        """Of the tokens after the first, whose time is another figure; None if there are none."""
        later = self.num_output - 1
        return (self.end_to_end - self.time_to_first_token) / later if later > 0 else None


@dataclass(slots=True)
class Run:
    """A set of requests run to the end under one setting.

    Decoding is counted over the steps that read no prompt: what speculation can change.
    """

    trials: list[Trial] = field(default_factory=list)  # in the order of the jobs
    seconds: float = 0.0
    decode_seconds: float = 0.0
    decode_tokens: int = 0
    num_steps: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(trial.num_output for trial in self.trials)


def run_closed(engine: Engine, jobs: Sequence[Job], concurrency: int) -> Run:
    """The engine must be idle. A run that breaks off leaves it clean."""
    run = Run()
    waiting = deque(enumerate(jobs))
    running: dict[int, tuple[int, Request]] = {}
    done: dict[int, Trial] = {}
    begin = perf_counter()
    try:
        while waiting or running:
            while waiting and len(running) < concurrency:
                index, job = waiting.popleft()
                request = engine.submit(job.tokens, job.params)
                running[request.id] = index, request
            before = perf_counter()
            deltas = engine.step()
            stats = engine.stats
            run.num_steps += 1
            if stats.num_decode_rows and not stats.num_prefill_tokens:
                run.decode_seconds += perf_counter() - before
                run.decode_tokens += stats.num_emitted
            for delta in deltas:
                if delta.finish_reason:
                    index, request = running.pop(delta.request.id)
                    done[index] = _trial(jobs[index], request)
    except BaseException:
        engine.reset()
        raise
    run.seconds = perf_counter() - begin
    run.trials = [done[index] for index in range(len(jobs))]
    return run


def _trial(job: Job, request: Request) -> Trial:
    assert request.first_token_at is not None and request.finished_at is not None
    return Trial(
        prompt_id=job.prompt_id,
        category=job.category,
        num_prompt=len(request.prompt),
        token_ids=request.tokens[len(request.prompt) :],
        finish_reason=request.finish_reason,
        time_to_first_token=request.first_token_at - request.submitted_at,
        end_to_end=request.finished_at - request.submitted_at,
        counts=request.spec,
    )
