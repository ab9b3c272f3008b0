"""Predictions of `outpace plan` against reality: memory and speedup on this CPU, and recorded runs of an H200.

    python -m benchmarks.plan_check --model TARGET.gguf --draft DRAFT --prompts FILE --json OUT.json
    python -m benchmarks.plan_check --recorded benchmarks/results --json OUT.json
    python -m benchmarks.plan_check --gpu-memory --json OUT.json        # on a machine with a GPU

The first form loads both models in a process of its own, lets them touch all weights and all of the cache, and compares
resident memory with the plan's. Then `--measure`'s acceptance and the engine's calibrated costs predict the speedup of
fixed depths; the engine runs the same prompts with plain decoding and these depths in turns, several rounds. A step
does the same work in each round, so the fastest time of each step counts: other programs only make a step slower. The
ratio by whole runs, the fastest of each, stands beside it, and so do the parts of a step, predicted and as the median
of all steps (`plan_parts.py`), and the shares of processor time that the host of this machine and other programs took.
Without --model it is the embedded SmolLM2 with its head. The second form predicts the speedups in recorded runs from
their costs and acceptance. The third builds the 8B and 1B shapes on a GPU and compares what torch allocated.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.memory import resident_bytes
from benchmarks.pair import row
from benchmarks.plan_parts import StepParts, predicted_parts
from benchmarks.report import provenance, write_json
from outpace import LLM
from outpace.bench.loads import Closed
from outpace.bench.paired import interleaved
from outpace.bench.prompt_files import load_prompts
from outpace.bench.settings import PLAIN, fixed
from outpace.bench.statistics import ratio_of_rates
from outpace.bench.targets import EngineTarget
from outpace.bench.trials import Job, Run
from outpace.bench.workloads import Prompt, evenly
from outpace.config import SamplingParams, usable_cores
from outpace.core import Request
from outpace.models.embedded import own_head
from outpace.models.resolve import resolve_model
from outpace.plan.agreement import Text
from outpace.plan.drafts import PlannedDraft, open_draft
from outpace.plan.machines import CPU, Machine, machine
from outpace.plan.measure import Acceptance, calibrated, measure_drafts, median_costs
from outpace.plan.models import open_model
from outpace.plan.probe import Others
from outpace.plan.roofline import completed, draft_costs, sampled, target_costs
from outpace.plan.speed import ENDLESS, Answer, Drafting, known_acceptance
from outpace.speculation.costs.curves import Costs

CONTEXT, SEQUENCES = 4096, 4
RECORDED = "gpu_speculation_h200*.json"
RECORDED_CONTEXT = 420  # mean tokens of a request in the recorded runs
CALIBRATIONS = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a GGUF file (default: the embedded SmolLM2, with its head)")
    parser.add_argument("--draft", type=Path, help="a smaller GGUF file, or a head")
    parser.add_argument("--prompts", type=Path, help="Spec-Bench, HumanEval or JSON lines")
    parser.add_argument("--count", type=int, default=12, help="prompts (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=64, help="(default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="of every run (default: %(default)s)")
    parser.add_argument("--depths", type=int, nargs="+", default=[2, 4], help="(default: 2 4)")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0], help="(default: 0 1)")
    parser.add_argument("--recorded", type=Path, metavar="DIR", help="folder with the results of recorded runs")
    parser.add_argument("--gpu-memory", action="store_true", help="compare memory of the 8B and 1B shapes on a GPU")
    parser.add_argument("--resident", action="store_true", help=argparse.SUPPRESS)  # of the child that loads models
    parser.add_argument("--cache-tokens", type=int, default=8192, help="of the compared memory (default: %(default)s)")
    parser.add_argument("--no-speed", action="store_true", help="compare the memory of the process only")
    parser.add_argument("--no-memory", action="store_true", help="leave out the memory of the process")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    found: dict[str, Any]
    models: list[Path] = []
    if options.recorded is not None:
        found = {"recorded": recorded(options.recorded)}
    elif options.gpu_memory:
        found = {"gpu_memory": gpu_memory()}
    else:
        model = options.model or resolve_model(None)
        draft = options.draft or own_head(model)
        if draft is None:
            parser.error("name a --draft for this model")
        if options.resident:
            print(json.dumps(resident(model, draft, options.cache_tokens)))
            return
        if options.prompts is None and not options.no_speed:
            parser.error("name a file of --prompts")
        models, found = [model, draft], {}
        if not options.no_memory:
            found["memory"] = memory(model, draft, options.cache_tokens)
        if not options.no_speed:
            prompts = evenly(load_prompts(options.prompts, options.max_tokens), options.count)
            found |= {"prompts": options.prompts.name, "count": options.count, "max_tokens": options.max_tokens}
            before, others = stolen_and_all(), Others()
            found["speed"] = speed(model, draft, prompts, options)
            stolen, every = (after - before for after, before in zip(stolen_and_all(), before, strict=True))
            found["stolen"] = stolen / max(every, 1)
            found["others"] = others.share()
            print(
                f"the machine's host took {found['stolen']:.1%} of the processor time, and with other programs "
                f"{found['others']:.1%}"
            )
    if options.json:
        write_json(options.json, {"provenance": provenance(models), **found})


def stolen_and_all() -> tuple[int, int]:
    """Processor time so far, in ticks: taken by the host of a virtual machine, and all."""
    times = list(map(int, Path("/proc/stat").read_text().splitlines()[0].split()[1:9]))
    return times[7], sum(times)


# ---- memory


def memory(model: Path, draft: Path, cache_tokens: int) -> dict[str, Any]:
    """Predicted and measured bytes of weights and cache."""
    child = [sys.executable, "-m", "benchmarks.plan_check", "--resident", "--model", str(model), "--draft", str(draft),
             "--cache-tokens", str(cache_tokens)]  # fmt: skip
    measured = json.loads(subprocess.run(child, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
    target = open_model(str(model))
    drafting = open_draft(str(draft), target)
    token = 2 * (target.shape.cache_elements_per_token + _draft_elements(drafting))
    predicted = {
        "weights": target.weight_bytes + drafting.weight_bytes,
        "cache": float(measured["cells"] * token),
    }
    total = sum(predicted.values())
    error = total / measured["resident"] - 1
    print(
        f"memory: predicted {total / 1e6:.0f} MB (weights {predicted['weights'] / 1e6:.0f}, cache "
        f"{predicted['cache'] / 1e6:.0f}), the process took {measured['resident'] / 1e6:.0f} MB: {error:+.1%}"
    )
    return {"predicted": predicted, "measured": measured, "error": error}


def _draft_elements(draft: PlannedDraft) -> int:
    if draft.head is not None:
        return draft.head.cache_elements_per_token
    assert draft.model is not None
    return draft.model.shape.cache_elements_per_token


def resident(model: Path, draft: Path, cache_tokens: int) -> dict[str, int]:
    """Resident bytes that loading both models and touching all of their memory adds to this process."""
    from outpace.backends.base import Capacity
    from outpace.backends.native.runner import NativeModel
    from outpace.models.head_formats import find_head
    from outpace.models.llama_library import load_library

    library, head = load_library(None), find_head(draft)
    opened = [NativeModel(model, library, head), *([] if head is not None else [NativeModel(draft, library)])]
    capacity = Capacity(max_sequences=SEQUENCES, cache_tokens=cache_tokens, max_context=CONTEXT, max_step_tokens=64)
    least = replace(capacity, max_sequences=1, cache_tokens=64, max_context=64)
    for each in opened:  # a first start loads code, makes threads and step buffers, which are not what is compared
        runner = each.start(least, usable_cores()).runner
        _touch(runner)
        runner.close()
    before = resident_bytes()
    started = [each.start(capacity, usable_cores()) for each in opened]
    loaded = resident_bytes()
    cells = [_touch(each.runner) for each in started]
    return {"resident": resident_bytes() - before, "weights": loaded - before, "cells": cells[0]}


def _touch(runner: Any) -> int:
    """Write every cell of the cache, of target and head; returns their number."""
    from outpace.backends.base import HeadTask
    from outpace.core import Row, StepPlan

    each = min(
        runner.pool.num_blocks * runner.pool.block_size // runner.capacity.max_sequences, runner.capacity.max_context
    )
    size = runner.capacity.max_step_tokens
    for seq in range(runner.capacity.max_sequences):
        for start in range(0, each, size):
            count = min(size, each - start)
            runner.forward(StepPlan([Row(seq, start, [1] * count, 1)]))
    head = runner.capabilities.head
    for seq in range(runner.capacity.max_sequences if head is not None else 0):
        request = Text([1] * each, SamplingParams(temperature=0.0, seed=0), frozenset()).request()
        request.seq, request.num_computed = seq, each - 1
        runner.truncate(seq, each - 1)
        head.draft([HeadTask(request, 1)])
    return int(each * runner.capacity.max_sequences)


def gpu_memory() -> list[dict[str, Any]]:
    """Weights and cache of random models in the shapes of Llama 3.1 8B and 3.2 1B, as torch allocates them."""
    import torch

    from benchmarks.gpu_models import random_weights, shape_config
    from outpace.backends.base import Capacity
    from outpace.backends.torch.execution.pages import PAGE_TOKENS
    from outpace.backends.torch.kernels import ops_for
    from outpace.backends.torch.model.model import Model
    from outpace.backends.torch.runner import TorchRunner, num_pages

    device = torch.device("cuda")
    rows = []
    for name, known in (("8B", "llama-3.1-8b"), ("1B", "llama-3.2-1b")):
        before = torch.cuda.memory_allocated()
        capacity = Capacity(max_sequences=16, cache_tokens=16384, max_context=CONTEXT, max_step_tokens=512)
        config = shape_config(name)
        runner = TorchRunner(Model(config, random_weights(config, device), ops_for(device), CONTEXT), capacity)
        measured = torch.cuda.memory_allocated() - before
        target = open_model(known)
        predicted = target.weight_bytes + num_pages(capacity) * PAGE_TOKENS * target.shape.cache_elements_per_token * 2
        print(
            f"{name}: predicted {predicted / 1e9:.2f} GB, allocated {measured / 1e9:.2f} GB: "
            f"{predicted / measured - 1:+.1%}"
        )
        rows.append({"model": known, "predicted": predicted, "measured": measured, "error": predicted / measured - 1})
        runner.close()
        del runner
        torch.cuda.empty_cache()
    return rows


# ---- speed


def speed(model: Path, draft: Path, prompts: Sequence[Prompt], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every temperature and depth. Acceptance is measured once, at the largest depth, as `outpace plan` does it."""
    target = open_model(str(model))
    drafting = open_draft(str(draft), target)
    measurement = measure_drafts(
        target, [drafting], prompts, options.temperature, max_tokens=options.max_tokens, depth=max(options.depths),
        options={"prefix_reuse": False},
    )  # fmt: skip
    measured, costs, usual = runs(model, draft, drafting.kind, prompts, options)
    rows = []
    for (temperature, depth), m in measured.items():
        p = predicted(costs, measurement.drafts[drafting.name][temperature], depth, usual)
        ratio, whole, real = m["step_ratio"], m["decode_ratio"], m["accepted"] / m["drafted"]
        error = p["speedup"] / ratio["value"] - 1
        print(
            f"temperature {temperature:g}, {drafting.kind}:{depth}: predicted {p['speedup']:.3f}, measured "
            f"{ratio['value']:.3f} ({_interval(ratio)}): {error:+.1%}; by whole runs "
            f"{whole['value']:.3f}: {p['speedup'] / whole['value'] - 1:+.1%}; tokens a step "
            f"{p['tokens_per_step']:.3f} and {m['tokens_per_step']:.3f}; accepted {p['acceptance']['value']:.3f} at "
            f"depth {max(options.depths)} by --measure, {real:.3f} by the engine"
        )
        print_parts(p["parts"], m["parts"])
        rows.append({"temperature": temperature, "setting": f"{drafting.kind}:{depth}", "predicted": p, "measured": m,
                     "error": error, "error_of_runs": p["speedup"] / whole["value"] - 1})  # fmt: skip
    return rows


def _interval(ratio: dict[str, Any]) -> str:
    return "one prompt" if ratio["low"] is None else f"{ratio['low']:.2f} to {ratio['high']:.2f}"


def print_parts(predicted: dict[str, float], measured: dict[str, float]) -> None:
    both = (f"{name} {1e3 * predicted[name]:.2f} and {1e3 * measured[name]:.2f}" for name in predicted)
    print(f"    ms, predicted and measured: {'; '.join(both)}")


def predicted(costs: Costs, acceptance: Acceptance, depth: int, usual: Answer) -> dict[str, Any]:
    whole = completed(costs, costs, Machine("here", 1.0, 1.0, 1.0, 1.0, kind=CPU))
    drafting = Drafting(whole, known_acceptance(acceptance.chances), answer=usual)
    context = usual.prompt_tokens + usual.tokens / 2
    found = drafting.fixed(1, depth, context)
    return {
        "speedup": found.speedup, "tokens_per_step": found.tokens_per_step, "step_seconds": found.seconds,
        "plain_seconds": whole.plain_seconds(1, context), "acceptance": acceptance.rate.as_dict(),
        "chances": list(acceptance.chances), "prompt_tokens": usual.prompt_tokens, "decoded_tokens": usual.tokens,
        "without_reading": replace(drafting, answer=ENDLESS).fixed(1, depth, context).speedup,
        "parts": predicted_parts(drafting, depth, context) | {"plain": whole.target.seconds(1, 1, context)},
    }  # fmt: skip


def runs(
    model: Path, draft: Path, kind: str, prompts: Sequence[Prompt], options: argparse.Namespace
) -> tuple[dict[tuple[float, int], dict[str, Any]], Costs, Answer]:
    """By temperature and depth, of the engine: the same prompts and seeds, settings in turns. Costs are calibrated a
    few times between prompts, so that the machine's changing speed affects both; the median counts. Also the mean
    prompt and answer."""
    method: Any = "head" if kind == "head" else "draft"
    settings = [PLAIN, *(fixed(method, depth) for depth in options.depths)]
    made: dict[tuple[float, str], list[Run]] = {(t, each.name): [] for t in options.temperature for each in settings}
    calibrations, lengths, parts = list[Costs](), list[tuple[int, int]](), StepParts()
    with LLM(str(model), draft=str(draft), prefix_reuse=False, max_context=2048) as llm:
        target = EngineTarget(llm)
        try:
            for i, prompt in enumerate(tqdm(prompts, unit="prompt", disable=None)):
                tokens = llm.encode_chat(prompt.messages)
                once = dict[tuple[float, str], Run]()
                for temperature in options.temperature:
                    params = SamplingParams(temperature=temperature, seed=i, max_tokens=options.max_tokens)
                    job = Job(i, "prompt", tokens, params)
                    if not i:
                        target.warm_up(job, settings)
                    with parts.watching(llm.engine):
                        for turn in range(options.rounds):
                            for setting, run in interleaved(target, [job], settings, Closed(1), i + turn):
                                parts.end_run(i, temperature, setting.name)
                                known = once.get((temperature, setting.name))
                                if known is None or run.decode_seconds < known.decode_seconds:
                                    once[temperature, setting.name] = run
                for key, run in once.items():
                    made[key].append(run)
                    lengths.append((len(tokens), run.decode_tokens))
                if i % max(1, len(prompts) // CALIBRATIONS) == 0:
                    scratch = Text(tokens, params, frozenset()).request()
                    calibrations.append(calibrated_now(llm, method, scratch))
        except KeyboardInterrupt:
            if not calibrations:
                raise
            print("interrupted; whole prompts count", file=sys.stderr)
    found = {}
    for temperature in options.temperature:
        for depth in options.depths:
            figures = row(made[temperature, f"{method}:{depth}"], made[temperature, PLAIN.name])
            figures["drafted"], figures["accepted"] = (
                sum(figures[f"{what}_per_position"]) for what in ("drafted", "accepted")
            )
            cell, plain = (temperature, f"{method}:{depth}"), (temperature, PLAIN.name)
            tokens = [run.decode_tokens for run in made[cell]]
            seconds, of_plain = (parts.seconds(each)[: len(tokens)] for each in (cell, plain))
            figures["step_ratio"] = ratio_of_rates(tokens, seconds, tokens, of_plain).as_dict()
            figures["parts"] = parts.medians(cell, depth) | {"plain": parts.medians(plain, 0)["verify"]}
            found[temperature, depth] = figures
    costs = median_costs(calibrations)
    num_read, num_decoded = map(statistics.mean, zip(*lengths, strict=True))
    return found, costs, Answer(round(num_read), num_decoded)


def calibrated_now(llm: LLM, method: str, scratch: Request) -> Costs:
    """As `outpace plan --measure` calibrates; host times, which no calibration measures, as steps have shown them."""
    seen, engine = llm.engine.costs, llm.engine
    assert seen is not None
    engine.forget()
    found = calibrated(engine._runner, [engine._proposers[method]], scratch)
    found.token_seconds, found.schedule_seconds = seen.token_seconds, seen.schedule_seconds
    found.drafts[method].draw_seconds = seen.drafts[method].draw_seconds
    return found


# ---- recorded runs


def recorded(folder: Path) -> list[dict[str, Any]]:
    """Speedups of the H200's runs, predicted from the costs and the acceptance in the same file. Drafts read the
    prompts while the target still prefills others, in time that these runs leave out; so the prediction does, too."""
    target, h200 = open_model("llama-3.1-8b"), machine("h200")
    modelled = target_costs(target, h200, 1, 1024, 2.0)
    modelled.drafts["head"] = draft_costs(open_draft("head", target), target, h200, 1, 1024, 2.0)
    rows = []
    for path in sorted(folder.glob(RECORDED)):
        name, results = path.name, json.loads(path.read_text())
        costs = completed(Costs.from_dict(results["costs"]), modelled, h200)
        costs.drafts = {"head": costs.drafts["head"]}
        for cell in results["summary"]["cells"]:
            if not cell["setting"].startswith("head:"):
                continue
            depth, accepted = int(cell["setting"][5:]), cell["acceptance_per_position"]
            chances = [accepted[0], *(b / a if a else 0.0 for a, b in pairwise(accepted))]
            predicted, by_table = (
                Drafting(sampled(each, target.shape, h200) if cell["temperature"] else each, known_acceptance(chances))
                .fixed(cell["concurrency"], depth, RECORDED_CONTEXT)
                for each in (costs, modelled)
            )  # fmt: skip
            error = predicted.speedup / cell["speedup"] - 1
            rows.append({
                "file": name, "concurrency": cell["concurrency"], "temperature": cell["temperature"],
                "setting": cell["setting"], "predicted": predicted.speedup, "measured": cell["speedup"], "error": error,
                "by_data_sheet": by_table.speedup,
            })  # fmt: skip
            print(
                f"{name}: {cell['concurrency']} at once, temperature {cell['temperature']:g}, {cell['setting']}: "
                f"predicted {predicted.speedup:.2f}, measured {cell['speedup']:.2f}: {error:+.1%}; by data sheet "
                f"{by_table.speedup:.2f}"
            )
    return rows


if __name__ == "__main__":
    main()
