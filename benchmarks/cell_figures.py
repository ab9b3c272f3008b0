"""Computes a cell's figures from the sums of its blocks, and prints all cells as a table. See policy_cells."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from outpace.bench.settings import AUTO, PLAIN
from outpace.bench.statistics import Estimate, percentile, ratio_of_rates

Block = Mapping[str, Mapping[str, Any]]


def figures(blocks: Sequence[Block]) -> dict[str, Any]:
    names = list(blocks[0])
    settings = {name: _setting(blocks, name) for name in sorted(names)}
    fixed = [name for name in names if name not in (PLAIN.name, AUTO.name)]
    found: dict[str, Any] = {"num_blocks": len(blocks), "settings": settings}
    if fixed:
        best = max(fixed, key=lambda name: settings[name]["decode_ratio"]["value"])
        found["best_fixed"] = best
        found["auto_to_best_fixed"] = _ratio(blocks, AUTO.name, best, "decode_tokens", "decode_seconds").as_dict()
    return found


def _setting(blocks: Sequence[Block], name: str) -> dict[str, Any]:
    sums = {key: _total(blocks, name, key) for key in blocks[0][name] if key != "time_per_output_token"}
    latencies = [value for block in blocks for value in block[name]["time_per_output_token"] if value is not None]
    drafted = sums["num_drafted"] > 0 and sums["estimated_decode_seconds"] > 0
    return {
        "decode_tokens_per_second": sums["decode_tokens"] / sums["decode_seconds"] if sums["decode_seconds"] else None,
        "decode_ratio": _ratio(blocks, name, PLAIN.name, "decode_tokens", "decode_seconds").as_dict(),
        "total_ratio": _ratio(blocks, name, PLAIN.name, "num_tokens", "seconds").as_dict(),
        "estimated_speedup": sums["estimated_plain_seconds"] / sums["estimated_decode_seconds"] if drafted else None,
        "acceptance": sums["num_accepted"] / sums["num_drafted"] if sums["num_drafted"] else None,
        "num_drafted": int(sums["num_drafted"]),
        "num_requests": int(sums["num_requests"]),
        "num_unequal": int(sums["num_unequal"]),
        "p99_time_per_output_token": percentile(latencies, 99),
    }


def _ratio(blocks: Sequence[Block], name: str, base: str, amount: str, seconds: str) -> Estimate:
    columns = [[block[run][key] for block in blocks] for run in (name, base) for key in (amount, seconds)]
    return ratio_of_rates(*columns)


def _total(blocks: Sequence[Block], name: str, key: str) -> float:
    return sum(float(block[name][key]) for block in blocks)


def print_table(cells: Mapping[str, Any]) -> None:
    print(
        f"{'cell':18}{'plain tok/s':>12}{'auto/plain decode':>26}{'total':>8}{'estimated':>10}{'P99 TPOT':>9}"
        f"{'best fixed':>12}{'its ratio':>10}{'auto/best':>26}{'unequal':>9}"
    )
    logs = []
    for name, cell in cells.items():
        found = cell["figures"]
        plain, auto = found["settings"][PLAIN.name], found["settings"][AUTO.name]
        best = found.get("best_fixed")
        ratio = auto["decode_ratio"]
        logs.append(math.log(ratio["value"]))
        flag = " <" if ratio["value"] < 0.98 else ""
        tail = auto["p99_time_per_output_token"] / plain["p99_time_per_output_token"]
        estimated = f"{auto['estimated_speedup']:.3f}" if auto["estimated_speedup"] else "-"
        versus = f"{best:>12}{found['settings'][best]['decode_ratio']['value']:10.3f}" if best else f"{'-':>22}"
        beside = _shown(found["auto_to_best_fixed"]) if best else "-"
        print(
            f"{name:18}{plain['decode_tokens_per_second']:12.1f}{_shown(ratio):>26}{auto['total_ratio']['value']:8.3f}"
            f"{estimated:>10}{tail:9.3f}{versus}{beside:>26}{auto['num_unequal']:5} / {auto['num_requests']}{flag}"
        )
    if logs:
        print(f"geometric mean of auto/plain over {len(logs)} cells: {math.exp(sum(logs) / len(logs)):.3f}")


def _shown(ratio: Mapping[str, Any]) -> str:
    return str(Estimate(ratio["value"], ratio["low"], ratio["high"]))
