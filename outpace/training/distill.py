"""One call of `outpace distill train`: answers, training, evaluation, and what is kept of an interrupted call."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import torch

from outpace.errors import BackendError, UsageError
from outpace.models.head_file import HeadConfig
from outpace.training.batches import BatchShape, make_batch, plan_batches
from outpace.training.card import Facts, card
from outpace.training.data import Answers, AnswerSettings, draft_vocabulary, find_or_write, spread
from outpace.training.display import Display
from outpace.training.evaluate import Evaluation, evaluate
from outpace.training.head import Head, default_taps, rope_theta, start_values
from outpace.training.prepared import Prepared
from outpace.training.settings import DistillSettings
from outpace.training.target import Target
from outpace.training.train import QUICK_DEPTH, QUICK_TEXTS, Progress, Trainer, TrainSettings
from outpace.training.write import Checkpoint, load_checkpoint, save_checkpoint

_SAVE_EVERY = 120.0  # seconds
_QUICK_EVERY = 30.0
_LOG_EVERY = 5.0
_FOR_THE_END = 30.0  # seconds of a limited call that are left for the evaluation
_HELD_ON_A_CPU = 24  # prompts; answering all would take longer than training
_GOOD_TOKENS = 60_000_000  # token passes after which a head of a small target is useful


def distill(
    target_path: Path, prepared: Prepared, out: Path, settings: DistillSettings, device: torch.device,
    display: Display, *, resume: Path | None = None, answers_folder: Path | None = None,
) -> Evaluation | None:  # fmt: skip
    """Train a head, or go on with one. None if the call's time ended before training did."""
    begin = time.monotonic()
    checkpoint = load_checkpoint(resume) if resume is not None else None
    deadline = None if settings.call_minutes is None else begin + 60 * settings.call_minutes
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    compile = settings.compile and device.type == "cuda"
    try:
        target = Target.load(target_path, device, dtype, compile=compile)
        _check_same_target(target, prepared, checkpoint)
        display.say(f"loaded {target.name} on {_name(device)} in {time.monotonic() - begin:.1f} s")
        if device.type != "cuda" and len(prepared.held) > _HELD_ON_A_CPU:
            prepared = _fewer_held(prepared, _HELD_ON_A_CPU)
            display.say(f"without a GPU, only {_HELD_ON_A_CPU} held-out prompts are used")
        # A resumed call that does not find the earlier answers lets the target write other ones.
        seed = settings.seed + (checkpoint.progress.steps if checkpoint is not None else 0)
        shape = _batch_shape(settings, on_gpu=device.type == "cuda")
        wanted = _answer_settings(
            settings, seed, deadline, max_text=min(shape.num_tokens, target.config.unwindowed_context)
        )
        answers = find_or_write(target, prepared, wanted, answers_folder or out, display)
        return _Call(target, prepared, answers, out, settings, compile, deadline, display).run(checkpoint)
    except torch.OutOfMemoryError as error:
        raise BackendError(
            f"{device} ran out of memory ({str(error).splitlines()[0]}); use fewer --batch-tokens or a smaller --vocab"
        ) from error


def _check_same_target(target: Target, prepared: Prepared, checkpoint: Checkpoint | None) -> None:
    if target.fingerprint != prepared.fingerprint or target.config.vocab_size <= max(prepared.end_ids, default=0):
        raise UsageError(
            f"the prompts were prepared for {prepared.target} ({prepared.fingerprint}) and the target is "
            f"{target.name} ({target.fingerprint}); run `outpace distill prepare` for this target"
        )
    if checkpoint is not None and checkpoint.config.target.get("fingerprint") != target.fingerprint:
        raise UsageError(
            f"the checkpoint is a head for {checkpoint.config.target.get('name')} "
            f"({checkpoint.config.target.get('fingerprint')}) and the target is {target.name} ({target.fingerprint}); "
            "name that target, or start a new head"
        )


def _batch_shape(settings: DistillSettings, *, on_gpu: bool) -> BatchShape:
    return BatchShape(
        num_tokens=settings.batch_tokens or (32 * 720 if on_gpu else 32 * 60),
        chunk=2048 if on_gpu else 256,
        num_steps=settings.num_steps,
    )


def _answer_settings(
    settings: DistillSettings, seed: int, deadline: float | None, *, max_text: int
) -> AnswerSettings:  # fmt: skip
    seconds = 60 * (settings.answer_minutes or settings.minutes / 4)
    if deadline is not None:
        seconds = min(seconds, max(deadline - time.monotonic() - 2 * _FOR_THE_END, 1.0))
    return AnswerSettings(
        seconds=seconds, max_answer=settings.max_answer, num_own_prompts=settings.num_own_prompts,
        document_share=settings.document_share, max_text=max_text, seed=seed,
    )  # fmt: skip


class _Call:
    def __init__(
        self, target: Target, prepared: Prepared, answers: Answers, out: Path, settings: DistillSettings,
        compile: bool, deadline: float | None, display: Display,
    ) -> None:  # fmt: skip
        self._target, self._prepared, self._answers, self._out = target, prepared, answers, out
        self._settings, self._compile, self._deadline, self._display = settings, compile, deadline, display
        on_gpu = target.device.type == "cuda"
        self._shape = _batch_shape(settings, on_gpu=on_gpu)
        self._quick_texts = spread(answers.held_greedy, QUICK_TEXTS if on_gpu else 8)

    def run(self, checkpoint: Checkpoint | None) -> Evaluation | None:
        settings, target = self._settings, self._target
        if checkpoint is None:
            checkpoint = self._fresh()
        else:  # what it was trained for
            self._shape = replace(self._shape, num_steps=checkpoint.config.num_steps)
        kept = checkpoint.kept.to(target.device)
        parameters = {name: p.to(target.device) for name, p in checkpoint.parameters.items()}
        head = Head(checkpoint.config, target, parameters, compile=self._compile)
        train_settings = TrainSettings(
            seconds=60 * settings.minutes, learning_rate=settings.learning_rate, seed=settings.seed, shape=self._shape
        )
        trainer = Trainer(target, head, kept, train_settings, checkpoint.progress, compile=self._compile)

        def save() -> None:
            save_checkpoint(Checkpoint(head.config, parameters, kept.cpu(), trainer.progress), self._out)

        self._warm_up(trainer)
        left = train_settings.seconds
        if self._deadline is not None:
            left = max(self._deadline - time.monotonic() - _FOR_THE_END, 0.0)
        try:
            trainer.run(self._answers.train, left, tick=self._ticker(trainer, save))
        finally:  # Ctrl-C as well
            save()
        self._log(trainer.progress, float("nan"), final=True)
        if trainer.progress.seconds < train_settings.seconds:
            return None
        return self._finish(head, kept, trainer.progress)

    def _fresh(self) -> Checkpoint:
        s, target = self._settings, self._target
        c = target.config
        kept = draft_vocabulary(self._answers.train, s.draft_vocab_size, c.vocab_size)
        config = HeadConfig(
            width=c.width,
            hidden=s.hidden or c.hidden,
            num_heads=c.num_heads,
            num_kv_heads=c.num_kv_heads,
            head_dim=c.head_dim,
            vocab_size=c.vocab_size,
            draft_vocab_size=len(kept),
            taps=default_taps(c.num_layers),
            epsilon=c.epsilon,
            rope_theta=rope_theta(c),
            num_steps=self._shape.num_steps,
            target={"name": target.name, "fingerprint": target.fingerprint, "architectures": [target.class_name]},
        )
        torch.manual_seed(s.seed)
        return Checkpoint(config, start_values(config, target, kept), kept, Progress())

    def _warm_up(self, trainer: Trainer) -> None:
        """Compile before the clock starts, and say what to expect of a CPU."""
        begin = time.monotonic()
        length, chosen = plan_batches(self._answers.train, self._shape, seed=0)[0]
        batch = make_batch(self._answers.train, length, chosen, self._shape, self._target.device)
        trainer.batch_loss(batch).backward()
        trainer.optimizer.zero_grad(set_to_none=True)
        if self._target.device.type == "cuda":
            torch.cuda.synchronize()
            self._display.say(f"ready to train after {time.monotonic() - begin:.0f} s of compiling")
            return
        speed = batch.num_tokens / (time.monotonic() - begin)
        self._display.say(
            f"without a GPU: about {speed:,.0f} tokens a second, {speed * 60 * self._settings.minutes / 1e6:.2f}M in "
            f"{self._settings.minutes:g} minutes; a useful head needs about {_GOOD_TOKENS / 1e6:.0f}M, "
            f"{_GOOD_TOKENS / speed / 3600:.0f} hours here"
        )

    def _ticker(self, trainer: Trainer, save: Callable[[], None]) -> Callable[[Progress, float], None]:
        total = 60 * self._settings.minutes
        due = {"save": time.monotonic() + _SAVE_EVERY, "quick": 0.0, "log": 0.0}
        begin, first = time.monotonic(), trainer.progress.tokens

        def tick(progress: Progress, loss: float) -> None:
            now = time.monotonic()
            if now >= due["quick"] and len(self._quick_texts):
                trainer.quick_figure(self._quick_texts)
                due["quick"] = time.monotonic() + _QUICK_EVERY
            if now >= due["save"]:
                save()
                due["save"] = time.monotonic() + _SAVE_EVERY
            if now >= due["log"]:
                self._log(progress, loss)
                due["log"] = now + _LOG_EVERY
            speed = (progress.tokens - first) / max(now - begin, 1e-9)
            self._display.show(
                "training",
                progress.seconds / total,
                f"loss {loss:.3f}, held-out {progress.quick:.2f} tokens a step at depth {QUICK_DEPTH}, "
                f"{progress.tokens / 1e6:.1f}M tokens, {speed / 1e3:,.1f}k/s",
            )

        return tick

    def _log(self, progress: Progress, loss: float, *, final: bool = False) -> None:
        line = asdict(progress) | ({"saved": True} if final else {"loss": loss})
        self._out.mkdir(parents=True, exist_ok=True)
        with (self._out / "training.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def _finish(self, head: Head, kept: torch.Tensor, progress: Progress) -> Evaluation:
        begin = time.monotonic()
        answers, target = self._answers, self._target
        found = evaluate(
            target, head, kept, answers.held_greedy, answers.held_sampled, self._prepared.categories, self._shape,
            rounded=True,
        )  # fmt: skip
        self._display.say(f"evaluated {found.num_texts} held-out answers in {time.monotonic() - begin:.1f} s")
        facts = Facts(
            config=head.config,
            prepared=self._prepared,
            progress=progress,
            evaluation=found,
            num_texts=len(answers.train),
            num_answer_tokens=answers.train.num_answer_tokens,
            answer_seconds=answers.seconds,
            num_own_prompts=answers.num_own_prompts,
            num_documents=answers.num_documents,
            num_parameters=sum(p.numel() for p in head.parameters.values()),
            device=_name(target.device),
        )
        (self._out / "card.md").write_text(card(facts), encoding="utf-8")
        with (self._out / "training.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"evaluation": found.as_dict()}) + "\n")
        return found


def _fewer_held(prepared: Prepared, count: int) -> Prepared:
    chosen = [i * len(prepared.held) // count for i in range(count)]
    held, categories = [prepared.held[i] for i in chosen], [prepared.categories[i] for i in chosen]
    return replace(prepared, held=held, categories=categories)


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
