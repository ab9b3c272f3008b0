"""What can go wrong, said in one sentence that names the cause and the remedy.

Every error a user can meet is an OutpaceError; its class decides the exit status of the command line.
"""

from __future__ import annotations


class OutpaceError(Exception):
    """Something failed that the user can understand and act on (exit status 1)."""


class UsageError(OutpaceError, ValueError):
    """A parameter, flag or request that cannot be meant as given (exit status 2)."""


class ModelError(OutpaceError):
    """A model file that cannot be used: missing, broken, unsupported, or not matching its partner."""


class BackendError(OutpaceError):
    """The library underneath is missing, does not match, or reported a fault."""
