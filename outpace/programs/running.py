"""Runs programs, many at once. Each has a thread, which mostly waits; generations are the backend's work.

A program that fails ends alone, and its error is in its result. Ctrl-C stops all of them and returns what is there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from queue import SimpleQueue
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any

from outpace.config import SamplingParams
from outpace.decoding.randomness import child_seed
from outpace.errors import OutpaceError, UsageError
from outpace.programs.on_server import OnServer, Server
from outpace.programs.parts import Backend
from outpace.programs.state import Setting, State

if TYPE_CHECKING:
    from outpace.llm import LLM

DEFAULTS = SamplingParams(temperature=0.0)
_STOP_SECONDS = 2.0  # that an interrupted program may take to end; its thread is then left alone


class Interrupted(OutpaceError):
    """The program was stopped before its end."""


@dataclass(slots=True)
class Result:
    """What became of one program. `value` raises the error of a program that failed or was interrupted."""

    state: State
    error: BaseException | None
    returned: Any = field(default=None, repr=False)

    @property
    def value(self) -> Any:
        """What the program returned."""
        if self.error is not None:
            raise self.error
        return self.returned

    @property
    def ok(self) -> bool:
        return self.error is None

    @property
    def text(self) -> str:
        """The text as far as it came."""
        return self.state.so_far

    @property
    def values(self) -> dict[str, Any]:
        """What was generated, by name, as far as the program came."""
        return self.state.values


def run(
    program: Callable[..., Any],
    inputs: Iterable[Any] | None = None,
    *,
    on: LLM | Server | str,
    params: SamplingParams | None = None,
    at_once: int = 64,
    progress: bool | None = None,
) -> list[Result]:
    """Run `program(state, input)` for every input; without inputs, `program(state)` once. Results are in their order.

    `on` is an LLM, whose engine then has all programs in one batch, or a server by its URL. `params` are the defaults
    of every `gen`: greedy, if not given. With a seed, every program and branch has its own, derived from it. At most
    `at_once` programs are under way.
    """
    if at_once < 1:
        raise UsageError(f"at_once must be at least 1; got {at_once}")
    arguments: list[tuple[Any, ...]] = [()] if inputs is None else [(each,) for each in inputs]
    if not arguments:
        return []
    backend = _backend(on, at_once)
    try:
        return _Running(program, arguments, backend, params or DEFAULTS).run(min(at_once, len(arguments)), progress)
    finally:
        backend.close()


def _backend(on: LLM | Server | str, at_once: int) -> Backend:
    if isinstance(on, str):
        on = Server(on)
    if isinstance(on, Server):
        return OnServer(on, at_once=at_once)
    from outpace.llm import LLM
    from outpace.programs.on_engine import OnEngine

    if not isinstance(on, LLM):
        raise UsageError(f"programs run on an LLM or on the URL of a server; got {type(on).__name__}")
    return OnEngine(on)


class _Running:
    def __init__(
        self,
        program: Callable[..., Any],
        arguments: Sequence[tuple[Any, ...]],
        backend: Backend,
        params: SamplingParams,
    ) -> None:
        self._program = program
        self._arguments = arguments
        self._backend = backend
        self._params = params
        unstarted = Interrupted("the program was not started")
        self._results = [Result(self._state(index), unstarted) for index in range(len(arguments))]
        self._indices = count()
        self._ended: SimpleQueue[int | None] = SimpleQueue()  # indices of programs; None: a thread has no more
        self._is_stopped = False
        self._lock = Lock()

    def run(self, num_threads: int, progress: bool | None) -> list[Result]:
        started = list[Thread]()  # without one whose start was interrupted: it cannot be joined, and ends by itself
        try:
            for i in range(num_threads):
                thread = Thread(target=self._work, name=f"program-{i}", daemon=True)
                thread.start()
                started.append(thread)
            self._wait(num_threads, progress)
        except KeyboardInterrupt:
            self._stop()
            for thread in started:
                thread.join(_STOP_SECONDS / num_threads)
        return self._results

    def _wait(self, num_threads: int, progress: bool | None) -> None:
        from tqdm import tqdm

        show = sys.stderr.isatty() and len(self._arguments) > 1 if progress is None else progress
        with tqdm(total=len(self._arguments), unit="program", dynamic_ncols=True, disable=not show) as bar:
            while num_threads:
                if self._ended.get() is None:
                    num_threads -= 1
                else:
                    bar.update(1)

    def _stop(self) -> None:
        with self._lock:
            self._is_stopped = True
            states = [result.state for result in self._results if isinstance(result.error, Interrupted)]
        for state in states:
            state.cancel(Interrupted("the program was stopped"))

    # ---- in the threads of the programs

    def _work(self) -> None:
        for index in self._due():
            self._run_one(index, self._results[index])
            self._ended.put(index)
        self._ended.put(None)

    def _due(self) -> Iterator[int]:
        """Programs that were not started yet, in order."""
        while True:
            with self._lock:
                index = next(self._indices)
                if self._is_stopped or index >= len(self._arguments):
                    return
                self._results[index].error = Interrupted("the program was stopped")  # unless it ends
            yield index

    def _state(self, index: int) -> State:
        seed = None if self._params.seed is None else child_seed(self._params.seed, 1 + index)
        name = getattr(self._program, "__qualname__", type(self._program).__name__)
        return State(Setting(self._backend, name, self._params, index), seed=seed)

    def _run_one(self, index: int, result: Result) -> None:
        state = result.state
        try:
            returned = self._program(state, *self._arguments[index])
            state.wait_for_all()
        except BaseException as error:
            state.cancel(Interrupted("the program has failed"))  # its other branches need not go on
            result.error = error
        else:
            result.returned, result.error = returned, None
