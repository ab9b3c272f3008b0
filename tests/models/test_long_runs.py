"""Long runs of similar characters; tests/models/test_gguf_tokenizer.py has them with a real tokenizer."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from outpace.errors import UsageError
from outpace.models.long_runs import MAX_RUN_CHARS, SPLIT_BY_LOOPS, longest_run, on_deep_stack
from tests.vocabulary_gguf import write_bpe


@pytest.mark.parametrize(
    ("text", "longest"),
    [
        ("", 0),
        ("hello world", 5),
        ("a" * 50 + " b", 50),
        ("中文字。" * 50, 3),
        (" \n" * 50, 100),
        ("!_" * 50, 100),
        (".,!?" * 50, 200),
        ("e\u0301" * 50, 100),
        ("a-b_c" * 50, 250),
    ],
)
def test_the_longest_run_is_what_one_expression_could_match(text, longest):
    assert longest_run(text) == 2 * longest


def test_only_long_runs_need_another_thread():
    here = threading.current_thread()
    assert on_deep_stack("a" * 2000, threading.current_thread) is here
    assert on_deep_stack("hello world " * 2000, threading.current_thread) is here
    assert on_deep_stack("a" * 5000, threading.current_thread) is not here


def test_errors_of_the_other_thread_reach_the_caller():
    with pytest.raises(ZeroDivisionError):
        on_deep_stack("a" * 5000, lambda: 1 // 0)


def test_runs_beyond_any_stack_are_refused():
    with pytest.raises(UsageError, match=f"has {MAX_RUN_CHARS} characters without a break"):
        on_deep_stack("a" * MAX_RUN_CHARS, lambda: None)


def test_the_size_of_other_threads_stacks_stays_as_it_was():
    before = threading.stack_size()
    on_deep_stack("a" * 5000, lambda: None)
    assert threading.stack_size() == before


@pytest.mark.slow
@pytest.mark.parametrize("splitter", sorted(SPLIT_BY_LOOPS))
def test_splitters_with_loops_need_no_stack_for_long_runs(tmp_path, splitter):
    path = write_bpe(tmp_path / "v.gguf", splitter=splitter)
    program = f"""
from pathlib import Path
from outpace.models.gguf_tokenizer import LlamaTokenizer
from outpace.models.llama_library import load_library
tokenizer = LlamaTokenizer(Path({str(path)!r}), load_library())
assert tokenizer._splits_by_loops
for bit in ("a", "A", "Aa", " ", "\\n", " \\n", "!", "!_", "+", "$", "7", "中", "🙂", "e\\u0301", "'s", "½"):
    assert len(tokenizer.encode(bit * 60_000)) > 1000
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"status {done.returncode}: {done.stderr}"
