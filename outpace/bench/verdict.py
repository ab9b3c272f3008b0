"""Turns figures into a decision in plain sentences: use it, use it for some classes, leave it off, no difference beyond
noise, or not known yet.

A pure function of the results. Every sentence has its figures, and a decision needs intervals that support it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outpace.bench.advice import commands
from outpace.bench.findings import Finding, all_findings, shown

PLAIN_NAME = "off"
WORTH_IT = 1.03  # a smaller gain may be real, but is not worth a setting
MIN_UNITS = 8  # with fewer paired blocks there is no decision
NO_GAIN = 1.05  # an interval that ends below this excludes a noticeable gain
NO_LOSS = 0.97  # an interval that begins above this excludes a noticeable loss
AUTO_MARGIN = 0.97  # of the best setting's speedup; from there on `auto` is preferred, because it needs no tuning

Results = Mapping[str, Any]


def verdict(results: Results) -> dict[str, Any]:
    findings = all_findings(results)
    overall = results["overall"]
    candidates = {name: each for name, each in overall.items() if name != PLAIN_NAME and each.get("all")}
    if not candidates:
        sentence = "Speculation was not compared with plain decoding, so there is no verdict; measure both."
        return _answer("too_little_data", None, sentence, [], [], findings, results)
    setting = _preferred(candidates)
    gains, losses = _classes(candidates[setting])
    decision, sentence = _decide(setting, candidates[setting], gains, losses)
    return _answer(decision, setting, sentence, gains, losses, findings, results)


def _preferred(candidates: Mapping[str, Any]) -> str:
    """The fastest overall, or `auto` if it is about as fast."""
    best = max(candidates, key=lambda name: float(candidates[name]["all"]["value"]))
    if "auto" in candidates and candidates["auto"]["all"]["value"] >= AUTO_MARGIN * candidates[best]["all"]["value"]:
        return "auto"
    return best


def _classes(speedups: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Classes with a significant gain worth having, and classes with a significant loss."""
    known = {name: each for name, each in speedups.items() if name != "all" and each and each["low"] is not None}
    gains = [name for name, each in known.items() if each["low"] > 1.0 and each["value"] >= WORTH_IT]
    losses = [name for name, each in known.items() if each["high"] < 1.0]
    return sorted(gains, key=lambda name: -known[name]["value"]), sorted(losses, key=lambda name: known[name]["value"])


def _decide(setting: str, speedups: Mapping[str, Any], gains: list[str], losses: list[str]) -> tuple[str, str]:
    whole = speedups["all"]
    figure = f"{shown(whole)} of plain decoding's speed over {whole['num_units']} paired blocks of requests"
    if whole["low"] is None or whole["num_units"] < MIN_UNITS:
        return "too_little_data", (
            f"Too little data for a verdict: {figure}. Run it longer (--requests, --time-budget)."
        )
    is_gain = whole["low"] > 1.0 and whole["value"] >= WORTH_IT
    if is_gain and not losses:
        return "use", f"Use it: with {setting}, {figure}, and no class of requests loses."
    if gains and (losses or not is_gain):
        keep = _with_figures(gains, speedups)
        rest = f" These lose: {_with_figures(losses, speedups)}." if losses else " The others show no clear gain."
        return "use_for_some", f"Use it for {keep} only: with {setting}, {figure}.{rest}"
    if is_gain:
        slower = _with_figures(losses, speedups)
        return "use_for_some", f"It pays, but not for every class: with {setting}, {figure}. These lose: {slower}."
    if whole["low"] <= 1.0 and whole["high"] >= NO_GAIN:
        return "no_difference", (
            f"No difference beyond noise: with {setting}, {figure}. A longer run (--requests, --time-budget) or a "
            "quieter machine could show a smaller one."
        )
    if setting == "auto" and whole["low"] >= NO_LOSS:
        return "leave_off", f"Leave it off, or leave it on auto, which costs nothing here: {figure}."
    return "leave_off", f"Leave it off: with {setting}, the best setting tried, {figure}."


def _with_figures(names: list[str], speedups: Mapping[str, Any]) -> str:
    parts = [f"{name} at {shown(speedups[name])}" for name in names]
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def _answer(
    decision: str,
    setting: str | None,
    sentence: str,
    gains: list[str],
    losses: list[str],
    findings: list[Finding],
    results: Results,
) -> dict[str, Any]:
    return {
        "decision": decision,
        "setting": setting,
        "sentence": sentence,
        "classes_that_gain": gains,
        "classes_that_lose": losses,
        "findings": [each.as_dict() for each in findings],
        "commands": commands(decision, setting, losses, results),
    }
