"""Would trees of drafts pay with the trained head? What a step accepts is replayed here; what it costs was recorded.

    python -m benchmarks.trees OUT --prompts question.jsonl [--count 16] [--max-tokens 128] [--widths 2 4 8 16]

A chain drafts one token after each token. A tree drafts several, so that a step goes on where the first guess is wrong.
The target verifies all nodes in one pass, which needs a mask that the Triton kernels do not have; so this decides
whether they should have one. Needs no GPU: about 12 s a prompt on one core. OUT.txt and OUT.json are written.

Accepted tokens are real. The model answers Spec-Bench's prompts greedily, then the head drafts from every position of
each answer, in float32. Decoding is played over the answer: a step keeps the longest path of its draft that the answer
has too, and one token of the target's own. The shapes:

  chain    the likeliest token, `depth` times
  static   the same tree in every step: the nodes that are accepted most often, by their ranks among their siblings.
           Each half of the prompts has the tree that fits the other half
  dynamic  as in EAGLE-2: every level expands its `width` likeliest nodes by joint probability, each to `width`
           children; of all nodes up to `depth`, the `nodes` likeliest are verified

Costs are those of an 8B on one H200. A pass of the target over all requests' tokens is read from --steps (results of
benchmarks.gpu_speculation), the head's passes from --drafts (results of benchmarks.head_kinds), at 1,024 tokens of
context. The gain is tokens a step over the cost of a step with its draft, in plain steps. Requests are alike.

It is an upper bound for trees. Charged is one pass of the head per level, which takes as long as the chain's pass with
as many rows as the level expands nodes; more than 128 rows, the most that were timed, count as 128. Nothing is charged
for the mask, for finding the likeliest children and nodes, or for moving the kept path in the cache. `slack` is what
these may take, in ms a step, before the gain is 1.1 times the best chain's, or no more than it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from benchmarks.report import provenance, write_json
from benchmarks.spec_bench import load_classes
from benchmarks.trees_drafts import Drafts, load_head
from benchmarks.trees_replay import MAX_DEPTH, NODES, Answer, Kind, Played, chains, dynamic_trees, static_trees
from outpace import LLM, SamplingParams
from outpace.models.embedded import own_head
from outpace.models.resolve import resolve_model
from outpace.speculation.costs.curves import StepCosts
from outpace.training.batches import join
from outpace.training.target import Target

RESULTS = Path(__file__).parent / "results"
REQUESTS, CONTEXT = (1, 8, 32), 1024
CHECK_DEPTH = 3  # of the engine's own drafts, beside which the replayed chains are printed
NUM_RESAMPLES = 2000
WANTED = 1.1  # times the best chain

# Costs.


@dataclass(frozen=True, slots=True)
class Machine:
    target: StepCosts
    first: Mapping[int, float]  # seconds of a draft's first pass, by rows
    later: Mapping[int, float]  # of a further one

    @staticmethod
    def read(steps: Path, drafts: Path) -> Machine:
        target = StepCosts.from_dict(json.loads(steps.read_text())["costs"]["target"])
        timed = json.loads(drafts.read_text())["timed"]["ms"]["eagle3"]
        first, later = dict[int, float](), dict[int, float]()
        for rows, ms in timed.items():
            depths = sorted(map(int, ms))
            first[int(rows)] = 1e-3 * ms["1"]
            later[int(rows)] = 1e-3 * (ms[str(depths[-1])] - ms["1"]) / (depths[-1] - 1)
        return Machine(target, first, later)

    def plain(self, requests: int) -> float:
        return self.target.seconds(requests, requests, CONTEXT)

    def step(self, requests: int, played: Played) -> float:
        """Seconds of a step in which every request has such a draft."""
        verify = self.target.seconds(requests, requests * (1 + played.nodes), CONTEXT)
        passes = (self.later if i else self.first for i in range(played.depth))
        draft = sum(
            float(np.interp(requests * rows, list(times), list(times.values())))
            for rows, times in zip(played.rows, passes, strict=True)
        )
        return verify + draft

    def gain(self, requests: int, played: Played, chosen: NDArray[np.int64] | slice = slice(None)) -> float:
        return played.rate(chosen) * self.plain(requests) / self.step(requests, played)


# Comparing.


def best(machine: Machine, requests: int, shapes: Sequence[Played], chosen: NDArray[np.int64] | slice = slice(None)) \
        -> Played:  # fmt: skip
    return max(shapes, key=lambda each: machine.gain(requests, each, chosen))


def figures(machine: Machine, requests: int, shapes: Mapping[str, Sequence[Played]], kind: Kind) -> dict[str, Any]:
    """The best tree of a kind beside the best chain."""
    chain, tree = (best(machine, requests, shapes[name]) for name in ("chain", kind))
    gains = {each.kind: machine.gain(requests, each) for each in (chain, tree)}
    ratio, step = gains[kind] / gains["chain"], machine.step(requests, tree)
    return {
        "shape": tree.name,
        "tokens_per_step": tree.rate(),
        "step": step / machine.plain(requests),
        "gain": gains[kind],
        "ratio": ratio,
        "interval": interval(machine, requests, tree, chain),
        "ratio_chosen_on_others": ratio_chosen_on_others(machine, requests, shapes, kind),
        "slack_ms": {"for 1.1": 1e3 * step * (ratio / WANTED - 1), "for 1.0": 1e3 * step * (ratio - 1)},
    }


def interval(machine: Machine, requests: int, tree: Played, chain: Played) -> tuple[float, float]:
    """95%, by resampling answers; the two shapes stay."""
    rng, count = np.random.default_rng(0), len(tree.steps)
    chosen = rng.integers(0, count, (NUM_RESAMPLES, count))
    costs = machine.step(requests, chain) / machine.step(requests, tree)
    ratios = costs * chain.steps[chosen].sum(1) / tree.steps[chosen].sum(1)
    low, high = np.quantile(ratios, (0.025, 0.975))
    return float(low), float(high)


def ratio_chosen_on_others(
    machine: Machine, requests: int, shapes: Mapping[str, Sequence[Played]], kind: Kind
) -> float:
    """Both shapes are chosen on one half of the answers and played over the other, in turn."""
    seconds = {"chain": 0.0, kind: 0.0}
    count = len(shapes["chain"][0].steps)
    halves = [np.arange(start, count, 2) for start in (0, 1)]
    for name in seconds:
        for chosen, played in (halves, halves[::-1]):
            found = best(machine, requests, shapes[name], chosen)
            seconds[name] += float(found.steps[played].sum()) * machine.step(requests, found)
    return seconds["chain"] / seconds[kind]


def compare(machine: Machine, answers: Sequence[Answer]) -> dict[str, Any]:
    shapes: dict[str, list[Played]] = {
        "chain": list(chains(answers)), "static": list(static_trees(answers)), "dynamic": list(dynamic_trees(answers)),
    }  # fmt: skip
    kinds: tuple[Kind, ...] = ("chain", "static", "dynamic")
    categories = list(dict.fromkeys(each.category for each in answers))
    by_class: dict[str, dict[str, dict[str, float]]] = {}
    for category in categories:
        chosen = np.array([i for i, each in enumerate(answers) if each.category == category])
        by_class[category] = {
            str(requests): {
                kind: machine.gain(requests, best(machine, requests, shapes[kind], chosen), chosen) for kind in kinds
            }
            for requests in REQUESTS
        }
    checked = sum(each.num_entries for each in answers) / sum(each.engine_steps for each in answers)
    return {
        "answers": len(answers),
        "tokens": sum(each.num_entries for each in answers),
        "engine_tokens_per_step": checked,
        "best": {
            str(requests): {kind: figures(machine, requests, shapes, kind) for kind in kinds} for requests in REQUESTS
        },
        "by_class": by_class,
        "chains": {str(each.depth): each.rate() for each in shapes["chain"]},
        "by_nodes": {
            str(requests): {
                kind: {
                    str(nodes): figures_of(machine, requests, best(machine, requests, fitting))
                    for nodes in NODES
                    if (fitting := [each for each in shapes[kind] if each.nodes == nodes])
                }
                for kind in kinds
            }
            for requests in REQUESTS
        },
    }  # fmt: skip


def figures_of(machine: Machine, requests: int, each: Played) -> dict[str, Any]:
    return {"shape": each.name, "tokens_per_step": each.rate(), "gain": machine.gain(requests, each)}


def as_text(found: Mapping[str, Any]) -> list[str]:
    lines = [
        f"{found['answers']} answers, {found['tokens']:,} tokens; chains of {CHECK_DEPTH} in the engine: "
        f"{found['engine_tokens_per_step']:.2f} tokens a step",
        "",
        "tokens a step by depth     " + "".join(f"{depth:7}" for depth in range(1, MAX_DEPTH + 1)),
        "  chain                    " + "".join(f"{rate:7.2f}" for rate in found["chains"].values()),
        "",
        "the best shape of each kind: tokens a step, a step in plain steps, gain; over the best chain (95% interval), "
        "both chosen on other prompts; slack in ms a step for 1.1 and for 1.0",
    ]
    for requests, kinds in found["best"].items():
        for each in kinds.values():
            low, high = each["interval"]
            slack = " ".join(f"{value:6.2f}" for value in each["slack_ms"].values())
            lines.append(
                f"  {requests:>2} at once  {each['shape']:38} {each['tokens_per_step']:5.2f} {each['step']:6.3f} "
                f"{each['gain']:6.3f}   {each['ratio']:.3f} ({low:.3f}-{high:.3f}) "
                f"{each['ratio_chosen_on_others']:6.3f}   {slack}"
            )
    for requests, kinds in found["by_nodes"].items():
        lines += ["", f"{requests} at once: the best gain by verified draft tokens, with its tokens a step"]
        lines.append(f"  {'nodes':8}" + "".join(f"{nodes:>12}" for nodes in NODES))
        for kind, row in kinds.items():
            at = (row.get(str(nodes)) for nodes in NODES)
            cells = [f"{each['gain']:.2f} ({each['tokens_per_step']:.2f})" if each else "" for each in at]
            lines.append(f"  {kind:8}" + "".join(f"{cell:>12}" for cell in cells).rstrip())
    lines += ["", "gain by class, each with its own best shapes: chain, static, dynamic; dynamic over chain"]
    for category, by_requests in found["by_class"].items():
        cells = [
            " ".join(f"{gain:6.2f}" for gain in gains.values()) + f" {gains['dynamic'] / gains['chain']:6.2f}"
            for gains in by_requests.values()
        ]
        lines.append(f"  {category:16}" + " | ".join(cells))
    return lines


# Answers.


def gather(options: argparse.Namespace) -> list[Answer]:
    """Ctrl-C keeps the answers that are complete."""
    path = resolve_model(options.model)
    head_path = options.head or own_head(path)
    if head_path is None:
        raise SystemExit(f"no head comes with {path.name}; name one with --head")
    draft = str(options.head) if options.head else None
    params = SamplingParams(temperature=0.0, max_tokens=options.max_tokens)
    fixed: dict[str, Any] = {"speculation": "on", "method": "head", "depth": CHECK_DEPTH}
    with LLM(options.model, draft, max_context=4096, threads=options.threads, **fixed) as llm:
        classes = load_classes(options.prompts, options.count)
        jobs = [
            (name, llm.encode_chat([{"role": "user", "content": text}]))
            for name, texts in classes.items()
            for text in texts
        ]
        outputs = llm.generate([prompt for _, prompt in jobs], params)
    if options.threads:
        torch.set_num_threads(options.threads)
    target = Target.load(path, torch.device("cpu"), torch.float32)
    head, kept = load_head(head_path, path, target)
    answers = list[Answer]()
    try:
        for (name, prompt), output in tqdm(list(zip(jobs, outputs, strict=True)), unit="answer", dynamic_ncols=True):
            said = output.outputs[0]
            if len(said.token_ids) < 2:
                continue  # nothing is drafted
            drafts = Drafts(head, kept, join([np.array([*prompt, *said.token_ids])], [len(prompt)]))
            trees = {width: drafts.tree_ranks(width, MAX_DEPTH) for width in options.widths}
            # The engine's first step only reads the prompt.
            answers.append(Answer(name, drafts.true_ranks(MAX_DEPTH), trees, said.speculation.steps - 1))
    except KeyboardInterrupt:
        print("interrupted; the answers so far count", file=sys.stderr)
    return answers


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="OUT.txt and OUT.json are written")
    parser.add_argument("--prompts", type=Path, required=True, help="Spec-Bench's question.jsonl, or other prompts")
    parser.add_argument("--model", metavar="FILE", help="a GGUF file (default: the embedded SmolLM2)")
    parser.add_argument("--head", type=Path, metavar="FILE", help="its head (default: the one that comes with it)")
    parser.add_argument("--count", type=int, default=16, help="prompts of each class (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=128, help="of an answer (default: %(default)s)")
    parser.add_argument("--widths", type=int, nargs="+", default=[2, 4, 8, 16], help="(default: 2 4 8 16)")
    parser.add_argument("--threads", type=int, help="(default: all cores)")
    parser.add_argument("--steps", type=Path, default=RESULTS / "gpu_speculation_h200.json", help="costs of the target")
    parser.add_argument("--drafts", type=Path, default=RESULTS / "head_kinds_h200.json", help="costs of the head")
    options = parser.parse_args(arguments)
    machine = Machine.read(options.steps, options.drafts)
    answers = gather(options)
    if not answers:
        return 1
    about, found = provenance([resolve_model(options.model)]), compare(machine, answers)
    lines = [
        f"command: {about['command']}", f"commit: {about['commit']}", f"cpu: {about['cpu']}",
        f"costs: recorded on one H200, {options.steps.name} and {options.drafts.name}; for trees a lower bound, so "
        "that gains are an upper one",
        "", *as_text(found),
    ]  # fmt: skip
    print("\n".join(lines))
    options.out.with_suffix(".txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    write_json(options.out.with_suffix(".json"), {"provenance": about, **found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
