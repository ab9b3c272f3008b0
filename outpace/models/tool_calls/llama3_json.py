"""Llama 3.1 and later: the answer is the call, a JSON object with `parameters`, sometimes after a control token."""

from outpace.models.tool_calls.syntax import CallSyntax, shows_json


def _knows(template: str) -> bool:
    return "<|start_header_id|>" in template and '"parameters": ' in template and shows_json(template)


LLAMA3_JSON = CallSyntax(
    name="llama3_json",
    opener="<|python_tag|>",
    begins_bare=True,
    separator="; ",
    arguments_key="parameters",
    knows=_knows,
)
