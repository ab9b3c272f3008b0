"""Turns paired runs into the numbers of a report: plain dictionaries, the only input of the verdict and the charts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from outpace.bench.paired import Paired, speed_ratio
from outpace.bench.settings import PLAIN
from outpace.bench.statistics import Estimate, percentile, percentiles
from outpace.bench.trials import DraftTotals, Run, Trial

HISTOGRAM_BINS = 10
_CDF_POINTS = 41


@dataclass(frozen=True, slots=True)
class Objective:
    """The limits in seconds for a good request. By default an answer begins within two seconds and is no slower than
    people read."""

    time_to_first_token: float = 2.0
    time_per_output_token: float = 0.1

    def is_met(self, trial: Trial) -> bool:
        later = trial.time_per_output_token
        return (
            not trial.error
            and trial.time_to_first_token <= self.time_to_first_token
            and (later is None or later <= self.time_per_output_token)
        )

    def as_dict(self) -> dict[str, float]:
        return {
            "time_to_first_token": self.time_to_first_token,
            "time_per_output_token": self.time_per_output_token,
        }


def cell_figures(paired: Paired, objective: Objective) -> dict[str, Any]:
    """Everything about one cell: per setting, and per class and setting."""
    names = [setting.name for setting in paired.settings]
    categories = sorted({trial.category for trial in paired.trials(names[0])})
    return {
        "num_blocks": paired.num_blocks,
        "settings": {name: _setting_figures(paired, name, objective) for name in names},
        "classes": {
            category: {name: _class_figures(paired, name, category, objective) for name in names}
            for category in categories
        },
    }


def pooled_speedups(cells: Sequence[Paired], setting: str) -> dict[str, Any]:
    """One setting's speedup over several cells together: `all`, and per class."""
    cells = [paired for paired in cells if setting in paired.runs]
    categories = sorted({trial.category for paired in cells for trial in paired.trials(setting)})
    found = {"all": estimate_dict(speed_ratio([paired.speed_rows(setting) for paired in cells]))}
    for category in categories:
        rows = [paired.speed_rows(setting, category=category) for paired in cells]
        found[category] = estimate_dict(speed_ratio(rows))
    return found


def _setting_figures(paired: Paired, name: str, objective: Objective) -> dict[str, Any]:
    runs, trials = paired.blocks(name), paired.trials(name)
    seconds = sum(run.seconds for run in runs)
    decode_seconds = sum(run.decode_seconds for run in runs)
    figures = _figures(trials, objective)
    has_base = PLAIN.name in paired.runs
    return figures | {
        "tokens_per_second": _over(sum(run.num_tokens for run in runs), seconds),
        "goodput": _over(sum(objective.is_met(trial) for trial in trials), seconds),
        "acceptance": acceptance_figures(trials, runs),
        "draft_share": _over(sum(run.draft_seconds for run in runs), decode_seconds),
        "speedup": estimate_dict(paired.speedup(name)) if has_base else None,
        "throughput_ratio": estimate_dict(paired.throughput_ratio(name)) if has_base else None,
        "decode_ratio": estimate_dict(paired.decode_ratio(name)) if has_base and decode_seconds else None,
        "estimated_speedup": paired.estimated_speedup(name),
        "num_unequal": paired.num_unequal(name) if has_base else None,
        "cdf": {
            "end_to_end": _cdf([trial.end_to_end for trial in trials if not trial.error]),
            "time_per_output_token": _cdf(_later_times(trials)),
        },
    }


def _class_figures(paired: Paired, name: str, category: str, objective: Objective) -> dict[str, Any]:
    trials = [trial for trial in paired.trials(name) if trial.category == category]
    has_base = PLAIN.name in paired.runs
    return _figures(trials, objective) | {
        "acceptance": acceptance_figures(trials, ()),
        "speedup": estimate_dict(paired.speedup(name, category=category)) if has_base else None,
    }


def _figures(trials: Sequence[Trial], objective: Objective) -> dict[str, Any]:
    answered = [trial for trial in trials if not trial.error]
    return {
        "num_requests": len(trials),
        "num_failed": len(trials) - len(answered),
        "errors": dict(Counter(trial.error for trial in trials if trial.error).most_common(5)),
        "num_tokens": sum(trial.num_output for trial in answered),
        "good_share": _over(sum(objective.is_met(trial) for trial in trials), len(trials)),
        "time_to_first_token": _finite(percentiles([trial.time_to_first_token for trial in answered])),
        "time_per_output_token": _finite(percentiles(_later_times(answered))),
        "end_to_end": _finite(percentiles([trial.end_to_end for trial in answered])),
    }


def acceptance_figures(trials: Sequence[Trial], runs: Sequence[Run]) -> dict[str, Any] | None:
    """From the answers if they have counts, otherwise from the server's metrics; None if nothing was drafted.

    A mean hides the requests that speculation slows down, so there is a histogram over requests, with its P10.
    """
    drafting = [trial.counts for trial in trials if trial.counts.num_drafted]
    totals = DraftTotals.of([trial.counts for trial in trials if not trial.error])
    reported = _reported([run.reported for run in runs if run.reported is not None])
    if not drafting:
        if not reported.num_drafted and reported.mean_accepted_length is None:
            return None
        totals = reported
    elif totals.mean_accepted_length is None:  # a server's answers do not count steps; its metrics do
        totals = replace(reported, num_drafted=totals.num_drafted, num_accepted=totals.num_accepted)
    rates = [each.num_accepted / each.num_drafted for each in drafting]
    edges = np.arange(HISTOGRAM_BINS + 1) / HISTOGRAM_BINS
    return {
        "rate": _over(totals.num_accepted, totals.num_drafted),
        "num_drafted": totals.num_drafted,
        "num_accepted": totals.num_accepted,
        "mean_accepted_length": totals.mean_accepted_length,
        "per_position": [
            _over(accepted, drafted)
            for accepted, drafted in zip(totals.accepted_per_position, totals.drafted_per_position, strict=True)
        ],
        "per_request": {
            "num_requests": len(rates),
            "p10": _number(percentile(rates, 10)),
            "p50": _number(percentile(rates, 50)),
            "histogram": [int(count) for count in np.histogram(rates, edges)[0]],
        },
    }


def _reported(parts: Sequence[DraftTotals]) -> DraftTotals:
    lengths = [part.mean_accepted_length for part in parts if part.mean_accepted_length is not None]
    depth = max((len(part.drafted_per_position) for part in parts), default=0)
    columns = [
        [sum(getattr(part, name)[i] for part in parts if i < len(getattr(part, name))) for i in range(depth)]
        for name in ("drafted_per_position", "accepted_per_position")
    ]
    return DraftTotals(
        num_drafted=sum(part.num_drafted for part in parts),
        num_accepted=sum(part.num_accepted for part in parts),
        mean_accepted_length=sum(lengths) / len(lengths) if lengths else None,
        drafted_per_position=columns[0],
        accepted_per_position=columns[1],
    )


def estimate_dict(estimate: Estimate) -> dict[str, Any] | None:
    """None instead of NaN, which JSON does not have: there was nothing to compare."""
    return estimate.as_dict() if math.isfinite(estimate.value) else None


def _later_times(trials: Sequence[Trial]) -> list[float]:
    times = [trial.time_per_output_token for trial in trials if not trial.error]
    return [time for time in times if time is not None]


def _cdf(values: Sequence[float]) -> list[float]:
    """Values at evenly spaced quantiles, from the smallest to the largest."""
    return [float(v) for v in np.quantile(values, np.linspace(0.0, 1.0, _CDF_POINTS))] if values else []


def _over(amount: float, whole: float) -> float | None:
    return amount / whole if whole else None


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _finite(values: dict[str, float]) -> dict[str, float | None]:
    return {name: _number(value) for name, value in values.items()}
