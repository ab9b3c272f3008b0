"""Formats numbers for reports; a dash if there is none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def number(value: float | None, style: str) -> str:
    return "-" if value is None else f"{value:{style}}"


def milliseconds(seconds: float | None, style: str = ".1f") -> str:
    return number(None if seconds is None else 1e3 * seconds, style)


def interval(estimate: Mapping[str, Any] | None) -> str:
    """A value with its confidence interval, where it has one."""
    if not estimate:
        return "-"
    if estimate["low"] is None:
        return f"{estimate['value']:.2f}"
    return f"{estimate['value']:.2f} ({estimate['low']:.2f} to {estimate['high']:.2f})"
