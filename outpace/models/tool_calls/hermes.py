"""Hermes, Qwen and others: every call is a JSON object between tags."""

from outpace.models.tool_calls.syntax import CallSyntax


def _knows(template: str) -> bool:
    # Some templates put XML or other syntax between the same tags.
    return "<tool_call>" in template and "<function=" not in template and "<arg_key>" not in template


HERMES = CallSyntax(name="hermes", opener="<tool_call>", closer="</tool_call>", space="\n", knows=_knows)
