"""Small programming tasks, and edits of what a model wrote for them, for benchmarks.prediction.

An edit is the same request again with a small change, as from an editor's "regenerate". The old code is in no request.
"""

from __future__ import annotations

from dataclasses import dataclass

_REQUEST = "Write {what} in Python. Answer with one block of code and nothing else."

# The name of the main class or function, another one for it, and what to write.
_TASKS = (
    ("Stack", "Pile", "a class `{name}` with the methods push, pop, peek, is_empty and size"),
    ("BankAccount", "Wallet", "a class `{name}` with deposit, withdraw, transfer, and a list of all transactions"),
    ("Matrix", "Table", "a class `{name}` with addition, multiplication, transpose and a method that prints it"),
    ("LinkedList", "Chain", "a class `{name}` with append, insert, remove, find and reverse"),
    ("TodoList", "Agenda", "a class `{name}` with add, complete and remove, which can be saved to JSON and loaded"),
    ("read_rows", "load_rows", "a function `{name}` that reads a CSV file into dictionaries, and one that writes them"),
    ("Inventory", "Warehouse", "a class `{name}` that keeps items with prices and quantities and reports the total"),
    ("word_count", "tally", "a command-line tool with a function `{name}` that counts lines, words and bytes of files"),
    ("Graph", "Network", "a class `{name}` with add_edge, neighbours, breadth-first search and shortest path"),
    ("RateLimiter", "Throttle", "a class `{name}` that allows a number of calls per minute for each user"),
    ("Temperature", "Degrees", "a class `{name}` that converts between Celsius, Fahrenheit and Kelvin and compares"),
    ("LRUCache", "RecentCache", "a class `{name}` with get, put and a limited capacity, with a dictionary and a list"),
    ("parse_log", "read_log", "a function `{name}` that parses lines of a web server's log and counts status codes"),
    ("Library", "Bookshelf", "a class `{name}` where members borrow and return books, and late ones are listed"),
    ("Queue", "Line", "a class `{name}` made of two stacks, with enqueue, dequeue, peek and length"),
    ("Polynomial", "Series", "a class `{name}` with addition, multiplication, evaluation and derivative"),
)
CHANGES = {
    "rename": "",  # the other name, everywhere in the request
    "types": "Use type hints.",
    "docstrings": "Give every function a docstring of one line.",
    "checks": "Raise a ValueError if an argument is invalid.",
    "example": "At the end, show how to use it with a short example.",
}


@dataclass(frozen=True, slots=True)
class EditTask:
    change: str
    first: str  # the request for the old code
    second: str  # the request for the new code


def edit_tasks(count: int) -> list[EditTask]:
    """The first `count` of all pairs of a task and a change; every task comes before one comes again."""
    names = list(CHANGES)
    everything = [
        (task, names[(number + turn) % len(names)]) for turn in range(len(names)) for number, task in enumerate(_TASKS)
    ]
    return [_edit(*task, change) for task, change in everything[:count]]


def _edit(name: str, other: str, what: str, change: str) -> EditTask:
    first = _REQUEST.format(what=what.format(name=name))
    if change == "rename":
        return EditTask(change, first, _REQUEST.format(what=what.format(name=other)))
    return EditTask(change, first, f"{first} {CHANGES[change]}")
