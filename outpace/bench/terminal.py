"""The report as text: the verdict first, then its figures."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from outpace.bench.formats import interval, milliseconds, number

Results = Mapping[str, Any]
_WIDTH = 118


def as_text(results: Results) -> str:
    return "\n".join(
        [*_verdict(results), "", *_cells(results), "", *_classes(results), "", *_commands(results)]
    ).rstrip()


def _verdict(results: Results) -> Iterator[str]:
    verdict = results["verdict"]
    yield from textwrap.wrap(verdict["sentence"], _WIDTH)
    for finding in verdict["findings"]:
        yield from textwrap.wrap(finding["sentence"], _WIDTH, initial_indent="- ", subsequent_indent="  ")
    plan = results["plan"]
    if plan["was_interrupted"]:
        yield "- The run was interrupted; the figures cover only what was measured before."
    elif plan["ran_out_of_time"]:
        yield f"- The time budget of {plan['time_budget']:.0f} s ended before the whole plan had run."


def _cells(results: Results) -> Iterator[str]:
    yield (
        f"{'':32}{'tok/s':>8}{'speedup':>24}{'accepted':>9}{'length':>7}{'TTFT p50':>9}{'p99':>7}"
        f"{'TPOT p50':>9}{'p90':>7}{'p99':>7}{'good':>6}{'failed':>7}"
    )
    for cell in results["cells"]:
        yield f"{cell['name']} ({cell['num_blocks']} blocks)"
        for name, figures in cell["settings"].items():
            yield f"  {name:30}{_row(figures)}"


def _row(figures: Mapping[str, Any]) -> str:
    acceptance = figures["acceptance"] or {}
    ttft, tpot = figures["time_to_first_token"], figures["time_per_output_token"]
    return (
        f"{number(figures['tokens_per_second'], '.1f'):>8}{interval(figures['speedup']):>24}"
        f"{number(acceptance.get('rate'), '.0%'):>9}{number(acceptance.get('mean_accepted_length'), '.2f'):>7}"
        f"{milliseconds(ttft['p50']):>9}{milliseconds(ttft['p99']):>7}{milliseconds(tpot['p50']):>9}{milliseconds(tpot['p90']):>7}{milliseconds(tpot['p99']):>7}"
        f"{number(figures['good_share'], '.0%'):>6}{figures['num_failed']:>7}"
    )


def _classes(results: Results) -> Iterator[str]:
    """Speedup by class over all cells of the grid, one column per setting."""
    settings = [name for name in results["overall"] if name != "off"]
    if not settings:
        return
    yield f"{'speedup by class, all loads and temperatures':46}" + "".join(f"{name:>24}" for name in settings)
    for category in results["overall"][settings[0]]:
        values = "".join(f"{interval(results['overall'][name].get(category)):>24}" for name in settings)
        yield f"  {category:44}{values}"


def _commands(results: Results) -> Iterator[str]:
    for name, command in results["verdict"]["commands"].items():
        yield f"{name:20}{command}"
