"""What Ray Serve costs: one replica beside `outpace serve`, and two replicas beside two separate servers.

    python -m benchmarks.ray_overhead [--requests 48] [--tokens 32] [--rounds 4] [--json FILE]

Every engine has one thread and decodes plainly. Clients send chats, one at a time each, with whole and with streamed
answers; no chat is sent twice to a service, so that none is in its cache. Servers and replicas take turns, and the
service whose turn it is not is stopped by SIGSTOP, since an idle Ray cluster takes processor time too: so each has the
machine to itself, and drift of the machine meets both. Printed are tokens per second, the seconds of a request, the
seconds to the first piece of a stream, replicas over servers (each the median of the turns' ratios), and the processor
time that a request takes in each kind of process: it tells what is left where engines and Ray share all cores.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean, median
from typing import Any

import httpx

from benchmarks.report import median_interval, provenance, write_json
from outpace.models.resolve import resolve_model

_OPTIONS = ["--max-model-len", "1024", "--log-level", "warning", "--speculation", "off"]
_START_SECONDS = 240.0
_SHARE_OF_ONE_CLIENT = 4  # a single client sends a quarter of the requests: it is slower
_SETTLE_SECONDS = 1.5  # after SIGCONT: what a process would have done meanwhile, it does now
_TICKS = os.sysconf("SC_CLK_TCK")
# Kinds of processes by what their command line contains, the first that fits
_KINDS = {
    "engines": "ray::ServeReplica:outpace:Engine",
    "router": "ray::ServeReplica:outpace:Router",
    "front": "ray::ServeReplica:outpace:Front",
    "haproxy": "bin/haproxy",
    "rest of Ray": "--replicas",
    "servers": "outpace serve",
}
Round = dict[str, float]


class Service:
    """Processes that serve, and the addresses that clients are spread over."""

    def __init__(self, name: str, commands: list[list[str]], ports: list[int]) -> None:
        self.name, self.ports = name, ports
        environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
        silent = subprocess.DEVNULL
        self._processes = [
            subprocess.Popen(each, env=environment, stdout=silent, stderr=silent, start_new_session=True)
            for each in commands
        ]
        for port in ports:
            self._wait(port, _START_SECONDS)
        self.send(signal.SIGSTOP)

    def _wait(self, port: int, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and all(process.poll() is None for process in self._processes):
            try:
                if httpx.get(f"http://127.0.0.1:{port}/health", timeout=10).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.2)
        self.stop()
        raise SystemExit(f"{self.name} did not start; run {sys.executable} -m outpace serve to see why")

    def __enter__(self) -> Service:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def send(self, number: signal.Signals) -> None:
        """Send a signal to all processes of the service, which are those of the sessions that it was started in."""
        sessions = {process.pid for process in self._processes}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                session = int((folder / "stat").read_text().rpartition(")")[2].split()[3])
                if session in sessions:
                    os.kill(int(folder.name), number)
            except (OSError, IndexError):
                continue  # it has ended

    @contextmanager
    def turn(self) -> Iterator[None]:
        """The service runs, and nothing else that this program started."""
        self.send(signal.SIGCONT)
        try:
            time.sleep(_SETTLE_SECONDS)
            for port in self.ports:
                self._wait(port, 30.0)
            yield
        finally:
            self.send(signal.SIGSTOP)

    def stop(self) -> None:
        self.send(signal.SIGCONT)
        for process in self._processes:
            process.send_signal(signal.SIGTERM)
        for process in self._processes:
            process.wait(60)


def servers(number: int) -> Service:
    ports = [8301 + i for i in range(number)]
    command = [sys.executable, "-m", "outpace", "serve", "--threads", "1", *_OPTIONS]
    return Service("servers", [[*command, "--port", str(port)] for port in ports], ports)


def replicas(number: int) -> Service:
    command = [sys.executable, "-m", "outpace", "serve", "--replicas", str(number), "--replica-cpus", "0.5", *_OPTIONS]
    return Service("replicas", [[*command, "--port", "8311"]], [8311])


def processor_seconds() -> dict[str, float]:
    """What each kind of process has used so far; of those that are neither served by nor part of Ray, the client's."""
    found = {"client": sum(os.times()[:2])}
    for folder in Path("/proc").iterdir():
        try:
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # not a process, or one that has ended
        kind = next((kind for kind, part in _KINDS.items() if part in command), None)
        kind = kind or ("rest of Ray" if command.startswith("ray::") or "/ray/" in command else None)
        if kind is not None:
            found[kind] = found.get(kind, 0.0) + (int(fields[11]) + int(fields[12])) / _TICKS
    return found


async def load(
    service: Service, num_clients: int, num_requests: int, num_tokens: int, streams: bool, first_chat: int = 0
) -> Round:
    """Every client sends its share, one request after the other. Chats are numbered from `first_chat` on."""
    seconds, first = list[float](), list[float]()

    async def ask(client: httpx.AsyncClient, number: int) -> None:
        url = f"http://127.0.0.1:{service.ports[number % len(service.ports)]}/v1/chat/completions"
        for i in range(num_requests // num_clients):
            text = f"{first_chat + i * num_clients + number} is a number. Tell me about it."
            body = {"messages": [{"role": "user", "content": text}], "max_tokens": num_tokens, "ignore_eos": True}
            begin, num_pieces, ended = time.perf_counter(), 0, ""
            async with client.stream("POST", url, json={**body, "stream": streams}) as response:
                response.raise_for_status()
                async for line in response.aiter_lines():
                    num_pieces += bool(line)
                    if num_pieces == 1:
                        first.append(time.perf_counter() - begin)
                    ended = line or ended
            seconds.append(time.perf_counter() - begin)
            if streams and ended != "data: [DONE]":
                raise SystemExit(f"{service.name}: a stream ended with {ended!r}")

    async with httpx.AsyncClient(timeout=120) as client:
        begin = time.perf_counter()
        await asyncio.gather(*(ask(client, number) for number in range(num_clients)))
        taken = time.perf_counter() - begin
    found = {"tokens_per_second": len(seconds) * num_tokens / taken, "request_seconds": median(seconds)}
    return {**found, "first_piece_seconds": median(first)} if streams else found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=48, help="of each round (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=32, help="of each answer (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=4, help="(default: %(default)s)")
    parser.add_argument("--engines", type=int, nargs="+", default=[1, 2], help="numbers to try (default: 1 2)")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    cells = {}
    for number in options.engines:
        for name, cell in _compare(number, options).items():
            cells[f"{number} engines, {name}"] = cell
            print(f"{number} engines, {name}: {_described(cell)}", flush=True)
    if options.json is not None:
        write_json(options.json, {"provenance": provenance([resolve_model(None)]), "cells": cells})


def _compare(number: int, options: argparse.Namespace) -> dict[str, Any]:
    loads = {
        f"{num_clients} clients, {'streamed' if streams else 'whole'}": (num_clients, streams)
        for num_clients in ((1, 8) if number == 1 else (8,))
        for streams in (False, True)
    }
    rounds: dict[str, dict[str, list[Round]]] = {name: {"servers": [], "replicas": []} for name in loads}
    first_chat = 100_000
    with servers(number) as alone, replicas(number) as together:
        for i in range(options.rounds + 1):
            for name, (num_clients, streams) in loads.items():
                num_requests = options.requests // (_SHARE_OF_ONE_CLIENT if num_clients == 1 else 1)
                for service in (alone, together) if i % 2 else (together, alone):
                    with service.turn():
                        before = processor_seconds()
                        asking = load(service, num_clients, num_requests, options.tokens, streams, first_chat)
                        found = asyncio.run(asking)
                        for kind, seconds in processor_seconds().items():
                            found[f"processor: {kind}"] = (seconds - before.get(kind, 0.0)) / num_requests
                    if i:  # the first round warms up
                        rounds[name][service.name].append(found)
                first_chat += num_requests
    return {name: {"rounds": each, **_ratios(each)} for name, each in rounds.items()}


def _ratios(rounds: dict[str, list[Round]]) -> dict[str, Any]:
    def pairs(name: str) -> list[tuple[float, float]]:
        return [(r[name], s[name]) for r, s in zip(rounds["replicas"], rounds["servers"], strict=True)]

    ratios = [ours / theirs for ours, theirs in pairs("tokens_per_second")]
    found: dict[str, Any] = {"throughput_ratio": median(ratios), "throughput_ratio_interval": median_interval(ratios)}
    for name in [each for each in rounds["servers"][0] if each.endswith("_seconds")]:
        found[f"added_{name}"] = median(ours - theirs for ours, theirs in pairs(name))
    return found


def _described(cell: dict[str, Any]) -> str:
    speeds = [[each["tokens_per_second"] for each in cell["rounds"][name]] for name in ("replicas", "servers")]
    ours, rays = (f"{median(each):.0f} ({min(each):.0f} to {max(each):.0f})" for each in reversed(speeds))
    added = ", ".join(f"{name.removeprefix('added_').removesuffix('_seconds')} {1000 * value:+.1f} ms"
                      for name, value in sorted(cell.items()) if name.startswith("added_"))  # fmt: skip
    used = "; ".join(f"processor ms of a request, {name}: {_used(cell['rounds'][name])}" for name in cell["rounds"])
    low, high = cell["throughput_ratio_interval"]
    ratio = f"ratio {cell['throughput_ratio']:.3f} ({low:.3f} to {high:.3f})"
    return f"tokens/s of servers {ours}, of replicas {rays}; {ratio}; {added}; {used}"


def _used(rounds: list[Round]) -> str:
    kinds = [name for name in rounds[0] if name.startswith("processor: ")]
    means = {name.removeprefix("processor: "): fmean(each.get(name, 0.0) for each in rounds) for name in kinds}
    return ", ".join(f"{name} {1000 * mean:.1f}" for name, mean in means.items() if mean >= 0.00005)


if __name__ == "__main__":
    main()
