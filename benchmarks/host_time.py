"""Host time per step of the torch backend, measured with the whole engine and a fake model.

    python -m benchmarks.host_time [--settings NAME ...] [--requests N ...] [--temperature T ...] [--json FILE]

Needs torch, no GPU. The fake model looks its logits up in a table; buckets, draft loops, sampling and verification are
those of a GPU, but run without graphs. Time in the model and in the sampling kernels is subtracted. The rest is host
time, given per request and step. `serial` is the time in which a device would be idle. `behind` is the time between
the launch of device work and the wait for it, which costs nothing if the device takes longer. Medians and quartiles
are over steps.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks.gpu_cells import Pair, speculation_params
from benchmarks.gpu_models import Letters
from benchmarks.report import provenance, spread, write_json
from benchmarks.stopwatch import Stopwatch
from outpace.backends.base import Capacity, LoadedModel
from outpace.backends.torch.execution.drafting import DraftLoop, LoopRun
from outpace.backends.torch.execution.graphs import Bucket, Graphs
from outpace.backends.torch.execution.step import StepInputs
from outpace.backends.torch.kernels.base import Cache
from outpace.backends.torch.model.model import Model
from outpace.backends.torch.runner import TorchRunner
from outpace.backends.torch.sampling import draws
from outpace.backends.torch.sampling.draws import Draws, Fetch
from outpace.config import SamplingParams
from outpace.speculation.costs.curves import Costs, DraftCosts, StepCosts

VOCAB_SIZE = 97
CONTEXT = 1408
PROMPT = 300
PERIOD = 24  # positions after which another token follows the same token: outputs repeat, but not endlessly
DRAFT_NOISE = 0.25  # weight of the noise in the draft's logits
WARM_UP = 10
# Milliseconds of a step by its tokens, as on an H200. `auto` decides with these costs.
TARGET_COSTS = {1: 3.91, 2: 4.15, 4: 4.22, 8: 4.31, 16: 4.49, 32: 5.20, 64: 5.25, 128: 5.53, 192: 7.06, 256: 7.10}
DRAFT_COSTS = {1: 0.87, 2: 1.26, 8: 1.34, 16: 1.42, 32: 1.59, 64: 1.65, 128: 1.71, 256: 2.09}
SETTINGS = ("plain", "ngram:1", "suffix:2", "draft:2", "auto")


class Device:
    """Tracks when a device would be busy, and times the CPU code that stands in for it, to subtract that."""

    def __init__(self) -> None:
        self._device = Stopwatch()  # code that stands in for the device
        self.behind = 0.0  # host seconds while the device would be busy
        self._number = self._num_done = 0  # launches so far, and the last launch that was waited for
        self._numbers: dict[int, int] = {}  # launch number by the id of the object to wait on
        self._begin()
        Bucket.replay = self._started(self._device.wrapped(Bucket.replay))  # type: ignore[method-assign]
        DraftLoop._run_first = self._device.wrapped(DraftLoop._run_first)  # type: ignore[method-assign]
        DraftLoop._run_others = self._device.wrapped(DraftLoop._run_others)  # type: ignore[method-assign]
        DraftLoop.launch = self._started(DraftLoop.launch)  # type: ignore[method-assign]
        LoopRun.fetch = self._waited(LoopRun.fetch)  # type: ignore[method-assign]
        Draws.fetch = self._noted(Draws.fetch)  # type: ignore[method-assign]
        Fetch.wait = self._waited(Fetch.wait)  # type: ignore[method-assign]
        draws.draw_rows = self._device.wrapped(draws.draw_rows)

    def step(self, work: Callable[[], object]) -> tuple[float, float]:
        """Host seconds of `work`: while the device is idle, and while it is busy."""
        self._device.seconds = self.behind = 0.0
        self._begin()
        begin = perf_counter()
        work()
        taken = perf_counter() - begin
        if self._num_done < self._number:
            self._end()
        return max(0.0, taken - self._device.seconds - self.behind), self.behind

    def _begin(self) -> None:
        self._since = perf_counter() - self._device.seconds

    def _end(self) -> None:
        self.behind += perf_counter() - self._device.seconds - self._since

    def _started(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def started(owner: Any, *arguments: Any) -> Any:
            result = call(owner, *arguments)
            if self._num_done == self._number:
                self._begin()
            self._number += 1
            self._numbers[id(owner if result is None else result)] = self._number
            return result

        return started

    def _noted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(owner: Any) -> Any:
            result = call(owner)
            self._numbers[id(result)] = self._number
            return result

        return noted

    def _waited(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def waited(owner: Any, *arguments: Any) -> Any:
            if self._num_done < self._number == self._numbers.get(id(owner)):
                self._num_done = self._number
                self._end()
            return call(owner, *arguments)

        return waited


class FreeModel:
    """A table gives the logits. They depend on the last token and, slowly, on its position."""

    def __init__(self, noise: float) -> None:
        random = torch.Generator().manual_seed(1)
        table = 2.0 * torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=random)
        self._table = table + noise * torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=random)
        self.config = SimpleNamespace(vocab_size=VOCAB_SIZE, width=1, num_layers=1, num_kv_heads=1, head_dim=1)
        self.weights = SimpleNamespace(embedding=torch.zeros(1), num_parameters=1)

    @torch.inference_mode()
    def forward(
        self, step: StepInputs, caches: list[Cache], room: Tensor | None = None, states: Tensor | None = None
    ) -> Tensor:
        found = (step.tokens + 5 * (step.positions // PERIOD)) % VOCAB_SIZE
        if step.shape.num_outputs != len(found):
            found = found.index_select(0, step.outputs)
        return self._table.index_select(0, found)


def started(noise: float, num_requests: int) -> LoadedModel:
    room = Capacity(2 * num_requests, 2 * num_requests * CONTEXT, CONTEXT, max_step_tokens=4096)
    runner = TorchRunner(cast(Model, FreeModel(noise)), room)
    cast(Graphs, runner._graphs)._captures = True  # pads steps to graph sizes; no graph is captured
    return LoadedModel(runner, Letters(VOCAB_SIZE), "looked up", 0, 0)


@dataclass(slots=True)
class Cell:
    requests: int
    temperature: float
    setting: str
    serial_us: list[float]  # of each step, per request
    behind_us: list[float]
    tokens: float = 0.0  # emitted per request and step

    @classmethod
    def measure(cls, device: Device, requests: int, temperature: float, setting: str, num_steps: int) -> Cell:
        def costs(milliseconds: dict[int, float]) -> StepCosts:
            return StepCosts({size: 1e-3 * each for size, each in milliseconds.items()})

        pair = Pair(started(0.0, requests), started(DRAFT_NOISE, requests))
        engine = pair.engine(requests, Costs(costs(TARGET_COSTS), {"draft": DraftCosts(costs(DRAFT_COSTS))}))
        random = torch.Generator().manual_seed(2)
        for i in range(requests):
            prompt = torch.randint(0, VOCAB_SIZE, (PROMPT,), generator=random).tolist()
            params = SamplingParams(
                max_tokens=CONTEXT - PROMPT, temperature=temperature, ignore_eos=True, seed=i,
                speculation=speculation_params(setting),
            )  # fmt: skip
            engine.submit(prompt, params)
        while engine.stats.num_decode_rows < requests:
            engine.step()
        for _ in range(WARM_UP):
            device.step(engine.step)
        cell = cls(requests, temperature, setting, [], [])
        for _ in range(num_steps):
            serial, behind = device.step(engine.step)
            cell.serial_us.append(1e6 * serial / requests)
            cell.behind_us.append(1e6 * behind / requests)
            cell.tokens += engine.stats.num_emitted / requests / num_steps
        assert engine.stats.num_decode_rows == requests, "a request finished early; use fewer --steps"
        return cell

    def as_dict(self) -> dict[str, Any]:
        return {
            "requests": self.requests, "temperature": self.temperature, "setting": self.setting, "tokens": self.tokens,
            "serial_us": statistics.quantiles(self.serial_us, n=4),
            "behind_us": statistics.quantiles(self.behind_us, n=4),
        }  # fmt: skip

    def as_text(self) -> str:
        return (
            f"{self.requests:8} {self.temperature:4.1f} {self.setting:>9} {statistics.median(self.serial_us):8.1f} "
            f"{spread(self.serial_us, '.1f'):>16} {statistics.median(self.behind_us):8.1f} {self.tokens:7.2f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", nargs="+", default=SETTINGS, help="(default: %(default)s)")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--steps", type=int, default=100, help="measured steps of each cell (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    torch.set_num_threads(1)
    device = Device()
    cells = [
        Cell.measure(device, requests, temperature, setting, options.steps)
        for requests in tqdm(options.requests, unit="size")
        for temperature in options.temperature
        for setting in options.settings
    ]
    print("microseconds of host time per request and step")
    print(f"{'requests':>8} {'T':>4} {'setting':>9} {'serial':>8} {'quartiles':>16} {'behind':>8} {'tokens':>7}")
    for cell in cells:
        print(cell.as_text())
    if options.json:
        write_json(options.json, {"provenance": provenance([]), "cells": [cell.as_dict() for cell in cells]})


if __name__ == "__main__":
    main()
