"""Whether Ray is there."""

from __future__ import annotations

from importlib.util import find_spec

from outpace.errors import UsageError


def check_ray(flag: str) -> None:
    """Raise a sentence with the remedy if Ray is not installed; `flag` needs it."""
    if find_spec("ray") is None:
        raise UsageError(f"{flag} needs Ray, which is not installed; pip install 'outpace[ray]'")
