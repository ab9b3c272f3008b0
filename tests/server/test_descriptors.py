"""The limit of open files: raised where the system allows it, and reported in one line where it is reached."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource
import signal
import socket
import time
from contextlib import ExitStack

import pytest

from outpace.errors import UsageError
from outpace.server import descriptors
from outpace.server.config import ServerConfig
from outpace.server.connections import SPARE_CONNECTIONS
from outpace.server.logs import Seldom
from tests.server.test_faults import process

OTHERS = SPARE_CONNECTIONS + descriptors._OTHER_DESCRIPTORS


@pytest.fixture
def limits(monkeypatch) -> list[int]:
    """The soft and the hard limit, as far as the code under test knows."""
    current = [256, 4096]
    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(current))
    monkeypatch.setattr(resource, "setrlimit", lambda _, wanted: current.__setitem__(slice(None), wanted))
    return current


def test_the_soft_limit_is_raised_to_what_the_connections_need(limits):
    config = ServerConfig(max_connections=1000)
    assert descriptors.fit(config) is config and limits == [1000 + OTHERS, 4096]
    limits[0] = 4000
    assert descriptors.fit(config) is config and limits == [4000, 4096]  # never lowered


def test_fewer_connections_where_the_hard_limit_is_low(limits, caplog):
    assert descriptors.fit(ServerConfig(max_connections=5000)).max_connections == 4096 - OTHERS
    assert limits == [4096, 4096]
    assert "ulimit -n" in caplog.text and f"--max-connections {4096 - OTHERS}" in caplog.text
    limits[:] = [64, 64]
    with pytest.raises(UsageError, match="may open 64 files"):
        descriptors.fit(ServerConfig())


def test_a_failing_accept_is_one_line_and_other_errors_are_reported_whole(monkeypatch, caplog):
    monkeypatch.setattr(descriptors, "_seldom", Seldom("outpace.server", seconds=60))
    loop = asyncio.new_event_loop()
    error = OSError(errno.EMFILE, "Too many open files")
    for _ in range(4000):
        descriptors.log_loop_error(loop, {"message": "socket.accept() out of system resource", "exception": error})
    (record,) = caplog.records
    assert "Too many open files" in record.getMessage() and record.exc_info is None
    descriptors.log_loop_error(loop, {"message": "a task failed", "exception": ValueError("broken")})
    assert caplog.records[-1].exc_info
    loop.close()


def test_a_line_says_how_many_were_left_out(monkeypatch, caplog):
    clock = [0.0]
    monkeypatch.setattr("outpace.server.logs.monotonic", lambda: clock[0])
    seldom = Seldom("outpace.server", seconds=60)
    for second in (0, 1, 59, 60, 61):
        clock[0] = second
        seldom.warning("full: %d", second)
    assert [record.getMessage() for record in caplog.records] == [
        "full: 0",
        "full: 60 (and 2 times more since the last such line)",
    ]
    assert caplog.records[0].levelno == logging.WARNING


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="only Linux can limit a running process")
def test_a_process_without_descriptors_says_so_once_and_recovers():
    with process(shutdown_timeout=0.1) as (running, server), ExitStack() as held:
        before = resource.prlimit(running.pid, resource.RLIMIT_NOFILE)
        in_use = len(os.listdir(f"/proc/{running.pid}/fd"))
        resource.prlimit(running.pid, resource.RLIMIT_NOFILE, (in_use + 5, before[1]))
        for _ in range(50):
            held.enter_context(socket.create_connection(("127.0.0.1", server.port)))
        time.sleep(1.5)  # asyncio tries to accept again after a second
        resource.prlimit(running.pid, resource.RLIMIT_NOFILE, before)
        held.close()
        assert server.get("/health")[0] == 200  # answered at the next try, within a second
        running.send_signal(signal.SIGTERM)
        assert running.stderr is not None
        lines = running.stderr.read().splitlines()
        assert running.wait(20) == 0
    assert len([line for line in lines if "Too many open files" in line]) == 1
    assert not [line for line in lines if "Traceback" in line]
