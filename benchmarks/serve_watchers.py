"""Watchers of the live view for benchmarks.serve_load, in a process of their own.

For each job (a line of JSON with `port` and `watchers`) it closes the watchers it has, opens as many new ones, waits
until each got an event, and answers with how many events the closed ones got and what CPU time reading them took. They
only count bytes, because what a browser does with them is done on another machine.
"""

from __future__ import annotations

import json
import sys
from selectors import EVENT_READ, DefaultSelector
from socket import create_connection
from threading import Event, Thread
from time import thread_time
from typing import Any

_REQUEST = b"GET /v1/outpace/events HTTP/1.1\r\nhost: localhost\r\n\r\n"
_EVENT = b"event: live\n"


class Watchers:
    def __init__(self, port: int, count: int) -> None:
        self.num_events, self.cpu_seconds = 0, 0.0
        self.all_watch, self._is_over = Event(), False
        self._selector = DefaultSelector()
        self._count = count
        for _ in range(count):
            connection = create_connection(("127.0.0.1", port), timeout=30)
            connection.sendall(_REQUEST)
            self._selector.register(connection, EVENT_READ)
        self._thread = Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        seen = set()
        while not self._is_over:
            for key, _ in self._selector.select(0.1):
                found = key.fileobj.recv(1 << 16).count(_EVENT)  # type: ignore[union-attr]
                self.num_events += found
                if found and not self.all_watch.is_set():
                    seen.add(key.fd)
                    if len(seen) == self._count:
                        self.all_watch.set()
        self.cpu_seconds = thread_time()

    def close(self) -> dict[str, Any]:
        self._is_over = True
        self._thread.join()
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        return {"events": self.num_events, "cpu_seconds": self.cpu_seconds}


def main() -> None:
    watchers: Watchers | None = None
    for line in sys.stdin:
        job = json.loads(line)
        seen = watchers.close() if watchers is not None else {}
        watchers = Watchers(job["port"], job["watchers"]) if job["watchers"] else None
        if watchers is not None:
            assert watchers.all_watch.wait(30), "no events"
        print(json.dumps(seen), flush=True)


if __name__ == "__main__":
    main()
