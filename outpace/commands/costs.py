"""`outpace costs`: prints the costs of steps and drafts on this machine, as the policy uses them."""

from __future__ import annotations

import argparse
import json
from typing import get_args

from outpace.config import BackendName, EngineConfig
from outpace.speculation.costs.curves import Costs, StepCosts

_DESCRIPTION = """\
Print the costs that `--speculation auto` decides by: a step of the target (and of a draft model) by its number of
tokens, the cost of further rows and of context, and the cost of a lookup. They are measured in about two seconds at
the first start, saved in the cache directory, and corrected by every step that runs.

examples:
  outpace costs
  outpace costs --model target.gguf --draft draft.gguf --measure
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    engine = EngineConfig()
    parser.description = _DESCRIPTION
    parser.add_argument("--model", metavar="FILE", help="a GGUF file (default: the embedded SmolLM2-135M-Instruct)")
    parser.add_argument("--draft", metavar="FILE", help="a smaller GGUF file, best with the same vocabulary")
    parser.add_argument("--backend", choices=get_args(BackendName), default=engine.backend,
                        help="what runs the model (default: %(default)s)")  # fmt: skip
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: all usable cores)")
    parser.add_argument("--measure", action="store_true", help="measure again instead of using the saved costs")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def execute(options: argparse.Namespace) -> int:
    engine = {name: getattr(options, name) for name in ("model", "draft", "backend", "threads")}

    from outpace.llm import LLM

    with LLM(**engine) as llm:
        llm.engine.calibrate(again=options.measure)
        costs = llm.engine.costs
        assert costs is not None
        print(json.dumps(costs.as_dict()) if options.json else as_text(costs))
    return 0


def as_text(costs: Costs) -> str:
    lines = ["target", *_table(costs.target)]
    for name, draft in costs.drafts.items():
        if draft.passes is not None:
            lines += ["", f"passes of {name}", *_table(draft.passes)]
        if draft.first is not None:
            lines += ["", f"first pass of a draft of {name}", *_table(draft.first)]
    lines.append("")
    for name, draft in costs.drafts.items():
        if draft.passes is None:
            lines.append(f"{'a lookup by ' + name:28} {1e6 * draft.lookup_seconds:9.1f} us")
        else:
            lines.append(f"{'host, a token of ' + name:28} {1e6 * draft.draw_seconds:9.1f} us")
    lines.append(f"{'host, a step':28} {1e6 * costs.schedule_seconds:9.1f} us")
    lines.append(f"{'host, a token emitted':28} {1e6 * costs.token_seconds:9.1f} us")
    return "\n".join(lines)


def _table(steps: StepCosts) -> list[str]:
    points = steps.points
    one = points[min(points)]
    lines = [f"  {'tokens':>8} {'ms':>10} {'of one':>8}"]
    lines += [f"  {size:8d} {1e3 * points[size]:10.3f} {points[size] / one:7.2f}x" for size in sorted(points)]
    lines.append(f"  each further row {1e6 * steps.row_seconds:.1f} us")
    step, row, token = steps.context_seconds, steps.row_context_seconds, steps.token_context_seconds
    lines.append(f"  1,000 tokens of context: {1e9 * step:.0f} us a step, {1e9 * row:.0f} us a row")
    lines[-1] += f", {1e9 * token:.0f} us a token"
    return lines
