"""One run of a batch: it answers the lines that have no result yet, many at once, and writes each result when it is
there. It may end at any time; the next run continues."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outpace.batch.answering import Answerer
from outpace.batch.lines import (
    BadLine,
    BatchRequest,
    Line,
    failure_message,
    is_failure,
    parse,
    read_lines,
    refused,
    seeded,
)
from outpace.batch.output_file import OutputFile
from outpace.errors import UsageError

_MOST_SHOWN = 10  # failures that are described on the terminal; the output file has all


@dataclass(slots=True)
class Tally:
    """What a batch has done, over all of its runs."""

    num_lines: int = 0
    num_done: int = 0
    num_failed: int = 0
    num_new: int = 0  # results of this run
    num_prompt_tokens: int = 0  # of this run
    num_output_tokens: int = 0  # of this run
    failures: list[str] = field(default_factory=list)  # the first ones of this run
    is_interrupted: bool = False

    @property
    def is_complete(self) -> bool:
        return self.num_done == self.num_lines

    def found(self, result: dict[str, Any]) -> None:
        """Count a result that an earlier run wrote."""
        self.num_done += 1
        self.num_failed += is_failure(result)

    def add(self, result: dict[str, Any]) -> None:
        self.found(result)
        self.num_new += 1
        if is_failure(result):
            if len(self.failures) < _MOST_SHOWN:
                self.failures.append(f"{result['custom_id'] or result['id']}: {failure_message(result)}")
            return
        usage = result["response"]["body"].get("usage", {})
        self.num_prompt_tokens += usage.get("prompt_tokens", usage.get("input_tokens", 0))
        self.num_output_tokens += usage.get("completion_tokens", usage.get("output_tokens", 0))


class Job:
    """The state of a batch on disk: its input, its output, and which lines have a result."""

    def __init__(
        self, source: Path, target: Path, *, seed: int | None = None, overwrite: bool = False, retry: bool = False
    ) -> None:
        self._source, self._seed = source, seed
        self.tally = Tally()
        try:
            known = {line.id for line in read_lines(source)}
        except OSError as error:
            raise UsageError(f"cannot read {source}: {error.strerror or error}; check its name") from error
        if target.exists() and target.samefile(source):
            raise UsageError(f"{target} is the input; choose another file for the output")
        self.tally.num_lines = len(known)
        self._done: set[str] = set()
        self.output = OutputFile(target, overwrite=overwrite)
        try:
            if retry:
                self.output.drop_failures()
            self.output.recover(lambda result: self._found(result, known, target))
        except BaseException:
            self.output.close()
            raise

    def _found(self, result: dict[str, Any], known: set[str], target: Path) -> None:
        if result["id"] not in known:
            raise UsageError(
                f"{target} has a result for {result['custom_id']!r}, and no line of {self._source} is the one it "
                "answers; choose another output file, or --overwrite to begin this one anew"
            )
        if result["id"] in self._done:
            raise UsageError(f"{target} has two results for {result['custom_id']!r}; remove one of them")
        self._done.add(result["id"])
        self.tally.found(result)

    def pending(self) -> Iterator[tuple[Line, BatchRequest | BadLine]]:
        """The lines without a result. A custom_id that an earlier line has is refused: it names one answer."""
        names: set[str] = set()
        for line in read_lines(self._source):
            try:
                request: BatchRequest | BadLine = parse(line)
            except BadLine as problem:
                request = problem
            if isinstance(request, BatchRequest) and request.custom_id in names:
                message = f"line {line.number}: an earlier line has the same custom_id; every line needs its own"
                request = BadLine("duplicate_custom_id", message, request.custom_id)
            elif isinstance(request, BatchRequest):
                names.add(request.custom_id)
                if self._seed is not None:
                    request = seeded(request, line, self._seed)
            if line.id not in self._done:
                yield line, request

    def write(self, result: dict[str, Any]) -> None:
        self.output.append(result)
        self.tally.add(result)

    def close(self) -> None:
        self.output.close()


async def run(job: Job, answerer: Answerer, show: Callable[[], None] = lambda: None) -> None:
    """Answer all pending lines, and call `show` after each result.

    The first SIGINT or SIGTERM takes no further lines and waits for those that run; the second gives those up. An
    error that is no line's own fault ends the run in the same way, and is raised.
    """
    running: set[asyncio.Task[None]] = set()
    errors: list[BaseException] = []
    room = asyncio.Semaphore(answerer.num_at_once)

    async def answer(line: Line, request: BatchRequest) -> None:
        job.write(await answerer.answer(line, request))
        show()

    def ended(task: asyncio.Task[None]) -> None:
        running.discard(task)
        room.release()
        if not task.cancelled() and (error := task.exception()) is not None:
            errors.append(error)

    def interrupt() -> None:
        if job.tally.is_interrupted:
            for task in running:
                task.cancel()
        job.tally.is_interrupted = True

    with _handling(interrupt):
        for line, request in job.pending():
            await room.acquire()
            if job.tally.is_interrupted or errors:
                break
            if isinstance(request, BadLine):
                job.write(refused(line, request))
                show()
                room.release()
            else:
                task = asyncio.create_task(answer(line, request))
                running.add(task)
                task.add_done_callback(ended)
        while running:
            await asyncio.wait(running)
    if errors:
        raise errors[0]


@contextmanager
def _handling(interrupt: Callable[[], None]) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    signals = (signal.SIGINT, signal.SIGTERM)
    handled = []
    for number in signals:
        with suppress(NotImplementedError, ValueError, RuntimeError):  # Windows, or another thread than the main one
            loop.add_signal_handler(number, interrupt)
            handled.append(number)
    try:
        yield
    finally:
        for number in handled:
            loop.remove_signal_handler(number)
