"""Keeps control tokens that users write apart from those of the chat template.

Before a conversation is rendered, the first character of every control token in its texts is replaced by a stand-in, a
private-use character that occurs nowhere else. The template sees texts of the same length, and what it writes itself
are the only control tokens in its output. After that, the stand-ins become the characters of the user again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

from outpace.errors import UsageError
from outpace.models.special_tokens import SpecialTokens

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_PRIVATE_USE = (range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))


def check_roles(messages: Sequence[Mapping[str, Any]]) -> None:
    """A role is written into the prompt as it is, so it must be one that templates know."""
    for i, message in enumerate(messages):
        if message["role"] not in ROLES:
            raise UsageError(
                f"messages[{i}] has a role that is not known; use one of {', '.join(ROLES)}, or set "
                "allow_control_tokens (--allow-control-tokens) if the model's template has other roles"
            )


class Hidden(NamedTuple):
    """What a client sent, without control tokens."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    stand_ins: dict[int, str]  # the character that each stands for


def hide_controls(
    messages: Sequence[Mapping[str, Any]],
    controls: SpecialTokens,
    template: str,
    tools: Sequence[Mapping[str, Any]] = (),
) -> Hidden:
    texts = [text for part in (*messages, *tools) for text in _texts(part)]
    if not any(_has_any(text, controls) for text in texts):
        _check_normalized(messages, tools, controls)
        return Hidden([dict(message) for message in messages], [dict(tool) for tool in tools], {})
    used = set(template).union(*texts, *(token.text for token in controls.tokens))
    spare = (chr(code) for code in chain(*_PRIVATE_USE) if chr(code) not in used)
    stand_ins: dict[str, str] = {}

    def hidden(text: str) -> str:
        characters = list(text)
        for start in _starts(text, controls):
            original = text[start]
            if original not in stand_ins:
                stand_ins[original] = _next(spare)
            characters[start] = stand_ins[original]
        return "".join(characters)

    changed = [
        {field: value if field == "role" else _changed(value, hidden) for field, value in message.items()}
        for message in messages
    ]
    changed_tools = [_changed(tool, hidden) for tool in tools]
    _check_normalized(changed, changed_tools, controls)
    return Hidden(changed, changed_tools, {ord(stand_in): original for original, stand_in in stand_ins.items()})


def _check_normalized(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], controls: SpecialTokens
) -> None:
    """Refuse texts that the tokenizer's normalizer turns into control tokens, such as one in full-width letters."""
    if controls.normalize is None:
        return
    for name, parts in (("messages", messages), ("tools", tools)):
        for i, part in enumerate(parts):
            if any(_has_whole(controls.normalize(text), controls) for text in _texts(part)):
                raise UsageError(f"{name}[{i}] has text that this tokenizer reads as a control token; remove it")


def _texts(value: Any) -> Iterator[str]:
    """Every text in JSON-like data, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from _texts(key)
            yield from _texts(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _texts(part)


def _changed(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_changed(key, change): _changed(part, change) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_changed(part, change) for part in value]
    return value


def _has_whole(text: str, controls: SpecialTokens) -> bool:
    return next(controls.starts(text), None) is not None


def _has_any(text: str, controls: SpecialTokens) -> bool:
    return next(_starts(text, controls), None) is not None


def _starts(text: str, controls: SpecialTokens) -> Iterator[int]:
    """Where control tokens begin, also one at the end that the next text could complete."""
    yield from controls.starts(text)
    end = len(text.rstrip())
    for n in range(1, min(end, controls.longest - 1) + 1):
        if text[end - n : end] in controls.beginnings:
            yield end - n


def _next(spare: Iterator[str]) -> str:
    found = next(spare, None)
    if found is None:
        raise UsageError("the messages and tools use every private-use character of Unicode; send fewer of them")
    return found
