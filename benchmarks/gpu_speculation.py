"""Speculation on a GPU at real acceptance and real cost: SmolLM2 inside an 8B, drafted for by itself, rounded, in a 1B.

    python -m benchmarks.gpu_speculation prepare MODEL.gguf QUESTIONS.jsonl TOKENS.json
    python -m benchmarks.gpu_speculation run MODEL.gguf TOKENS.json OUT

`prepare` needs the tokenizer (llama.cpp) and no GPU; `run` needs a GPU and no tokenizer. The texts are SmolLM2's own
(see `gpu_padding.py`; their logits are compared with the unpadded model's first). The draft has as many parameters as
a 1B and SmolLM2's 30 layers, since layers cannot be merged; a real 1B has 16, and less to launch.

Tokens per second are those said in steps where all requests decode and nothing else happens: not while prompts are
read, nor once the first request has ended, nor in steps that captured a graph.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.prompts import load_prompts

NUM_PROMPTS = 128
LONGEST_PROMPT = 640
NEW_TOKENS = 128
CONCURRENCY = (1, 8, 32, 128)
NUM_ALONE = 10  # requests of one after the other
DEPTHS = {1: 7, 8: 4, 32: 3, 128: 2}  # drafted where the depth is fixed, by concurrency
METHODS = ("plain", "ngram", "suffix", "draft", "auto")
DRAFT_SHAPE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "hidden_size": 1536, "intermediate_size": 4096,
    "num_hidden_layers": 30, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip


def prepare(model: str, questions: Path, out: Path) -> None:
    from outpace import LLM

    with LLM(model, max_context=512, speculation="off") as llm:
        found = []
        for text in load_prompts(questions):
            rendered = llm.render_chat([{"role": "user", "content": text}])
            tokens = llm.tokenizer.encode(rendered, add_special=False)
            if len(tokens) <= LONGEST_PROMPT:
                found.append(tokens)
        step = len(found) / NUM_PROMPTS
        kept = [found[int(i * step)] for i in range(NUM_PROMPTS)]
    out.write_text(json.dumps({"prompts": kept, "source": questions.name}) + "\n")
    print(f"{len(kept)} prompts of {len(found)}, {sum(map(len, kept)) / len(kept):.0f} tokens on average")


class Experiment:
    def __init__(self, model: Path, prompts: list[list[int]], bits: int, out: Path) -> None:
        import torch

        from benchmarks.gpu_models import shape_config
        from benchmarks.gpu_padding import padded, rounded
        from outpace.backends.base import Capacity, LoadedModel
        from outpace.backends.torch.config import parse_config
        from outpace.backends.torch.kernels import ops_for
        from outpace.backends.torch.loader import load_weights, open_checkpoint
        from outpace.backends.torch.model import Model
        from outpace.backends.torch.runner import TorchRunner

        self.out, self.prompts, self.bits = out, prompts, bits
        self.figures: dict[str, Any] = {"rows": []}
        self.lines: list[str] = []
        device = torch.device("cuda")
        checkpoint = open_checkpoint(model)
        small = load_weights(checkpoint, torch.bfloat16, device)
        config = checkpoint.config
        self.capacity = Capacity(129, 129 * (LONGEST_PROMPT + NEW_TOKENS + 32), 1024, 4096)

        def runner(shape: Any, weights: Any) -> TorchRunner:
            larger, moved = padded(config, weights, shape)
            return TorchRunner(Model(larger, moved, ops_for(device), 1024), self.capacity)

        self.target = runner(shape_config("8B"), small)
        self.draft = runner(parse_config(DRAFT_SHAPE), rounded(small, bits))
        few = replace(self.capacity, max_sequences=2, cache_tokens=1024)
        self.small = TorchRunner(Model(config, small, ops_for(device), 1024), few)
        self.end_ids = frozenset({2})

        def loaded(runner: TorchRunner, name: str) -> LoadedModel:
            return LoadedModel(runner, Silent(runner.vocab_size), name, 0, 0)

        self.loaded_target, self.loaded_draft = loaded(self.target, "8B"), loaded(self.draft, "1B")
        self.costs: Any = None

    def say(self, line: str) -> None:
        print(line, flush=True)
        self.lines.append(line)

    def save(self) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        (self.out / "gpu_speculation.json").write_text(json.dumps(self.figures, indent=1) + "\n")
        (self.out / "gpu_speculation.txt").write_text("\n".join(self.lines) + "\n")

    def check(self) -> None:
        """The padded model's logits beside the small one's, in bfloat16, along whole prompts."""
        import numpy as np

        from outpace.core import Row, StepPlan

        agreed, total, worst = 0, 0, 0.0
        for tokens in self.prompts[:6]:
            pair = []
            for runner in (self.small, self.target):
                plan = StepPlan([Row(0, 0, tokens, len(tokens))])
                pair.append(runner.forward(plan)[:, : self.small.vocab_size])
                runner.free(0)
            ours, expected = pair[1], pair[0]
            worst = max(worst, float(np.linalg.norm(ours - expected) / np.linalg.norm(expected)))
            agreed += int((ours.argmax(1) == expected.argmax(1)).sum())
            total += len(tokens)
        self.figures["padding"] = {"relative_error": worst, "same_argmax": agreed / total, "tokens": total}
        self.say(f"padded against small: relative error {worst:.1e}, same argmax {agreed} of {total}")

    def run(self, method: str, concurrency: int, temperature: float) -> dict[str, Any]:
        from outpace.config import EngineConfig, SamplingParams
        from outpace.core import Request
        from outpace.engine.engine import Engine
        from outpace.speculation.base import NoDraft, Proposer
        from outpace.speculation.draft_model import DraftModelProposer
        from outpace.speculation.ngram import NgramProposer
        from outpace.speculation.suffix import SuffixProposer

        is_fixed = method in ("ngram", "suffix", "draft")
        mode: Any = "off" if method == "plain" else "on" if is_fixed else "auto"
        named: Any = method if is_fixed else None
        config = EngineConfig(
            draft="1B", speculation=mode, method=named, depth=DEPTHS[concurrency] if is_fixed else None,
            max_sequences=concurrency, max_context=1024, max_step_tokens=4096, prefix_reuse=False,
            cache_tokens=self.capacity.cache_tokens,
        ).resolve(model_context=8192, model_path="8B", draft_path="1B", backend="torch")  # fmt: skip
        drafter = DraftModelProposer(self.loaded_draft, self.target.vocab_size)
        proposers: list[Proposer] = [
            NoDraft(),
            NgramProposer(config.ngram_min, config.ngram_max),
            SuffixProposer(65536),
            drafter,
        ]
        engine = Engine(self.loaded_target, {p.name: p for p in proposers}, config, draft=self.loaded_draft)
        if mode == "auto":
            if self.costs is None:
                engine.calibrate()
                self.costs = engine.costs
            engine.policy.costs = self.costs
        params = SamplingParams(max_tokens=NEW_TOKENS, temperature=temperature, ignore_eos=True)
        count = concurrency if concurrency > 1 else NUM_ALONE
        waiting = [self.prompts[i * len(self.prompts) // count] for i in range(count)]
        requests, seconds, said, num_steps = list[Request](), 0.0, 0, 0
        while waiting or engine.has_requests:
            if not engine.has_requests:
                batch, waiting = waiting[:concurrency], waiting[concurrency:]
                requests += [engine.submit(prompt, params, seed=len(requests) + i) for i, prompt in enumerate(batch)]
            captured = self.num_captured
            begin = time.perf_counter()
            engine.step()
            taken = time.perf_counter() - begin
            stats = engine.stats
            if stats.num_decode_rows == concurrency and not stats.num_prefill_tokens and captured == self.num_captured:
                seconds, said, num_steps = seconds + taken, said + stats.num_emitted, num_steps + 1
        for request in requests:
            drafter.release(request)
        drafted: list[int] = []
        accepted: list[int] = []
        for request in requests:
            for total, mine in (
                (drafted, request.spec.drafted_per_position),
                (accepted, request.spec.accepted_per_position),
            ):
                total += [0] * (len(mine) - len(total))
                for i, value in enumerate(mine):
                    total[i] += value
        return {
            "method": method, "concurrency": concurrency, "temperature": temperature,
            "depth": DEPTHS[concurrency] if is_fixed else None, "tokens_per_s": said / seconds if seconds else None,
            "ms_per_step": 1e3 * seconds / num_steps if num_steps else None, "tokens": said, "steps": num_steps,
            "tokens_per_step_and_request": said / num_steps / concurrency if num_steps else None,
            "drafted_per_position": drafted, "accepted_per_position": accepted,
            "texts": [list(request.tokens[len(request.prompt) :]) for request in requests],
        }  # fmt: skip

    @property
    def num_captured(self) -> int:
        return self.target.num_captured + self.draft.num_captured

    def all(self, concurrencies: list[int], methods: list[str], seconds: float) -> None:
        begin = time.perf_counter()
        self.say(
            f"{'':12}{'T':>4}{'method':>8}{'tok/s':>9}{'x':>7}{'ms/step':>9}{'tok/step':>9}  accepted per position"
        )
        for concurrency in concurrencies:
            for temperature in (0.0, 1.0):
                plain: dict[str, Any] | None = None
                for method in methods:
                    if time.perf_counter() - begin > seconds:
                        self.say(f"{concurrency} {temperature} {method}: left out, time is up")
                        continue
                    row = self.run(method, concurrency, temperature)
                    texts = row.pop("texts")
                    if method == "plain":
                        plain = row | {"texts": texts}
                    if plain is not None and plain["tokens_per_s"] and row["tokens_per_s"]:
                        row["speedup"] = row["tokens_per_s"] / plain["tokens_per_s"]
                        row["same_texts"] = sum(a == b for a, b in zip(texts, plain["texts"], strict=True)) / len(texts)
                    self.figures["rows"].append(row)
                    self._show(row)
                    self.save()

    def _show(self, row: dict[str, Any]) -> None:
        shares = [
            f"{accepted / drafted:.2f}"
            for drafted, accepted in zip(row["drafted_per_position"], row["accepted_per_position"], strict=True)
            if drafted
        ]
        if row["tokens_per_s"] is None:
            self.say(
                f"  {row['concurrency']:4} at once {row['temperature']:5.1f}{row['method']:>8}  no step to measure"
            )
            return
        self.say(
            f"  {row['concurrency']:4} at once {row['temperature']:4.1f}{row['method']:>8}{row['tokens_per_s']:9.0f}"
            f"{row.get('speedup', 0.0):7.2f}{row['ms_per_step']:9.2f}{row['tokens_per_step_and_request']:9.2f}"
            f"  {' '.join(shares)}  same texts {row.get('same_texts', 0.0):.2f}"
        )


class Silent:
    """A tokenizer for a machine that has none: tokens are not turned into text."""

    bos_text = eos_text = ""
    chat_template: str | None = None
    end_ids: frozenset[int] = frozenset()

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        raise NotImplementedError("tokens were prepared elsewhere")

    def token_bytes(self, token: int) -> bytes:
        return b"x"

    def vocabulary(self) -> list[tuple[bytes, int]]:
        return [(b"%d" % token, 0) for token in range(self.vocab_size)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    preparing = commands.add_parser("prepare")
    running = commands.add_parser("run")
    for each in (preparing, running):
        each.add_argument("model", help="SmolLM2 as a GGUF file")
    preparing.add_argument("questions", type=Path, help="Spec-Bench's question.jsonl")
    preparing.add_argument("out", type=Path)
    running.add_argument("tokens", type=Path, help="what `prepare` wrote")
    running.add_argument("out", type=Path, help="folder for text and JSON")
    running.add_argument("--bits", type=int, default=4, help="of the draft's weights (default: %(default)s)")
    running.add_argument("--concurrency", type=int, nargs="+", default=list(CONCURRENCY))
    running.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    running.add_argument("--seconds", type=float, default=480, help="start no run after this (default: %(default)s)")
    options = parser.parse_args()
    if options.command == "prepare":
        prepare(options.model, options.questions, options.out)
        return 0
    import torch

    prompts = json.loads(options.tokens.read_text())["prompts"]
    experiment = Experiment(Path(options.model), prompts, options.bits, options.out)
    experiment.figures |= {
        "command": " ".join(sys.argv), "torch": torch.__version__, "gpu": torch.cuda.get_device_name(),
        "bits": options.bits, "new_tokens": NEW_TOKENS,
    }  # fmt: skip
    experiment.check()
    experiment.save()
    experiment.all(options.concurrency, options.methods, options.seconds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
