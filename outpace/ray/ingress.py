"""Where HTTP requests enter if Ray Serve runs HAProxy: HAProxy asks a router for a replica, and sends it the request.

Answers go from the replica to HAProxy to the client, so no message of a stream passes through another Python process.
Ray's own LLM deployments work like this ("direct streaming", experimental). Serve has no public interface to it yet:
`_with_ingress_request_router`, `_reserve` and `_replica` below are private, and `is_supported` asks for the first.
"""

from __future__ import annotations

import json
from typing import Any

from ray import serve
from ray.exceptions import RayError
from ray.serve.schema import LoggingConfig

from outpace.ray.asgi import read_body, send_text
from outpace.ray.environment import has_haproxy
from outpace.ray.prefixes import routed_text

ENGINE, ROUTER = "Engine", "Router"
QUIET = LoggingConfig(enable_access_log=False, log_level="WARNING")  # the server has logs of its own


def is_supported() -> bool:
    return has_haproxy() and hasattr(serve.Application, "_with_ingress_request_router")


def routed_application(engine: serve.Application) -> serve.Application:
    """`engine` as an application whose replicas HAProxy serves as a router says."""
    router = serve.deployment(_Router).options(name=ROUTER, max_ongoing_requests=1000, logging_config=QUIET)
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
            self._handle = serve.get_deployment_handle(ENGINE, serve.get_replica_context().app_name)
        body = await read_body(receive)
        if body is None:
            return
        try:
            async with self._handle.choose_replica(routed=routed_text(body, ""), _reserve=False) as selection:
                name = selection._replica.replica_id.to_full_id_str()
        except RayError as error:
            await send_text(send, 503, f"no replica can be chosen: {error}")
        else:
            await send_text(send, 200, json.dumps({"replica_id": name}), "application/json")


@serve.ingress(RouterApp())
class _Router:
    pass
