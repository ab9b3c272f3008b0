"""Long prompts: tasks about a text, where the text is made of answers that the target wrote before.

Prompt files hold mostly short questions. A head trained on them alone drafts badly after a long prompt, because it has
never had to find words far back in one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

LONGEST = 1200  # tokens of such a prompt, at most
_SHORTEST = 96
TASKS = (
    ("Summarize the following text.\n\n", ""),
    ("Summarize: ", ""),
    ("", "\n\nSummarize the text above in a few sentences."),
    ("", "\n\nTL;DR"),
    ("Write a short summary of this article:\n\n", ""),
    ("List the main points of the text below.\n\n", ""),
    ("What is the following text about?\n\n", ""),
    ("Give the text below a title and explain your choice.\n\n", ""),
    ("Rewrite this in simpler words:\n\n", ""),
    ("Correct the mistakes in this text and return it in full.\n\n", ""),
    ("Repeat the following text, but more formally:\n\n", ""),
    ("Continue this text:\n\n", ""),
    ("Read the passages and answer the question.\n\n", "\n\nQuestion: What is the most important fact?\nAnswer:"),
    ("Context:\n", "\n\nUsing only the context, explain who or what it is about."),
    ("Text:\n", "\n\nWhich names, numbers and dates does the text mention?"),
    ("Here are my notes:\n\n", "\n\nTurn them into a table."),
    ("Answer with words of the text only.\n\nText: ", "\n\nQuestion: What happens first, and what follows?"),
    ("Translate the following text to French:\n\n", ""),
    ("Translate the following text to German:\n\n", ""),
    ("Extract the key facts as JSON.\n\n", ""),
)


@dataclass(frozen=True, slots=True)
class Frame:
    """A task as tokens: all that comes before the text and all that comes after it, the chat template included."""

    before: Sequence[int]
    after: Sequence[int]


def document_prompts(
    frames: Sequence[Frame], answers: Sequence[NDArray[np.integer]], count: int, longest: int, seed: int
) -> list[NDArray[np.int64]]:
    """`count` prompts of at most `longest` tokens. A text is one answer after the other, cut at a random length."""
    if not frames or not answers:
        return []
    random = np.random.default_rng(seed)
    prompts = []
    for _ in range(count):
        frame = frames[int(random.integers(len(frames)))]
        room = max(longest - len(frame.before) - len(frame.after), 1)
        length = int(random.integers(min(_SHORTEST, room), room + 1))
        text = np.zeros(0, np.int64)
        while len(text) < length:
            text = np.concatenate([text, answers[int(random.integers(len(answers)))]])
        prompts.append(np.concatenate([frame.before, text[:length], frame.after]).astype(np.int64))
    return prompts
