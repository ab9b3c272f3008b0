"""Small programming tasks, and edits of what a model writes for them, for benchmarks.prediction.

A small model makes few edits well, and none of a file that it cannot see. So most edits are made backwards: the model's
own answer is the new code, and the old code is that answer with one edit undone. The model then makes exactly this
edit, by construction. With `again`, the old code is what the model wrote for a slightly different request, and nothing
is constructed.
"""

from __future__ import annotations

import keyword
import re
from collections import Counter
from dataclasses import dataclass

_REQUEST = "Write {what} in Python. Answer with one block of code and nothing else."
_TASKS = (
    "a class `Stack` with the methods push, pop, peek, is_empty and size",
    "a class `BankAccount` with deposit, withdraw, transfer, and a list of all transactions",
    "a class `Matrix` with addition, multiplication, transpose and a method that prints it",
    "a class `LinkedList` with append, insert, remove, find and reverse",
    "a class `TodoList` with add, complete and remove, which can be saved to JSON and loaded",
    "a function `read_rows` that reads a CSV file into dictionaries, and one that writes them",
    "a class `Inventory` that keeps items with prices and quantities and reports the total",
    "a command-line tool with a function `word_count` that counts lines, words and bytes of files",
    "a class `Graph` with add_edge, neighbours, breadth-first search and shortest path",
    "a class `RateLimiter` that allows a number of calls per minute for each user",
    "a class `Temperature` that converts between Celsius, Fahrenheit and Kelvin and compares",
    "a class `LRUCache` with get, put and a limited capacity, with a dictionary and a list",
    "a function `parse_log` that parses lines of a web server's log and counts status codes",
    "a class `Library` where members borrow and return books, and late ones are listed",
    "a class `Queue` made of two stacks, with enqueue, dequeue, peek and length",
    "a class `Polynomial` with addition, multiplication, evaluation and derivative",
)
_CHANGES = (
    "Use type hints.",
    "Give every function a docstring of one line.",
    "Raise a ValueError if an argument is invalid.",
    "At the end, show how to use it with a short example.",
)
KINDS = {
    "rename": "the most frequent name is another one, everywhere",
    "insert": "five lines are new, in two places",
    "delete": "five lines are gone, in two places",
    "replace": "three lines are others",
    "again": "the request has one sentence more, and the old code is the answer without it",
}
_NAME = re.compile(r"\b[A-Za-z_]\w{2,}\b")


@dataclass(frozen=True, slots=True)
class EditTask:
    kind: str
    first: str  # the request whose answer the old code is made of
    second: str  # the request for the new code: the same, except for `again`


def edit_tasks(count: int) -> list[EditTask]:
    """The first `count` of all pairs of a task and a kind; every task comes before one comes again."""
    kinds, found = list(KINDS), list[EditTask]()
    for turn in range(len(kinds)):
        for number, what in enumerate(_TASKS):
            kind, first = kinds[(number + turn) % len(kinds)], _REQUEST.format(what=what)
            change = f" {_CHANGES[number % len(_CHANGES)]}" if kind == "again" else ""
            found.append(EditTask(kind, first, first + change))
    return found[:count]


def old_code(kind: str, answer: str, other: str) -> str:
    """The code before an edit that leads to this answer. `other` is code for another task, for lines of other text."""
    lines, others = answer.splitlines(keepends=True), other.splitlines(keepends=True)
    third, half = len(lines) // 3, len(others) // 2
    if kind == "rename":
        name = frequent_name(answer)
        return re.sub(rf"\b{name}\b", f"former_{name}", answer)
    if kind == "insert":
        return "".join(lines[:third] + lines[third + 3 : 2 * third] + lines[2 * third + 2 :])
    if kind == "delete":
        added = others[half : half + 5]
        return "".join(lines[:third] + added[:3] + lines[third : 2 * third] + added[3:] + lines[2 * third :])
    if kind == "replace":
        for i, line in enumerate(others[half : half + 3], 1):
            lines[i * len(lines) // 4] = line
        return "".join(lines)
    return answer


def frequent_name(code: str) -> str:
    """The most frequent name that is not a word of Python."""
    names = Counter(name for name in _NAME.findall(code) if not keyword.iskeyword(name) and name != "self")
    return names.most_common(1)[0][0] if names else "code"
