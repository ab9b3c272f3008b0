"""`outpace serve --replicas`: starts or joins a Ray cluster, runs the application, and stays until a signal.

SIGHUP reads the settings again and replaces the replicas one after the other. Each finishes its answers first.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import ray
from ray import serve

from outpace.errors import OutpaceError, UsageError
from outpace.models.generation_config import GenerationChoice
from outpace.ray.application import Replicas, application
from outpace.ray.priority import yield_to_engines
from outpace.server.config import ServerConfig

log = logging.getLogger("outpace.server")
NAME = "outpace"


@dataclass(frozen=True, slots=True)
class Service:
    """What is served, and by how many."""

    engine: dict[str, Any]
    config: ServerConfig
    generation: GenerationChoice
    replicas: Replicas

    def run(self) -> None:
        """Start the replicas, or replace those that run. Returns when all are ready."""
        app = application(
            replicas=self.replicas, name=NAME, server=self.config, generation=self.generation, **self.engine
        )
        serve.run(app, name=NAME, route_prefix="/")
        where = f"http://{self.config.host}:{self.config.port}"
        name, number = self.config.model_names[0], self.replicas.number
        log.info("serving %s with %s replicas at %s by Ray Serve (metrics /metrics)", name, number, where)


def serve_replicas(read: Callable[[], Service], address: str | None = None) -> int:
    """Serve until SIGINT or SIGTERM. Returns the exit status.

    `read` reads the settings, again after SIGHUP. `address`: of a cluster to join; None starts one.
    """
    service = read()
    if address is None:
        yield_to_engines()  # Ray's processes inherit it; engines and the router give it up
    try:
        ray.init(
            address=address,
            log_to_driver=True,
            logging_level=logging.WARNING,
            include_dashboard=False if address is None else None,  # a cluster that exists has one or not
        )
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise OutpaceError(
            f"cannot use the Ray cluster: {' '.join(str(error).split())}; check --ray-address"
        ) from error
    signals: SimpleQueue[int] = SimpleQueue()
    reload = getattr(signal, "SIGHUP", None)  # not on Windows
    for number in (signal.SIGINT, signal.SIGTERM, *([reload] if reload else [])):
        signal.signal(number, lambda number, _: signals.put(number))
    try:
        serve.start(http_options={"host": service.config.host, "port": service.config.port, "location": "EveryNode"})
        service.run()
        while signals.get() == reload:
            service = _updated(service, read)
        log.info("stopping; answers may finish for up to %g s", service.config.shutdown_timeout)
        serve.delete(NAME)
    except RuntimeError as error:
        raise OutpaceError(f"Ray Serve could not run the model: {' '.join(str(error).split())}") from error
    finally:
        serve.shutdown()
        ray.shutdown()
    return 0


def _updated(service: Service, read: Callable[[], Service]) -> Service:
    """The service with the settings as they are now; as it was, if they are wrong or their replicas do not start."""
    try:
        wanted = read()
        if (wanted.config.host, wanted.config.port) != (service.config.host, service.config.port):
            raise UsageError("host and port cannot change while it serves; stop it and start it again")
    except OutpaceError as error:
        log.error("the settings were not changed: %s", error)
        return service
    log.info("the settings were read again; replacing the replicas")
    try:
        wanted.run()
    except RuntimeError as error:
        log.error("the new replicas do not start, so the old settings are used: %s", " ".join(str(error).split()))
        service.run()
        return service
    return wanted
