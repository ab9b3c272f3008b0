"""Where HTTP requests enter if Ray Serve runs HAProxy: HAProxy asks a router for a replica, and sends it the request.

Answers go from the replica to HAProxy to the client, so no message of a stream passes through another Python process.
Ray's own LLM deployments work like this ("direct streaming", experimental). Serve has no public interface to it yet:
`_with_ingress_request_router`, a deployment's version, `_reserve` and `_replica` below are private, and `is_supported`
asks for the first.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.schema import LoggingConfig

from outpace import __version__
from outpace.ray.asgi import read_body, send_text
from outpace.ray.environment import WAIT_SECONDS, has_haproxy
from outpace.ray.prefixes import routed_text
from outpace.ray.priority import run_at_once

ENGINE, ROUTER = "Engine", "Router"
_AGAIN_SECONDS = 0.2
QUIET = LoggingConfig(enable_access_log=False, log_level="WARNING")  # the server has logs of its own


def is_supported() -> bool:
    return has_haproxy() and hasattr(serve.Application, "_with_ingress_request_router")


def routed_application(engine: serve.Application) -> serve.Application:
    """`engine` as an application whose replicas HAProxy serves as a router says."""
    deployment: Any = serve.deployment  # Ray declares it without `options`
    router = deployment(_Router).options(
        name=ROUTER,
        max_ongoing_requests=1000,
        graceful_shutdown_timeout_s=WAIT_SECONDS,
        logging_config=QUIET,
    )
    # Without a version, Serve replaces the router too whenever the engines get new settings
    router = router.options(version=__version__, _internal=True)
    application: serve.Application = engine._with_ingress_request_router(router.bind())
    return application


class RouterApp:
    """Answers HAProxy's question with the name of a replica. HAProxy forwards the body and no key of the client."""

    def __init__(self) -> None:
        self._handle: Any = None

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        if self._handle is None:
            run_at_once()
            self._handle = serve.get_deployment_handle(ENGINE, serve.get_replica_context().app_name)
        body = await read_body(receive)
        if body is None:
            return
        try:
            name = await asyncio.wait_for(self._choose(routed_text(body, "")), WAIT_SECONDS)
        except (RayError, TimeoutError) as error:
            await send_text(send, 503, f"no replica can be chosen: {error!r}")
        else:
            await send_text(send, 200, json.dumps({"replica_id": name}), "application/json")

    async def _choose(self, text: bytes) -> str:
        """The name of a replica. If the only one is being replaced, this waits for the next."""
        while True:
            try:
                async with self._handle.choose_replica(routed=text, _reserve=False) as selection:
                    name: str = selection._replica.replica_id.to_full_id_str()
                    return name
            except DeploymentUnavailableError:  # replicas with new settings did not start; those with the old will
                await asyncio.sleep(_AGAIN_SECONDS)


@serve.ingress(RouterApp())
class _Router:
    pass
