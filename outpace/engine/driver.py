"""Lets several streams, in any threads, share one engine.

Reading any stream steps the engine; the deltas of the others are queued for them. One lock guards the engine: requests
that several threads submit run in one batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from threading import RLock

from outpace.core import Delta, Request
from outpace.engine.engine import Engine
from outpace.errors import UsageError

CLOSED = "this LLM was closed; create a new one to generate"


class Driver:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._lock = RLock()
        self._is_busy = False  # inside a step: the engine must not change under it
        self.is_closed = False
        self._queues: dict[int, deque[Delta]] = {}  # by request id; the requests of one stream share a queue
        self._abandoned: deque[Sequence[Request]] = deque()  # of streams that were dropped without being closed

    def check_open(self) -> None:
        if self.is_closed:
            raise UsageError(CLOSED)

    def submit(self, submit_all: Callable[[], Sequence[Request]]) -> Stream:
        """A stream of the requests that `submit_all` submits. No step runs between the two."""
        with self._lock:
            self.check_open()
            requests = submit_all()
            queue: deque[Delta] = deque()
            self._queues.update((request.id, queue) for request in requests)
        return Stream(self, requests, queue)

    def add(self, stream: Stream, submit_all: Callable[[], Sequence[Request]]) -> Sequence[Request]:
        """More requests for a stream, which then holds only those that are not finished."""
        with self._lock:
            self.check_open()
            requests = submit_all()
            for request in stream.drop_finished():
                self._queues.pop(request.id, None)
            stream.accept(requests)
            self._queues.update((request.id, stream.queue) for request in requests)
        return requests

    def advance(self, stream: Stream) -> None:
        """Step the engine, unless another thread has queued a delta for the stream in the meantime."""
        with self._lock:
            self.check_open()
            if not stream.is_waiting:
                return
            self._end_abandoned()
            self._is_busy = True
            try:
                deltas = self.engine.step()
            except BaseException:  # it failed or was interrupted
                self.engine.reset()
                raise
            finally:
                self._is_busy = False
            for delta in deltas:
                queue = self._queues.get(delta.request.id)
                if queue is not None:
                    queue.append(delta)

    def end(self, requests: Sequence[Request]) -> None:
        """Abort those of the requests that are not finished."""
        with self._lock:
            for request in requests:
                self._queues.pop(request.id, None)
                self.engine.abort(request)

    def abandon(self, requests: Sequence[Request]) -> None:
        """Like `end`, but never waits: the garbage collector may call it in any thread, even during a step."""
        self._abandoned.append(requests)
        if self._lock.acquire(blocking=False):
            try:
                if not self._is_busy:
                    self._end_abandoned()
            finally:
                self._lock.release()

    def _end_abandoned(self) -> None:
        while self._abandoned:
            self.end(self._abandoned.popleft())

    def close(self) -> None:
        """End all requests and save what steps cost; from now on streams raise an error."""
        with self._lock:  # another thread's step changes the costs
            if not self.is_closed:
                self.is_closed = True
                self.engine.keep_costs()
                self.engine.reset()


class Stream:
    """An iterator over deltas. Closing or dropping it aborts its unfinished requests."""

    def __init__(self, driver: Driver, requests: Sequence[Request], queue: deque[Delta]) -> None:
        self.requests = requests
        self.queue = queue
        self._driver = driver
        self._num_unfinished = len(requests)
        self._is_stopped = False

    @property
    def request(self) -> Request:
        """The first request, the only one for a single prompt; its counts and text can be read at any time."""
        return self.requests[0]

    @property
    def is_waiting(self) -> bool:
        """Whether a step is needed: an engine without requests finished ours, or was reset."""
        is_needed = not self.queue and self._num_unfinished > 0 and not self._is_stopped
        return is_needed and self._driver.engine.has_requests

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Delta:
        if not self.queue and self._num_unfinished:
            self._driver.check_open()
        while self.is_waiting:
            self._driver.advance(self)
        if not self.queue:
            self.close()
            raise StopIteration
        delta = self.queue.popleft()
        self._num_unfinished -= delta.finish_reason is not None
        return delta

    def accept(self, requests: Sequence[Request]) -> None:
        """Wait for these requests too."""
        self.requests = [*self.requests, *requests]
        self._num_unfinished += len(requests)

    def drop_finished(self) -> list[Request]:
        """Finished requests, which are no longer held. Their deltas stay queued."""
        finished = [request for request in self.requests if request.finish_reason is not None]
        self.requests = [request for request in self.requests if request.finish_reason is None]
        return finished

    def step(self) -> list[Delta]:
        """What has arrived for all requests of the stream, after one step if nothing has."""
        if self.is_waiting:
            self._driver.advance(self)
        deltas = [self.queue.popleft() for _ in range(len(self.queue))]
        self._num_unfinished -= sum(delta.finish_reason is not None for delta in deltas)
        return deltas

    def stop(self) -> None:
        """End after the step that runs now, with what it emits. It only sets a mark, so a signal handler may call it.

        An exception during a step clears the engine's caches; this keeps them.
        """
        self._is_stopped = True

    def close(self) -> None:
        self._num_unfinished = 0
        self.queue.clear()
        self._driver.end(self.requests)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if self._num_unfinished:
            self._driver.abandon(self.requests)
