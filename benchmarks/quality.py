"""The error of each backend's rounding: its next-token distributions against float32 with the same weights.

    python -m benchmarks.quality --prompts FILE [--model FILE] [--positions N] [--json FILE]

A quantised file fixes the weights; a backend adds its own rounding of activations and sums. The reference is the numpy
decoder of the tests, which dequantises the file and computes in float32. Reported are, over the first N positions of
real text in windows of 256 tokens: the mean KL divergence from the reference, how often the most likely token is the
same, and the perplexity of the text. The first token of a window is left out: it has no context, and in some models its
activations are so large that the rounding error of every backend is large only there (its KL is a separate column).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from benchmarks.prompts import load_prompts
from benchmarks.report import provenance, write_json
from outpace.backends.base import Capacity, Runner
from outpace.backends.llamacpp.runner import LlamaModel
from outpace.backends.native.runner import NativeModel
from outpace.config import usable_cores
from outpace.core import Row, StepPlan
from outpace.models.llama_library import load_library
from outpace.models.resolve import resolve_model
from tests.numpy_reference import ReferenceModel

WINDOW = 256
ALL = 1 << 20  # more prompts than a file has


def windows(text: list[int], num_positions: int) -> Iterator[list[int]]:
    """Windows of the text, each with one token more than positions: the target of the last position."""
    for begin in range(0, min(num_positions, len(text) - 1), WINDOW):
        yield text[begin : begin + min(WINDOW, num_positions - begin, len(text) - 1 - begin) + 1]


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))


def run(runner: Runner, tokens: list[int]) -> NDArray[np.float32]:
    logits = runner.forward(StepPlan([Row(0, 0, tokens, len(tokens))])).copy()
    runner.free(0)
    return logits


class Score:
    def __init__(self) -> None:
        self.first_kl: list[float] = []
        self.kl: list[float] = []
        self.same_top: list[bool] = []
        self.surprise: list[float] = []

    def add(self, reference: NDArray[np.float64], found: NDArray[np.float64], answers: list[int]) -> None:
        kl = (np.exp(reference) * (reference - found)).sum(-1)
        self.first_kl.append(float(kl[0]))
        self.kl += kl[1:].tolist()
        self.same_top += (reference.argmax(-1) == found.argmax(-1))[1:].tolist()
        self.surprise += (-found[np.arange(len(answers)), answers])[1:].tolist()

    def figures(self) -> dict[str, float]:
        return {
            "mean_kl": float(np.mean(self.kl)),
            "median_kl": float(np.median(self.kl)),
            "p99_kl": float(np.quantile(self.kl, 0.99)),
            "same_top": float(np.mean(self.same_top)),
            "perplexity": float(np.exp(np.mean(self.surprise))),
            "first_token_kl": float(np.mean(self.first_kl)),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a GGUF file (default: the embedded SmolLM2)")
    parser.add_argument("--prompts", type=Path, required=True, help="Spec-Bench, HumanEval or JSON lines: the text")
    parser.add_argument("--positions", type=int, default=2000, help="(default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    options = parser.parse_args()

    path = resolve_model(options.model)
    capacity = Capacity(max_sequences=1, cache_tokens=WINDOW, max_context=WINDOW, max_step_tokens=WINDOW)
    library, threads = load_library(), usable_cores()
    native = NativeModel(path, library)
    text = native.tokenizer.encode("\n\n".join(load_prompts(options.prompts, ALL)))
    runners = {
        "native": native.start(capacity, threads).runner,
        "llamacpp": LlamaModel(path, library).start(capacity, threads).runner,
    }
    reference = ReferenceModel.load(path)
    scores = {name: Score() for name in ("float32", *runners)}
    for window in tqdm(list(windows(text, options.positions)), desc=f"windows of {WINDOW}"):
        tokens, answers = window[:-1], window[1:]
        truth = log_softmax(reference.logits(tokens))
        scores["float32"].add(truth, truth, answers)
        for name, runner in runners.items():
            scores[name].add(truth, log_softmax(run(runner, tokens)), answers)

    results: dict[str, Any] = {name: score.figures() for name, score in scores.items()}
    columns = list(results["native"])
    print(f"\n{len(scores['native'].kl)} positions of {options.prompts.name}, {path.name}")
    print(f"{'':10}" + "".join(f"{column:>16}" for column in columns))
    for name, figures in results.items():
        print(f"{name:10}" + "".join(f"{figures[column]:16.6f}" for column in columns))
    results["perplexity_ratio"] = results["native"]["perplexity"] / results["llamacpp"]["perplexity"]
    results["positions"] = len(scores["native"].kl)
    if options.json:
        write_json(options.json, results | {"provenance": provenance([path])})
    print(json.dumps({"kl_ratio": results["native"]["mean_kl"] / results["llamacpp"]["mean_kl"],
                      "perplexity_ratio": results["perplexity_ratio"]}))  # fmt: skip


if __name__ == "__main__":
    main()
