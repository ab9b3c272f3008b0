"""A JSON object as the value of a flag."""

from __future__ import annotations

import json
from typing import Any

from outpace.errors import UsageError


def json_object(flag: str, text: str, example: str) -> dict[str, Any]:
    """The object. Raises UsageError, with the flag and the example, for anything else."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{flag} is not JSON ({error}); write it as {example}") from error
    if not isinstance(values, dict):
        raise UsageError(f"{flag} is not a JSON object; write it as {example}")
    return values
