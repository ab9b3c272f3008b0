"""An agent with two tools. The form of a call is constrained, so every call can be made; Python makes it.

python examples/agent.py
"""

from __future__ import annotations

import json
from typing import Any

from outpace import LLM
from outpace.programs import State, gen, run, system, user

PRICES = {"apple": 30, "bread": 210, "milk": 95}
CALL: dict[str, Any] = {
    "anyOf": [
        {
            "type": "object",
            "properties": {"tool": {"const": "price"}, "of": {"enum": list(PRICES)}},
            "required": ["tool", "of"],
            "additionalProperties": False,
        },
        {
            "type": "object",
            "properties": {
                "tool": {"const": "add"},
                "numbers": {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 4},
            },
            "required": ["tool", "numbers"],
            "additionalProperties": False,
        },
        {
            "type": "object",
            "properties": {"tool": {"const": "answer"}, "text": {"type": "string", "maxLength": 60}},
            "required": ["tool", "text"],
            "additionalProperties": False,
        },
    ]
}
MOST_CALLS = 5


def use(call: dict[str, Any]) -> str:
    if call["tool"] == "price":
        return f"{PRICES[call['of']]} cents"
    return str(sum(call["numbers"]))


def agent(s: State, question: str) -> str:
    s += system('Use tools: {"tool": "price", "of": "milk"}, {"tool": "add", "numbers": [1, 2]}, or answer.')
    s += user(question)
    for _ in range(MOST_CALLS):
        s += gen("call", json_schema=CALL, max_tokens=80)
        if s.answer("call").finish_reason != "stop":
            return "a call was cut: it was too long, or the context is full"
        call = json.loads(s["call"])
        if call["tool"] == "answer":
            return str(call["text"])
        s += user(f"Result: {use(call)}. Go on, or answer.")
    return "no answer after the last call"


def main() -> None:
    for result in run(agent, ["What do an apple and a bread cost together?", "What is milk?"], on=LLM()):
        print(result.value)
        for message in result.state.messages[2:]:
            print(f"    {message['role']}: {message['content']}")


if __name__ == "__main__":
    main()
