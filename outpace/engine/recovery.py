"""After a step that broke: who can go on, who cannot, and whether the engine can at all.

A broken step may have said something to some of its requests and nothing to others. Those it finished are finished; one
it left half way through a token cannot be trusted and fails. The caches are thrown away, which loses nothing: like a
preempted request, each is computed again from what it has said. Then every request that was running goes on alone, for
one decoding step. Who breaks a step alone is at fault and fails; the others go on together. If nobody is left to vouch
for the engine, one token of its own has to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from outpace.config import SamplingParams
from outpace.core import Delta, Request
from outpace.engine.engine import Engine


class Readers(Protocol):
    """Those who hear what becomes of requests."""

    def step_done(self, deltas: Sequence[Delta]) -> None: ...
    def catch_up(self, request: Request) -> None: ...
    def failed(self, request: Request, error: Exception) -> None: ...


def recover(engine: Engine, requests: Sequence[Request], error: Exception, readers: Readers) -> None:
    """Bring `engine` back after `error`; `requests` are all it had. Raises where that is not possible."""
    was_running = set(map(id, engine.scheduler.running))
    engine.restart()
    suspects: list[Request] = []
    waiting: list[Request] = []
    for request in requests:
        if not _is_whole(request):
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


def _is_whole(request: Request) -> bool:
    """Whether all parts of a request have heard of the same number of tokens."""
    return request.num_output == request.writer.num_tokens == request.shaper.num_output


def _try_alone(engine: Engine, request: Request, readers: Readers) -> Exception | None:
    num_steps = request.spec.steps  # what is computed anew is prefill, so the first token said does not count
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
