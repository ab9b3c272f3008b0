"""Programs over a model: Python functions whose text is partly written by the program and partly generated.

    from outpace.programs import gen, run, select

    def review(s, text):
        s += f"Review: {text}\\nIn one word, the food was"
        s += gen("food", regex=" [a-z]+")
        s += ". The verdict:"
        s += select("verdict", [" good", " bad"])
        return s["verdict"]

    results = run(review, ["Cold soup.", "Great bread!"], on=LLM())

`parts.py` is what a program adds to its state, `state.py` the state, `running.py` runs many programs at once.
Generations are made by the engine in this process (`on_engine.py`) or by a server with OpenAI's API (`on_server.py`).
"""

from __future__ import annotations

from outpace.programs.on_server import Server
from outpace.programs.parts import Answer, assistant, gen, select, system, tool, user
from outpace.programs.running import Interrupted, Result, run
from outpace.programs.state import Branches, State

__all__ = [
    "Answer",
    "Branches",
    "Interrupted",
    "Result",
    "Server",
    "State",
    "assistant",
    "gen",
    "run",
    "select",
    "system",
    "tool",
    "user",
]
