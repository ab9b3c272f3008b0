"""A judge that compares two answers. It sees them in both orders, since models prefer the first or the second one.

python examples/judge.py
"""

from __future__ import annotations

from outpace import LLM
from outpace.programs import State, run, select, system, user

QUESTION = "Why is the sky blue?"
ANSWERS = ("Air scatters blue light more than red light.", "Because it is.")


def judge(s: State, answers: tuple[str, str]) -> str:
    s += system("You compare answers. A good answer explains.")
    orders = s.fork(2)
    for branch, (first, second) in zip(orders, (answers, answers[::-1]), strict=True):
        branch += user(f"{QUESTION}\nAnswer A: {first}\nAnswer B: {second}\nWhich answer is better?")
        branch += "The better answer is answer"
        branch += select("verdict", [" A", " B"])
    orders.join()
    straight, swapped = (branch.answer("verdict").scores for branch in orders)
    lead = straight[" A"] - straight[" B"] + swapped[" B"] - swapped[" A"]
    s["lead"] = lead  # of the first answer: a log of odds
    return answers[0] if lead > 0 else answers[1]


def main() -> None:
    [result] = run(judge, [ANSWERS], on=LLM())
    print(f"better: {result.value!r} (log odds {result.values['lead']:+.2f} for the first)")


if __name__ == "__main__":
    main()
