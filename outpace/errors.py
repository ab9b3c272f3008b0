"""Error classes. Each message is one sentence that names the cause and the remedy.

Every error a user can meet is an OutpaceError; its class decides the exit status of the command line.
"""

from __future__ import annotations


class OutpaceError(Exception):
    """A failure that the user can understand and act on (exit status 1)."""

    def __init__(self, message: str) -> None:
        """Names from model files may hold line breaks and terminal escapes; these become spaces."""
        super().__init__("".join(character if character.isprintable() else " " for character in message))


class UsageError(OutpaceError, ValueError):
    """An invalid parameter, flag or request (exit status 2)."""


class ModelError(OutpaceError):
    """A model file that cannot be used: missing, broken, unsupported, or not matching the other model."""


class BackendError(OutpaceError):
    """A backend's library is missing, has the wrong version, or reported an error."""
