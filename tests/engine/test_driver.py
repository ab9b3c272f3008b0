"""Several threads on one LLM, and what is left of it after it was closed."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from threading import Barrier, Event, current_thread
from typing import Any

import pytest

from outpace import LLM, SamplingParams
from outpace.errors import UsageError
from tests.fakes import runner_of
from tests.test_llm import GREEDY, is_clean, token_ids, use_fakes

PROMPTS = ["abc", "def", "hello there", "xyz", "a b c d", "once upon", "a time", "the end"]


@pytest.fixture
def llm(monkeypatch) -> Iterator[LLM]:
    use_fakes(monkeypatch)
    with LLM(cache_tokens=2048) as made:
        yield made


# ---- stopping


def test_a_stopped_stream_ends_after_its_step_and_leaves_the_cache_usable(llm):
    prompt = "once upon a time there was a prompt longer than the shortest shared prefix"
    token_ids(llm, prompt)
    stream = llm.stream(prompt, GREEDY)
    next(stream)
    stream.stop()
    assert list(stream) == [] and stream.request.finish_reason == "abort" and is_clean(llm)
    again = llm.stream(prompt, GREEDY)
    assert [token for delta in again for token in delta.token_ids] == token_ids(llm, prompt)[0]
    assert again.request.num_shared == len(prompt), "the prefix of an earlier request was lost"


def test_a_stream_can_be_stopped_while_its_prompt_is_computed(monkeypatch):
    use_fakes(monkeypatch)
    with LLM(max_step_tokens=64, speculation="off") as llm:
        stream, forward = llm.stream("x" * 400, GREEDY), llm.engine._runner.forward

        def stopping(plan):
            stream.stop()
            return forward(plan)

        monkeypatch.setattr(llm.engine._runner, "forward", stopping)
        assert list(stream) == [] and is_clean(llm)
        assert runner_of(llm.engine).num_computed == 64, "it went on with the prompt"


# ---- threads


@pytest.mark.parametrize("num_threads", [2, 8])
def test_threads_that_generate_on_one_llm_get_what_each_would_alone(llm, num_threads):
    alone = [token_ids(llm, prompt)[0] for prompt in PROMPTS]
    together = Barrier(num_threads)

    def work(thread: int) -> list[list[int]]:
        together.wait(10)
        mine = [prompt for i, prompt in enumerate(PROMPTS) if i % num_threads == thread]
        return [token_ids(llm, prompt)[0] for prompt in mine]

    with ThreadPoolExecutor(num_threads) as pool:
        futures = [pool.submit(work, thread) for thread in range(num_threads)]
        found = [future.result(timeout=60) for future in futures]
    for thread, answers in enumerate(found):
        assert answers == alone[thread::num_threads]
    assert is_clean(llm)


def test_threads_share_the_steps_of_one_batch(llm):
    """Requests of another thread run beside ours: there are fewer steps than both need one after the other."""
    num_steps, step = [0], llm.engine.step

    def counted():
        num_steps[0] += 1
        return step()

    llm.engine.step = counted
    token_ids(llm, "abc")
    alone, num_steps[0] = num_steps[0], 0
    streams = [llm.stream("abc", GREEDY), llm.stream("def", GREEDY)]
    with ThreadPoolExecutor(2) as pool:
        emitted = [future.result(timeout=60) for future in [pool.submit(list, stream) for stream in streams]]
    assert all(sum(len(delta.token_ids) for delta in deltas) == 12 for deltas in emitted)
    assert num_steps[0] < 2 * alone


def test_a_thread_may_drop_a_stream_while_another_reads(llm):
    kept = llm.stream("abc", SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True))
    next(kept)
    with ThreadPoolExecutor(4) as pool:
        for _ in range(20):
            dropped = llm.stream("def", GREEDY)
            next(dropped)
            future = pool.submit(next, kept)
            del dropped
            gc.collect()
            future.result(timeout=60)
    kept.close()
    assert is_clean(llm)


class WatchedLock:
    """A lock that runs `on_wait` in each thread that is about to take it."""

    def __init__(self, lock: AbstractContextManager[Any], on_wait: Callable[[], None]) -> None:
        self._lock, self._on_wait = lock, on_wait

    def __enter__(self) -> None:
        self._on_wait()
        self._lock.__enter__()

    def __exit__(self, *details: Any) -> None:
        self._lock.__exit__(*details)


def test_closing_waits_for_a_step_before_it_saves_the_costs(llm, monkeypatch):
    is_stepping, has_begun, wants_to_close, has_closed = Event(), Event(), Event(), Event()
    saved_during_step = list[bool]()
    step, stream, closer = llm.engine.step, llm.stream("abc", GREEDY), current_thread()

    def slow_step():
        """Lasts until the other thread waits for its end, or saves without waiting."""
        is_stepping.set()
        has_begun.set()
        assert wants_to_close.wait(60)
        try:
            return step()
        finally:
            is_stepping.clear()

    def on_wait():
        if current_thread() is closer:
            wants_to_close.set()

    def keep_costs():
        saved_during_step.append(is_stepping.is_set())
        wants_to_close.set()

    def read():
        next(stream)
        assert has_closed.wait(60)
        return list(stream)

    monkeypatch.setattr(llm.engine, "step", slow_step)
    monkeypatch.setattr(llm.engine, "keep_costs", keep_costs)
    watched = WatchedLock(stream._driver._lock, on_wait)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read)
        assert has_begun.wait(60)
        monkeypatch.setattr(stream._driver, "_lock", watched)
        llm.close()
        has_closed.set()
        with pytest.raises(UsageError, match="closed"):
            reading.result(timeout=60)
    llm.close()
    assert saved_during_step == [False], "once, and between two steps"


# ---- after close


def test_a_stream_of_a_closed_llm_says_so_and_can_be_dropped(llm):
    stream = llm.stream("abc", GREEDY)
    next(stream)
    text = stream.request.writer.text
    llm.close()
    with pytest.raises(UsageError, match="closed"):
        next(stream)
    assert stream.request.finish_reason == "abort" and stream.request.writer.text.startswith(text)
    stream.close()
    del stream
    gc.collect()


def test_a_closed_llm_generates_nothing(llm):
    llm.close()
    for call in (lambda: llm.generate("abc"), lambda: llm.stream("abc"), lambda: llm.generate([[1, 2]])):
        with pytest.raises(UsageError, match="closed"):
            call()
    llm.close()


@pytest.mark.model
@pytest.mark.parametrize("backend", ["native", "llamacpp"])
@pytest.mark.parametrize(
    "lines",
    [
        "del s",
        "try:\n    next(s)\nexcept UsageError as error:\n    print(error)",
        "assert llm.tokenizer.encode('hello world') == before",
        "assert llm.tokenizer.token_bytes(before[0])",
        "del llm\ngc.collect()\ndel s\ngc.collect()",
    ],
    ids=["drop", "next", "encode", "decode", "drop both"],
)
def test_nothing_uses_freed_memory_after_close(backend: str, lines: str):
    """In a process of its own: freed memory would end the process with a signal."""
    code = f"""
import gc
from outpace import LLM, SamplingParams
from outpace.errors import UsageError
with LLM(backend={backend!r}, max_context=256) as llm:
    before = llm.tokenizer.encode("hello world")
    s = llm.stream("Once upon a time", SamplingParams(max_tokens=40))
    next(s)
{lines}
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Traceback" not in done.stderr
