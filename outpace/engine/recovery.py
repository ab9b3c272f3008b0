"""Recovers from a failed step: finds the requests at fault and checks whether the engine still works.

A failed step may have emitted tokens for only some of its requests. Requests that it finished stay finished. A request
whose parts disagree on the number of tokens fails. The caches are cleared, which loses nothing: like a preempted
request, each is computed again from its tokens. Then every request that was running takes one decoding step alone. A
request whose step fails alone is at fault and fails; the others continue together. If none is left to show that the
engine works, a test request of one token must succeed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from outpace.config import SamplingParams
from outpace.core import Delta, Request
from outpace.engine.engine import Engine


class Readers(Protocol):
    """Receives the results of requests during recovery."""

    def step_done(self, deltas: Sequence[Delta]) -> None: ...
    def catch_up(self, request: Request) -> None: ...
    def failed(self, request: Request, error: Exception) -> None: ...


def recover(engine: Engine, requests: Sequence[Request], error: Exception, readers: Readers) -> None:
    """Bring `engine` back after `error`; `requests` are all its requests. Raises if that is not possible."""
    was_running = set(map(id, engine.scheduler.running))
    engine.restart()
    suspects: list[Request] = []
    waiting: list[Request] = []
    for request in requests:
        if not _is_consistent(request):
            readers.failed(request, error)
            continue
        readers.catch_up(request)
        if request.finish_reason is None:
            (suspects if id(request) in was_running else waiting).append(request)
    cleared = []
    for request in suspects:
        fault = _try_alone(engine, request, readers)
        if fault is not None:
            readers.failed(request, fault)
        elif request.finish_reason is None:
            cleared.append(request)
    if not cleared:
        _check_alive(engine)
    engine.restart([*cleared, *waiting])


def _is_consistent(request: Request) -> bool:
    """Whether all parts of a request have counted the same number of tokens."""
    return request.num_output == request.writer.num_tokens == request.shaper.num_output


def _try_alone(engine: Engine, request: Request, readers: Readers) -> Exception | None:
    num_steps = request.spec.steps  # recomputing is prefill, so the first token emitted is not a decoding step
    engine.restart([request])
    try:
        while request.finish_reason is None and request.spec.steps == num_steps:
            readers.step_done(engine.step())
    except Exception as error:
        engine.restart()
        return error
    engine.restart()
    return None


def _check_alive(engine: Engine) -> None:
    engine.restart()
    request = engine.submit([0], SamplingParams(max_tokens=1, temperature=0.0))
    while request.finish_reason is None:
        engine.step()
