"""Lets several streams share one engine. Reading any stream steps the engine; the others' deltas are queued."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from outpace.core import Delta, Request
from outpace.engine.engine import Engine


class Driver:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._queues: dict[int, deque[Delta]] = {}  # by request id; the requests of one stream share a queue

    def read(self, requests: Sequence[Request]) -> Stream:
        """A stream of these requests' deltas. They must be submitted, and no step may have run since."""
        queue: deque[Delta] = deque()
        self._queues.update((request.id, queue) for request in requests)
        return Stream(self, requests, queue)

    def step(self) -> None:
        """Step the engine. If the step fails or is interrupted, reset the engine."""
        try:
            deltas = self.engine.step()
        except BaseException:
            self.engine.reset()
            raise
        for delta in deltas:
            queue = self._queues.get(delta.request.id)
            if queue is not None:
                queue.append(delta)

    def end(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self._queues.pop(request.id, None)
            self.engine.abort(request)


class Stream:
    """An iterator over deltas. Closing or dropping it aborts its unfinished requests."""

    def __init__(self, driver: Driver, requests: Sequence[Request], queue: deque[Delta]) -> None:
        self.requests = requests
        self._driver = driver
        self._queue = queue
        self._num_unfinished = len(requests)

    @property
    def request(self) -> Request:
        """The first request, the only one for a single prompt; its counts and text can be read at any time."""
        return self.requests[0]

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Delta:
        # An engine without requests emits nothing more: it finished our requests, or was reset.
        while not self._queue and self._num_unfinished and self._driver.engine.has_requests:
            self._driver.step()
        if not self._queue:
            self.close()
            raise StopIteration
        delta = self._queue.popleft()
        self._num_unfinished -= delta.finish_reason is not None
        return delta

    def close(self) -> None:
        self._num_unfinished = 0
        self._queue.clear()
        self._driver.end(self.requests)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()
