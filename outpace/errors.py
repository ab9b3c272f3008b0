"""Error classes. Each message is one sentence that names the cause and the remedy.

Every error a user can meet is an OutpaceError; its class decides the exit status of the command line.
"""

from __future__ import annotations

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
