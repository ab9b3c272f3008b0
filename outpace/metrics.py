"""Totals of what the engine did. Only the engine's thread writes them; exporters only read.

`EngineMetrics` holds plain numbers. `Exporter` shows them in Prometheus' format, under the names that vLLM's dashboards
use and some of our own; `summary` gives them as one JSON object, `log_line` as a log line. HTTP is left to the server.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from outpace.core import MethodCounts, Request, StepStats

if TYPE_CHECKING:
    from prometheus_client import Metric

    from outpace.engine.engine import Engine

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_TOKEN_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)
_RATES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
_PARTS = ("schedule", "policy", "draft", "forward", "verify")
_DEPTHS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)


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
    step_seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_PARTS, 0.0))
    spent_seconds: float = 0.0
    plain_seconds: float = 0.0
    time_to_first_token: Histogram = field(default_factory=lambda: Histogram(_SECONDS))
    time_per_output_token: Histogram = field(default_factory=lambda: Histogram(_TOKEN_SECONDS))
    latency: Histogram = field(default_factory=lambda: Histogram(_SECONDS))
    depth: Histogram = field(default_factory=lambda: Histogram(_DEPTHS))
    acceptance: dict[str, Histogram] = field(default_factory=dict)  # per request, by method

    def step_done(self, stats: StepStats) -> None:
        self.num_steps += 1
        self.num_preemptions += stats.num_preempted
        self.num_plain_rows += stats.num_plain_rows
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
            self.time_to_first_token.observe(now - request.submitted_at)
        elif num_new:
            self.time_per_output_token.observe((now - last_at) / num_new, num_new)

    def ended(self, request: Request, reason: str) -> None:
        spec = request.spec
        self.finished[reason] += 1
        self.latency.observe((request.finished_at or request.submitted_at) - request.submitted_at)
        self.num_lossy_requests += request.params.speculation.is_lossy
        self.num_lenient += spec.num_lenient
        if spec.num_drafted:
            method = "+".join(sorted(spec.proposers))
            histogram = self.acceptance.setdefault(method, Histogram(_RATES))
            histogram.observe(spec.num_accepted / spec.num_drafted)

    def look_at(self, engine: Engine) -> None:
        """Update the gauges. Kept prefixes of finished requests do not count as used: they are evicted on demand."""
        scheduler = engine.scheduler
        self.num_running, self.num_waiting = len(scheduler.running), len(scheduler.waiting)
        used = sum(request.num_computed for request in scheduler.running)
        self.cache_usage = min(1.0, used / engine.capacity.cache_tokens)
        self.spent_seconds, self.plain_seconds = engine.budget.spent_seconds, engine.budget.plain_seconds

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
        """From the engine's budget; None before anything was drafted."""
        return self.plain_seconds / self.spent_seconds if self.spent_seconds and self.num_drafted else None

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


class Exporter(Collector):
    """Reads the metrics when Prometheus collects. Several may exist, each with its own registry."""

    def __init__(self, metrics: EngineMetrics, model_name: str) -> None:
        self._metrics = metrics
        self._model = model_name

    def collect(self) -> Iterator[Metric]:
        m = self._metrics
        counter, gauge, histogram = self._counter, self._gauge, self._histogram
        yield counter("vllm:spec_decode_num_drafts", "Drafts verified in speculative decoding.", m.num_drafts)
        yield counter("vllm:spec_decode_num_draft_tokens", "Draft tokens in speculative decoding.", m.num_drafted)
        yield counter("vllm:spec_decode_num_accepted_tokens", "Draft tokens accepted by the target.", m.num_accepted)
        per_position = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens accepted, by position in the draft.",
            labels=["model_name", "position"],
        )
        for position, count in sorted(dict(m.accepted_per_position).items()):
            per_position.add_metric([self._model, str(position)], count)
        yield per_position
        yield gauge(
            "vllm:spec_decode_draft_acceptance_rate",
            "Speculative decoding draft acceptance rate since the start.",
            m.acceptance_rate,
        )
        yield histogram("vllm:time_to_first_token_seconds", "From submission to first token.", m.time_to_first_token)
        yield histogram("vllm:time_per_output_token_seconds", "Between output tokens.", m.time_per_output_token)
        yield histogram("vllm:e2e_request_latency_seconds", "From submission to the last token.", m.latency)
        yield gauge("vllm:num_requests_running", "Requests that run now.", m.num_running)
        yield gauge("vllm:num_requests_waiting", "Requests that wait in the queue.", m.num_waiting)
        usage = "Share of the KV cache that running requests hold; 1 is all of it."
        yield gauge("vllm:kv_cache_usage_perc", usage, m.cache_usage)
        yield gauge("vllm:gpu_cache_usage_perc", f"{usage} Older name of vllm:kv_cache_usage_perc.", m.cache_usage)
        yield counter("vllm:num_preemptions", "Requests preempted, to be computed again later.", m.num_preemptions)
        yield counter("vllm:prompt_tokens", "Prompt tokens of requests that emitted a token.", m.num_prompt_tokens)
        yield counter("vllm:generation_tokens", "Tokens generated.", m.num_generated_tokens)
        yield self._labelled("vllm:request_success", "Requests ended, by reason.", "finished_reason", dict(m.finished))
        yield from self._own(m)

    def _own(self, m: EngineMetrics) -> Iterator[Metric]:
        counter, gauge = self._counter, self._gauge
        acceptance = HistogramMetricFamily(
            "outpace_acceptance_rate_per_request",
            "Share of a request's draft tokens that were accepted, by drafting method.",
            labels=["model_name", "method"],
        )
        for method, values in sorted(dict(m.acceptance).items()):
            acceptance.add_metric([self._model, method], values.buckets(), values.total)
        yield acceptance
        for what in ("drafted", "accepted"):
            tokens = {method: getattr(counts, f"num_{what}") for method, counts in dict(m.by_method).items()}
            yield self._labelled(
                f"outpace_{what}_tokens", f"Draft tokens {what}, by drafting method.", "method", tokens
            )
        speedup = m.estimated_speedup or 1.0
        yield gauge(
            "outpace_estimated_speedup_ratio",
            "Estimated time of plain decoding of the same tokens / time taken; 1: no gain.",
            speedup,
        )
        yield self._histogram(
            "outpace_speculation_depth", "Draft tokens verified for one request in one step; 0: plain.", m.depth
        )
        yield counter("outpace_plain_steps", "Steps of a decoding request that verified no draft.", m.num_plain_rows)
        yield self._labelled(
            "outpace_ledger_seconds",
            "Seconds that decoding took, and the estimate for plain decoding of the same tokens.",
            "kind",
            {"spent": m.spent_seconds, "plain": m.plain_seconds},
            family=GaugeMetricFamily,
        )
        yield counter("outpace_lossy_requests", "Requests that asked for lossy acceptance.", m.num_lossy_requests)
        yield counter("outpace_lossy_tokens", "Tokens accepted only by a lossy rule.", m.num_lenient)
        yield counter("outpace_engine_steps", "Forward passes of the target.", m.num_steps)
        yield counter("outpace_engine_faults", "Steps that failed.", m.num_faults)
        yield self._labelled(
            "outpace_step_seconds", "Time of steps, by part.", "part", {k: m.step_seconds[k] for k in _PARTS}
        )

    def _counter(self, name: str, what: str, value: float) -> CounterMetricFamily:
        family = CounterMetricFamily(name, what, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def _gauge(self, name: str, what: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(name, what, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def _histogram(self, name: str, what: str, values: Histogram) -> HistogramMetricFamily:
        family = HistogramMetricFamily(name, what, labels=["model_name"])
        family.add_metric([self._model], values.buckets(), values.total)
        return family

    def _labelled(
        self,
        name: str,
        what: str,
        label: str,
        values: dict[str, Any],
        family: type[CounterMetricFamily] | type[GaugeMetricFamily] = CounterMetricFamily,
    ) -> CounterMetricFamily | GaugeMetricFamily:
        result = family(name, what, labels=["model_name", label])
        for value, count in sorted(values.items()):
            result.add_metric([self._model, value], count)
        return result
