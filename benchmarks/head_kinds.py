"""Which kind of draft head is better: both are trained on the same data for the same time, then compared by their cost.

    outpace distill prepare MODEL.gguf --prompts FILE... --held-out question.jsonl --prepared PREPARED.npz --out OUT
    python -m benchmarks.head_kinds answers MODEL.gguf PREPARED.npz OUT --seconds 75
    python -m benchmarks.head_kinds train MODEL.gguf PREPARED.npz OUT --minutes 3
    python -m benchmarks.head_kinds time OUT
    python -m benchmarks.head_kinds table OUT --gpu-costs gpu_speculation_h200.json --cpu-costs COSTS.json

`answers` lets the target answer the prompts, `train` trains and evaluates each head, one after the other, and `time`
times drafts in the shape of an 8B; these need a GPU. `table` joins the results and needs none; COSTS.json is the output
of `outpace costs --json`. Data, loss of the drafts, optimiser, clock and evaluation are those of `outpace distill`.

The heads: `eagle3` is the autoregressive kind that Outpace ships. The one-pass kind is in `head_kinds_onepass.py`:
`onepass` has two layers whose MLPs are half as wide, so that about as many parameters are multiplied, and a Markov term
of rank 32. `onepass-large` has two layers with whole MLPs and rank 64.

What is compared is tokens a step over the cost of a step with its draft, in plain steps. Tokens a step are SmolLM2's.
The cost of the target's step is a recorded one. The draft's cost is measured on the GPU. On the CPU, where no one-pass
head runs, it is an estimate: the measured cost of the autoregressive head's pass with as many tokens, scaled by the
number of parameters that are multiplied.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file

from benchmarks import head_kinds_onepass as onepass
from benchmarks.gpu_models import shape_config
from benchmarks.head_kinds_drafts import NEW_ENTRIES, draft_ms
from benchmarks.head_kinds_onepass import OnePassConfig, OnePassHead, OnePassTrainer
from outpace.backends.torch.kernels import ops_for
from outpace.bench.provenance import commit_name, provenance
from outpace.models.architecture import Architecture
from outpace.models.head_file import HeadConfig
from outpace.speculation.costs.curves import DraftCosts, StepCosts
from outpace.training.batches import BatchShape, make_batch, plan_batches
from outpace.training.data import Answers, AnswerSettings, draft_vocabulary, find_or_write, load_answers, spread
from outpace.training.display import Display
from outpace.training.evaluate import evaluate
from outpace.training.head import Head, default_taps, rope_theta, start_values
from outpace.training.prepared import Prepared, load_prepared
from outpace.training.target import Target
from outpace.training.train import QUICK_TEXTS, Progress, Trainer, TrainSettings

DRAFT_VOCABULARY = 16_384
LARGE_DRAFT_VOCABULARY = 32_000  # of EAGLE-3's head for Llama 3 8B
LEARNING_RATE = 1.5e-3
MAX_ANSWER = 256
DEPTHS = range(1, 8)
ROWS, CONTEXT = (1, 8, 32, 128), 1024  # requests at once, on the GPU
CPU_ROWS, CPU_CONTEXT = (1, 4), 256
CLASSES = ("all", "conversation", "translation", "summarization", "qa", "math_reasoning", "rag")  # of Spec-Bench
_QUICK_EVERY = 30.0  # seconds


@dataclass(frozen=True, slots=True)
class Variant:
    kind: Literal["eagle3", "onepass"]
    num_steps: int  # drafted tokens per entry in training
    mlp_parts: int = 1  # the MLP has this part of the target's width
    markov_rank: int = 0


VARIANTS = {
    "eagle3": Variant("eagle3", num_steps=4),
    "onepass": Variant("onepass", num_steps=onepass.NUM_STEPS, mlp_parts=2, markov_rank=32),
    "onepass-large": Variant("onepass", num_steps=onepass.NUM_STEPS, markov_rank=64),
}


# Training.


def head_config(variant: Variant, target: Architecture, draft_vocab_size: int) -> HeadConfig:
    c = target
    sizes: dict[str, Any] = {
        "width": c.width, "hidden": c.hidden // variant.mlp_parts, "num_heads": c.num_heads,
        "num_kv_heads": c.num_kv_heads, "head_dim": c.head_dim, "vocab_size": c.vocab_size,
        "draft_vocab_size": draft_vocab_size, "taps": default_taps(c.num_layers), "epsilon": c.epsilon,
        "rope_theta": rope_theta(c), "num_steps": variant.num_steps,
    }  # fmt: skip
    return HeadConfig(**sizes) if variant.kind == "eagle3" else OnePassConfig(**sizes, markov_rank=variant.markov_rank)


def start(config: HeadConfig, target: Target, kept: torch.Tensor, settings: TrainSettings, *, compile: bool) -> Trainer:
    """A head with its start values, and what trains it."""
    torch.manual_seed(0)
    places = kept.to(target.device)
    if isinstance(config, OnePassConfig):
        found = {n: p.to(target.device) for n, p in onepass.start_values(config, target, kept).items()}
        one_pass = OnePassHead(config, target, found, compile=compile)
        return OnePassTrainer(target, one_pass, places, settings, Progress(), compile=compile)
    found = {n: p.to(target.device) for n, p in start_values(config, target, kept).items()}
    return Trainer(target, Head(config, target, found, compile=compile), places, settings, Progress(), compile=compile)


def train(
    name: str, target: Target, answers: Answers, prepared: Prepared, out: Path, minutes: float, *, compile: bool,
    display: Display, shape: BatchShape | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Train a head and evaluate it on the held-out prompts; OUT/NAME.safetensors is the head and OUT/NAME.json this."""
    variant = VARIANTS[name]
    shape = replace(shape or BatchShape(), num_steps=variant.num_steps)
    kept = draft_vocabulary(answers.train, DRAFT_VOCABULARY, target.config.vocab_size)
    settings = TrainSettings(seconds=60 * minutes, learning_rate=LEARNING_RATE, shape=shape)
    trainer = start(head_config(variant, target.config, len(kept)), target, kept, settings, compile=compile)
    parameters = trainer.head.parameters

    begin = time.monotonic()
    length, chosen = plan_batches(answers.train, shape, seed=0)[0]  # compiles before the clock starts
    trainer.batch_loss(make_batch(answers.train, length, chosen, shape, target.device)).backward()
    trainer.optimizer.zero_grad(set_to_none=True)
    if target.device.type == "cuda":
        torch.cuda.synchronize()
    display.say(f"{name}: ready after {time.monotonic() - begin:.0f} s")

    quick_texts, due, log = spread(answers.held_greedy, QUICK_TEXTS), 0.0, list[dict[str, float]]()

    def tick(progress: Progress, loss: float) -> None:
        nonlocal due
        if progress.seconds >= due:
            trainer.quick_figure(quick_texts)
            log.append(asdict(progress) | {"loss": loss})
            due = progress.seconds + _QUICK_EVERY
        display.show(
            name,
            progress.seconds / settings.seconds,
            f"loss {loss:.3f}, {progress.quick:.2f} tokens a step at depth 3, {progress.tokens / 1e6:.1f}M tokens",
        )

    trainer.run(answers.train, settings.seconds, tick=tick)
    weights = {n: p.detach().to(torch.bfloat16).contiguous() for n, p in parameters.items()}
    save_file(weights | {"kept": kept}, out / f"{name}.safetensors")
    found = evaluate(
        target, trainer.head, trainer.kept, answers.held_greedy, answers.held_sampled, prepared.categories, shape,
        rounded=True,
    )  # fmt: skip
    row = found.tokens_a_step["all"]
    display.say(f"{name}: " + ", ".join(f"{value:.3f}" for value in row) + " tokens a step by depth")
    result = {
        "minutes": minutes, "num_steps": shape.num_steps, "parameters": count_parameters(parameters),
        "log": log, "progress": asdict(trainer.progress), "evaluation": found.as_dict(),
    }  # fmt: skip
    (out / f"{name}.json").write_text(json.dumps(result) + "\n")
    return result


def count_parameters(parameters: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """All of them; those that the draft of a token multiplies: in layers and vocabulary (`pass`), by the Markov term,
    and for each new feature (`fuse`). The Markov term's other matrix is only looked up."""
    sizes = {name: p.numel() for name, p in parameters.items()}
    looked_up = sum(size for name, size in sizes.items() if name.startswith("markov_w1"))
    markov = sum(size for name, size in sizes.items() if name.startswith("markov_w2"))
    fuse = sum(size for name, size in sizes.items() if name.startswith("fc"))
    total = sum(sizes.values())
    return {
        "all": total, "pass": total - looked_up - markov - fuse, "markov": markov, "fuse": fuse, "looked_up": looked_up
    }  # fmt: skip


# Costs.


def sampled_tokens_a_step(overlaps: Sequence[float]) -> list[float]:
    """By depth, if positions were independent: a draft's token counts if it and all before it are accepted."""
    return [1.0 + total for total in accumulate(accumulate(overlaps, mul))]


def gain(tokens: float, target: StepCosts, draft_seconds: float, rows: int, depth: int, context: int) -> float:
    """Tokens a step over the cost of a step with its draft, in plain steps."""
    plain = target.seconds(rows, rows, context)
    return tokens * plain / (target.seconds(rows, rows * (depth + 1), context) + draft_seconds)


def one_pass_estimate(chain: DraftCosts, sizes: Mapping[str, int], chain_sizes: Mapping[str, int], rows: int,
                      depth: int) -> float:  # fmt: skip
    """Seconds of a one-pass draft on a CPU, from the measured passes of the autoregressive head.

    All slots are one pass of `rows * depth` tokens with more weights. The Markov term costs its share of a pass of
    `rows` tokens in every slot. What the first pass costs more than another, to take in new features, is the same.
    """
    assert chain.passes is not None
    one = chain.passes.seconds(rows, rows)
    first = chain.seconds(rows, 1, 0) - one - rows * chain.draw_seconds
    block = chain.passes.seconds(rows, rows * depth) * sizes["pass"] / chain_sizes["pass"]
    markov = depth * one * sizes["markov"] / chain_sizes["pass"]
    return first + block + markov + rows * depth * chain.draw_seconds


def best(gains: Mapping[int, float]) -> int:
    """The depth with the largest gain."""
    return max(gains, key=lambda depth: gains[depth])


# Commands.


def answer(options: argparse.Namespace) -> None:
    device = torch.device(options.device)
    target = Target.load(options.model, device, _dtype(device))
    most = min(BatchShape().num_tokens, target.config.unwindowed_context)
    settings = AnswerSettings(seconds=options.seconds, max_answer=MAX_ANSWER, document_share=0.2, max_text=most)
    find_or_write(target, load_prepared(options.prepared), settings, options.out, Display())


def train_all(options: argparse.Namespace) -> None:
    device, display = torch.device(options.device), Display()
    compile = device.type == "cuda"
    prepared = load_prepared(options.prepared)
    target = Target.load(options.model, device, _dtype(device), compile=compile)
    answers = load_answers(options.out, target.fingerprint)
    if answers is None:
        raise SystemExit(f"{options.out} holds no answers; write them with the command answers")
    display.say(f"{answers.train.num_answer_tokens:,} answer tokens in {len(answers.train):,} answers")
    for name in options.heads:
        train(name, target, answers, prepared, options.out, options.minutes, compile=compile, display=display)
    data = {
        "answer_tokens": answers.train.num_answer_tokens, "answers": len(answers.train), "seconds": answers.seconds,
        "documents": answers.num_documents, "held_out": len(answers.held_greedy),
    }  # fmt: skip
    figures = provenance(sys.argv, [options.model]) | {"data": data}
    figures["commit"] = options.commit or figures["commit"]
    (options.out / "training.json").write_text(json.dumps(figures, indent=1) + "\n")


def time_drafts(options: argparse.Namespace) -> None:
    device, shape = torch.device("cuda"), shape_config("8B")
    ops = ops_for(device)
    embedding = torch.empty((shape.vocab_size, shape.width), dtype=torch.bfloat16, device=device).normal_(0.0, 0.02)
    found: dict[str, dict[int, dict[int, float]]] = {}
    for name, variant in VARIANTS.items():
        config = head_config(variant, shape, LARGE_DRAFT_VOCABULARY)
        for rows in ROWS:
            ms = draft_ms(config, shape, ops, embedding, rows, DEPTHS, CONTEXT)
            found.setdefault(name, {})[rows] = ms
            print(f"{name:14} {rows:4}  " + " ".join(f"{value:.3f}" for value in ms.values()), flush=True)
            torch.cuda.empty_cache()
    about = {"command": provenance(sys.argv, [])["command"], "commit": options.commit or commit_name()}
    (options.out / "draft_ms.json").write_text(json.dumps(about | {"ms": found}, indent=1) + "\n")


@dataclass(frozen=True, slots=True)
class Machine:
    target: StepCosts
    draft_seconds: Callable[[str, int, int], float]  # of a head, a number of requests and a depth
    rows: Sequence[int]
    context: int

    def figures(self, tokens: Mapping[str, Mapping[str, Mapping[int, float]]], rows: int) -> dict[str, Any]:
        """`tokens` a step, by temperature, head and depth. A draft's cost in plain steps; the tokens a step, over those
        of eagle3, with which a one-pass head is as good as eagle3 at the same depth; and gains."""
        context, heads = self.context, list(tokens["0"])
        plain = self.target.seconds(rows, rows, context)
        verify = {depth: self.target.seconds(rows, rows * (depth + 1), context) for depth in DEPTHS}
        drafts = {name: {depth: self.draft_seconds(name, rows, depth) for depth in DEPTHS} for name in heads}
        steps = {name: {depth: verify[depth] + each for depth, each in row.items()} for name, row in drafts.items()}
        return {
            "draft": {name: {depth: each / plain for depth, each in row.items()} for name, row in drafts.items()},
            "enough": {
                name: {depth: each / steps["eagle3"][depth] for depth, each in steps[name].items()}
                for name in heads
                if VARIANTS[name].kind == "onepass"
            },
            "gain": {
                temperature: {
                    name: {
                        depth: gain(each, self.target, drafts[name][depth], rows, depth, context)
                        for depth, each in row.items()
                    }
                    for name, row in by_head.items()
                }
                for temperature, by_head in tokens.items()
            },
        }


def compare(out: Path, gpu_costs: Mapping[str, Any], cpu_costs: Mapping[str, Any]) -> dict[str, Any]:
    """Figures by machine and number of requests, from what the other commands wrote into OUT."""
    heads = {
        name: json.loads((out / f"{name}.json").read_text()) for name in VARIANTS if (out / f"{name}.json").exists()
    }
    found = {name: each["evaluation"] for name, each in heads.items()}
    tokens = {
        "0": {name: dict(zip(DEPTHS, each["tokens_a_step"]["all"], strict=False)) for name, each in found.items()},
        "1": {
            name: dict(zip(DEPTHS, sampled_tokens_a_step(each["overlap"]), strict=False))
            for name, each in found.items()
        },
    }
    timed = json.loads((out / "draft_ms.json").read_text())
    sizes = {name: each["parameters"] for name, each in heads.items()}
    chain = DraftCosts.from_dict(cpu_costs["drafts"]["head"])

    def on_gpu(name: str, rows: int, depth: int) -> float:
        return 1e-3 * float(timed["ms"][name][str(rows)][str(depth)])

    def on_cpu(name: str, rows: int, depth: int) -> float:
        if VARIANTS[name].kind == "eagle3":
            return chain.seconds(rows, depth, 0)
        return one_pass_estimate(chain, sizes[name], sizes["eagle3"], rows, depth)

    machines = {
        "H200, shape of an 8B": Machine(StepCosts.from_dict(gpu_costs["target"]), on_gpu, ROWS, CONTEXT),
        "CPU, SmolLM2": Machine(StepCosts.from_dict(cpu_costs["target"]), on_cpu, CPU_ROWS, CPU_CONTEXT),
    }
    figures = {name: {rows: each.figures(tokens, rows) for rows in each.rows} for name, each in machines.items()}
    return {"heads": heads, "timed": timed, "tokens_a_step": tokens, "machines": figures}


def as_text(found: Mapping[str, Any]) -> list[str]:
    heads, lines = found["heads"], list[str]()
    lines.append("parameters in millions (all; multiplied in a pass; Markov term; looked up), training")
    for name, each in heads.items():
        sizes, progress = each["parameters"], each["progress"]
        shown = "  ".join(f"{sizes[key] / 1e6:6.2f}" for key in ("all", "pass", "markov", "looked_up"))
        lines.append(
            f"  {name:14} {shown}   {each['minutes']:g} minutes, {progress['steps']:,} steps, "
            f"{progress['tokens'] / 1e6:.1f}M token passes, {each['num_steps']} drafted tokens at once"
        )
    lines += ["", "tokens a step on held-out prompts, greedy, by depth" + "".join(f"{depth:7}" for depth in DEPTHS)]
    for category in (name for name in CLASSES if name in next(iter(heads.values()))["evaluation"]["tokens_a_step"]):
        for name, each in heads.items():
            row = each["evaluation"]["tokens_a_step"][category][: len(DEPTHS)]
            lines.append(f"  {category:16} {name:14}" + " " * 18 + "".join(f"{value:7.2f}" for value in row))
    lines += ["", "overlap of the two distributions at temperature 1, by depth"]
    for name, each in heads.items():
        lines.append(f"  {name:14} " + "  ".join(f"{value:.3f}" for value in each["evaluation"]["overlap"]))
    titles = {
        "draft": "a draft in plain steps",
        "enough": "tokens a step, over those of eagle3, with which a one-pass head is as good at that depth",
    }
    for machine, by_rows in found["machines"].items():
        for key, title in titles.items():
            lines += ["", f"{machine}: {title}, by depth" + "".join(f"{depth:7}" for depth in DEPTHS)]
            for rows, figures in by_rows.items():
                for name, row in figures[key].items():
                    lines.append(f"  {rows:4} at once  {name:14}" + "".join(f"{value:7.3f}" for value in row.values()))
        lines += ["", f"{machine}: tokens a step over the cost of a step with its draft, by depth (* the best)"]
        for rows, figures in by_rows.items():
            for temperature, by_head in figures["gain"].items():
                for name, row in by_head.items():
                    values = " ".join(f"{value:6.3f}{' *'[depth == best(row)]}" for depth, value in row.items())
                    lines.append(f"  {rows:4} at once, temperature {temperature}  {name:14} {values}".rstrip())
    return lines


def table(options: argparse.Namespace) -> None:
    gpu, cpu = (json.loads(path.read_text()) for path in (options.gpu_costs, options.cpu_costs))
    found = compare(options.out, gpu.get("costs", gpu), cpu.get("costs", cpu))
    figures = json.loads((options.out / "training.json").read_text())
    about = [
        f"command: {figures['command']}", f"commit: {figures['commit']}", f"torch: {figures.get('torch')}",
        f"gpu: {figures['gpu']}", f"data: {figures['data']}",
        f"target's steps: recorded, {options.gpu_costs.name} and {options.cpu_costs.name}",
        f"drafts on the H200: measured at commit {found['timed']['commit']}, {CONTEXT} tokens of context, "
        f"{NEW_ENTRIES} new features a request",
        "drafts on the CPU: the autoregressive head's are measured, the one-pass ones ESTIMATED from them",
        "temperature 1: tokens a step from the overlaps, as if positions were independent",
    ]  # fmt: skip
    lines = [*about, "", *as_text(found)]
    print("\n".join(lines))
    (options.out / "head_kinds.txt").write_text("\n".join(lines) + "\n")
    costs = {"gpu": gpu.get("costs", gpu), "cpu": cpu.get("costs", cpu)}
    (options.out / "head_kinds.json").write_text(json.dumps(figures | found | {"costs": costs}, indent=1) + "\n")


def _dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    answering, training, timing, joining = (commands.add_parser(name) for name in ("answers", "train", "time", "table"))
    for each in (answering, training):
        each.add_argument("model", type=Path, help="SmolLM2 as a GGUF file")
        each.add_argument("prepared", type=Path, help="written by `outpace distill prepare`")
        each.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    for each in (answering, training, timing, joining):
        each.add_argument("out", type=Path, help="folder for all results")
    answering.add_argument(
        "--seconds", type=float, default=75.0, help="for the target's answers (default: %(default)g)"
    )
    training.add_argument("--minutes", type=float, default=3.0, help="for each head (default: %(default)g)")
    training.add_argument("--heads", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    for each in (training, timing):
        each.add_argument("--commit", help="commit of this code, for a copy without git history")
    joining.add_argument("--gpu-costs", type=Path, required=True, help="results of benchmarks.gpu_speculation")
    joining.add_argument("--cpu-costs", type=Path, required=True, help="output of `outpace costs --json`")
    for each, function in ((answering, answer), (training, train_all), (timing, time_drafts), (joining, table)):
        each.set_defaults(function=function)
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    options.function(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
