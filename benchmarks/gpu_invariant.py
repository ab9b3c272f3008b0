"""`--batch-invariant` on a GPU: whether a token's logits are the same bits in every step, and what that costs.

    python -m benchmarks.gpu_invariant OUT            OUT.txt and OUT.json; an 8B's shape with random weights, one H200

One sequence is computed alone, token by token. Then the same sequence is computed in chunks of a prompt, in batches of
8, 32 and 128 with others of different lengths, and verified with drafts of 1 to 8 tokens. Counted are the logits that
differ in any bit. The usual kernels are counted beside them. Then one step of each is timed as one CUDA graph.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outpace.backends.torch.runner import TorchRunner
from outpace.core import Row, StepPlan

LENGTH, PROMPT, MAX_CONTEXT = 700, 640, 2048
TIMED = ((1, 1), (1, 8), (8, 1), (32, 1), (128, 1), (1, 512))  # rows, tokens of each
CONTEXT = 1024  # of the timed steps


@dataclass(frozen=True, slots=True)
class Difference:
    step: str
    num_different: int  # logits with other bits
    num_logits: int
    largest: float


def tokens_of(seed: int, count: int, vocab_size: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(vocab_size) for _ in range(count)]


def logits(
    runner: TorchRunner, tokens: Sequence[int], sizes: Sequence[int], others: int = 0
) -> NDArray[np.float32]:  # fmt: skip
    """Of all tokens, in steps of these sizes; `others`: sequences of other lengths that share the steps."""
    vocab_size, found, at = runner.vocab_size, list[NDArray[np.float32]](), 0
    texts = [tokens_of(seq, 40 + 13 * seq % 60 + len(sizes), vocab_size) for seq in range(1, others + 1)]
    for seq, text in enumerate(texts, 1):
        runner.forward(StepPlan([Row(seq, 0, text[: len(text) - len(sizes)], 1)]))
    for i, size in enumerate(sizes):
        rows = [Row(0, at, list(tokens[at : at + size]), size)]
        for seq, text in enumerate(texts, 1):
            start = len(text) - len(sizes) + i
            rows.append(Row(seq, start, [text[start]], 1))
        place = i % len(rows)  # the sequence is not always the first row
        rows[0], rows[place] = rows[place], rows[0]
        found.append(runner.forward(StepPlan(rows))[place : place + size].copy())
        at += size
    for seq in range(others + 1):
        runner.free(seq)
    return np.concatenate(found)


def compare(runner: TorchRunner, length: int, prompt: int, batches: Sequence[int]) -> list[Difference]:
    """The logits of one text in different steps, beside those of its tokens one by one."""
    text, rest = tokens_of(0, length, runner.vocab_size), length - prompt
    truth = logits(runner, text, [1] * length)
    ways: dict[str, tuple[list[int], int]] = {
        "a prompt in chunks": ([prompt // 3, prompt - prompt // 3 - 7, 7] + [1] * rest, 0)
    }
    ways |= {f"a draft of {d}": ([prompt] + [d + 1] * (rest // (d + 1)), 0) for d in range(1, 9)}
    ways |= {f"a batch of {n}": ([prompt] + [1] * rest, n - 1) for n in batches}
    found = []
    for name, (sizes, others) in ways.items():
        mine = logits(runner, text, sizes, others)
        expected = truth[: len(mine)]
        differs = mine.view(np.uint32) != expected.view(np.uint32)
        largest = float(np.abs(mine - expected).max())
        found.append(Difference(name, int(differs.sum()), mine.size, largest))
    return found


def main() -> int:
    import torch

    from benchmarks.gpu import Report
    from benchmarks.gpu_machine import describe
    from benchmarks.gpu_models import captured, random_caches, random_weights, replay_ms, shape_config, uniform_step
    from outpace.backends.base import Capacity
    from outpace.backends.torch.execution.pages import PAGE_TOKENS
    from outpace.backends.torch.kernels import ops_for
    from outpace.backends.torch.model.model import Model

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="output path, without a suffix")
    parser.add_argument("--shape", default="8B", choices=("8B", "1B"), help="(default: %(default)s)")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks.gpu_invariant needs a CUDA GPU, and torch sees none", file=sys.stderr)
        return 2
    report, device = Report(options.out), torch.device("cuda", 0)
    report.say(f"python -m benchmarks.gpu_invariant {' '.join(Path(arg).name for arg in sys.argv[1:])}")
    report.figures["machine"] = describe(device)
    report.say(f"  {json.dumps(report.figures['machine'])}")
    config = shape_config(options.shape)
    torch.manual_seed(0)
    weights = random_weights(config, device)
    capacity = Capacity(max_sequences=130, cache_tokens=130 * 256, max_context=MAX_CONTEXT, max_step_tokens=MAX_CONTEXT)
    is_invariant = False
    for name in ("batch invariant", "usual"):
        model = Model(config, weights, ops_for(device, batch_invariant=name != "usual"), MAX_CONTEXT)
        runner = TorchRunner(model, capacity)
        found = compare(runner, LENGTH, PROMPT, batches=(8, 32, 128))
        runner.close()
        torch.cuda.empty_cache()
        report.figures[name] = [asdict(each) for each in found]
        report.say(f"{name}: logits that differ from those of single tokens")
        for each in found:
            report.say(
                f"  {each.step:20} {each.num_different:12,} of {each.num_logits:12,}, by at most {each.largest:.2e}"
            )
        if name != "usual":
            is_invariant = all(each.num_different == 0 for each in found)
        report.save()
    report.say(f"milliseconds of one step, {CONTEXT} tokens of context: usual, batch invariant, ratio")
    timed: list[dict[str, Any]] = report.figures.setdefault("steps", [])
    for rows, tokens in TIMED:
        step = uniform_step(rows, tokens, CONTEXT, config.vocab_size, device)
        caches = random_caches(config, rows * -(-CONTEXT // PAGE_TOKENS), device)
        ms = []
        for invariant in (False, True):
            model = Model(config, weights, ops_for(device, batch_invariant=invariant), MAX_CONTEXT)
            graph = captured(lambda m=model, s=step, c=caches: m.forward(s, c))  # type: ignore[misc]
            ms.append(statistics.median(replay_ms(graph, rounds=5)))
        del caches
        torch.cuda.empty_cache()
        timed.append({"rows": rows, "tokens": tokens, "usual_ms": ms[0], "invariant_ms": ms[1]})
        report.say(f"  {rows:4} x {tokens:3}  {ms[0]:8.3f} {ms[1]:8.3f} {ms[1] / ms[0]:6.2f}")
        report.save()
    report.say("the same bits in every step" if is_invariant else "FAILED: bits depend on the step")
    report.save()
    return 0 if is_invariant else 1


if __name__ == "__main__":
    sys.exit(main())
