"""Error classes. Each message is one sentence that names the cause and the remedy.

Every error a user can meet is an OutpaceError; its class decides the exit status of the command line.
"""

from __future__ import annotations


class OutpaceError(Exception):
    """A failure that the user can understand and act on (exit status 1)."""


class UsageError(OutpaceError, ValueError):
    """An invalid parameter, flag or request (exit status 2)."""


class PromptTooLong(UsageError):
    """A prompt with more tokens than the context holds."""


class ModelError(OutpaceError):
    """A model file that cannot be used: missing, broken, unsupported, or not matching the other model."""


class BackendError(OutpaceError):
    """A backend's library is missing, has the wrong version, or reported an error."""
