"""Percentiles, and confidence intervals for ratios of paired measurements. Pure functions of numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 2000
MIN_UNITS = 3  # with fewer paired units the spread is unknown
MIN_RESAMPLED_UNITS = 8  # with fewer, resampling gives too narrow an interval
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value and its confidence interval; no interval if there were too few units."""

    value: float
    low: float | None = None
    high: float | None = None
    num_units: int = 0

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.value:.3f} (no interval)"
        return f"{self.value:.3f} ({self.low:.3f} .. {self.high:.3f})"

    def as_dict(self) -> dict[str, Any]:
        return {"value": self.value, "low": self.low, "high": self.high, "num_units": self.num_units}


def percentile(values: Sequence[float], percent: float) -> float:
    """By linear interpolation between the two nearest values; NaN if there are none."""
    return float(np.percentile(np.asarray(values, np.float64), percent)) if len(values) else math.nan


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """The three that a table shows. P99 of few values is close to the largest of them."""
    return {f"p{percent}": percentile(values, percent) for percent in (50, 90, 99)}


def ratio_of_rates(
    amounts: Sequence[float],
    seconds: Sequence[float],
    base_amounts: Sequence[float],
    base_seconds: Sequence[float],
    *,
    confidence: float = 0.95,
    seed: int = 0,
) -> Estimate:
    """(sum of amounts / sum of seconds) over the same of the baseline. Element i of all four is one paired unit.

    The interval comes from resampling whole units, because a disturbance of the machine during a unit affects both of
    its sides. With fewer than MIN_RESAMPLED_UNITS it is Student's interval, on the logarithm of the ratio.
    """
    columns = np.array([amounts, seconds, base_amounts, base_seconds], np.float64)
    num_units = columns.shape[1]
    value = float(_ratio(columns.sum(axis=1)))
    if num_units < MIN_UNITS or not math.isfinite(value):
        return Estimate(value, num_units=num_units)
    if num_units < MIN_RESAMPLED_UNITS:
        factor = math.exp(student_t_quantile(0.5 + confidence / 2, num_units - 1) * _log_ratio_error(columns))
        return Estimate(value, value / factor, value * factor, num_units)
    picks = np.random.default_rng(seed).integers(num_units, size=(RESAMPLES, num_units))
    resampled = _ratio(columns[:, picks].sum(axis=2))
    tail = expanded_tail(num_units, confidence)
    low, high = np.quantile(resampled, [tail, 1 - tail])
    return Estimate(value, float(low), float(high), num_units)


def _ratio(sums: Floats) -> Floats:
    amount, seconds, base_amount, base_seconds = sums
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio: Floats = (amount / seconds) / (base_amount / base_seconds)
    return ratio


def _log_ratio_error(columns: Floats) -> float:
    """Standard error of the logarithm of the ratio, from the influence of each unit."""
    shares = columns / columns.sum(axis=1, keepdims=True)
    influence = shares[0] - shares[1] - shares[2] + shares[3]
    num_units = columns.shape[1]
    return math.sqrt(num_units / (num_units - 1) * float((influence**2).sum()))


def expanded_tail(num_units: int, confidence: float) -> float:
    """The tail probability at which to cut the bootstrap distribution of a mean-like figure of `num_units` units.

    The plain percentile interval is too narrow for few units, like a normal interval with the uncorrected standard
    deviation. The factor from that one to Student's interval corrects the coverage.
    """
    t = student_t_quantile(0.5 + confidence / 2, num_units - 1)
    return NormalDist().cdf(-t * math.sqrt(num_units / (num_units - 1)))


def student_t_quantile(probability: float, degrees: int) -> float:
    """For probabilities above one half; by bisection on the numerically integrated density."""
    low, high = 0.0, 1000.0
    for _ in range(60):
        middle = (low + high) / 2
        if student_t_cdf(middle, degrees) < probability:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def student_t_cdf(t: float, degrees: int) -> float:
    """With t = sqrt(degrees) * tan(angle) the density becomes a power of a cosine, which is smooth and bounded."""
    width = math.atan(t / math.sqrt(degrees)) / 2000
    angles = (np.arange(2000) + 0.5) * width  # midpoints
    log_scale = math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2) - 0.5 * math.log(math.pi)
    return 0.5 + math.exp(log_scale) * float((np.cos(angles) ** (degrees - 1)).sum()) * width
