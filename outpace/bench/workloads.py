"""The built-in prompts by class: six workloads written for this project, from copying text to inventing it.

The texts are in `data/NAME.txt`. A line `%%% max_tokens=N` begins a prompt, `%% ROLE` another message of it. The text
before the first prompt describes the workload.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import TypeVar

from outpace.errors import UsageError

T = TypeVar("T")
Message = Mapping[str, str]

BUILT_IN = ("code_edit", "code", "json", "summarise", "chat", "story")
_PROMPT_LINE = re.compile(r"^%%% max_tokens=(\d+)\n", re.MULTILINE)
_ROLE_LINE = re.compile(r"^%% (\w+)\n", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A conversation to answer. `category` is its class in every table. Without a temperature, the run's applies."""

    messages: Sequence[Message]
    category: str
    max_tokens: int
    temperature: float | None = None


def built_in(name: str, count: int | None = None) -> list[Prompt]:
    """The prompts of one built-in workload, or `count` of them, spread over the whole."""
    if name not in BUILT_IN:
        raise UsageError(f"there is no built-in workload {name!r}; choose from {', '.join(BUILT_IN)}")
    prompts = _read(name)
    return prompts if count is None else evenly(prompts, count)


@cache
def _read(name: str) -> list[Prompt]:
    text = (files("outpace.bench") / "data" / f"{name}.txt").read_text(encoding="utf-8")
    _, *parts = _PROMPT_LINE.split(text)
    return [Prompt(_messages(body), name, int(limit)) for limit, body in zip(parts[::2], parts[1::2], strict=True)]


def _messages(body: str) -> tuple[Message, ...]:
    first, *rest = _ROLE_LINE.split(body)
    turns = [("user", first), *zip(rest[::2], rest[1::2], strict=True)]
    return tuple({"role": role, "content": content.strip()} for role, content in turns)


def evenly(items: Sequence[T], count: int) -> list[T]:
    """`count` items spread over the whole, so that every kind in a file is represented."""
    count = min(count, len(items))
    return [items[i * len(items) // count] for i in range(count)]
