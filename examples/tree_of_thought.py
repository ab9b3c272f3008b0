"""A tree of thought: every state proposes several next thoughts, a score keeps the best ones, and the rest is dropped.

python examples/tree_of_thought.py
"""

from __future__ import annotations

from outpace import LLM, SamplingParams
from outpace.programs import State, gen, run, select

PROBLEM = "A train leaves at 9:40 and takes 85 minutes. When does it arrive?"
WIDTH, KEPT, DEPTH = 4, 2, 2


def promise(thought: State) -> float:
    """How much likelier "yes" is than "no", as a log of odds."""
    judged = thought.fork(1)[0]
    judged += "\nIs this on the right way? Answer:"
    judged += select("is_right", [" yes", " no"])
    scores = judged.answer("is_right").scores
    return scores[" yes"] - scores[" no"]


def solve(s: State, problem: str) -> str:
    s += f"Problem: {problem}\nThink step by step.\n"
    kept: list[State] = [s]
    for depth in range(1, DEPTH + 1):
        thoughts = [branch for state in kept for branch in state.fork(WIDTH)]
        for thought in thoughts:
            thought += f"Step {depth}:"
            thought += gen("step", max_tokens=24, stop="\n", temperature=0.8)
            thought += "\n"
        kept = sorted(thoughts, key=promise, reverse=True)[:KEPT]
    best = kept[0]
    best += "So it arrives at"
    best += gen("answer", regex=" [0-9]{1,2}:[0-9]{2}")
    return best.text


def main() -> None:
    [result] = run(solve, [PROBLEM], on=LLM(), params=SamplingParams(temperature=0.0, seed=1))
    print(result.value)


if __name__ == "__main__":
    main()
