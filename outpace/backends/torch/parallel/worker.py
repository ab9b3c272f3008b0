"""A rank other than 0: it loads its part of the model, then runs each step that rank 0 sends, until the pipe closes.

It knows nothing of requests, drafts or sampling. Signals that end a service are left to rank 0.
"""

from __future__ import annotations

import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from outpace.backends.torch.execution.pages import Pages
from outpace.backends.torch.execution.step import StepInputs, StepShape, views
from outpace.backends.torch.kernels import ops_for
from outpace.backends.torch.model.loader import choose_formats, open_checkpoint
from outpace.backends.torch.parallel.group import Group
from outpace.backends.torch.parallel.messages import Kind, Setup, receive, shape_of
from outpace.backends.torch.parallel.model import ShardedModel
from outpace.backends.torch.parallel.ops import ShardedOps
from outpace.backends.torch.parallel.shard import Shard, load_shard


class Rank:
    def __init__(self, setup: Setup) -> None:
        self.device = torch.device(setup.device)
        if self.device.type == "cpu":
            torch.set_num_threads(setup.threads)
        else:
            torch.cuda.set_device(self.device)
        checkpoint = open_checkpoint(Path(setup.model))
        shard, dtype = Shard(setup.rank, setup.size), getattr(torch, setup.dtype)
        self._setup, self.number = setup, setup.rank
        self._config = shard.of(checkpoint.config)
        formats = choose_formats(checkpoint, setup.quantization, dtype, self.device)
        self._weights = load_shard(checkpoint, shard, dtype, self.device, formats)
        c = self._config
        cache_dtype = getattr(torch, setup.cache_dtype)
        self._pages = Pages(c.num_layers, setup.num_pages, c.num_kv_heads, c.head_dim, cache_dtype, self.device)
        self._graphs: dict[StepShape, torch.cuda.CUDAGraph] = {}
        self._steps: dict[StepShape, StepInputs] = {}  # of the graphs

    def join(self) -> None:
        setup = self._setup
        store = TCPStore("127.0.0.1", setup.port, is_master=False, timeout=timedelta(seconds=60))
        self._group = Group(store, setup.rank, setup.size, self.device)
        ops = ShardedOps(ops_for(self.device), self._group, self._config.vocab_size)
        self._model = ShardedModel(self._config, self._weights, ops, setup.capacity.max_context)

    def act(self, kind: Kind, numbers: list[int]) -> None:
        if kind is Kind.COPY_PAGE:
            source, target = numbers[:2]
            self._pages.copy(source, target)
        elif kind is Kind.RUN:
            self._run(self._step(shape_of(numbers)))
        elif kind is Kind.CAPTURE:
            self._capture(shape_of(numbers))
        else:
            self._graphs[shape_of(numbers)].replay()

    def _step(self, shape: StepShape) -> StepInputs:
        return views(torch.zeros(shape.num_words, dtype=torch.int32, device=self.device), shape)

    @torch.inference_mode()
    def _run(self, step: StepInputs) -> None:
        self._group.from_first(step.words)
        self._model.forward(step, self._pages.caches)

    def _capture(self, shape: StepShape) -> None:
        """Rank 0 has run the step before, so kernels are compiled and connections made."""
        graph = torch.cuda.CUDAGraph()
        step = self._steps[shape] = self._step(shape)
        with torch.cuda.graph(graph):
            self._run(step)
        self._graphs[shape] = graph


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    parent = os.getppid()
    pipe, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb", 0)
    os.dup2(2, 1)  # what libraries print must not look like our answers
    line = pipe.readline()
    if not line:
        return
    try:
        rank = Rank(Setup.decode(line))
    except Exception as error:
        answers.write(f"{' '.join(str(error).split())}\n".encode())
        sys.exit(1)
    answers.write(b"ready\n")
    if pipe.readline() != b"join\n":
        return
    status = 0
    try:
        rank.join()
        while (message := receive(pipe)) is not None:
            rank.act(*message)
    except Exception as error:
        status = 1
        if os.getppid() == parent:  # else rank 0 has died, which made this one fail
            print(f"outpace: rank {rank.number} failed: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
    os._exit(status)  # without waiting for an operation on a GPU that waits for a dead rank


if __name__ == "__main__":
    main()
