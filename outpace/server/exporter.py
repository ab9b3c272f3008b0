"""Shows the engine's metrics in Prometheus' format, under the names that vLLM's dashboards use and some of our own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from outpace.metrics import PARTS, EngineMetrics, Histogram

if TYPE_CHECKING:
    from prometheus_client import Metric


class Exporter(Collector):
    """Reads the metrics when Prometheus collects. Several may exist, each with its own registry."""

    def __init__(self, metrics: EngineMetrics, model_name: str, cache: Mapping[str, str]) -> None:
        """`cache`: facts on the KV cache, for vllm:cache_config_info."""
        self._metrics = metrics
        self._model = model_name
        self._cache = dict(cache)

    def collect(self) -> Iterator[Metric]:
        m = self._metrics
        yield from self._speculation(m)
        yield from self._requests(m)
        yield from self._load(m)
        yield from self._own(m)

    def _speculation(self, m: EngineMetrics) -> Iterator[Metric]:
        counter, gauge = self._counter, self._gauge
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

    def _requests(self, m: EngineMetrics) -> Iterator[Metric]:
        histogram = self._histogram
        between = "Time between output tokens."
        yield histogram("vllm:time_to_first_token_seconds", "From submission to first token.", m.time_to_first_token)
        yield histogram("vllm:inter_token_latency_seconds", between, m.time_per_output_token)
        older = f"{between} Older name of vllm:inter_token_latency_seconds."
        yield histogram("vllm:time_per_output_token_seconds", older, m.time_per_output_token)
        yield histogram("vllm:e2e_request_latency_seconds", "From submission to the last token.", m.latency)
        yield histogram("vllm:request_queue_time_seconds", "From submission to the first step.", m.queue_time)
        yield histogram("vllm:request_prefill_time_seconds", "From the first step to the first token.", m.prefill_time)
        yield histogram("vllm:request_decode_time_seconds", "From the first token to the last.", m.decode_time)
        yield histogram("vllm:request_inference_time_seconds", "From the first step to the last.", m.inference_time)
        yield histogram("vllm:request_prompt_tokens", "Prompt tokens of a completion.", m.prompt_length)
        yield histogram("vllm:request_generation_tokens", "Tokens generated for a completion.", m.output_length)
        longest = "Tokens of the longest completion of a prompt."
        yield histogram("vllm:request_max_num_generation_tokens", longest, m.longest_output)
        yield histogram("vllm:request_params_max_tokens", "max_tokens of a completion.", m.output_limit)
        yield histogram("vllm:request_params_n", "Completions of a prompt.", m.num_completions)
        yield self._labelled("vllm:request_success", "Requests ended, by reason.", "finished_reason", dict(m.finished))

    def _load(self, m: EngineMetrics) -> Iterator[Metric]:
        counter, gauge = self._counter, self._gauge
        yield gauge("vllm:num_requests_running", "Requests that run now.", m.num_running)
        yield gauge("vllm:num_requests_waiting", "Requests that wait in the queue.", m.num_waiting)
        usage = "Share of the KV cache that running requests hold; 1 is all of it."
        yield gauge("vllm:kv_cache_usage_perc", usage, m.cache_usage)
        yield gauge("vllm:gpu_cache_usage_perc", f"{usage} Older name of vllm:kv_cache_usage_perc.", m.cache_usage)
        yield counter("vllm:num_preemptions", "Requests preempted, to be computed again later.", m.num_preemptions)
        yield counter(
            "vllm:prompt_tokens",
            "Prompt tokens computed or shared for requests.",
            m.num_prompt_tokens,
        )
        yield counter("vllm:generation_tokens", "Tokens generated.", m.num_generated_tokens)
        yield counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the cache.", m.num_prompt_tokens)
        yield counter("vllm:prefix_cache_hits", "Prompt tokens found there.", m.num_prefix_hits)
        step = "Tokens of one step: computed for prompts, and generated."
        yield self._histogram("vllm:iteration_tokens_total", step, m.step_tokens)
        cache = GaugeMetricFamily("vllm:cache_config_info", "The KV cache.", labels=["model_name", *self._cache])
        cache.add_metric([self._model, *self._cache.values()], 1.0)
        yield cache

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
            "outpace_step_seconds", "Time of steps, by part.", "part", {k: m.step_seconds[k] for k in PARTS}
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
