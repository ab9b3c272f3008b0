"""Findings beside the verdict: tail latency, unsuitable drafts, temperatures, loads, failures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

P50_BETTER = 0.98  # times plain's P50: at or below this the median got better
P99_WORSE = 1.05  # times plain's P99: at or above this the tail got worse
MIN_TAIL_REQUESTS = 20  # with fewer, P99 depends on a single request
MISMATCHED_FIRST = 0.15  # share of first tokens accepted; below this the draft does not match its target
WEAK_RATE = 0.5  # below this, an accepted token costs more than two drafted ones
LARGE_SHARE = 0.4  # of decode time spent on drafting

Results = Mapping[str, Any]
Cell = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Finding:
    kind: str
    sentence: str
    figures: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, "sentence": self.sentence, "figures": self.figures}


def all_findings(results: Results) -> list[Finding]:
    return [
        *kept_caches(results),
        *failures(results),
        *tails(results),
        *draft_health(results),
        *low_acceptance(results),
        *temperatures(results),
        *loads(results),
        *best_fixed(results),
        *unequal_answers(results),
    ]


def grid_cells(results: Results) -> list[Cell]:
    return [cell for cell in results["cells"] if cell["purpose"] == "grid"]


def shown(estimate: Mapping[str, Any]) -> str:
    if estimate["low"] is None:
        return f"{estimate['value']:.2f}x (no interval)"
    return f"{estimate['value']:.2f}x ({estimate['low']:.2f} to {estimate['high']:.2f})"


def kept_caches(results: Results) -> Iterator[Finding]:
    if results["target"].get("caches_emptied") is False:
        yield Finding(
            "kept_caches",
            "The server keeps its caches between runs. Repeated prompts (at another load or temperature) are "
            "answered from them, and proposers that remember answers look better than they are.",
        )


def failures(results: Results) -> Iterator[Finding]:
    for cell in results["cells"]:
        for name, figures in cell["settings"].items():
            if figures["num_failed"]:
                reason = next(iter(figures["errors"]), "no reason given")
                yield Finding(
                    "failures",
                    f"{figures['num_failed']} of {figures['num_requests']} requests failed with {name} at "
                    f"{cell['name']}: {reason}",
                    {"num_failed": figures["num_failed"], "num_requests": figures["num_requests"]},
                )


@dataclass(frozen=True, slots=True)
class TailTrouble:
    """The median got better and the tail worse; `culprit` is the class whose requests lost most."""

    cell: Cell
    setting: str
    p50_ratio: float
    p99_ratio: float
    culprit: str | None
    culprit_speedup: Mapping[str, Any] | None


def tail_troubles(results: Results) -> list[TailTrouble]:
    troubles = []
    for cell in grid_cells(results):
        plain = cell["settings"].get("off")
        if plain is None:
            continue
        for name, figures in cell["settings"].items():
            if name == "off" or figures["num_requests"] < MIN_TAIL_REQUESTS:
                continue
            ratios = [
                _over(figures["time_per_output_token"][p], plain["time_per_output_token"][p]) for p in ("p50", "p99")
            ]
            if ratios[0] is None or ratios[1] is None or ratios[0] > P50_BETTER or ratios[1] < P99_WORSE:
                continue
            culprit, speedup = _slowest_class(cell, name)
            troubles.append(TailTrouble(cell, name, ratios[0], ratios[1], culprit, speedup))
    return troubles


def _slowest_class(cell: Cell, setting: str) -> tuple[str | None, Mapping[str, Any] | None]:
    speedups = {name: each[setting]["speedup"] for name, each in cell["classes"].items() if each[setting]["speedup"]}
    if not speedups:
        return None, None
    worst = min(speedups, key=lambda name: float(speedups[name]["value"]))
    return (worst, speedups[worst]) if speedups[worst]["value"] < 1.0 else (None, None)


def tails(results: Results) -> Iterator[Finding]:
    for trouble in tail_troubles(results):
        sentence = (
            f"The slowest 1% got worse while the median got better: with {trouble.setting} at {trouble.cell['name']}, "
            f"time per output token is {trouble.p50_ratio:.2f}x of plain's at P50 and {trouble.p99_ratio:.2f}x at P99"
        )
        if trouble.culprit and trouble.culprit_speedup:
            sentence += f"; the class that loses is {trouble.culprit}, {shown(trouble.culprit_speedup)}"
            sentence += _confirmation(results, trouble)
        yield Finding(
            "tail",
            sentence + ".",
            {"p50_ratio": trouble.p50_ratio, "p99_ratio": trouble.p99_ratio, "class": trouble.culprit},
        )


def _confirmation(results: Results, trouble: TailTrouble) -> str:
    """The speedup of the class when it runs alone."""
    for cell in results["cells"]:
        same_place = all(cell[key] == trouble.cell[key] for key in ("temperature", "load"))
        if cell["purpose"] == "confirm" and cell["only_class"] == trouble.culprit and same_place:
            speedup = cell["settings"].get(trouble.setting, {}).get("speedup")
            if speedup:
                verb = "which confirms it" if speedup["value"] < 1.0 else "so it loses only in a mixed batch"
                return f"; run alone it has {shown(speedup)}, {verb}"
    return ""


def draft_health(results: Results) -> Iterator[Finding]:
    """Is the draft model too weak, too big or unrelated to its target? Uses the lowest temperature measured."""
    cells = [c for c in results["cells"] if any(_is_draft(name) for name in c["settings"])]
    cells = [c for c in cells if c["purpose"] != "confirm"]
    if not cells:
        return
    cell = min(cells, key=lambda each: (each["temperature"], each["purpose"] != "sweep"))
    drafting = {name: f for name, f in cell["settings"].items() if _is_draft(name) and f["acceptance"]}
    if not drafting:
        return
    name = max(drafting, key=lambda each: _value(drafting[each]["speedup"]))
    figures = drafting[name]
    acceptance, share = figures["acceptance"], figures["draft_share"]
    first = acceptance["per_position"][0] if acceptance["per_position"] else acceptance["rate"]
    facts = {"rate": acceptance["rate"], "first_position": first, "draft_share": share, "setting": name}
    where = f"at temperature {cell['temperature']:g}"
    speed = f"{shown(figures['speedup'])}" if figures["speedup"] else "unknown speed"
    if first is not None and first < MISMATCHED_FIRST:
        yield Finding(
            "draft_mismatched",
            f"The draft does not belong to this target: {where} only {first:.0%} of its first tokens are accepted "
            f"({speed} with {name}); use a draft of the same family and training, or none.",
            facts,
        )
    elif acceptance["rate"] < WEAK_RATE and _value(figures["speedup"]) < 1.0:
        yield Finding(
            "draft_weak",
            f"The draft is too weak here: {where} {acceptance['rate']:.0%} of its tokens are accepted ({speed} with "
            f"{name}); use a better one, or a smaller depth.",
            facts,
        )
    elif share is not None and share > LARGE_SHARE and _value(figures["speedup"]) < 1.0:
        yield Finding(
            "draft_big",
            f"The draft is too big for this target: drafting takes {share:.0%} of decode time, although "
            f"{acceptance['rate']:.0%} of its tokens are accepted {where} ({speed} with {name}); use a smaller one.",
            facts,
        )
    else:
        yield Finding(
            "draft_fits",
            f"The draft fits: {where} {acceptance['rate']:.0%} of its tokens are accepted, {speed} with {name}.",
            facts,
        )


def low_acceptance(results: Results) -> Iterator[Finding]:
    """A good mean can hide a tenth of the requests with acceptance below WEAK_RATE."""
    for name in _settings(results):
        found = [c["settings"][name] for c in grid_cells(results) if name in c["settings"]]
        worst = [f for f in found if f["acceptance"] and f["acceptance"]["per_request"]["p10"] is not None]
        if name == "auto" or not worst:
            continue
        low = min(worst, key=lambda f: float(f["acceptance"]["per_request"]["p10"]))["acceptance"]
        if low["per_request"]["p10"] < WEAK_RATE:
            yield Finding(
                "low_acceptance",
                f"Acceptance is uneven with {name}: in the worst cell {low['rate']:.0%} overall, but at most "
                f"{low['per_request']['p10']:.0%} for the worst tenth of requests.",
                {"setting": name, "p10": low["per_request"]["p10"], "rate": low["rate"]},
            )


def temperatures(results: Results) -> Iterator[Finding]:
    yield from _trend(results, "temperature", lambda cell: (float(cell["temperature"]), f"{cell['temperature']:g}"))


def loads(results: Results) -> Iterator[Finding]:
    def place(cell: Cell) -> tuple[float, str]:
        load = cell["load"]
        return float(load.get("concurrency") or load.get("rate")), load["name"]

    yield from _trend(results, "load", place)


def _trend(results: Results, kind: str, place: Any) -> Iterator[Finding]:
    """Each setting's speedup along one axis, with the other axis at its first value."""
    cells = grid_cells(results)
    if not cells:
        return
    other = "load" if kind == "temperature" else "temperature"
    held = cells[0][other]
    line = sorted((cell for cell in cells if cell[other] == held), key=place)
    if len({place(cell) for cell in line}) < 2:
        return
    for name in _settings(results):
        steps = [(place(cell)[1], cell["settings"][name]["speedup"]) for cell in line if name in cell["settings"]]
        steps = [(label, speedup) for label, speedup in steps if speedup]
        if len(steps) > 1:
            described = ", ".join(f"{shown(speedup)} at {label}" for label, speedup in steps)
            where = cells[0]["load"]["name"] if kind == "temperature" else f"temperature {held:g}"
            yield Finding(
                kind,
                f"By {kind} ({where}), {name}: {described}.",
                {"setting": name, "speedups": {label: speedup["value"] for label, speedup in steps}},
            )


def best_fixed(results: Results) -> Iterator[Finding]:
    for cell in results["cells"]:
        fixed = {n: f for n, f in cell["settings"].items() if ":" in n and f["speedup"]}
        if cell["purpose"] != "sweep" or not fixed:
            continue
        best = max(fixed, key=lambda name: _value(fixed[name]["speedup"]))
        auto = cell["settings"].get("auto", {}).get("speedup")
        beside = f"; auto reaches {shown(auto)}" if auto else ""
        yield Finding(
            "best_fixed",
            f"Of {len(fixed)} fixed settings at temperature {cell['temperature']:g}, {cell['load']['name']}, the best "
            f"is {best} with {shown(fixed[best]['speedup'])}{beside}.",
            {"setting": best, "speedup": fixed[best]["speedup"]["value"]},
        )


def unequal_answers(results: Results) -> Iterator[Finding]:
    cells = [cell for cell in results["cells"] if "off" in cell["settings"]]
    compared = [f for cell in cells for name, f in cell["settings"].items() if name != "off"]
    unequal = sum(f["num_unequal"] or 0 for f in compared)
    total = sum(f["num_requests"] for f in compared)
    if not total:
        return
    if unequal:
        sentence = (
            f"{unequal} of {total} answers differ from plain decoding with the same prompt and seed. Rounding causes "
            "this where the backend's results depend on the batch of a step; see docs/exactness.md."
        )
    else:
        sentence = f"All {total} answers equal those of plain decoding, token for token."
    yield Finding("equality", sentence, {"num_unequal": unequal, "num_compared": total})


def _settings(results: Results) -> Sequence[str]:
    return [name for name in results["overall"] if name != "off"]


def _is_draft(name: str) -> bool:
    return name.partition(":")[0] in ("draft", "head")


def _value(estimate: Mapping[str, Any] | None) -> float:
    return float(estimate["value"]) if estimate else 0.0


def _over(amount: float | None, whole: float | None) -> float | None:
    return amount / whole if amount is not None and whole else None
