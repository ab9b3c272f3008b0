"""`outpace distill`: trains a draft head for a target, in one command or in steps on different machines."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from outpace.errors import BackendError, OutpaceError, UsageError
from outpace.models.resolve import resolve_model

if TYPE_CHECKING:
    from outpace.backends.base import Tokenizer
    from outpace.training.evaluate import Evaluation
    from outpace.training.settings import DistillSettings

STEPS = ("prepare", "train", "pack")
PREPARED = "prepared.npz"
_DESCRIPTION = """\
Train a draft head for a model that has no small sibling. A head reads the target's hidden states and drafts the next
tokens at a few percent of the target's cost. The target answers your prompts itself, greedily and at temperature 1;
the head learns to say what the target would say. Half an hour on one GPU is enough for a small model; a CPU works, but
takes days.

  outpace distill TARGET --prompts FILE... --out DIR      all steps in one command

The steps can run on different machines. Each reads what the one before wrote into DIR:

  outpace distill prepare TARGET --prompts FILE... --out DIR    prompts to token ids; needs the tokenizer, no torch
  outpace distill train TARGET --out DIR                        answers, training, evaluation; needs torch, best a GPU
  outpace distill pack DIR                                      model.safetensors and head.gguf; needs no GPU

TARGET is a GGUF file or a Hugging Face folder (without it: the embedded SmolLM2-135M-Instruct). FILE is a JSON list or
JSON lines with `prompt`, `messages`, `instruction` and `input`, `question`, or Spec-Bench's and ShareGPT's fields.

DIR then holds config.json and model.safetensors in the format of the `speculators` project, head.gguf for the native
backend, card.md (what it was trained on, and how well it drafts) and training.jsonl. Ctrl-C keeps a checkpoint, and
the same command with --resume goes on.

examples:
  outpace distill --prompts gpteacher.json gsm8k.jsonl --held-out spec_bench.jsonl --out head --minutes 20
  outpace distill train model.gguf --prepared prepared.npz --out head --minutes 20 --call-minutes 9 --resume
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = _DESCRIPTION
    parser.add_argument("words", nargs="*", metavar="[STEP] TARGET", help="see above")
    parser.add_argument("--out", type=Path, metavar="DIR", help="the head's folder")
    data = parser.add_argument_group("prompts")
    data.add_argument("--prompts", nargs="+", type=Path, default=[], metavar="FILE", help="prompts to train on")
    data.add_argument("--held-out", nargs="+", type=Path, default=[], metavar="FILE",
                      help="prompts to measure with (default: one of fifty of --prompts)")  # fmt: skip
    data.add_argument("--exclude", nargs="+", type=Path, default=[], metavar="FILE",
                      help="drop prompts that share 13 words in a row with these or with --held-out")  # fmt: skip
    data.add_argument("--own-prompts", type=int, default=0, metavar="N",
                      help="let the target write up to N more prompts itself, for when there are few")  # fmt: skip
    data.add_argument("--documents", type=float, default=0.2, metavar="S",
                      help="share of tasks about long texts, made of the target's answers, among the prompts; they "
                           "teach the head to follow long prompts (default: %(default)g)")  # fmt: skip
    data.add_argument("--prepared", type=Path, metavar="FILE", help=f"the prepared file (default: DIR/{PREPARED})")
    data.add_argument("--answers", type=Path, metavar="DIR",
                      help="keeps the target's answers, or holds earlier ones (default: --out)")  # fmt: skip
    time = parser.add_argument_group("time")
    time.add_argument("--minutes", type=float, default=15.0, metavar="M",
                      help="training time in all, over all calls (default: %(default)g)")  # fmt: skip
    time.add_argument("--answer-minutes", type=float, metavar="M",
                      help="time for the target's answers (default: a quarter of --minutes)")  # fmt: skip
    time.add_argument("--call-minutes", type=float, metavar="M",
                      help="stop this call after so long, with a checkpoint to resume from")  # fmt: skip
    time.add_argument("--resume", nargs="?", type=Path, const=Path(), metavar="DIR",
                      help="go on from the checkpoint in DIR (default: --out)")  # fmt: skip
    head = parser.add_argument_group("the head")
    head.add_argument("--vocab", type=int, default=16384, metavar="N",
                      help="most frequent tokens that it can draft (default: %(default)s)")  # fmt: skip
    head.add_argument("--hidden", type=int, metavar="N", help="width of its MLP (default: the target's)")
    head.add_argument("--steps", type=int, default=4, metavar="N",
                      help="drafted tokens trained at once (default: %(default)s)")  # fmt: skip
    head.add_argument("--learning-rate", type=float, default=1.5e-3, metavar="R", help="(default: %(default)g)")
    head.add_argument("--batch-tokens", type=int, metavar="N",
                      help="tokens of a training step, a multiple of 32 (default: 23040; on a CPU 1920)")  # fmt: skip
    head.add_argument("--max-answer", type=int, default=256, metavar="N",
                      help="longest answer of the target in tokens (default: %(default)s)")  # fmt: skip
    head.add_argument("--type", choices=("Q4_0", "Q4_1", "Q8_0"), default="Q4_0", metavar="T",
                      help="of the matrices in head.gguf: Q4_0, Q4_1 or Q8_0 (default: %(default)s)")  # fmt: skip
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="(default: %(default)s)")
    parser.add_argument(
        "--no-compile", action="store_true", help="do not compile on the GPU: starts sooner, runs slower"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="(default: %(default)s)")


def execute(options: argparse.Namespace) -> int:
    step = options.words[0] if options.words and options.words[0] in STEPS else "all"
    words = options.words[step != "all" :]
    if len(words) > 1:
        raise UsageError(f"expected one target and got {' '.join(words)}; put files of prompts after --prompts")
    if step == "pack":
        return _pack(Path(words[0]) if words else options.out, options.type)
    if options.out is None:
        raise UsageError("where should the head go? Name a folder with --out DIR")
    target = resolve_model(words[0] if words else None)
    if step == "prepare":
        return _prepare(target, options)
    settings, resume = _settings(options), _checkpoint_folder(options)
    if step == "all" and not _has_prepared(options):
        _prepare(target, options)
    is_complete = _train(target, options, settings, resume)
    return _pack(options.out, options.type) if is_complete and step == "all" else 0


def _has_prepared(options: argparse.Namespace) -> bool:
    """A resumed run uses the prompts it began with."""
    return options.resume is not None and (options.out / PREPARED).is_file()


def _prepare(target: Path, options: argparse.Namespace) -> int:
    from outpace.training.prepared import save_prepared
    from outpace.training.prompts import prepare

    if not options.prompts:
        raise UsageError("no prompts were given; name files of prompts with --prompts FILE...")
    prepared = prepare(
        target, _tokenizer(target), prompt_files=options.prompts, held_files=options.held_out,
        exclude_files=options.exclude,
    )  # fmt: skip
    path = options.prepared or options.out / PREPARED
    save_prepared(prepared, path)
    overlapping = sum(source.num_overlapping for source in prepared.sources)
    _say(
        f"{len(prepared.train):,} prompts to train on and {len(prepared.held):,} held out are in {path}; "
        f"{overlapping:,} were dropped because they overlap with held-out or excluded ones"
    )
    return 0


def _tokenizer(path: Path) -> Tokenizer:
    """From a folder, its own tokenizer; from a GGUF, llama.cpp's."""
    if path.is_dir():
        from outpace.models.hf_config import read_config
        from outpace.models.hf_tokenizer import HFTokenizer

        return HFTokenizer(path, read_config(path).vocab_size)
    from outpace.models.gguf_tokenizer import LlamaTokenizer
    from outpace.models.llama_library import load_library

    return LlamaTokenizer(path, load_library(None))


def _settings(options: argparse.Namespace) -> DistillSettings:
    from outpace.training.settings import DistillSettings

    return DistillSettings(
        minutes=options.minutes, call_minutes=options.call_minutes,
        answer_minutes=options.answer_minutes, num_own_prompts=options.own_prompts,
        document_share=options.documents, max_answer=options.max_answer,
        draft_vocab_size=options.vocab, hidden=options.hidden, num_steps=options.steps,
        learning_rate=options.learning_rate, batch_tokens=options.batch_tokens, seed=options.seed,
        compile=not options.no_compile,
    )  # fmt: skip


def _train(target: Path, options: argparse.Namespace, settings: DistillSettings, resume: Path | None) -> bool:
    """Whether training is complete."""
    try:
        import torch

        from outpace.backends.torch.device import choose_device
        from outpace.training.distill import distill
    except ImportError as error:
        raise BackendError(
            f"training needs {error.name or 'torch'}, which is not installed; pip install 'outpace[distill]'"
        ) from error
    from outpace.training.display import Display
    from outpace.training.prepared import load_prepared

    prepared = load_prepared(options.prepared or options.out / PREPARED)
    display = Display()
    device = torch.device("cpu") if options.device == "cpu" else choose_device(options.device)
    again = "the same command with --resume goes on"
    try:
        found = distill(
            target, prepared, options.out, settings, device, display, resume=resume, answers_folder=options.answers
        )
    except KeyboardInterrupt as error:
        display.close()
        raise OutpaceError(f"interrupted; what was done is kept in {options.out}, and {again}") from error
    display.close()
    if found is None:
        _say(f"the call's time is over before the training's; the checkpoint is in {options.out}, and {again}")
        return False
    _say(_summary(found, options.out))
    return True


def _checkpoint_folder(options: argparse.Namespace) -> Path | None:
    if options.resume is not None:
        folder: Path = options.out if options.resume == Path() else options.resume
        # Interrupted while the target still wrote answers: there is no checkpoint yet.
        return folder if any(folder.glob("checkpoint*.safetensors")) or options.resume != Path() else None
    if any(options.out.glob("checkpoint*.safetensors")):
        raise UsageError(f"{options.out} already holds a head; go on with --resume, or choose another --out")
    return None


def _summary(found: Evaluation, out: Path) -> str:
    row = found.tokens_a_step.get("all", [])
    shown = ", ".join(f"{row[depth - 1]:.2f} at depth {depth}" for depth in (1, 3, 5, 8) if depth <= len(row))
    return (
        f"tokens a step on held-out prompts: {shown}; overlap at temperature 1: {found.overlap[0]:.2f}; "
        f"{out / 'card.md'} has more"
    )


def _pack(folder: Path | None, quantisation: str) -> int:
    if folder is None:
        raise UsageError("which head? Name its folder: outpace distill pack DIR")
    from outpace.training.write import pack

    for path in pack(folder, quantisation):
        _say(f"wrote {path} ({path.stat().st_size / 1e6:.1f} MB)")
    return 0


def _say(text: str) -> None:
    print(text, file=sys.stderr)
