"""`outpace plan`: before a launch, says what fits, which draft pays, at which depth and load."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outpace.config import MAX_SEQUENCES, WORKLOADS, usable_cores
from outpace.errors import UsageError

if TYPE_CHECKING:
    from outpace.plan.machines import Machine
    from outpace.plan.measure import Measurement
    from outpace.plan.planning import Wanted
    from outpace.speculation.costs.curves import Costs, DraftCosts

_DESCRIPTION = """\
Say before a launch what fits and what pays: memory for weights, draft and cache; which draft, at which depth, up to
which load; the flags to paste. It is arithmetic over shapes and data sheets; it needs no GPU, no torch and no weights.
With --measure it runs the models here and uses what they do.

TARGET and DRAFT are names such as llama-3.1-70b or meta-llama/Llama-3.1-70B-Instruct, GGUF files, Hugging Face folders
(their config.json is enough), or names on the hub. A DRAFT may also be a draft head, `head` (one that outpace distill
would train), self:int4 (the target's quantised self), ngram or suffix. Alternatives are added to the comparison.

examples:
  outpace plan llama-3.1-70b llama-3.1-8b --gpu h100 --gpus 2 --precision int8 --utilization 0.92
  outpace plan llama-3.1-70b llama-3.1-8b --gpu h100 --gpus 2 --nominal
  outpace plan qwen2.5-72b --gpu h200 --gpus 2 --concurrency 32 --html plan.html
  outpace plan target.gguf --candidates drafts/ --here
  outpace plan target.gguf draft.gguf --measure --temperature 0 0.8
"""
_DEFAULT_UTILIZATION = 0.9
_MOST_AT_ONCE = 4096
_USUAL_OUTPUT = 256
_OF_MEASURE = {"prompts": None, "num_prompts": 12, "max_tokens": 64, "backend": "auto"}  # options and their defaults


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = _DESCRIPTION
    parser.usage = "%(prog)s TARGET [DRAFT ...] [options]"  # not two dozen lines before a wrong one is named
    parser.add_argument("target", metavar="TARGET", help="the model to serve")
    parser.add_argument("drafts", metavar="DRAFT", nargs="*", default=[],
                        help="ways to draft for it (default: what is known)")  # fmt: skip
    parser.add_argument("--candidates", type=Path, metavar="DIR", help="rank every model and head in this folder")
    machine = parser.add_argument_group("machine")
    machine.add_argument("--gpu", "--cpu", dest="gpu", metavar="NAME",
                         help="an accelerator or CPU of the table (default: h100)")  # fmt: skip
    machine.add_argument("--gpus", type=int, default=1, metavar="N", help="the target is sharded over N (default: 1)")
    machine.add_argument("--draft-gpus", type=int, default=1, metavar="N",
                         help="the draft runs on the first GPU (1) or on all (default: 1)")  # fmt: skip
    machine.add_argument("--here", action="store_true", help="this machine; saved costs of its engine are used")
    machine.add_argument("--memory", type=float, metavar="GB", help="of one GPU, instead of the table's")
    machine.add_argument("--bandwidth", type=float, metavar="GB/S", help="of its memory, instead of the table's")
    machine.add_argument("--tflops", type=float, metavar="N", help="dense, in bf16, instead of the table's")
    machine.add_argument("--utilization", type=float, metavar="U",
                         help=f"share of the memory that may be used (default: {_DEFAULT_UTILIZATION})")  # fmt: skip
    machine.add_argument("--threads", type=int, metavar="N", help="CPU threads, with --here (default: all)")
    formats = parser.add_argument_group("precision")
    formats.add_argument("--precision", metavar="P", help="of the target's weights: bf16, fp8, int8, int4, q4_k_m, ... "
                         "(default: as published)")  # fmt: skip
    formats.add_argument("--draft-precision", metavar="P", help="of the draft's weights (default: as published)")
    formats.add_argument("--cache-precision", "--kv-cache-dtype", type=_cache_precision, default="bf16",
                         metavar="P", help="bf16, fp8 or int8 (default: bf16)")  # fmt: skip
    formats.add_argument("--nominal", action="store_true", help="articles' arithmetic: 2, 1 or 0.5 bytes a weight, "
                         "round parameter counts, the whole memory, weights only")  # fmt: skip
    load = parser.add_argument_group("load")
    load.add_argument("--context", type=int, default=8192, metavar="N",
                      help="tokens of a sequence, prompt and output (default: %(default)s)")  # fmt: skip
    load.add_argument("--output-tokens", type=int, default=_USUAL_OUTPUT, metavar="N",
                      help="of an answer, over which the draft's reading of the prompt is spread "
                      "(default: %(default)s)")  # fmt: skip
    load.add_argument("--concurrency", type=int, default=1, metavar="N",
                      help="requests at once for which to choose (default: %(default)s)")  # fmt: skip
    load.add_argument("--temperature", type=float, nargs="+", default=[0.0], metavar="T",
                      help="of the requests; the first decides, --measure measures all (default: 0)")  # fmt: skip
    load.add_argument("--workload", choices=list(WORKLOADS), help="the kind of text, for guesses")
    load.add_argument("--acceptance", type=float, nargs="+", default=[], metavar="A",
                      help="of the named drafts: the chance of a token if all before it were accepted; "
                      "several: by position")  # fmt: skip
    load.add_argument("--depth", type=int, metavar="K", help="draft tokens a step (default: the best)")
    measuring = parser.add_argument_group("measuring")
    measuring.add_argument("--measure", action="store_true",
                           help="run target and drafts on sample prompts here: acceptance and costs; with --gpu, "
                           "acceptance only")  # fmt: skip
    measuring.add_argument("--prompts", type=Path, metavar="FILE", help="of --measure, in the formats of outpace bench "
                           "(default: two of each built-in workload)")  # fmt: skip
    measuring.add_argument("--num-prompts", type=int, metavar="N", help="(default: %(default)s)")
    measuring.add_argument("--max-tokens", type=int, metavar="N", help="of an answer (default: %(default)s)")
    measuring.add_argument("--backend", help="that runs the models (default: %(default)s)")
    measuring.set_defaults(**_OF_MEASURE)
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    output.add_argument("--html", type=Path, metavar="FILE", help="also write a page with charts")


def _cache_precision(given: str) -> str:
    """In any case, and as vLLM writes it."""
    word = given.lower()
    return {"auto": "bf16", "bfloat16": "bf16", "float16": "fp16", "fp8_e4m3": "fp8"}.get(word, word)


def execute(options: argparse.Namespace) -> int:
    from outpace.plan.guesses import Conditions
    from outpace.plan.memory import Deployment
    from outpace.plan.models import open_model
    from outpace.plan.planning import make_plan, open_wanted
    from outpace.plan.report import finite
    from outpace.plan.terminal import as_text

    _check(options)
    target = open_model(options.target, options.precision)
    wanted = open_wanted(target, options.drafts, options.draft_precision, options.candidates)
    utilization = options.utilization
    if utilization is None:
        utilization = 1.0 if options.nominal else _DEFAULT_UTILIZATION
    to = Deployment(
        machine=_machine(options), gpus=options.gpus, utilization=utilization, draft_gpus=options.draft_gpus,
        cache_precision=options.cache_precision, context=options.context,
        sequences=max(16, min(options.concurrency, MAX_SEQUENCES)), nominal=options.nominal,
    )  # fmt: skip
    conditions = Conditions(
        options.temperature[0], options.workload, options.concurrency, options.depth, tuple(options.acceptance),
        options.output_tokens,
    )  # fmt: skip
    measurement = _measured(options, wanted) if options.measure else None
    costs, of_drafts, source = (
        (None, {}, _measured_how(measurement, to.machine)) if measurement else _saved(options, wanted)
    )
    report = finite(
        make_plan(
            wanted, to, conditions, measurement=measurement, costs=costs, costs_of_drafts=of_drafts, costs_from=source
        )
    )
    if options.html is not None:
        from outpace.plan.html import write_html

        write_html(options.html, report)
    print(json.dumps(report) if options.json else as_text(report))
    return 0


def _check(options: argparse.Namespace) -> None:
    for name in ("gpus", "draft_gpus", "context", "output_tokens", "concurrency", "num_prompts", "max_tokens"):
        if getattr(options, name) < 1:
            raise UsageError(f"--{name.replace('_', '-')} must be at least 1; got {getattr(options, name)}")
    for name in ("memory", "bandwidth", "tflops"):
        value = getattr(options, name)
        if value is not None and not 0 < value < 1e9:
            raise UsageError(f"--{name} must be a number above 0, below a billion; got {value:g}")
    if options.concurrency > _MOST_AT_ONCE:
        raise UsageError(f"--concurrency must be at most {_MOST_AT_ONCE}; got {options.concurrency}")
    if options.depth is not None and not 1 <= options.depth <= 64:
        raise UsageError(f"--depth must be between 1 and 64; got {options.depth}")
    for temperature in options.temperature:
        if not 0 <= temperature <= 100:
            raise UsageError(f"a temperature must be between 0 and 100; got {temperature:g}")
    if options.threads is not None and not 1 <= options.threads <= usable_cores():
        raise UsageError(
            f"--threads must be between 1 and {usable_cores()}, the cores of this machine; got {options.threads}"
        )
    _check_together(options)


def _check_together(options: argparse.Namespace) -> None:
    """Options that contradict each other, or that would have no effect."""
    if options.here and options.gpu is not None:
        raise UsageError("--here is this machine and --gpu another one; leave out one of them")
    if options.measure and options.acceptance:
        raise UsageError("--measure finds the acceptance and --acceptance gives it; leave out one of them")
    if options.threads is not None and not (options.here or options.measure):
        raise UsageError("--threads is for what runs on this machine; add --here or --measure, or leave it out")
    if options.output_tokens > options.context and options.output_tokens != _USUAL_OUTPUT:
        raise UsageError(
            f"an answer of {options.output_tokens} tokens (--output-tokens) is longer than its sequence of "
            f"{options.context} (--context); raise the one or lower the other"
        )
    for name, default in _OF_MEASURE.items():
        if not options.measure and getattr(options, name) != default:
            raise UsageError(f"--{name.replace('_', '-')} is for --measure; add --measure, or leave it out")


def _machine(options: argparse.Namespace) -> Machine:
    from outpace.plan.machines import custom, here, machine

    figures = {name: getattr(options, name) for name in ("memory", "bandwidth", "tflops")}
    given = {name: value for name, value in figures.items() if value is not None}
    if len(given) == len(figures):
        return custom(options.gpu or "this GPU", **figures)
    is_here = options.here or (options.measure and options.gpu is None)
    found = (
        here(options.threads or usable_cores()) if is_here else machine("h100" if options.gpu is None else options.gpu)
    )
    changes: dict[str, Any] = {}
    if "memory" in given:
        changes |= {"memory_bytes": given["memory"] * 1e9, "nominal_bytes": given["memory"] * 1e9}
    if "bandwidth" in given:
        changes["bandwidth"] = given["bandwidth"] * 1e9
    if "tflops" in given:
        changes["bf16"] = given["tflops"] * 1e12
    return replace(found, **changes)


def _measured(options: argparse.Namespace, wanted: Wanted) -> Measurement:
    from outpace.bench.prompt_files import load_prompts
    from outpace.bench.workloads import BUILT_IN, built_in, evenly
    from outpace.plan.measure import measure_drafts

    if options.prompts is not None:
        prompts = evenly(load_prompts(options.prompts), options.num_prompts)
    else:
        each = -(-options.num_prompts // len(BUILT_IN))
        prompts = evenly([prompt for name in BUILT_IN for prompt in built_in(name, each)], options.num_prompts)
    found = measure_drafts(
        wanted.target, wanted.drafts, prompts, options.temperature, max_tokens=options.max_tokens,
        options={"backend": options.backend, "threads": options.threads},
    )  # fmt: skip
    found.is_of_machine = options.gpu is None
    return found


def _measured_how(measurement: Measurement, to: Machine) -> str:
    from outpace.plan.machines import BUSY

    if not measurement.is_of_machine:
        return f"bandwidth and arithmetic of {to.name}; only the acceptance was measured here"

    how, others = "measured here, by the engine's calibration", measurement.taken_by_others
    if others > BUSY:
        how += f", while {others:.0%} of the processor time went to other programs; measure again when they have ended"
    return how


def _saved(options: argparse.Namespace, wanted: Wanted) -> tuple[Costs | None, dict[str, DraftCosts], str | None]:
    """With --here, what the engine keeps: the costs of this target, and by name those of drafts that it ran with."""
    if not options.here or wanted.target.path is None:
        return None, {}, None
    from outpace.plan.measure import saved_costs

    drafts: dict[str, DraftCosts] = {}
    costs = saved_costs(wanted.target.path, None, options.threads)
    for draft in wanted.drafts:
        found = saved_costs(wanted.target.path, draft.path, options.threads) if draft.path is not None else None
        if found is not None and draft.kind in found.drafts:
            costs, drafts[draft.name] = costs or found, found.drafts[draft.kind]
    if costs is None:
        return None, {}, None
    which = "the target's steps" + (f" and the drafts of {', '.join(drafts)}" if drafts else "")
    return costs, drafts, f"{which} as the engine measured them on this machine; other drafts by bandwidth"
