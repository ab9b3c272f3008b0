"""Ray Serve beside `outpace serve`: one replica beside one server, two replicas beside two servers.

    python -m benchmarks.ray_overhead [--requests 40] [--json FILE]

Every engine has one thread. Clients send the same chats, one at a time per client; rounds alternate, so that drift of
the machine meets both. Prints tokens per second and the time of a request, and the ratios that the issue asks for.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from benchmarks.report import write_json
from outpace.bench.provenance import commit_name

_OPTIONS = ["--max-model-len", "1024", "--log-level", "warning", "--speculation", "off"]
_TOKENS = 32
_START_SECONDS = 240.0


class Service:
    """Processes that serve, and the addresses that clients are spread over."""

    def __init__(self, name: str, commands: list[list[str]], ports: list[int]) -> None:
        self.name, self.ports = name, ports
        environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
        quiet = subprocess.DEVNULL
        self._processes = [subprocess.Popen(each, env=environment, stdout=quiet, stderr=quiet) for each in commands]
        for port in ports:
            self._wait(port)

    def _wait(self, port: int) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline:
            try:
                if httpx.get(f"http://127.0.0.1:{port}/health", timeout=10).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.2)
        self.stop()
        raise SystemExit(f"{self.name} did not start within {_START_SECONDS:g} s")

    def stop(self) -> None:
        for process in self._processes:
            process.send_signal(signal.SIGTERM)
        for process in self._processes:
            process.wait(60)


def servers(number: int, first_port: int) -> Service:
    ports = [first_port + i for i in range(number)]
    command = [sys.executable, "-m", "outpace", "serve", "--threads", "1", *_OPTIONS]
    return Service(f"{number} x outpace serve", [[*command, "--port", str(port)] for port in ports], ports)


def replicas(number: int, port: int) -> Service:
    command = [sys.executable, "-m", "outpace", "serve", "--replicas", str(number), "--port", str(port), *_OPTIONS]
    return Service(f"Ray Serve, {number} replicas", [[*command, "--replica-cpus", "0.5"]], [port])


async def load(service: Service, num_clients: int, num_requests: int) -> dict[str, float]:
    """Every client sends its share, one request after the other."""
    seconds = list[float]()

    async def ask(client: httpx.AsyncClient, number: int) -> None:
        for i in range(num_requests // num_clients):
            text = f"Tell me about the number {number * 1000 + i}."
            body = {"messages": [{"role": "user", "content": text}], "max_tokens": _TOKENS, "ignore_eos": True}
            begin = time.perf_counter()
            port = service.ports[number % len(service.ports)]
            response = await client.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body)
            response.raise_for_status()
            seconds.append(time.perf_counter() - begin)

    async with httpx.AsyncClient(timeout=120) as client:
        begin = time.perf_counter()
        await asyncio.gather(*(ask(client, number) for number in range(num_clients)))
        taken = time.perf_counter() - begin
    return {"tokens_per_second": len(seconds) * _TOKENS / taken, "request_seconds": median(seconds)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=40, help="of each round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found: dict[str, Any] = {"command": "python -m benchmarks.ray_overhead", "commit": commit_name()}
    for number, clients in ((1, (1, 8)), (2, (8,))):
        pair = [servers(number, 8301), replicas(number, 8311)]
        try:
            for num_clients in clients:
                found[f"{number} engines, {num_clients} clients"] = _compare(pair, num_clients, options)
        finally:
            for service in pair:
                service.stop()
    print(json.dumps(found, indent=1))
    if options.json is not None:
        write_json(options.json, found)


def _compare(pair: list[Service], num_clients: int, options: argparse.Namespace) -> dict[str, Any]:
    rounds: dict[str, list[dict[str, float]]] = {service.name: [] for service in pair}
    for service in pair:
        asyncio.run(load(service, num_clients, 2 * num_clients))  # warm up
    for _ in range(options.rounds):
        for service in pair:
            rounds[service.name].append(asyncio.run(load(service, num_clients, options.requests)))
    ours, rays = (rounds[service.name] for service in pair)
    ratios = [b["tokens_per_second"] / a["tokens_per_second"] for a, b in zip(ours, rays, strict=True)]
    added = [b["request_seconds"] - a["request_seconds"] for a, b in zip(ours, rays, strict=True)]
    return {"rounds": rounds, "ray_over_plain": median(ratios), "added_seconds": median(added)}


if __name__ == "__main__":
    main()
