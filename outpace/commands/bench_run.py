"""Runs the plan of `outpace bench`: opens the target, measures, writes the reports."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tqdm import tqdm

from outpace.bench import results as results_file
from outpace.bench.figures import Objective
from outpace.bench.loads import Closed, Load
from outpace.bench.plan import CellPlan, Plan
from outpace.bench.provenance import provenance
from outpace.bench.session import Session
from outpace.bench.targets import EngineTarget, Target
from outpace.bench.terminal import as_text
from outpace.bench.trials import Run
from outpace.commands.bench import Wanted
from outpace.llm import LLM
from outpace.models.resolve import resolve_model

CONFIRM_SHARE = 0.15  # share of the time budget for measuring suspect classes again, alone


def run(options: argparse.Namespace, wanted: Wanted) -> int:
    objective = Objective(options.ttft_objective / 1e3, options.tpot_objective / 1e3)
    with ExitStack() as opened:
        target, models = opened.enter_context(_target(options, wanted.loads))
        plan = wanted.plan(target.drafting)
        progress = opened.enter_context(_Progress(plan))
        session = Session(target, plan, wanted.sources, on_run=progress.add, on_note=progress.say)
        session.measure()
        origin = provenance(["outpace", *sys.argv[1:]], models)
        measured = results_file.assemble(session, objective, origin)
        more = results_file.suspects(measured, plan)
        if more and not session.was_interrupted:
            progress.extend(more)
            session.confirm(more, CONFIRM_SHARE * plan.time_budget)
            measured = results_file.assemble(session, objective, origin)
    print(as_text(measured))
    if options.json:
        results_file.save(options.json, measured)
    if options.html:
        from outpace.bench.html import write_html

        write_html(options.html, measured)
    return 1 if session.was_interrupted else 0


@contextmanager
def _target(options: argparse.Namespace, loads: Sequence[Load]) -> Iterator[tuple[Target, list[Path]]]:
    if options.url:
        from outpace.bench.url_target import UrlTarget

        yield UrlTarget(options.url, options.baseline_url, api_key=options.api_key), []
        return
    model = resolve_model(options.model)
    most = max((load.concurrency if isinstance(load, Closed) else 16) for load in loads)
    engine: dict[str, Any] = {
        "backend": options.backend,
        "threads": options.threads,
        "max_sequences": max(8, most),
        "cache_tokens": max(8192, 1024 * most),
    }
    models = [model, *([Path(options.draft)] if options.draft else [])]
    with LLM(str(model), draft=options.draft, **engine) as llm:
        yield EngineTarget(llm), models


class _Progress:
    """A bar with the requests done of those planned; on a terminal only."""

    def __init__(self, plan: Plan) -> None:
        self._total = sum(cell.num_requests * len(cell.settings) for cell in plan.cells)

    def __enter__(self) -> _Progress:
        self._bar = tqdm(total=self._total, unit="request", disable=not sys.stderr.isatty(), dynamic_ncols=True)
        return self

    def add(self, cell: CellPlan, run: Run) -> None:
        self._bar.set_description_str(cell.name, refresh=False)
        self._bar.update(len(run.trials))

    def say(self, note: str) -> None:
        self._bar.write(f"outpace: {note}", file=sys.stderr)

    def extend(self, cells: Sequence[CellPlan]) -> None:
        self._total += sum(cell.num_requests * len(cell.settings) for cell in cells)
        self._bar.total = self._total
        self._bar.refresh()

    def __exit__(self, *_: object) -> None:
        self._bar.close()
