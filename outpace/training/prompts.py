"""Reads prompt files, applies the target's chat template and tokenizer, and drops what must not be trained on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from outpace.backends.base import Tokenizer
from outpace.bench.prompt_files import load_prompts
from outpace.bench.workloads import Prompt
from outpace.errors import UsageError
from outpace.models.fingerprint import fingerprint
from outpace.models.prompts import ChatPrompt, encode, render
from outpace.training.contamination import overlaps, words
from outpace.training.documents import TASKS, Frame
from outpace.training.prepared import Prepared, Source

MAX_PROMPT = 512  # tokens of a training prompt
MAX_HELD_PROMPT = 4096  # tokens of a held-out prompt
_HELD_SHARE = 50  # without held-out files, one prompt of so many is held out
_MARK = "MARK"
_LICENCES = {"mit license": "MIT", "the mit license": "MIT", "apache license": "Apache-2.0"}


def prepare(
    target: Path, tokenizer: Tokenizer, *, prompt_files: Sequence[Path], held_files: Sequence[Path],
    exclude_files: Sequence[Path],
) -> Prepared:  # fmt: skip
    if tokenizer.chat_template is None:
        raise UsageError(f"{target.name} has no chat template, so nobody asks it questions; name an instruct model")
    held_prompts, held_sources = [], []
    for path in held_files:
        prompts = load_prompts(path)
        held_prompts += prompts
        held_sources.append(Source(path.name, licence_of(path), len(prompts)))
    excluded = [words(text_of(prompt)) for path in exclude_files for prompt in load_prompts(path)]
    excluded += [words(text_of(prompt)) for prompt in held_prompts]
    train, sources, seen = list[Prompt](), list[Source](), set[str]()
    for path in prompt_files:
        kept, source = _usable(path, tokenizer, excluded, seen)
        train += kept
        sources.append(source)
    if not train:
        raise UsageError("no prompt is left to train on: all are too long or overlap with held-out ones; give others")
    if not held_files:
        held_prompts, train = train[::_HELD_SHARE], [p for i, p in enumerate(train) if i % _HELD_SHARE]
        held_sources = [Source("one of fifty training prompts", "as above", len(held_prompts))]
    held = [(prompt, _tokens(tokenizer, prompt)) for prompt in held_prompts]
    held = [(prompt, tokens) for prompt, tokens in held if len(tokens) <= MAX_HELD_PROMPT]
    begin, end = _template_around_user(tokenizer)
    return Prepared(
        train=[np.array(_tokens(tokenizer, prompt)) for prompt in train],
        held=[np.array(tokens) for _, tokens in held],
        categories=[prompt.category for prompt, _ in held],
        end_ids=sorted(tokenizer.end_ids),
        user_begin=begin,
        user_end=end,
        frames=_frames(tokenizer, begin, end),
        vocab_size=tokenizer.vocab_size,
        target=target.name,
        fingerprint=fingerprint(target),
        sources=sources,
        held_sources=held_sources,
        excluded=[path.name for path in exclude_files],
    )


def _usable(
    path: Path, tokenizer: Tokenizer, excluded: Sequence[Sequence[str]], seen: set[str]
) -> tuple[list[Prompt], Source]:
    """Prompts of a file that are new, short enough and free of overlap. `seen` grows."""
    prompts = load_prompts(path)
    new = []
    for prompt in prompts:
        text = text_of(prompt)
        if text not in seen:
            seen.add(text)
            new.append(prompt)
    tainted = overlaps([words(text_of(prompt)) for prompt in new], excluded)
    clean = [prompt for prompt, is_tainted in zip(new, tainted, strict=True) if not is_tainted]
    kept = [prompt for prompt in clean if len(_tokens(tokenizer, prompt)) <= MAX_PROMPT]
    source = Source(
        path.name,
        licence_of(path),
        len(kept),
        num_overlapping=sum(tainted),
        num_long=len(clean) - len(kept),
        num_repeated=len(prompts) - len(new),
    )
    return kept, source


def text_of(prompt: Prompt) -> str:
    return "\n".join(message["content"] for message in prompt.messages)


def _tokens(tokenizer: Tokenizer, prompt: Prompt) -> list[int]:
    return encode(tokenizer, render(tokenizer, prompt.messages))


def _template_around_user(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Tokens before the user's words and after them; empty if the template does not repeat the words as they are."""
    before, mark, after = render(tokenizer, [{"role": "user", "content": _MARK}]).text.partition(_MARK)
    if not mark:
        return [], []
    return encode(tokenizer, ChatPrompt(before, before)), tokenizer.encode(after, add_special=False)


def _frames(tokenizer: Tokenizer, begin: list[int], end: list[int]) -> list[Frame]:
    """The tasks about a text, in the chat template."""
    if not begin:
        return []

    def tokens(text: str) -> list[int]:
        return tokenizer.encode(text, add_special=False, parse_special=False)

    return [Frame([*begin, *tokens(before)], [*tokens(after), *end]) for before, after in TASKS]


def licence_of(path: Path) -> str:
    """By the first line of a LICENSE file beside the prompts."""
    for name in ("LICENSE", "LICENSE.txt", "LICENSE.md", "LICENCE"):
        licence = path.parent / name
        if licence.is_file():
            lines = [line.strip() for line in licence.read_text(errors="replace").splitlines() if line.strip()]
            first = lines[0] if lines else ""
            return _LICENCES.get(first.lower(), first or "unknown")
    return "unknown"
