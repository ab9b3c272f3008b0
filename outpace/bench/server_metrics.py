"""Reads speculation figures from the metrics page of Outpace, vLLM, llama.cpp or SGLang.

New vLLM, Outpace and llama.cpp have the counters ...spec_decode_num_drafts, _num_draft_tokens, _num_accepted_tokens
and _num_accepted_tokens_per_pos. Old vLLM counts emitted tokens instead of drafts. SGLang has gauges only: the mean
accepted length and, in newer versions, the rate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

from outpace.bench.trials import DraftTotals

_PREFIXES = ("vllm", "llamacpp")
_COUNTERS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_emitted_tokens")


@dataclass(slots=True)
class Snapshot:
    """The figures at one moment, summed over models and ranks; None if the server does not have them."""

    num_drafts: float | None = None
    num_draft_tokens: float | None = None
    num_accepted_tokens: float | None = None
    num_emitted_tokens: float | None = None
    accepted_per_position: dict[int, float] = field(default_factory=dict)
    accept_length: float | None = None  # a gauge over the server's recent past
    accept_rate: float | None = None

    @property
    def is_empty(self) -> bool:
        return self.num_draft_tokens is None and self.accept_length is None and self.accept_rate is None


def read_metrics(page: str) -> Snapshot:
    """Parse the text of a /metrics page; an unknown page gives an empty snapshot."""
    found = Snapshot()
    try:
        samples = [sample for family in text_string_to_metric_families(page) for sample in family.samples]
    except ValueError:
        return found
    for sample in samples:
        prefix, _, name = sample.name.partition(":")
        name = name.removesuffix("_total")
        if math.isnan(sample.value):
            continue
        if prefix == "sglang" and name in ("spec_accept_length", "spec_accept_rate"):
            setattr(found, name.removeprefix("spec_"), sample.value)
        elif prefix in _PREFIXES and name == "spec_decode_draft_acceptance_rate":
            found.accept_rate = sample.value
        elif prefix in _PREFIXES and name.startswith("spec_decode_"):
            _count(found, name.removeprefix("spec_decode_"), sample.labels, sample.value)
    return found


def _count(found: Snapshot, name: str, labels: dict[str, str], value: float) -> None:
    if name in _COUNTERS:
        setattr(found, name, (getattr(found, name) or 0.0) + value)
    elif name == "num_accepted_tokens_per_pos" and labels.get("position", "").isdecimal():
        position = int(labels["position"])
        found.accepted_per_position[position] = found.accepted_per_position.get(position, 0.0) + value


def between(before: Snapshot, after: Snapshot) -> DraftTotals | None:
    """Totals between two snapshots; gauges come from the second. None if nothing is known."""
    if after.is_empty:
        return None
    if after.num_draft_tokens is None:
        return DraftTotals(mean_accepted_length=after.accept_length)
    drafted = _grown(before.num_draft_tokens, after.num_draft_tokens)
    accepted = _grown(before.num_accepted_tokens, after.num_accepted_tokens)
    drafts = _grown(before.num_drafts, after.num_drafts)
    if after.num_drafts is None and after.num_emitted_tokens is not None:
        # Each verified draft also emits one token of the target's own.
        drafts = _grown(before.num_emitted_tokens, after.num_emitted_tokens) - accepted
    positions = range(max(after.accepted_per_position, default=-1) + 1)
    per_position = [
        round(after.accepted_per_position.get(i, 0.0) - before.accepted_per_position.get(i, 0.0)) for i in positions
    ]
    while per_position and per_position[-1] == 0:  # some servers list every possible position
        per_position.pop()
    if not drafted:
        return DraftTotals()
    return DraftTotals(
        num_drafted=drafted,
        num_accepted=accepted,
        # Per verified draft, the target's own token included; steps without a draft are not counted by these servers.
        mean_accepted_length=1 + accepted / drafts if drafts else None,
        # Each draft counts at every position, because servers do not report draft lengths.
        drafted_per_position=[drafts] * len(per_position) if drafts else [],
        accepted_per_position=per_position if drafts else [],
    )


def _grown(before: float | None, after: float | None) -> int:
    return round((after or 0.0) - (before or 0.0))
