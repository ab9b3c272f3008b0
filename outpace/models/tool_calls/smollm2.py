"""SmolLM2: all calls of an answer are one JSON list between tags. Its templates do not know tools."""

from outpace.models.tool_calls.syntax import CallSyntax


def _knows(template: str) -> bool:
    return "SmolLM" in template and "tool" not in template


SMOLLM2 = CallSyntax(name="smollm2", opener="<tool_call>", closer="</tool_call>", is_list=True, knows=_knows)
