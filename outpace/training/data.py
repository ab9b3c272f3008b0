"""What a head is trained and measured on: the target's own answers, written once and kept in a file."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from outpace.errors import UsageError
from outpace.training.answers import Answer, Answerer, Ask, Prompt, until
from outpace.training.batches import Texts, join
from outpace.training.contamination import overlaps
from outpace.training.display import Display
from outpace.training.documents import LONGEST, document_prompts
from outpace.training.prepared import Prepared
from outpace.training.shards import load_sharded, save_sharded
from outpace.training.target import Target

MIN_ANSWER = 5  # shorter ones teach nothing: a draft needs tokens to hit
HELD_ANSWER = 200  # tokens of a held-out answer, at most
_NGRAM = 13  # tokens; more than a chat template repeats
_FOR_TEXTS = 0.3  # of the time: answers to the prompts alone, from which texts are then made
_STEM = "answers"
_PARTS = ("train", "held_greedy", "held_sampled")
_KEYS = ("prompts", "answers", "prompt_lengths", "answer_lengths", "prompt_numbers")


@dataclass(frozen=True, slots=True)
class Answers:
    train: Texts
    held_greedy: Texts  # in the order of the held-out prompts
    held_sampled: Texts  # at temperature 1
    seconds: float  # that the target took
    num_own_prompts: int  # written by the target itself
    num_documents: int = 0  # prompts about texts of the target


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerSettings:
    seconds: float  # for the training answers
    max_answer: int = 256
    max_rounds: int = 8  # answers per prompt, at most
    num_own_prompts: int = 0
    document_share: float = 0.0  # of the prompts: tasks about a text
    max_text: int = 2048  # tokens of such a prompt with its answer, at most
    seed: int = 0


Report = Callable[[str, int, float], None]  # what is done, tokens, share of the time


def find_or_write(
    target: Target, prepared: Prepared, settings: AnswerSettings, folder: Path, display: Display
) -> Answers:
    """The answers that the folder holds; else new ones, which it holds from then on."""
    found = load_answers(folder, target.fingerprint)
    if found is not None:
        if len(found.held_greedy) != len(prepared.held):
            raise UsageError(
                f"the answers in {folder} are to {len(found.held_greedy)} held-out prompts and {len(prepared.held)} "
                f"were prepared; delete {folder}/{_STEM}* to write new ones"
            )
        display.say(f"{found.train.num_answer_tokens:,} answer tokens read from {folder}")
        return found

    def report(what: str, num_tokens: int, share: float) -> None:
        display.show(what, share, f"{num_tokens / 1e6:.2f}M tokens")

    def keep(answers: Answers) -> None:
        save_answers(answers, folder, target.fingerprint, target.config.vocab_size)

    answers = write_answers(target, prepared, settings, report, keep)
    display.say(
        f"the target wrote {answers.train.num_answer_tokens:,} tokens in {len(answers.train):,} answers in "
        f"{answers.seconds:.0f} s"
    )
    if target.device.type == "cuda":
        torch.cuda.empty_cache()
    return answers


def write_answers(
    target: Target, prepared: Prepared, settings: AnswerSettings, report: Report, keep: Callable[[Answers], None]
) -> Answers:
    """Held-out prompts are answered first and whole; training prompts until the time is over.

    `keep` saves the answers, also the fewer ones of an interrupted run.
    """
    begin = time.monotonic()
    torch.manual_seed(settings.seed)
    held = _answer_held(target, prepared, min(HELD_ANSWER, settings.max_answer))
    report("held-out answers", sum(len(each.tokens) for each in held), 0.0)
    train_begin = time.monotonic()
    deadline = train_begin + settings.seconds
    longest = max((len(prompt) for prompt in prepared.train), default=1)
    longest_document = min(LONGEST, settings.max_text - settings.max_answer)
    has_documents = settings.document_share > 0 and longest_document > longest
    if has_documents:
        longest = longest_document
    answerer = Answerer(
        target, max_prompt=max(longest, settings.max_answer + 64), max_answer=settings.max_answer,
        end_ids=prepared.end_ids, most_rows=max(len(prepared.train) * settings.max_rounds, settings.num_own_prompts),
    )  # fmt: skip
    own = _own_prompts(answerer, prepared, settings.num_own_prompts, deadline)
    prompts: list[Prompt] = [*prepared.train, *own]
    documents: list[NDArray[np.int64]] = []
    found = list[Answer]()

    num_tokens = 0

    def write(asks: Iterator[Ask], end: float) -> None:
        nonlocal num_tokens
        for answer in answerer.answer(until(asks, end)):
            if len(answer.tokens) >= MIN_ANSWER:
                found.append(answer)
                num_tokens += len(answer.tokens)
            report("answers", num_tokens, min((time.monotonic() - train_begin) / max(settings.seconds, 1e-9), 1.0))

    try:
        if has_documents:
            write(_rounds(prompts, settings), train_begin + _FOR_TEXTS * settings.seconds)
            documents = _documents(prepared, found, len(prompts), longest, settings)
        write(_rounds([*prompts, *documents], settings, first=int(has_documents)), deadline)
    finally:
        half = len(prepared.held)
        answers = Answers(
            _texts(found), _texts(held[:half]), _texts(held[half:]), time.monotonic() - begin, len(own), len(documents)
        )
        if found:
            keep(answers)
    if not found:
        raise UsageError(
            f"the target gave no answer of at least {MIN_ANSWER} tokens to any prompt in {settings.seconds:.0f} s; "
            "give more minutes, or prompts that call for longer answers"
        )
    return answers


def _answer_held(target: Target, prepared: Prepared, max_answer: int) -> list[Answer]:
    """Greedy answers to all held-out prompts, then sampled ones."""
    if not prepared.held:
        return []
    longest = max(len(prompt) for prompt in prepared.held)
    rows = 2 * len(prepared.held)
    answerer = Answerer(target, max_prompt=longest, max_answer=max_answer, end_ids=prepared.end_ids, most_rows=rows)
    asks = [Ask(i, prepared.held[i % (rows // 2)], float(i >= rows // 2)) for i in range(rows)]
    return sorted(answerer.answer(asks), key=lambda answer: answer.key)


def _rounds(prompts: Sequence[Prompt], settings: AnswerSettings, first: int = 0) -> Iterator[Ask]:
    """Half of the answers greedy, half at temperature 1. Greedy ones repeat themselves: from the third round on, a low
    temperature stands for them."""
    for round_number in range(first, settings.max_rounds):
        calm = 0.0 if round_number < 2 else 0.5
        order = np.random.default_rng((settings.seed, round_number)).permutation(len(prompts))
        for i in order:
            yield Ask(int(i), prompts[i], calm if (i + round_number) % 2 == 0 else 1.0)


def _own_prompts(answerer: Answerer, prepared: Prepared, count: int, deadline: float) -> list[NDArray[np.int64]]:
    """Prompts that the target writes itself: it continues the chat template where the user's words would begin."""
    if not count or not prepared.user_begin:
        return []
    held = [np.asarray(prompt) for prompt in prepared.held]
    found: dict[bytes, NDArray[np.int64]] = {}
    asks = (Ask(i, prepared.user_begin, 1.0) for i in range(count))
    for answer in answerer.answer(until(asks, deadline)):
        has_ended = answer.tokens[-1] in prepared.end_ids
        if has_ended and len(answer.tokens) > 3:
            words = answer.tokens[:-1]
            found[words.tobytes()] = np.concatenate([prepared.user_begin, words, prepared.user_end]).astype(np.int64)
    prompts = [prompt for prompt in found.values() if len(prompt) <= answerer.max_prompt]
    inner = [prompt[len(prepared.user_begin) : len(prompt) - len(prepared.user_end)] for prompt in prompts]
    tainted = overlaps([each.tolist() for each in inner], [each.tolist() for each in held], _NGRAM)
    return [prompt for prompt, is_tainted in zip(prompts, tainted, strict=True) if not is_tainted]


def _documents(
    prepared: Prepared, answers: Sequence[Answer], num_prompts: int, longest: int, settings: AnswerSettings
) -> list[NDArray[np.int64]]:
    """Tasks about texts made of answers, as many as their share beside the other prompts."""
    count = round(num_prompts * settings.document_share / (1 - settings.document_share))
    random = np.random.default_rng(settings.seed)
    chosen = random.permutation(len(answers))[: 4 * count]  # a text is a few answers long
    ends = set(prepared.end_ids)
    texts = [answers[i].tokens[: -1 if answers[i].tokens[-1] in ends else None] for i in chosen]
    held = [np.asarray(prompt).tolist() for prompt in prepared.held]
    tainted = overlaps([text.tolist() for text in texts], held, _NGRAM)
    clean = [text for text, is_tainted in zip(texts, tainted, strict=True) if not is_tainted]
    return document_prompts(prepared.frames, clean, count, longest, settings.seed)


def _texts(answers: Sequence[Answer]) -> Texts:
    parts = [np.concatenate([answer.prompt, answer.tokens]).astype(np.int64) for answer in answers]
    return join(parts, [len(answer.prompt) for answer in answers])


def save_answers(answers: Answers, folder: Path, fingerprint: str, vocab_size: int) -> None:
    """A prompt that was answered several times is stored once."""
    kind = torch.uint16 if vocab_size <= 1 << 16 else torch.uint32
    tensors = {}
    for name in _PARTS:
        texts: Texts = getattr(answers, name)
        prompts: dict[bytes, int] = {}
        parts = [texts.tokens[at : at + n] for at, n in zip(texts.offsets, texts.prompt_lengths, strict=False)]
        numbers = [prompts.setdefault(part.astype(np.int64).tobytes(), len(prompts)) for part in parts]
        different = [np.frombuffer(prompt, np.int64) for prompt in prompts]
        arrays = {
            "prompts": np.concatenate([np.zeros(0, np.int64), *different]),
            "answers": texts.tokens[texts.is_answer()].astype(np.int64),
            "prompt_lengths": np.array([len(prompt) for prompt in different], np.int32),
            "answer_lengths": (texts.lengths - texts.prompt_lengths).astype(np.int32),
            "prompt_numbers": np.array(numbers, np.int32),
        }
        for key, array in arrays.items():
            tensor = torch.from_numpy(array)
            tensors[f"{name}.{key}"] = tensor.to(kind) if tensor.dtype == torch.int64 else tensor
    about = {"fingerprint": fingerprint, "seconds": answers.seconds, "num_own_prompts": answers.num_own_prompts,
             "num_documents": answers.num_documents}  # fmt: skip
    save_sharded(tensors, folder, _STEM, metadata={"about": json.dumps(about)})


def load_answers(folder: Path, fingerprint: str) -> Answers | None:
    """None if the folder holds none."""
    try:
        tensors, metadata = load_sharded(folder, _STEM)
    except FileNotFoundError:
        return None
    about = json.loads(metadata["about"])
    if about["fingerprint"] != fingerprint:
        raise UsageError(f"the answers in {folder} are another target's; delete {folder}/{_STEM}* to write new ones")
    texts = {name: _joined({key: tensors[f"{name}.{key}"] for key in _KEYS}) for name in _PARTS}
    return Answers(**texts, seconds=about["seconds"], num_own_prompts=about["num_own_prompts"],
                   num_documents=about.get("num_documents", 0))  # fmt: skip


def _joined(tensors: dict[str, torch.Tensor]) -> Texts:
    """Prompts and answers as one text after the other."""
    prompts, answers, prompt_lengths, answer_lengths, numbers = (
        tensors[key].to(torch.int64).numpy() for key in _KEYS
    )  # fmt: skip
    different = np.split(prompts, np.cumsum(prompt_lengths)[:-1])
    said = np.split(answers, np.cumsum(answer_lengths)[:-1])
    parts = [np.concatenate([different[number], answer]) for number, answer in zip(numbers, said, strict=False)]
    return join(parts, prompt_lengths[numbers])


def draft_vocabulary(texts: Texts, size: int, vocab_size: int) -> torch.Tensor:
    """The tokens that answers hold most often, ascending; all tokens if `size` is larger."""
    counts = np.bincount(texts.tokens[texts.is_answer()], minlength=vocab_size)
    most = np.argsort(-counts, kind="stable")[: min(size, vocab_size)]
    return torch.from_numpy(np.sort(most).astype(np.int64))


def spread(texts: Texts, count: int) -> Texts:
    """Spread over all, so that every category is represented."""
    count = min(count, len(texts))
    return texts.take([i * len(texts) // count for i in range(count)])
