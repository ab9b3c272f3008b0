"""Would lookahead decoding pay? (Fu et al. 2024: the target drafts for itself, with n-grams from Jacobi branches.)

    python -m benchmarks.lookahead --prompts question.jsonl [--model FILE] [--count 12] [--json FILE]

No backend here runs trees, so lookahead is not built; this decides whether it should be. Two parts are real: the
n-grams, and the costs of steps.

N-grams: each prompt is answered greedily. At every position the model also computes a window of W columns and N - 1
levels, exactly as a lookahead step would: the token at level l of column j sees the text, level 0 of the columns up to
j, and the lower levels of its own column. Without tree attention this takes one forked sequence per column, which is
slow and gives the same tokens. The new token of each column completes an n-gram, which goes into the pool.

Steps: a lookahead decoder is then played over the known answer. At each step it verifies up to G n-grams of the pool
that begin with the last token, as a tree; the longest agreement is accepted. The step has 1 + (N - 1) W + (N - 1) g
tokens, with g the n-grams found. `single` verifies only the latest one. `text` has no window: its pool is the n-grams
of the prompt and the answer so far, as `ngram` has, but verified as a tree. A decoder that accepts tokens skips the
windows of the positions that it skips.

Costs are those of `outpace/bench/simulation/machines.py`, measured on this CPU (SmolLM2 135M, Qwen2.5-Coder 1.5B) and
on an H200 (8B). The n-grams are those of the model that runs here. A ratio is the time of plain decoding over that of
lookahead, for R requests that each add their tokens to one step.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.prompts import load_prompts
from benchmarks.report import provenance, write_json
from outpace import LLM
from outpace.backends.base import Runner
from outpace.bench.simulation.machines import MACHINES
from outpace.core import Row, StepPlan
from outpace.models.resolve import resolve_model

SETTINGS = ((5, 15, 15), (5, 7, 7), (5, 5, 3), (3, 10, 5), (3, 5, 3), (3, 3, 2), (3, 2, 1))  # N, W, G
COSTS = ("cpu-native", "cpu-pair", "h200")
REQUESTS = (1, 8)
TEXT = 0  # sequence numbers: the text, then one for each column


@dataclass
class Answer:
    """A greedy answer, and the n-grams that the window gave at each of its positions, by column."""

    prompt: list[int]
    tokens: list[int]
    found: dict[int, list[list[tuple[int, ...]]]] = field(default_factory=dict)  # by N: position, column


@dataclass
class Played:
    steps: int = 0
    tokens: int = 0
    sizes: list[int] = field(default_factory=list)  # tokens of each step


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, required=True, help="Spec-Bench, HumanEval or JSON lines")
    parser.add_argument("--model", metavar="FILE", help="a GGUF file (default: the embedded SmolLM2)")
    parser.add_argument("--count", type=int, default=12, help="prompts (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=64, help="(default: %(default)s)")
    parser.add_argument("--threads", type=int, help="(default: all cores)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    with LLM(options.model, max_context=2048, speculation="off", threads=options.threads) as llm:
        answers = gather(llm, load_prompts(options.prompts, options.count), options.max_tokens)
    rows = [row(answers, *setting) for setting in SETTINGS]
    rows.append(row(answers, 5, 0, 4))
    print_rows(rows)
    if options.json and answers:
        found = {"prompts": len(answers), "tokens": sum(len(each.tokens) for each in answers), "rows": rows}
        write_json(options.json, {"provenance": provenance([resolve_model(options.model)]), **found})
    return 0


def gather(llm: LLM, texts: Sequence[str], max_tokens: int) -> list[Answer]:
    """Ctrl-C keeps the answers that are complete."""
    runner, answers = llm._target.runner, list[Answer]()
    try:
        for text in tqdm(texts, unit="prompt", dynamic_ncols=True):
            prompt = llm.encode_chat([{"role": "user", "content": text}])[-1024:]
            answer = Answer(prompt, plain_answer(runner, prompt, max_tokens, llm.tokenizer.end_ids))
            for size in sorted({setting[0] for setting in SETTINGS}):
                width = max(setting[1] for setting in SETTINGS if setting[0] == size)
                answer.found[size] = windows(runner, answer, size, width)
            runner.free(TEXT)
            answers.append(answer)
    except KeyboardInterrupt:
        print("interrupted; the answers so far count", file=sys.stderr)
    return answers


def next_tokens(runner: Runner, rows: Sequence[Row]) -> list[int]:
    return [int(line.argmax()) for line in runner.forward(StepPlan(list(rows)))]


def plain_answer(runner: Runner, prompt: Sequence[int], max_tokens: int, ends: frozenset[int]) -> list[int]:
    """Also leaves prompt and answer in the cache of the text's sequence."""
    limit = runner.capacity.max_step_tokens
    for start in range(0, len(prompt), limit):
        [token] = next_tokens(runner, [Row(TEXT, start, prompt[start : start + limit], 1)])
    tokens = [token]
    while len(tokens) < max_tokens and tokens[-1] not in ends:
        tokens += next_tokens(runner, [Row(TEXT, len(prompt) + len(tokens) - 1, tokens[-1:], 1)])
    return tokens


def windows(runner: Runner, answer: Answer, size: int, width: int) -> list[list[tuple[int, ...]]]:
    """The n-grams of each column, at every position of the answer."""
    rng = random.Random(0)
    levels = [[rng.choice(answer.prompt) for _ in range(width)]]
    found: list[list[tuple[int, ...]]] = []
    for position in range(len(answer.tokens)):
        length = len(answer.prompt) + position  # of the text before its last token, which is the first of each row
        rows = []
        for column in range(width):
            runner.fork(TEXT, 1 + column, length)
            upper = [level[column] for level in levels[1:]]
            rows.append(Row(1 + column, length, [answer.tokens[position], *levels[0][: column + 1], *upper], 1))
        new = next_tokens(runner, rows)
        for column in range(width):
            runner.free(1 + column)
        if len(levels) == size - 1:
            found.append([(*(level[column] for level in levels), new[column]) for column in range(width)])
            levels = [*levels[1:], new]
        else:
            found.append([])
            levels.append(new)
    return found


def play(answer: Answer, size: int, width: int, most: int, *, is_tree: bool = True) -> Played:
    """A lookahead decoder on the known answer; without a window, the n-grams are those of the text."""
    pool: dict[int, list[tuple[int, ...]]] = defaultdict(list)
    played, tokens, at = Played(), answer.tokens, 0
    if not width:
        for start in range(len(answer.prompt) - size + 1):
            remember(pool, tuple(answer.prompt[start : start + size]), most)
    while at + 1 < len(tokens):
        candidates = pool[tokens[at]][-(most if is_tree else 1) :]
        rest = tokens[at + 1 :]
        accepted = max((agreed(each, rest) for each in candidates), default=0)
        played.steps += 1
        played.sizes.append(1 + (size - 1) * (width + len(candidates)))
        for gram in answer.found[size][at][:width] if width else ():
            remember(pool, gram, most)
        num_new = min(1 + accepted, len(rest))
        if not width:
            for end in range(at + 1, at + 1 + num_new):
                before = [*answer.prompt, *tokens[: end + 1]]
                remember(pool, tuple(before[-size:]), most)
        played.tokens += num_new
        at += num_new
    return played


def remember(pool: dict[int, list[tuple[int, ...]]], gram: tuple[int, ...], most: int) -> None:
    """The latest n-grams of each first token stay."""
    known = pool[gram[0]]
    if gram[1:] in known:
        known.remove(gram[1:])
    known.append(gram[1:])
    del known[:-most]


def agreed(gram: Sequence[int], text: Sequence[int]) -> int:
    return next((i for i, token in enumerate(gram) if i >= len(text) or token != text[i]), len(gram))


def row(answers: Sequence[Answer], size: int, width: int, most: int) -> dict[str, Any]:
    played = [play(answer, size, width, most) for answer in answers]
    single = [play(answer, size, width, most, is_tree=False) for answer in answers]
    return {
        "n": size,
        "window": width,
        "ngrams": most,
        "tokens_per_step": rate(played),
        "tokens_per_step_single": rate(single),
        "mean_step_tokens": sum(sum(each.sizes) for each in played) / sum(each.steps for each in played),
        "ratios": {f"{name} {count}": ratio(played, name, count) for name in COSTS for count in REQUESTS},
        "ratios_single": {f"{name} {count}": ratio(single, name, count) for name in COSTS for count in REQUESTS},
        "best_prompt": max(each.tokens / each.steps for each in played),
    }


def rate(played: Sequence[Played]) -> float:
    return sum(each.tokens for each in played) / sum(each.steps for each in played)


def ratio(played: Sequence[Played], machine: str, num_requests: int) -> float:
    """Speed over plain decoding, with a context of 300 tokens. Requests are alike, so a step has R times the tokens."""
    law = MACHINES[machine]
    plain = sum(each.tokens for each in played) * law.of(num_requests, num_requests, 300.0)
    sizes = [size for each in played for size in each.sizes]
    return plain / sum(law.of(num_requests, num_requests * size, 300.0) for size in sizes)


def print_rows(rows: Sequence[dict[str, Any]]) -> None:
    columns = [f"{name} {count}" for name in COSTS for count in REQUESTS]
    print(
        f"{'N, W, G':14}{'tokens of a step':>17}{'said a step':>13}{'single':>8}" + "".join(f"{c:>14}" for c in columns)
    )
    for each in rows:
        name = (
            f"{each['n']}, {each['window']}, {each['ngrams']}"
            if each["window"]
            else f"text {each['n']}, {each['ngrams']}"
        )
        ratios = "".join(f"{each['ratios'][column]:14.2f}" for column in columns)
        print(
            f"{name:14}{each['mean_step_tokens']:17.1f}{each['tokens_per_step']:13.2f}"
            f"{each['tokens_per_step_single']:8.2f}{ratios}"
        )


if __name__ == "__main__":
    sys.exit(main())
