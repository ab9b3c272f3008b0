"""The application for Ray Serve: a router, and engines that answer. `serve.run(application(...))` starts it.

Where Serve runs HAProxy, requests reach the engines through it (ingress.py), else through Ray's proxy and a front.

from ray import serve
from outpace.ray import application

serve.run(application(model="target.gguf", replicas=2), route_prefix="/")
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import ray
from ray import serve
from ray.serve.config import RequestRouterConfig

from outpace.errors import UsageError
from outpace.models.generation_config import GenerationChoice
from outpace.ray import ingress
from outpace.ray.board import Board
from outpace.ray.front import FrontApp
from outpace.ray.replica import EngineReplica
from outpace.ray.routing import DirectPrefixRouter, PrefixRouter
from outpace.server.config import ServerConfig

BOARD, NAMESPACE = "outpace-board", "outpace"


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicas:
    """How many replicas run, and what each gets."""

    number: int | Literal["auto"] = 1
    least: int = 1  # with auto
    most: int = 4  # with auto
    add_after: float = 30.0  # with auto: seconds of too many open requests
    remove_after: float = 600.0  # with auto: seconds of too few
    num_cpus: float = 1.0
    num_gpus: float = 0.0

    def __post_init__(self) -> None:
        if self.number != "auto" and self.number < 1:
            raise UsageError(f"--replicas must be at least 1, or auto; got {self.number}")
        if not 1 <= self.least <= self.most:
            raise UsageError(f"--min-replicas ({self.least}) must be between 1 and --max-replicas ({self.most})")
        for flag, seconds in (("upscale", self.add_after), ("downscale", self.remove_after)):
            if not seconds >= 0:
                raise UsageError(f"--{flag}-delay must be at least 0 seconds; got {seconds}")

    def scaling(self, num_at_once: int) -> dict[str, Any]:
        """Options of a deployment. Replicas are added while more requests are open than they run at once."""
        if self.number != "auto":
            return {"num_replicas": self.number}
        return {
            "autoscaling_config": {
                "min_replicas": self.least,
                "max_replicas": self.most,
                "target_ongoing_requests": num_at_once,
                "upscale_delay_s": self.add_after,
                "downscale_delay_s": self.remove_after,
            }
        }


def application(
    model: str | None = None,
    *,
    replicas: int | Literal["auto"] | Replicas = 1,
    name: str = "default",
    server: ServerConfig | None = None,
    generation: GenerationChoice | None = None,
    **engine: Any,
) -> serve.Application:
    """An application of Ray Serve with the server's routes.

    `engine` are the fields of `EngineConfig`. `name` must be the one that `serve.run` gets. Running it again with the
    same name and other settings replaces the replicas one by one; each finishes its answers first.
    """
    wanted = replicas if isinstance(replicas, Replicas) else Replicas(number=replicas)
    config = server or ServerConfig()
    num_at_once = int(engine.get("max_sequences", 8))
    board = ray.remote(Board).options(
        name=f"{BOARD}:{name}", namespace=NAMESPACE, get_if_exists=True, num_cpus=0, lifetime="detached"
    )
    is_direct = ingress.is_supported()
    deployment: Any = serve.deployment  # Ray declares it without `options`
    router: Any = DirectPrefixRouter if is_direct else PrefixRouter
    replica = deployment(serve.ingress()(EngineReplica) if is_direct else EngineReplica).options(
        name=ingress.ENGINE,
        ray_actor_options={"num_cpus": wanted.num_cpus, "num_gpus": wanted.num_gpus},
        max_ongoing_requests=num_at_once + config.max_queued,
        graceful_shutdown_timeout_s=config.shutdown_timeout,
        health_check_period_s=2.0,
        health_check_timeout_s=30.0,
        logging_config=ingress.QUIET,
        request_router_config=RequestRouterConfig(
            request_router_class=router, request_router_kwargs={"at_once": num_at_once}
        ),
        **wanted.scaling(num_at_once),
    )
    bound = replica.bind(
        {"model": model, **engine}, config, generation or GenerationChoice.of(None, None), board.remote()
    )
    if is_direct:
        return ingress.routed_application(bound)
    front = deployment(_Front).options(
        name="Front",
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=config.max_connections,
        graceful_shutdown_timeout_s=config.shutdown_timeout,
    )
    fronted: serve.Application = front.bind(bound)
    return fronted


@serve.ingress(FrontApp())
class _Front:
    def __init__(self, engine: Any) -> None:
        """`engine` makes Ray deploy it; the app finds it by name."""
