"""Error classes. Each message is one sentence that names the cause and the remedy.

Every error a user can meet is an OutpaceError; its class decides the exit status of the command line.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

_LONGEST = 1200  # characters of a message that a person would still read


class OutpaceError(Exception):
    """A failure that the user can understand and act on (exit status 1)."""

    def __init__(self, message: str) -> None:
        super().__init__(_one_line(message))


def _one_line(message: str) -> str:
    """Names from model files may be very long, and hold line breaks and terminal escapes, which become spaces."""
    if len(message) > _LONGEST:
        message = f"{message[: _LONGEST * 2 // 3]} ... {message[-_LONGEST // 3 :]}"
    return "".join(character if character.isprintable() else " " for character in message)


class UsageError(OutpaceError, ValueError):
    """An invalid parameter, flag or request (exit status 2)."""


class PromptTooLong(UsageError):
    """A prompt with more tokens than the context holds."""


class ModelError(OutpaceError):
    """A model file that cannot be used: missing, broken, unsupported, or not matching the other model."""


class BackendError(OutpaceError):
    """A backend's library is missing, has the wrong version, or reported an error."""


class BackendLost(BackendError):
    """A part of the backend is gone for good, such as a process that holds a part of the model."""


def suggestion(word: str, known: Iterable[str]) -> str:
    """A question that follows a misspelt flag, with the flag that was probably meant; empty if none is similar."""
    from difflib import get_close_matches

    name, names = word.partition("=")[0].replace("_", "-").lower(), sorted(known)
    begun = [each for each in names if each.startswith(name)] if len(name) > 3 else []
    similar = begun or get_close_matches(name, names, n=1, cutoff=0.7)
    return f"did you mean {similar[0]}?" if similar else ""


def json_object(flag: str, text: str, example: str) -> dict[str, Any]:
    """The JSON object that is a flag's value. Raises UsageError, with the flag and the example, for anything else."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{flag} is not JSON ({error}); write it as {example}") from error
    if not isinstance(values, dict):
        raise UsageError(f"{flag} is not a JSON object; write it as {example}")
    return values
