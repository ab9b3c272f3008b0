"""Guards llama.cpp's tokenizer against texts with long runs of similar characters.

llama.cpp splits texts for many vocabularies with std::regex, which calls itself for every character that one expression
matches: 25,000 letters without a break overflow a stack of 8 MiB and end the process. Such texts are tokenised in a
thread with a larger stack, up to a limit.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

from outpace.errors import UsageError
from outpace.stacks import run_on_stack

R = TypeVar("R")

# Names (tokenizer.ggml.pre) of the splitters that llama.cpp implements with loops, not with std::regex.
SPLIT_BY_LOOPS = frozenset({
    "gpt-2", "smollm", "llama3", "llama-v3", "llama-bpe", "falcon3", "qwen2", "deepseek-r1-qwen", "megrez", "stablelm2",
    "starcoder", "refact", "command-r", "olmo", "dbrx", "jais", "codeshell", "exaone", "minerva-7b", "trillion",
    "kimi-k2", "hunyuan", "glm4", "chatglm-bpe", "mpt",
})  # fmt: skip
_CHARS_ON_ANY_STACK = 4096
_BYTES_PER_CHAR = 512  # measured: 375
_STACK_BYTES = 64 << 20
MAX_RUN_CHARS = _STACK_BYTES // _BYTES_PER_CHAR - _CHARS_ON_ANY_STACK
# What one expression may match: white space, punctuation and symbols, or anything between common punctuation.
_RUNS = (
    re.compile(r"\s+"),
    re.compile(r"(?:[^\w\s]|_)+"),
    re.compile("[^\\s.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c]+"),
)


def longest_run(text: str) -> int:
    """The most characters that one expression of a splitter may match."""
    # Expressions match a run and, before or after it, one of another kind.
    return 2 * max((match.end() - match.start() for run in _RUNS for match in run.finditer(text)), default=0)


def on_deep_stack(text: str, work: Callable[[], R]) -> R:
    """`work`, which tokenises the text, in this thread if its stack is large enough for it, else in another one."""
    if len(text) <= _CHARS_ON_ANY_STACK or (longest := longest_run(text)) <= _CHARS_ON_ANY_STACK:
        return work()
    if longest > MAX_RUN_CHARS:
        raise UsageError(
            f"the text has {longest // 2} characters without a break, which this model's tokenizer cannot split; "
            f"insert spaces, so that there are at most {MAX_RUN_CHARS // 2}"
        )
    return run_on_stack(_STACK_BYTES, work)
