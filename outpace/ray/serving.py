"""`outpace serve --replicas`: starts or joins a Ray cluster, runs the application, and stays until a signal."""

from __future__ import annotations

import logging
import signal
import threading
from typing import Any

import ray
from ray import serve

from outpace.errors import OutpaceError
from outpace.models.generation_config import GenerationChoice
from outpace.ray.application import Replicas, application
from outpace.server.config import ServerConfig

log = logging.getLogger("outpace.server")
NAME = "outpace"


def serve_replicas(
    engine: dict[str, Any],
    config: ServerConfig,
    generation: GenerationChoice,
    replicas: Replicas,
    address: str | None = None,
) -> int:
    """Serve until SIGINT or SIGTERM. Returns the exit status. `address`: of a cluster to join; None starts one."""
    try:
        ray.init(address=address, log_to_driver=True, logging_level=logging.WARNING)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise OutpaceError(
            f"cannot use the Ray cluster: {' '.join(str(error).split())}; check --ray-address"
        ) from error
    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    try:
        serve.start(http_options={"host": config.host, "port": config.port, "location": "EveryNode"})
        app = application(replicas=replicas, name=NAME, server=config, generation=generation, **engine)
        serve.run(app, name=NAME, route_prefix="/")
        log.info(
            "serving %s with %s replicas at http://%s:%d by Ray Serve (metrics /metrics)",
            config.model_names[0],
            replicas.number,
            config.host,
            config.port,
        )
        stopped.wait()
        log.info("stopping; answers may finish for up to %g s", config.shutdown_timeout)
        serve.delete(NAME)
    except RuntimeError as error:
        raise OutpaceError(f"Ray Serve could not run the model: {' '.join(str(error).split())}") from error
    finally:
        serve.shutdown()
        ray.shutdown()
    return 0
