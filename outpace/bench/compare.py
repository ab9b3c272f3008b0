"""Compares two runs: first their conditions, then their figures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

Results = Mapping[str, Any]
_CONDITIONS = ("outpace", "commit", "python", "xllamacpp", "torch", "cpu", "gpu", "cores", "models", "seed")


def as_text(before: Results, after: Results) -> str:
    lines = [
        f"before  {before['verdict']['sentence']}",
        f"after   {after['verdict']['sentence']}",
        "",
        *_changed_conditions(before, after),
        *_cells(before, after),
    ]
    return "\n".join(lines)


def _changed_conditions(before: Results, after: Results) -> Iterator[str]:
    """Figures from two machines or two models do not compare two settings."""
    changed = [
        (name, before["provenance"].get(name), after["provenance"].get(name))
        for name in _CONDITIONS
        if before["provenance"].get(name) != after["provenance"].get(name)
    ]
    for name, old, new in changed:
        if name == "models":
            old, new = ", ".join(old or ()), ", ".join(new or ())
            old, new = (old, new) if old != new else (old, f"{new} (different file)")
        yield f"{name + ' differs':20}{old}  ->  {new}"
    if changed:
        yield ""


def _cells(before: Results, after: Results) -> Iterator[str]:
    old_cells = {cell["name"]: cell for cell in before["cells"]}
    new_cells = {cell["name"]: cell for cell in after["cells"]}
    yield f"{'':28}{'tok/s':>20}{'speedup':>36}{'TPOT p99, ms':>20}{'accepted':>16}"
    for name in [name for name in old_cells if name in new_cells]:
        yield name
        old, new = old_cells[name]["settings"], new_cells[name]["settings"]
        for setting in [each for each in old if each in new]:
            yield f"  {setting:26}{_row(old[setting], new[setting])}"
    for label, cells, others in (("before", old_cells, new_cells), ("after", new_cells, old_cells)):
        missing = [name for name in cells if name not in others]
        if missing:
            yield f"measured only {label}: {'; '.join(missing)}"


def _row(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    rate = _change(old["tokens_per_second"], new["tokens_per_second"], ".1f")
    tail = _change(_ms(old["time_per_output_token"]["p99"]), _ms(new["time_per_output_token"]["p99"]), ".1f")
    accepted = _change(_rate(old), _rate(new), ".0%")
    return f"{rate:>20}{_speedups(old['speedup'], new['speedup']):>36}{tail:>20}{accepted:>16}"


def _speedups(old: Mapping[str, Any] | None, new: Mapping[str, Any] | None) -> str:
    if not old or not new:
        return "-"
    change = ""
    if None not in (old["low"], old["high"], new["low"], new["high"]):
        if new["low"] > old["high"]:
            change = "  better"
        elif new["high"] < old["low"]:
            change = "  WORSE"
    return f"{old['value']:.2f} -> {new['value']:.2f}{change}"


def _change(old: float | None, new: float | None, style: str) -> str:
    if old is None or new is None:
        return "-"
    return f"{old:{style}} -> {new:{style}}"


def _rate(figures: Mapping[str, Any]) -> float | None:
    rate: float | None = (figures["acceptance"] or {}).get("rate")
    return rate


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds
