"""Write docs/results.md, and the figures in the README, from the files in benchmarks/results/.

python -m benchmarks.results_page            # write the page
python -m benchmarks.results_page --check    # exit with 1 where the page is not what the files say
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "results.md"
README = ROOT / "README.md"
BEGIN, END = "<!-- figures: python -m benchmarks.results_page -->", "<!-- end of figures -->"
WORKLOADS = {"code_edit": "code edit", "summarise": "summarise", "json": "JSON", "chat": "chat", "story": "story"}
VERSUS = {
    "head": "SmolLM2-135M with its head, twelve blocks a cell, beside commit 548960b",
    "head_1_4": "One and four at once, later. The machine was slower on that day: plain decoding took 1.2 times as "
    "long as above, and the earlier policy had 1.18 and 1.00 of it (above 1.40 and 1.12)",
    "head_8": "The present policy, eight at once, while nothing else ran",
    "qwen": "Qwen2.5-Coder 1.5B with its 0.5B as draft, at most 32 tokens an answer, beside commit 548960b",
    "qwen_now": "The same on the slower day, when the draft model did not pay: the earlier policy had 1.16, 0.96 and "
    "0.99 (above 1.67, 1.09 and 0.93). What the model lost kept this policy from lookups in the first four blocks",
}

Row = Sequence[str]


@cache
def load(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return found


def table(head: Row, rows: Iterable[Row]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines] + [""]


def source(name: str) -> str:
    """Where figures come from: the file, the commit, and the command that wrote it."""
    found = load(name)
    about = found.get("provenance") or found.get("machine") or found
    command = about.get("command")
    text = f"`benchmarks/results/{name}.json`, commit {about['commit']}"
    return f"{text}: `{command}`." if command else f"{text}."


def interval(ratio: Mapping[str, float]) -> str:
    return f"{ratio['value']:.2f} ({ratio['low']:.2f}-{ratio['high']:.2f})"


def title(text: str) -> list[str]:
    return [f"## {text}", ""]


def native() -> list[str]:
    lines = title("The native CPU backend beside llama.cpp, plain decoding")
    names = {"native_smollm2": "SmolLM2-135M Q4_1", "native_qwen": "Qwen2.5-Coder 1.5B Q4_K_M"}
    rows = []
    for name, model in names.items():
        f = load(name)
        rows += [
            [f"{model}, tokens per second", f"{f['tokens_per_second.native']:.1f} ({f['rate_ratio']:.2f}x)",
             f"{f['tokens_per_second.llamacpp']:.1f}"],
            [f"{model}, share of memory bandwidth: best step / mean step",
             f"{f['floor_share']:.2f} / {f['least_floor_share']:.2f}", ""],
            [f"{model}, step of 4 / 8 tokens over a step of 1",
             f"{f['step_ratio.native.4']:.2f} / {f['step_ratio.native.8']:.2f}",
             f"{f['step_ratio.llamacpp.4']:.2f} / {f['step_ratio.llamacpp.8']:.2f}"],
            [f"{model}, prefill of 512 tokens, tokens per second", f"{f['prefill.native.512']:.0f}",
             f"{f['prefill.llamacpp.512']:.0f}"],
        ]  # fmt: skip
    return [*lines, *table(["", "native", "llama.cpp"], rows), *(source(name) for name in names), ""]


def auto_on_cpu() -> list[str]:
    lines = title("`auto` on a CPU")
    lines += ["Decode tokens per second of `auto` over plain decoding, and over an earlier policy, in "
              "interleaved blocks. In brackets: 95% intervals.", ""]  # fmt: skip
    for key, model in VERSUS.items():
        found = load(f"policy_versus_{key}")
        groups = sorted(found["groups"], key=int)
        rows = [[f"all, {over}", *(interval(found["groups"][g]["ratios"][f"new/{over}"]) for g in groups)]
                for over in ("plain", "old")]  # fmt: skip
        for workload, shown in WORKLOADS.items():
            for temperature in ("0", "1"):
                cells = [found["cells"].get(f"{workload}/{temperature}/{group}") for group in groups]
                if any(cells):
                    ratios = [interval(cell["figures"]["ratios"]["new/plain"]) if cell else "" for cell in cells]
                    rows.append([f"{shown}, temperature {temperature}, plain", *ratios])
        lines += [f"{model}:", "", *table(["over", *(f"{group} at once" for group in groups)], rows)]
        lines += [source(f"policy_versus_{key}"), ""]
    return lines


# The latest first.
GPU_SPECULATION = ("gpu_speculation_h200", "gpu_speculation_h200_depths")
GPU_PEERS = "gpu_peers_h200"
QWEN_HEAD = "humaneval_qwen_head"
SPEC_BENCH = {f"spec_bench_smollm2_{cell}": shown for cell, shown in (
    ("c1_t0", "1 at once, temperature 0"), ("c1_t1", "1 at once, temperature 1"),
    ("c4_t0", "4 at once, temperature 0"), ("c8_t0", "8 at once, temperature 0"),
)}  # fmt: skip


def head_on_cpu() -> list[str]:
    found = {name: load(name) for name in SPEC_BENCH}
    rows = []
    for kind in next(iter(found.values()))["classes"]:
        ratios = [interval(each["classes"][kind]["auto"]["decode_ratio"]) for each in found.values()]
        rows.append([kind.replace("_", " "), *ratios])
    rows.append(["geometric mean", *(f"{each['means']['auto']:.2f}" for each in found.values())])
    rows.append(
        ["the same, always 3 tokens of the head", *(f"{each['means']['head:3']:.2f}" for each in found.values())]
    )
    lines = title("The embedded model with its head, by the classes of Spec-Bench")
    lines += ["Decode tokens per second of `auto` over plain decoding, with 95% intervals. The head's card is "
              "`benchmarks/results/head_smollm2_card.md`, its training log beside it.", ""]  # fmt: skip
    lines += table(["", *SPEC_BENCH.values()], rows)
    lines += [*(source(name) for name in SPEC_BENCH), ""]
    code = load(QWEN_HEAD)["classes"]["HumanEval"]
    lines += ["Qwen2.5-Coder 1.5B with a head that `outpace distill` trained in 15 minutes, the target's answers "
              "included (`benchmarks/results/head_qwen_coder_card.md`), HumanEval, one request, temperature 0:",
              ""]  # fmt: skip
    shown = [[name, interval(each["decode_ratio"]), f"{each['tokens_per_step']:.2f}"] for name, each in code.items()]
    return [*lines, *table(["", "over plain", "tokens a step"], shown), source(QWEN_HEAD), ""]


def peers() -> list[str]:
    lines = title("The same prompts and weights through other engines")
    lines += ["Tokens per second end to end, prompt included. In brackets: answers equal to that engine's own plain "
              "decoding.", ""]  # fmt: skip
    for name, model in {"peers_smollm2": "SmolLM2-135M Q4_1", "peers_qwen": "Qwen2.5-Coder 1.5B + 0.5B"}.items():
        found = load(name)
        rows = [[f"{row['engine']}, {row['variant']}", f"{row['tokens_per_second']:.1f}",
                 f"{row['same_as_own_plain']} of {row['num_requests']}"] for row in found["rows"]]  # fmt: skip
        lines += [f"{model}:", "", *table(["engine", "tokens per second", "equal"], rows), source(name), ""]
    return lines


def peers_by_class() -> list[str]:
    name = "spec_bench_peers_smollm2"
    found = load(name)["classes"]
    engines = [engine for engine in next(iter(found.values())) if engine != "outpace"]
    rows = []
    for kind, of in found.items():
        ratios = [f"{interval(of[e]['auto_over_it'])}, least prompt {min(of[e]['by_prompt']):.2f}" for e in engines]
        rows.append([kind.replace("_", " "), *ratios])
    lines = title("The same, by the classes of Spec-Bench")
    lines += ["End to end, `auto` with the embedded head over the fastest variant of each engine in that class: plain, "
              "or lookups at depth 4. Four prompts a class; in brackets 95% intervals.", ""]  # fmt: skip
    return [*lines, *table(["", *engines], rows), source(name), ""]


def head_costs() -> list[str]:
    name = "draft_cost"
    rows = []
    for texts, drafts in load(name)["drafts"].items():
        cells = [f"{of['ratio']:.3f} ({of['quartiles'][0]:.3f}-{of['quartiles'][1]:.3f})" for of in drafts.values()]
        rows.append([f"{texts} texts", *cells, f"{drafts['head:3']['largest']:.3f}"])
    lines = title("What a draft of the embedded head costs on a CPU")
    lines += ["In plain steps, medians over prompts, with quartiles. At a fixed depth; `auto` also asks for the "
              "confidence of each token.", ""]  # fmt: skip
    lines += table(["", "1 token", "2 tokens", "3 tokens", "3 tokens, dearest prompt"], rows)
    return [*lines, source(name), ""]


def first_run() -> list[str]:
    lines = title("Starting, beside the commit before the embedded head")
    lines += ["`outpace run` in fresh processes, in turns, over commit 02125ce: median, least and most. The first run "
              "calibrates; the second uses what it saved. Before calibration was made quicker: "
              "`benchmarks/results/first_run_before.json`.", ""]  # fmt: skip
    lines += times_as_long("first_run")
    lines += [
        "A new user's two commands, `pip install` and the first run, with all downloads, while other programs ran:",
        "",
    ]
    return [*lines, *times_as_long("first_install")]


def times_as_long(name: str) -> list[str]:
    ratios = {what: sorted(values) for what, values in load(name)["ratios"].items()}
    rows = [[what, f"{statistics.median(r):.2f} ({r[0]:.2f}-{r[-1]:.2f})"] for what, r in ratios.items()]
    return [*table(["", "times as long"], rows), source(name), ""]


def gpu_speculation() -> list[str]:
    lines = title("`auto` on one H200")
    lines += [
        "A real 135M model inside the shape of an 8B, with its own head, padded to the size of an 8B's. Spec-Bench "
        "prompts, medians of blocks, over plain decoding. [What this shows and what not](gpu.md). The second table has "
        "more fixed depths beside an earlier policy.",
        "",
    ]
    for name in GPU_SPECULATION:
        lines += [*gpu_speculation_table(name), source(name), ""]
    return lines


def gpu_speculation_table(name: str) -> list[str]:
    cells = {(c["concurrency"], c["temperature"], c["setting"]): c for c in load(name)["summary"]["cells"]}
    rows = []
    for concurrency in sorted({concurrency for concurrency, _, _ in cells}):
        for temperature in (0.0, 1.0):
            of = {s: c for (n, t, s), c in cells.items() if (n, t) == (concurrency, temperature)}
            if "auto" not in of:
                continue
            drafts = {s: c for s, c in of.items() if s.startswith(("draft:", "head:"))}
            best = max(drafts, key=lambda s: drafts[s]["speedup"])
            auto = of["auto"]
            low, high = auto["speedup_range"]
            fixed = f"{of[best]['speedup']:.2f} ({best})"
            ours = f"{auto['speedup']:.2f} ({low:.2f}-{high:.2f})"
            rows.append([str(concurrency), f"{temperature:.0f}", f"{of['plain']['tokens_per_s']:.0f}", fixed, ours])
    return table(["at once", "temperature", "plain, tokens/s", "best fixed depth", "auto (least-most)"], rows)


def gpu_peers() -> list[str]:
    """Each engine's best setting in every cell, beside plain decoding."""
    found = load(GPU_PEERS)["rows"]
    steps = {(row["engine"], row["concurrency"]): f"{row['ms_per_step']:.2f}" for row in found if row["do"] == "steps"}
    numbers = sorted({number for _, number in steps})
    engines = list(dict.fromkeys(engine for engine, _ in steps))
    lines = title("Outpace beside vLLM 0.24.0 on one H200")
    lines += [
        "The same model, head and prompts as above, in one run; vLLM in a process of its own, as it starts by default. "
        "Milliseconds of a plain step, 1,024 tokens of context, by requests:",
        "",
        *table(["", *map(str, numbers)], [[name, *(steps.get((name, n), "") for n in numbers)] for name in engines]),
        "Tokens per second with Spec-Bench's prompts, medians of two blocks:",
        "",
    ]
    head = [
        "at once",
        "temperature",
        "Outpace plain",
        "Outpace `auto`",
        "vLLM plain",
        "vLLM's best setting",
        "`auto` over it",
    ]
    return [*lines, *table(head, peer_cells(found)), source(GPU_PEERS), ""]


def peer_cells(found: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    rows = []
    cells = [row for row in found if row["do"] == "cell"]
    for number, temperature in dict.fromkeys((row["concurrency"], row["temperature"]) for row in cells):
        speeds: dict[tuple[str, str], list[float]] = {}
        for row in cells:
            if (row["concurrency"], row["temperature"]) == (number, temperature):
                speeds.setdefault((row["engine"], row["setting"]), []).append(row["tokens_per_s"])
        medians = {key: statistics.median(values) for key, values in speeds.items()}
        best = max((key for key in medians if key[0].startswith("vllm")), key=lambda key: medians[key])
        auto = medians["outpace", "auto"]
        rows.append([
            str(number), f"{temperature:.0f}", f"{medians['outpace', 'plain']:.0f}", f"{auto:.0f}",
            f"{medians['vllm-plain', 'plain']:.0f}", f"{medians[best]:.0f} ({best[1]})", f"{auto / medians[best]:.2f}",
        ])  # fmt: skip
    return rows


def gpu_steps() -> list[str]:
    found = load("gpu_h200")["table"]
    columns = ("floor", "step", "engine", "naive", "transformers")
    rows = [[cell, *(f"{of[name]:.2f}" if name in of else "" for name in columns)] for cell, of in found.items()]
    lines = title("Milliseconds of a step on one H200, bfloat16, 1,024 tokens of context")
    lines += ["The floor is the time to read weights and cache once.", ""]
    head = ["requests x tokens", "floor", "our step", "whole engine", "naive torch", "transformers"]
    return [*lines, *table(head, rows), source("gpu_h200"), ""]


def simulator() -> list[str]:
    found = load("simulate")
    sample = load("simulate_quick")  # the oracle takes too long for all of them
    rows = [
        [f"{name}, {len(each['scenarios'])} scenarios", f"{f['geometric_mean']:.3f}", f"{f['lowest']:.3f}",
         "-" if f["of_oracle_stationary"] is None else f"{f['of_oracle_stationary']:.3f}",
         f"{f['p99_long']:.2f} / {f['p99_short']:.2f}"]
        for each in (found, sample) for name, f in each["policies"].items()
    ]  # fmt: skip
    lines = title("The simulator")
    lines += [
        f"{len(found['scenarios'])} scenarios of {found['seeds']} seeds; a promise is missed in "
        f"{len(found['below_promise'])} scenarios; in the sample of {len(sample['scenarios'])}, in "
        f"{len(sample['below_promise'])}. "
        "[What is simulated](speculation.md#the-simulator).",
        "",
    ]
    head = ["policy", "geometric mean", "lowest run", "of the oracle, stationary", "worst P99, long / short"]
    lines += table(head, rows)
    for name in ("simulate", "simulate_quick"):
        command, commit = (RESULTS / f"{name}.txt").read_text(encoding="utf-8").splitlines()[:2]
        lines.append(f"`benchmarks/results/{name}.txt`, {commit.strip('()')}: `{command}`.")
    return [*lines, ""]


def exactness() -> list[str]:
    rows = []
    for path in sorted(RESULTS.glob("equality_*_native*.json")):
        found = load(path.stem)
        settings, cells = found["settings"], found["cells"]
        compared, different = sum(c["compared"] for c in cells), sum(len(c["differences"]) for c in cells)
        kind = "seeded" if settings["temperature"] else "greedy"
        methods = f"{', '.join(settings['methods'])}; depths {', '.join(map(str, settings['depths']))}"
        prompts = f"{settings['count']} prompts, {settings['max_tokens']} tokens"
        rows.append([kind, prompts, methods, f"{different} of {compared}", found["provenance"]["commit"]])
    lines = title("Answers that differ from plain decoding, native backend")
    lines += table(["requests", "prompts", "proposers", "different answers", "commit"], rows)
    return [*lines, "One request at a time and eight at once: `python -m benchmarks.equality`.", ""]


def server() -> list[str]:
    figures = load("serve_overhead")["figures"]
    rows = [[kind, f"{figures[kind]['over_offline']:.2f}"] for kind in ("streamed", "whole")]
    lines = title("`outpace serve` beside the offline engine, 8 clients")
    return [
        *lines,
        *table(["replies", "of the offline engine's tokens per second"], rows),
        source("serve_overhead"),
        "",
    ]


def page() -> str:
    lines = [
        "# Results",
        "",
        "Written by `python -m benchmarks.results_page` from `benchmarks/results/`. Do not edit by hand. Each figure "
        "is of the commit it names; not all were measured again after later changes. CPU figures: two cores of an AMD "
        "EPYC with AVX-512, interleaved runs on a machine whose own speed varies by tens of percent.",
        "",
        *native(), *head_on_cpu(), *head_costs(), *first_run(), *auto_on_cpu(), *peers(), *peers_by_class(),
        *gpu_speculation(), *gpu_peers(), *gpu_steps(), *simulator(),
        *exactness(), *server(),
    ]  # fmt: skip
    return "\n".join(lines).rstrip() + "\n"


def headline() -> str:
    """The figures of the README, each claim beside the worst figure that qualifies it."""
    cpu, versus = load("native_smollm2"), load("policy_versus_head")
    gpu = load(GPU_SPECULATION[0])["summary"]["cells"]
    auto = {(c["concurrency"], c["temperature"]): c for c in gpu if c["setting"] == "auto"}
    code = load(QWEN_HEAD)["classes"]["HumanEval"]["auto"]["decode_ratio"]
    simulated = load("simulate")
    ours = simulated["policies"]["ours"]
    against = sorted(row[-1] for row in peer_cells(load(GPU_PEERS)["rows"]))
    spec = {name.removeprefix("spec_bench_smollm2_"): load(name) for name in SPEC_BENCH}
    cells = {name: cell["figures"]["ratios"]["new/plain"]["value"] for name, cell in versus["cells"].items()}
    best, worst = max(cells, key=lambda name: cells[name]), min(cells, key=lambda name: cells[name])
    groups = [versus["groups"][group]["ratios"]["new/plain"] for group in ("1", "4", "8")]
    rows = [
        ["CPU, plain decoding over llama.cpp, SmolLM2-135M", f"{cpu['rate_ratio']:.1f}x", ""],
        ["CPU, `auto` with the embedded head over plain, Spec-Bench, 1 / 4 / 8 requests",
         " / ".join(f"{spec[f'c{n}_t0']['means']['auto']:.2f}" for n in (1, 4, 8)),
         f"{min(lowest(each) for each in spec.values()):.2f} in one class; "
         f"{spec['c1_t1']['means']['auto']:.2f} alone at temperature 1"],
        ["CPU, Qwen2.5-Coder 1.5B with a head trained in 15 minutes, HumanEval, one request",
         f"{code['value']:.2f}", f"{code['low']:.2f} to {code['high']:.2f} (95% interval)"],
        ["CPU, the same model on built-in workloads, temperatures 0 and 1, 1 / 4 / 8 requests, mean of "
         f"{len(cells) // 3} cells each",
         " / ".join(f"{group['value']:.2f}" for group in groups),
         f"{cells[worst]:.2f} in {shown(worst)}; best {cells[best]:.2f} in {shown(best)}"],
        *(
            [f"H200, `auto` (commit {load(GPU_SPECULATION[0])['commit']}) with the head over plain, 1 / 8 / 32 / 128 "
             f"requests at temperature {temperature:.0f}",
             " / ".join(f"{auto[n, temperature]['speedup']:.2f}" for n in (1, 8, 32, 128)),
             " / ".join(f"{auto[n, temperature]['speedup_range'][0]:.2f}" for n in (1, 8, 32, 128))
             + " in the lowest of three blocks"]
            for temperature in (0.0, 1.0)
        ),
        ["H200, plain steps of vLLM 0.24.0 over ours, 1 / 8 / 32 / 128 requests", plain_beside_vllm(),
         f"`auto` beside vLLM's best setting with the same head: {against[0]} to {against[-1]}, and ahead of it in "
         f"{sum(float(each) > 1 for each in against)} of {len(against)} cells"],
        [f"simulator, {len(simulated['scenarios'])} scenarios of up to 32 requests, `auto` over plain",
         f"{ours['geometric_mean']:.2f}",
         f"lowest run {ours['lowest']:.3f}; P99 time per token of long / short requests at worst "
         f"{ours['p99_long']:.2f} / {ours['p99_short']:.2f} of plain's, and more than promised in "
         f"{len(simulated['below_promise'])} scenarios"],
    ]  # fmt: skip
    return "\n".join([BEGIN, *table(["", "measured", "worst"], rows)[:-1], END])


def plain_beside_vllm() -> str:
    steps = {(row["engine"], row["concurrency"]): row["ms_per_step"] for row in load(GPU_PEERS)["rows"]
             if row["do"] == "steps"}  # fmt: skip
    return " / ".join(f"{steps['vllm-plain', n] / steps['outpace', n]:.2f}" for n in (1, 8, 32, 128))


def lowest(found: Mapping[str, Any]) -> float:
    """The lowest class of a run of `benchmarks.spec_bench`."""
    return min(float(each["auto"]["decode_ratio"]["value"]) for each in found["classes"].values())


def shown(cell: str) -> str:
    workload, temperature, concurrency = cell.split("/")
    return f"{WORKLOADS[workload]} at temperature {temperature}, {concurrency} at once"


def readme() -> str:
    """The README with its figures as the files have them."""
    text = README.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + headline() + after


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 where the page is out of date")
    options = parser.parse_args()
    wanted = {PAGE: page(), README: readme()}
    stale = [path for path, text in wanted.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    for path in stale:
        print(f"{path.relative_to(ROOT)} " + ("is out of date" if options.check else "written"))
        if not options.check:
            path.write_text(wanted[path], encoding="utf-8")
    if not stale:
        print("up to date")
    return 1 if options.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
