"""Tables of the comparison with vLLM: plain steps, and every setting at every number of requests."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]


def summary_lines(rows: Sequence[Row]) -> list[str]:
    steps = [row for row in rows if row["do"] == "steps"]
    cells = [row for row in rows if row["do"] == "cell"]
    return [*_step_lines(steps), *_cell_lines(cells)]


def _is_ours(row: Row) -> bool:
    return str(row["engine"]).startswith("outpace")


def _step_lines(rows: Sequence[Row]) -> Iterator[str]:
    if not rows:
        return
    numbers = sorted({row["concurrency"] for row in rows})
    yield "milliseconds a plain step, by requests; 1,024 tokens of context, temperature 0"
    yield f"  {'':24}" + "".join(f"{number:>9}" for number in numbers)
    by_engine = {name: _medians(rows, name) for name in dict.fromkeys(row["engine"] for row in rows)}
    for name, found in by_engine.items():
        yield f"  {name:24}" + "".join(f"{found[n]:9.2f}" if n in found else f"{'-':>9}" for n in numbers)
    for quantization in dict.fromkeys(row["quantization"] for row in rows):
        mine, theirs = (
            [name for name in by_engine if _has(rows, name, quantization, ours=ours)] for ours in (True, False)
        )
        ratios = []
        for number in numbers:
            ours, other = (
                min((by_engine[name][number] for name in names if number in by_engine[name]), default=None)
                for names in (mine, theirs)
            )
            ratios.append(f"{other / ours:9.2f}" if ours and other else f"{'-':>9}")
        yield f"  {'vLLM over Outpace, ' + (quantization or 'bf16'):24}" + "".join(ratios)


def _has(rows: Sequence[Row], engine: str, quantization: str | None, *, ours: bool) -> bool:
    return any(r["engine"] == engine and r["quantization"] == quantization and _is_ours(r) == ours for r in rows)


def _medians(rows: Sequence[Row], engine: str) -> dict[int, float]:
    found: dict[int, list[float]] = {}
    for row in rows:
        if row["engine"] == engine:
            found.setdefault(row["concurrency"], []).append(row["ms_per_step"])
    return {number: statistics.median(values) for number, values in found.items()}


def _cell_lines(rows: Sequence[Row]) -> Iterator[str]:
    if not rows:
        return
    yield "tokens per second with Spec-Bench's prompts: median (least-most) over blocks; x: over the engine's own plain"
    yield (
        f"  {'at once':>7}{'T':>4}  {'engine':24}{'setting':>10}{'tokens/s':>10}{'(least-most)':>16}{'x':>7}"
        f"{'ms/step':>9}{'tokens':>8}  accepted of each position"
    )
    verdicts = list[str]()
    for place in dict.fromkeys((row["concurrency"], row["temperature"]) for row in rows):
        mine = [row for row in rows if (row["concurrency"], row["temperature"]) == place]
        speeds = {
            key: statistics.median(row["tokens_per_s"] for row in _of(mine, key))
            for key in dict.fromkeys((row["engine"], row["setting"]) for row in mine)
        }
        for key, speed in speeds.items():
            yield _line(place, key, _of(mine, key), speed, _plain_of(key, speeds))
        verdicts += _verdicts(place, speeds)
    yield from verdicts
    yield from _agreement([row for row in rows if row["temperature"] == 0])


def _of(rows: Sequence[Row], key: tuple[str, str]) -> list[Row]:
    return [row for row in rows if (row["engine"], row["setting"]) == key]


def _plain_of(key: tuple[str, str], speeds: Mapping[tuple[str, str], float]) -> float | None:
    """The engine's own plain speed; of vLLM in its own process, if both were measured."""
    name = "outpace" if key[0].startswith("outpace") else "vllm-plain"
    return speeds.get((name, "plain"))


def _line(
    place: tuple[int, float], key: tuple[str, str], rows: Sequence[Row], speed: float, plain: float | None
) -> str:
    every = [row["tokens_per_s"] for row in rows]
    ratio = f"{speed / plain:7.2f}" if plain else f"{'-':>7}"
    step, tokens = (
        statistics.median(row[name] for row in rows) for name in ("ms_per_step", "tokens_per_step_and_request")
    )
    shares = max((row["accepted_of_steps"] for row in rows), key=len)
    shown = " ".join(f"{share:.2f}" for share in shares[:8])
    return (
        f"  {place[0]:7}{place[1]:4.0f}  {key[0]:24}{key[1]:>10}{speed:10.0f}"
        f"{f'({min(every):.0f}-{max(every):.0f})':>16}{ratio}{step:9.2f}{tokens:8.2f}  {shown}"
    )


def _verdicts(place: tuple[int, float], speeds: Mapping[tuple[str, str], float]) -> Iterator[str]:
    auto, plain = (speeds.get(("outpace", setting)) for setting in ("auto", "plain"))
    theirs = {name: speed for (name, _), speed in speeds.items() if not name.startswith("outpace")}
    if auto is None or plain is None or not theirs:
        return
    best = max(theirs, key=lambda name: theirs[name])
    losing = [name for name, speed in theirs.items() if speed < 0.98 * theirs.get("vllm-plain", 0.0)]
    yield (
        f"{place[0]} at once, temperature {place[1]:.0f}: Outpace auto is {auto / plain:.2f} of its plain and "
        f"{auto / theirs[best]:.2f} of vLLM's best ({best}); Outpace plain is "
        f"{plain / theirs.get('vllm-plain', theirs[best]):.2f} of vLLM's; slower than vLLM's plain: "
        + (", ".join(f"{name} {theirs[name] / theirs['vllm-plain']:.2f}" for name in losing) or "none")
    )


def _agreement(rows: Sequence[Row]) -> Iterator[str]:
    """Whether the engines run the same model: greedy texts that begin as those of Outpace's plain decoding.

    In bfloat16 a few differ, where two tokens are about equally likely. A saved file has no texts, so nothing is said.
    """
    rows = [row for row in rows if "first_tokens" in row]
    own = {_place(row): row["first_tokens"] for row in rows if (row["engine"], row["setting"]) == ("outpace", "plain")}
    counts: dict[str, list[int]] = {}
    for row in rows:
        for theirs, ours in zip(row["first_tokens"], own.get(_place(row), ()), strict=False):
            count = counts.setdefault(row["engine"], [0, 0])
            count[0] += theirs == ours
            count[1] += 1
    if counts:
        shown = ", ".join(f"{name} {same} of {number}" for name, (same, number) in counts.items())
        yield f"greedy texts whose first tokens are those of Outpace's plain decoding: {shown}"


def _place(row: Row) -> tuple[int, int]:
    return row["concurrency"], row["block"]
