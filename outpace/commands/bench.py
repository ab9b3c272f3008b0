"""`outpace bench`: measures where speculation pays, with which settings, and its effect on the slowest 1%."""

from __future__ import annotations

import argparse
import importlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from outpace.bench.figures import Objective
from outpace.bench.loads import Arrivals, Closed, Load, Open
from outpace.bench.mix import load_sources, parse_mix
from outpace.bench.plan import FULL, QUICK, CellPlan, Plan, Scale, grid
from outpace.bench.settings import AUTO, PLAIN, Setting, fixed, fixed_settings, parse_setting
from outpace.bench.workloads import BUILT_IN
from outpace.config import BackendName, Method
from outpace.errors import UsageError

SUBCOMMANDS = {
    "compare": "show the changes between two runs",
    "simulate": "compare policies in a simulation with known costs and acceptance",
    "peers": "compare with other installed engines on the same prompts",
}
DEPTHS = (2, 4, 8)
MAIN_DEPTH = 4

_DESCRIPTION = f"""\
Measure whether speculation pays on this machine, for your models, prompts, temperatures and load.
All settings run interleaved in one process on the same requests; the report ends with a verdict.

Without options: the embedded model, six built-in workloads ({", ".join(BUILT_IN)}),
temperatures {", ".join(f"{t:g}" for t in FULL.temperatures)}, {", ".join(map(str, FULL.concurrencies))} requests \
at once; under ten minutes. With --quick: fewer cases, under one minute.

examples:
  outpace bench --quick
  outpace bench --model target.gguf --draft draft.gguf --html report.html --json report.json
  outpace bench --mix json=0.6,story=0.4 --temperature 0,0.7 --concurrency 1,8
  outpace bench --mix mine.jsonl --rate 0.5,2 --arrivals bursty
  outpace bench --url http://with:8000 --baseline-url http://without:8000
  outpace bench compare before.json after.json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = _DESCRIPTION
    _add_run_arguments(parser)
    subparsers = parser.add_subparsers(dest="bench_command", metavar="COMMAND", title="other commands")
    for name, summary in SUBCOMMANDS.items():
        subparser = subparsers.add_parser(
            name, help=summary, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
        )
        _module(name).add_arguments(subparser)


def execute(options: argparse.Namespace) -> int:
    if options.bench_command is not None:
        status: int = _module(options.bench_command).execute(options)
        return status
    from outpace.commands.bench_run import run

    return run(options, wanted_by(options))


def _module(name: str) -> Any:
    return importlib.import_module(f"outpace.commands.bench_{name}")


def _add_run_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what is measured")
    group.add_argument("--model", metavar="FILE", help="a GGUF file (default: the embedded SmolLM2-135M-Instruct)")
    group.add_argument("--draft", metavar="FILE", help="a smaller GGUF, best of the same vocabulary, or a head")
    group.add_argument("--backend", choices=get_args(BackendName), default="auto", help="(default: %(default)s)")
    group.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: all usable cores)")
    group.add_argument(
        "--url", metavar="URL", help="measure a server with the OpenAI API instead; its speculation is on"
    )
    group.add_argument("--baseline-url", metavar="URL",
                       help="the same server without speculation; not needed for an Outpace server")  # fmt: skip
    group.add_argument("--api-key", metavar="KEY", help="for --url and --baseline-url")
    group = parser.add_argument_group("requests")
    group.add_argument(
        "--mix", metavar="NAME=W,...", help="weights of workloads or prompt files (default: all built-in ones)"
    )
    group.add_argument("--temperature", metavar="T,...", help="(default: 0,0.7,1)")
    group.add_argument("--concurrency", metavar="N,...", help="requests at once, closed loop (default: 1,4,16)")
    group.add_argument("--rate", metavar="R,...", help="requests per second, open loop; instead of --concurrency")
    group.add_argument("--arrivals", choices=get_args(Arrivals), default="poisson", help="(default: %(default)s)")
    group.add_argument("--max-tokens", type=int, metavar="N", help="most tokens of an answer")
    group.add_argument(
        "--requests",
        type=int,
        metavar="N",
        help="requests per cell and setting (default: 36 one at a time, else 5 blocks)",
    )
    group.add_argument("--time-budget", type=float, metavar="S", help="seconds of measuring (default: 460, quick 40)")
    group.add_argument(
        "--seed", type=int, default=0, metavar="S", help="seed of prompts, sampling and arrivals (default: %(default)s)"
    )
    group = parser.add_argument_group("settings")
    group.add_argument(
        "--settings", metavar="S,...", help="off, auto or METHOD:DEPTH (default: off, auto and one METHOD:4)"
    )
    group.add_argument(
        "--depths", metavar="K,...", help="depths of the sweep over fixed settings; 0: no sweep (default: 2,4,8)"
    )
    group = parser.add_argument_group("report")
    group.add_argument("--quick", action="store_true", help="measure fewer cases, in under a minute")
    group.add_argument("--ttft-objective", type=float, default=1e3 * Objective().time_to_first_token, metavar="MS",
                       help="longest time to first token of a good request (default: %(default).0f)")  # fmt: skip
    group.add_argument("--tpot-objective", type=float, default=1e3 * Objective().time_per_output_token, metavar="MS",
                       help="longest time per further token of a good request (default: %(default).0f)")  # fmt: skip
    group.add_argument("--json", type=Path, metavar="FILE", help="write all measurements")
    group.add_argument("--html", type=Path, metavar="FILE", help="write a report with charts")


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the options ask for. The plan needs to know in addition which draft the target is opened with."""

    options: argparse.Namespace
    scale: Scale
    temperatures: tuple[float, ...]
    loads: list[Load]
    settings: list[Setting] | None  # those that were named
    depths: list[int]  # of the sweep
    weights: dict[str, float]
    time_budget: float
    sources: dict[str, Any]

    def plan(self, drafting: Method | None) -> Plan:
        """`drafting`: the method that runs a model, besides lookups."""
        options, scale = self.options, self.scale
        settings = self.settings or [PLAIN, AUTO, fixed(drafting or "suffix", MAIN_DEPTH)]
        cells = grid(
            self.temperatures, self.loads, settings, lambda load: _num_blocks(options.requests, load, scale)
        ) + self._sweep(drafting)
        return Plan(tuple(cells), self.weights, self.time_budget, options.seed, scale.confirm_blocks)

    def _sweep(self, drafting: Method | None) -> list[CellPlan]:
        """A cell with every method at every depth, at the first temperature and load."""
        if self.settings or self.depths == [0]:
            return []
        methods: list[Method] = [drafting, "suffix"] if drafting else ["suffix", "ngram"]
        if self.options.quick:
            methods = methods[:1]
        settings = (PLAIN, AUTO, *fixed_settings(methods, self.depths))
        load = self.loads[0]
        blocks = max(1, self.scale.sweep_requests // load.block_size)
        return [CellPlan(self.temperatures[0], load, settings, blocks, "sweep")]


def wanted_by(options: argparse.Namespace) -> Wanted:
    """Check the options and read the prompts, before a model is opened."""
    scale = QUICK if options.quick else FULL
    temperatures = _numbers("--temperature", options.temperature, float) or scale.temperatures
    for temperature in temperatures:
        if not 0 <= temperature <= 100:
            raise UsageError(f"--temperature must be between 0 and 100; got {temperature:g}")
    settings = _named_settings(options)
    loads = _loads(options, scale)
    weights = parse_mix(options.mix) if options.mix else dict.fromkeys(BUILT_IN, 1.0)
    sources = load_sources(list(weights), options.max_tokens or scale.max_tokens)
    depths = [int(each) for each in _numbers("--depths", options.depths, int) or DEPTHS]
    if options.requests is not None and options.requests < 1:
        raise UsageError(f"--requests must be at least 1; got {options.requests}")
    budget = scale.time_budget if options.time_budget is None else options.time_budget
    if budget <= 0:
        raise UsageError(f"--time-budget must be above 0 seconds; got {budget:g}")
    return Wanted(options, scale, temperatures, loads, settings, depths, weights, budget, sources)


def _named_settings(options: argparse.Namespace) -> list[Setting] | None:
    if options.settings:
        settings = [parse_setting(part.strip()) for part in options.settings.split(",")]
        return list(dict.fromkeys([PLAIN, *settings]))
    if options.url and options.baseline_url:
        return [PLAIN, Setting("on", AUTO.speculation)]
    return None


def _loads(options: argparse.Namespace, scale: Scale) -> list[Load]:
    if options.rate and options.concurrency:
        raise UsageError("--rate is an open loop and --concurrency a closed one; give one of them")
    if options.rate:
        return [Open(rate, options.arrivals) for rate in _numbers("--rate", options.rate, float)]
    chosen = _numbers("--concurrency", options.concurrency, int) or scale.concurrencies
    return [Closed(int(each)) for each in chosen]


def _num_blocks(requests: int | None, load: Load, scale: Scale) -> int:
    """Enough blocks for `requests`, or the scale's default."""
    return scale.num_blocks(load) if requests is None else math.ceil(requests / load.block_size)


def _numbers(flag: str, text: str | None, kind: type[float] | type[int]) -> tuple[float, ...]:
    if text is None:
        return ()
    try:
        return tuple(dict.fromkeys(kind(part) for part in text.split(",")))
    except ValueError:
        raise UsageError(f"{flag} must be numbers separated by commas, such as 1,4; got {text!r}") from None
