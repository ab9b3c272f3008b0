"""An actor that all replicas know: it holds their metrics, and what they have learned for those that start later."""

from __future__ import annotations

from time import monotonic
from typing import Any

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_STALE_SECONDS = 15.0  # after which a silent replica counts as gone


class Board:
    """Used as a Ray actor; a plain class, so that tests need no cluster."""

    def __init__(self) -> None:
        self._metrics: dict[str, tuple[float, str]] = {}
        self._learned: dict[str, Any] = {}  # by setting

    def report(self, replica: str, metrics: str) -> None:
        self._metrics[replica] = monotonic(), metrics

    def leave(self, replica: str) -> None:
        self._metrics.pop(replica, None)

    def metrics(self) -> str:
        now = monotonic()
        self._metrics = {name: each for name, each in self._metrics.items() if now - each[0] < _STALE_SECONDS}
        return merged({name: text for name, (_, text) in self._metrics.items()})

    def teach(self, setting: str, learned: Any) -> None:
        self._learned[setting] = learned

    def learned(self, setting: str) -> Any:
        """What a replica with this setting has learned last; None if there was none."""
        return self._learned.get(setting)


def merged(texts: dict[str, str]) -> str:
    """Prometheus' texts of several replicas as one, with a label `replica`."""
    families: dict[str, Metric] = {}
    for replica, text in sorted(texts.items()):
        for family in text_string_to_metric_families(text):
            found = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                found.samples.append(sample._replace(labels={**sample.labels, "replica": replica}))

    class _Given(Collector):
        def collect(self) -> Any:
            return iter(families.values())

    registry = CollectorRegistry()
    registry.register(_Given())
    return generate_latest(registry).decode()
