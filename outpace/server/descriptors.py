"""File descriptors: every connection needs one, and a process that has none left accepts no clients."""

from __future__ import annotations

import asyncio
import errno
import logging
from dataclasses import replace
from typing import Any

from outpace.errors import UsageError
from outpace.server.config import ServerConfig
from outpace.server.connections import ACCEPTED_AT_ONCE, SPARE_CONNECTIONS
from outpace.server.logs import Seldom

try:
    import resource
except ImportError:  # Windows, whose sockets are not counted with files
    resource = None  # type: ignore[assignment]

log = logging.getLogger("outpace.server")

# Model files, the event loop, the log, a device's driver; and connections that are closed some turns after they came.
_OTHER_DESCRIPTORS = 128 + 4 * ACCEPTED_AT_ONCE
_NO_RESOURCE = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_seldom = Seldom("outpace.server", seconds=60.0)


def fit(config: ServerConfig) -> ServerConfig:
    """Raise this process's limit to what --max-connections needs; where the system forbids that, allow fewer."""
    if resource is None:
        return config
    needed = config.max_connections + SPARE_CONNECTIONS + _OTHER_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return config
    most = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    except (OSError, ValueError):
        most = soft
    if most == needed:
        return config
    fewer = most - SPARE_CONNECTIONS - _OTHER_DESCRIPTORS
    if fewer < 1:
        raise UsageError(f"this process may open {most} files, and serving needs more than {most - fewer}; "
                         "raise the limit with 'ulimit -n'")  # fmt: skip
    log.warning(
        "this process may open %d files, enough for %d connections instead of %d; raise the limit with 'ulimit -n' or "
        "set --max-connections %d",
        *(most, fewer, config.max_connections, fewer),
    )
    return replace(config, max_connections=fewer)


def log_loop_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """The event loop's handler of errors that nobody awaits: a failing accept() is one line a minute, no traceback.

    asyncio reports it thousands of times a second, because it tries once for every connection that may be waiting, and
    each try is repeated a second later, even if the listening socket is closed by then.
    """
    error, message = context.get("exception"), context.get("message", "")
    if isinstance(error, OSError) and error.errno in _NO_RESOURCE and "accept" in message:
        _seldom.warning(
            "cannot accept a connection: %s; raise the limit with 'ulimit -n' or lower --max-connections",
            error.strerror,
        )
    elif not (isinstance(error, ValueError) and "_start_serving" in message):
        loop.default_exception_handler(context)
