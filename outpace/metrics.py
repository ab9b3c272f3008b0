"""Totals of what the engine did. Only the engine's thread writes them; exporters only read.

`EngineMetrics` holds plain numbers. `summary` gives them as one JSON object, `log_line` as a log line;
`server/exporter.py` shows them in Prometheus' format. A step updates counters only; what is known of a request is
counted once, when it ends.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from outpace.core import MethodCounts, Request, StepStats, speedup_or_none

if TYPE_CHECKING:
    from outpace.engine.engine import Engine

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_TOKEN_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)
_RATES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
PARTS = ("schedule", "policy", "draft", "forward", "verify")  # of a step
_DEPTHS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)
_LENGTHS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))  # tokens of a request
_STEP_TOKENS = tuple(2**power for power in (0, *range(3, 15)))
_NUMBERS = (1, 2, 5, 10, 20, 50, 100)


class Histogram:
    """Counts by bucket. Cheaper than the client library's class, which locks and converts on every observation."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self.total += value * times

    @property
    def count(self) -> int:
        return sum(self._counts)

    def nonzero(self) -> dict[str, int]:
        """How many values were at most each bound and above the one before it, where there were any."""
        names = (*(f"{bound:g}" for bound in self._bounds), "more")
        return {name: count for name, count in zip(names, self._counts, strict=True) if count}

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative counts, as Prometheus expects them."""
        seen = 0
        result = []
        for bound, count in zip((*map(float, self._bounds), "+Inf"), list(self._counts), strict=True):
            seen += count
            result.append((str(bound), float(seen)))
        return result


@dataclass(slots=True)
class EngineMetrics:
    num_steps: int = 0
    num_faults: int = 0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    by_method: dict[str, MethodCounts] = field(default_factory=dict)  # counts of drafts
    accepted_per_position: Counter[int] = field(default_factory=Counter)
    num_plain_rows: int = 0
    num_preemptions: int = 0
    num_lossy_requests: int = 0
    num_lenient: int = 0
    finished: Counter[str] = field(default_factory=Counter)  # by reason
    num_running: int = 0
    num_waiting: int = 0
    cache_usage: float = 0.0
    step_seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    spent_seconds: float = 0.0
    plain_seconds: float = 0.0
    time_to_first_token: Histogram = field(default_factory=lambda: Histogram(_SECONDS))
    time_per_output_token: Histogram = field(default_factory=lambda: Histogram(_TOKEN_SECONDS))
    latency: Histogram = field(default_factory=lambda: Histogram(_SECONDS))
    depth: Histogram = field(default_factory=lambda: Histogram(_DEPTHS))
    acceptance: dict[str, Histogram] = field(default_factory=dict)  # per request, by method
    step_tokens: Histogram = field(default_factory=lambda: Histogram(_STEP_TOKENS))
    num_prefix_hits: int = 0  # prompt tokens taken from another sequence's cache
    # Of each request that emitted a token. Its phases are one after the other: in the queue, prefill, decode.
    queue_time: Histogram = field(default_factory=lambda: Histogram(_SECONDS))
    prefill_time: Histogram = field(default_factory=lambda: Histogram(_SECONDS))
    decode_time: Histogram = field(default_factory=lambda: Histogram(_SECONDS))
    inference_time: Histogram = field(default_factory=lambda: Histogram(_SECONDS))
    prompt_length: Histogram = field(default_factory=lambda: Histogram(_LENGTHS))
    output_length: Histogram = field(default_factory=lambda: Histogram(_LENGTHS))
    output_limit: Histogram = field(default_factory=lambda: Histogram(_LENGTHS))  # max_tokens
    longest_output: Histogram = field(default_factory=lambda: Histogram(_LENGTHS))  # of a request's n completions
    num_completions: Histogram = field(default_factory=lambda: Histogram(_NUMBERS))  # n
    _unfinished: dict[Hashable, list[int]] = field(default_factory=dict)  # lengths, of requests with several

    def step_done(self, stats: StepStats) -> None:
        self.num_steps += 1
        self.num_preemptions += stats.num_preempted
        self.num_plain_rows += stats.num_plain_rows
        self.step_tokens.observe(stats.num_prefill_tokens + stats.num_emitted)
        if stats.num_plain_rows:
            self.depth.observe(0, stats.num_plain_rows)
        for depth, num_rows in Counter(stats.depths).items():
            self.depth.observe(depth, num_rows)
        for accepted, num_rows in Counter(stats.accepted).items():
            for position in range(accepted):  # the accepted tokens are always a prefix of the draft
                self.accepted_per_position[position] += num_rows
        for method, counts in stats.drafts_by_method.items():
            total = self.by_method.setdefault(method, MethodCounts())
            total.num_drafts += counts.num_drafts
            total.num_drafted += counts.num_drafted
            total.num_accepted += counts.num_accepted
        seconds = self.step_seconds
        seconds["schedule"] += stats.schedule_seconds
        seconds["policy"] += stats.policy_seconds + stats.learning_seconds
        seconds["draft"] += stats.lookup_seconds + stats.draft_seconds
        seconds["forward"] += stats.forward_seconds
        seconds["verify"] += stats.verify_seconds

    def advanced(self, request: Request, num_new: int, last_at: float | None, now: float) -> None:
        """A step emitted `num_new` tokens for this request; `last_at` is when it last emitted some."""
        self.num_generated_tokens += num_new
        if last_at is None:
            self.num_prompt_tokens += len(request.prompt)
            self.num_prefix_hits += request.num_shared
            if num_new:
                self.time_to_first_token.observe(now - request.submitted_at)
        elif num_new:
            self.time_per_output_token.observe((now - last_at) / num_new, num_new)

    def ended(self, request: Request, reason: str, group: Hashable = None) -> None:
        """A completion ended. The `n` completions of one prompt share a group."""
        spec = request.spec
        self.finished[reason] += 1
        self.latency.observe((request.finished_at or request.submitted_at) - request.submitted_at)
        self.num_lossy_requests += request.params.speculation.is_lossy
        self.num_lenient += spec.num_lenient
        if spec.num_drafted:
            method = "+".join(sorted(spec.proposers))
            histogram = self.acceptance.setdefault(method, Histogram(_RATES))
            histogram.observe(spec.num_accepted / spec.num_drafted)
        self._measure_phases(request)
        self._measure_lengths(request, group)

    def _measure_phases(self, request: Request) -> None:
        admitted, first, last = request.admitted_at, request.first_token_at, request.finished_at
        if admitted is not None and first is not None and last is not None:
            self.queue_time.observe(admitted - request.submitted_at)
            self.prefill_time.observe(first - admitted)
            self.decode_time.observe(last - first)
            self.inference_time.observe(last - admitted)

    def _measure_lengths(self, request: Request, group: Hashable) -> None:
        if request.first_token_at is not None:
            self.prompt_length.observe(len(request.prompt))
            self.output_length.observe(request.num_output)
            self.output_limit.observe(request.params.max_tokens)
        n = request.params.n
        lengths = [request.num_output] if n == 1 else self._unfinished.setdefault(group, [])
        if n > 1:
            lengths.append(request.num_output)
        if len(lengths) == n:
            self._unfinished.pop(group, None)
            if any(lengths):
                self.longest_output.observe(max(lengths))
                self.num_completions.observe(n)

    def look_at(self, engine: Engine) -> None:
        """Update the gauges. Kept prefixes of finished requests do not count as used: they are evicted on demand."""
        scheduler = engine.scheduler
        self.num_running, self.num_waiting = len(scheduler.running), len(scheduler.waiting)
        used = sum(request.num_computed for request in scheduler.running)
        self.cache_usage = min(1.0, used / engine.capacity.cache_tokens)
        self.spent_seconds, self.plain_seconds = engine.policy.spent_seconds, engine.policy.plain_seconds

    @property
    def num_drafts(self) -> int:
        return sum(counts.num_drafts for counts in list(self.by_method.values()))

    @property
    def num_drafted(self) -> int:
        return sum(counts.num_drafted for counts in list(self.by_method.values()))

    @property
    def num_accepted(self) -> int:
        return sum(counts.num_accepted for counts in list(self.by_method.values()))

    @property
    def estimated_speedup(self) -> float | None:
        """From the engine's budget; None while there is too little to estimate it from."""
        generated, drafted = self.num_generated_tokens, self.num_drafted
        return speedup_or_none(self.plain_seconds, self.spent_seconds, num_generated=generated, num_drafted=drafted)

    @property
    def acceptance_rate(self) -> float:
        return self.num_accepted / self.num_drafted if self.num_drafted else 0.0


def summary(metrics: EngineMetrics) -> dict[str, Any]:
    speedup = metrics.estimated_speedup
    return {
        "running": metrics.num_running,
        "waiting": metrics.num_waiting,
        "cache_usage": round(metrics.cache_usage, 4),
        "prompt_tokens": metrics.num_prompt_tokens,
        "generated_tokens": metrics.num_generated_tokens,
        "drafted": metrics.num_drafted,
        "accepted": metrics.num_accepted,
        "acceptance_rate": round(metrics.acceptance_rate, 4),
        "estimated_speedup": None if speedup is None else round(speedup, 3),
        "preemptions": metrics.num_preemptions,
        "faults": metrics.num_faults,
        "finished": dict(metrics.finished),
    }


def log_line(before: dict[str, Any], now: dict[str, Any], seconds: float) -> str:
    """The changes between two summaries, in one line."""
    generated = now["generated_tokens"] - before["generated_tokens"]
    prompt = now["prompt_tokens"] - before["prompt_tokens"]
    drafted, accepted = now["drafted"] - before["drafted"], now["accepted"] - before["accepted"]
    parts = [
        f"{generated / seconds:.1f} tokens/s generated, {prompt / seconds:.1f} prompt tokens/s",
        f"{now['running']} running, {now['waiting']} waiting, cache {now['cache_usage']:.0%}",
        f"{accepted} of {drafted} draft tokens accepted" if drafted else "no drafts: plain decoding",
    ]
    if now["estimated_speedup"] is not None:
        parts.append(f"about {now['estimated_speedup']:.2f}x plain since the start")
    return "; ".join(parts)
