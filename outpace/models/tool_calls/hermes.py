"""Hermes, Qwen and others: every call is a JSON object between tags."""

from outpace.models.tool_calls.syntax import CallSyntax, shows_json


def _knows(template: str) -> bool:
    return "<tool_call>" in template and shows_json(template)  # others put XML between the same tags


HERMES = CallSyntax(name="hermes", opener="<tool_call>", closer="</tool_call>", space="\n", knows=_knows)
