"""What rounding costs in quality: the perplexity of a fixed text with every format of weights and of the KV cache.

    python -m benchmarks.gpu_perplexity prepare MODEL.gguf TEXT TOKENS.json     so that `run` needs no tokenizer
    python -m benchmarks.gpu_perplexity run MODEL.gguf TOKENS.json OUT          OUT.txt and OUT.json

TEXT is a file of prompts as published (Spec-Bench, HumanEval, JSON lines). The model runs through the torch backend's
runner, in windows of 512 tokens, in bfloat16 on a GPU if there is one, else in float32. The first row has the file's
weights dequantised and a cache in the same dtype; each other row changes one thing. Beside the perplexity: the mean KL
divergence of the next token's distribution from the first row's, and how often the likeliest token is the same.

Windows are computed 64 tokens at a time on a GPU: with more, products of FP8 weights round activations too, which is a
row of its own. Results are written after every row.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks.gpu_models import Letters
from benchmarks.report import provenance, write_json
from outpace.backends.base import Capacity
from outpace.backends.torch.device import TorchOptions
from outpace.backends.torch.runner import TorchModel, TorchRunner
from outpace.config import DeviceName, KVCacheDtype, Quantization, usable_cores
from outpace.core import Row, StepPlan

WINDOW = 512
SMALL_STEP = 64  # tokens; with more, products of FP8 weights on a GPU round activations too


@dataclass(frozen=True, slots=True)
class Setting:
    name: str
    quantization: Quantization = "none"
    kv_cache_dtype: KVCacheDtype = "auto"
    step_tokens: int | None = None  # None: few on a GPU, the whole window on a CPU


SETTINGS = (
    Setting("not rounded"),
    Setting("as stored", "stored"),
    Setting("int8", "int8"),
    Setting("fp8", "fp8"),
    Setting("fp8, activations too", "fp8", step_tokens=WINDOW),
    Setting("int4, groups of 32", "int4"),
    Setting("int4, groups of 128", "int4-128"),
    Setting("KV cache int8", kv_cache_dtype="int8"),
    Setting("KV cache fp8", kv_cache_dtype="fp8"),
)


@dataclass(frozen=True, slots=True)
class Quality:
    setting: str
    perplexity: float
    loss: float  # perplexity over the first setting's, less 1
    mean_kl: float
    same_top: float
    bits_per_weight: float
    seconds: float


def windows(tokens: Sequence[int], positions: int) -> list[list[int]]:
    """Each has one token more than positions: the answer to the last."""
    ends = min(positions, len(tokens) - 1)
    return [list(tokens[at : min(at + WINDOW, ends) + 1]) for at in range(0, ends, WINDOW)]


@torch.inference_mode()
def log_probs(runner: TorchRunner, tokens: list[int], step_tokens: int) -> Tensor:
    """Of the next token after each of a window's, [tokens, vocab]."""
    parts = []
    for at in range(0, len(tokens), step_tokens):
        part = tokens[at : at + step_tokens]
        logits = runner.forward(StepPlan([Row(0, at, part, len(part))]))
        parts.append(torch.from_numpy(logits.copy()).to(runner.device).log_softmax(-1))
    runner.free(0)
    return torch.cat(parts)


class Bench:
    def __init__(self, model: Path, texts: list[list[int]], device: DeviceName, threads: int) -> None:
        self._model, self._texts, self._device, self._threads = model, texts, device, threads
        self._truth: list[Tensor] = []  # of the first setting
        self._first = 0.0
        self.dtype = ""

    def measure(self, setting: Setting) -> Quality:
        options = TorchOptions(
            self._device, quantization=setting.quantization, kv_cache_dtype=setting.kv_cache_dtype
        )  # fmt: skip
        begin = time.perf_counter()
        opened = TorchModel(self._model, options, tokenizer=Letters(1))
        self.dtype = str(opened.dtype).removeprefix("torch.")
        capacity = Capacity(max_sequences=1, cache_tokens=WINDOW, max_context=WINDOW, max_step_tokens=WINDOW)
        runner = opened.start(capacity, self._threads).runner
        assert isinstance(runner, TorchRunner)
        step = setting.step_tokens or (SMALL_STEP if runner.device.type == "cuda" else WINDOW)
        surprise, kl, same, count = 0.0, 0.0, 0, 0
        is_first = not self._truth
        for i, text in enumerate(tqdm(self._texts, desc=setting.name, disable=not sys.stderr.isatty(), leave=False)):
            found = log_probs(runner, text[:-1], step)
            answers = torch.tensor(text[1:], device=found.device)
            if is_first:
                self._truth.append(found)
            truth = self._truth[i]
            surprise -= float(found.gather(1, answers[:, None]).double().sum())
            kl += float((truth.exp() * (truth - found)).sum(-1).double().sum())
            same += int((truth.argmax(-1) == found.argmax(-1)).sum())
            count += len(answers)
        weights = runner.model.weights
        matrices = [each for each in weights.tensors if len(each.shape) > 1 and each is not weights.embedding]
        bits = 8 * sum(each.nbytes for each in matrices) / sum(each.numel() for each in matrices)
        runner.close()
        perplexity = math.exp(surprise / count)
        self._first = self._first or perplexity
        seconds = time.perf_counter() - begin
        return Quality(setting.name, perplexity, perplexity / self._first - 1, kl / count, same / count, bits, seconds)


def table(found: Sequence[Quality]) -> str:
    lines = [f"{'':22}{'perplexity':>12}{'loss':>9}{'mean KL':>11}{'same top':>10}{'bits a weight':>15}{'seconds':>9}"]
    lines += [
        f"{q.setting:22}{q.perplexity:12.4f}{q.loss:+9.2%}{q.mean_kl:11.2e}{q.same_top:10.2%}{q.bits_per_weight:15.2f}"
        f"{q.seconds:9.0f}"
        for q in found
    ]
    return "\n".join(lines)


def prepare(options: argparse.Namespace) -> None:
    from benchmarks.prompts import load_prompts
    from outpace.backends.torch.runner import open_tokenizer

    text = "\n\n".join(load_prompts(options.text))
    tokens = open_tokenizer(options.model, 0).encode(text)[: options.positions + 1]
    options.tokens.write_text(json.dumps({"model": options.model.name, "text": options.text.name, "tokens": tokens}))
    print(f"{len(tokens)} tokens of {options.text.name}")


def run(options: argparse.Namespace) -> None:
    given = json.loads(options.tokens.read_text())
    texts = windows(given["tokens"], options.positions)
    bench = Bench(options.model, texts, options.device, options.threads)
    source = provenance([options.model])
    about = {"model": options.model.name, "text": given["text"], "positions": sum(len(text) - 1 for text in texts)}
    found: list[Quality] = []
    for setting in SETTINGS:
        if setting.step_tokens is not None and not torch.cuda.is_available():
            continue  # without a GPU, all steps have so many
        found.append(bench.measure(setting))
        head = f"{about['model']}, {bench.dtype}, {about['positions']} positions of {about['text']}"
        print(f"{head}\n{table(found)}" if len(found) == 1 else table(found).splitlines()[-1], flush=True)
        results: dict[str, Any] = {**about, "dtype": bench.dtype, "settings": [asdict(each) for each in found]}
        write_json(options.out.with_suffix(".json"), results | {"provenance": source}, announce=False)
        lines = [source["command"], f"commit {source['commit']}", head, table(found)]
        options.out.with_suffix(".txt").write_text("\n".join(lines) + "\n")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--positions", type=int, default=4096, metavar="N", help="of the text (default: %(default)s)")
    commands = parser.add_subparsers(required=True, metavar="prepare|run")
    preparing = commands.add_parser("prepare", help="write the token ids of a text")
    preparing.add_argument("model", type=Path, help="a GGUF file")
    preparing.add_argument("text", type=Path, help="Spec-Bench, HumanEval or JSON lines")
    preparing.add_argument("tokens", type=Path, help="the file to write")
    preparing.set_defaults(execute=prepare)
    running = commands.add_parser("run", help="measure every format")
    running.add_argument("model", type=Path, help="a GGUF file or a Hugging Face folder")
    running.add_argument("tokens", type=Path, help="from `prepare`")
    running.add_argument("out", type=Path, help="output path, without a suffix")
    running.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="(default: %(default)s)")
    running.add_argument("--threads", type=int, default=usable_cores(), help="on a CPU (default: %(default)s)")
    running.set_defaults(execute=run)
    options = parser.parse_args(arguments)
    options.execute(options)


if __name__ == "__main__":
    main()
