"""Mistral, up to its tokenizer v7: a control token, then all calls of an answer as one JSON list."""

from hashlib import sha256

from outpace.models.tool_calls.syntax import CallSyntax


def _knows(template: str) -> bool:
    return "[TOOL_CALLS]" in template and "[ARGS]" not in template  # [ARGS]: v11 and later write no list


def _short_id(given: str) -> str:
    """These templates refuse ids that are not nine letters and digits."""
    return given if len(given) == 9 and given.isascii() and given.isalnum() else sha256(given.encode()).hexdigest()[:9]


MISTRAL = CallSyntax(name="mistral", opener="[TOOL_CALLS]", is_list=True, knows=_knows, call_id=_short_id)
