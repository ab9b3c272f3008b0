"""Runs ragged rows through the torch model. `kv/blocks.py` allocates the cache pages.

The engine counts tokens and a page holds PAGE_TOKENS of them, so the pool has extra pages for the unused ends of last
pages. On a GPU, steps whose rows fit a bucket replay a captured graph; others run kernel by kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outpace.backends.base import (
    Capabilities,
    Capacity,
    DraftedTokens,
    DraftTask,
    LoadedModel,
    Runner,
    Tokenizer,
    max_scored_tokens,
)
from outpace.backends.torch.device import (
    MemoryPlan,
    TorchOptions,
    choose_device,
    choose_dtype,
    out_of_memory,
    usable_bytes,
)
from outpace.backends.torch.execution import staging
from outpace.backends.torch.execution.ahead import Ahead
from outpace.backends.torch.execution.drafting import WIDTHS, LoopRun
from outpace.backends.torch.execution.executor import DeviceExecutor, score
from outpace.backends.torch.execution.graphs import LARGEST_BUCKET, Graphs, has_trees, num_captured_tokens
from outpace.backends.torch.execution.launched import Launched
from outpace.backends.torch.execution.pages import PAGE_TOKENS, Pages, bytes_per_token, choose_cache_dtype, is_rounded
from outpace.backends.torch.execution.step import HostStep, StepShape, views
from outpace.backends.torch.head import TorchHead
from outpace.backends.torch.kernels import ops_for
from outpace.backends.torch.kernels.base import fixed_shares
from outpace.backends.torch.kernels.compiling import num_compiled
from outpace.backends.torch.model.head import HeadModel
from outpace.backends.torch.model.head_loader import open_head
from outpace.backends.torch.model.head_weights import HeadWeights, allocate_head
from outpace.backends.torch.model.loader import (
    check_invariant,
    choose_formats,
    choose_head_formats,
    load_weights,
    open_checkpoint,
    weight_bytes,
)
from outpace.backends.torch.model.model import Model
from outpace.backends.torch.model.taps import TapStore
from outpace.backends.torch.parallel.ops import local_ops
from outpace.backends.torch.parallel.shard import Shard, num_shard_bytes
from outpace.backends.torch.sampling.draws import Draws, Mode
from outpace.backends.torch.sampling.independent import max_kept
from outpace.core import MeasuredAcceptance, Row, StepPlan
from outpace.errors import BackendError
from outpace.kv.blocks import BlockPool
from outpace.models.head_file import HeadConfig

Follower = Callable[[Sequence[DraftTask], LoopRun], Ahead | None]


class TorchModel:
    """A model on disk that the torch backend can run, and its tokenizer. `start` loads the weights."""

    def __init__(
        self, path: Path, options: TorchOptions, tokenizer: Tokenizer | None = None, head: Path | None = None
    ) -> None:
        """`head`: the file or folder of a draft head for this model."""
        self.device = choose_device(options.device)
        self.dtype = choose_dtype(options.dtype, self.device)
        self.cache_dtype = choose_cache_dtype(options.kv_cache_dtype, self.dtype, self.device)
        self.options = options
        self.runner: TorchRunner | None = None  # once it is started
        self._path = path
        self._checkpoint = open_checkpoint(path)
        self._shard = Shard(0, options.tensor_parallel_size)
        self._shard.check(self._checkpoint.config)
        self._formats = choose_formats(self._checkpoint, options.quantization, self.dtype, self.device)
        if options.batch_invariant:
            check_invariant(self._checkpoint, self.dtype, self._formats, self._shard.size)
        self._head_formats = choose_head_formats(options.head_quantization, self.dtype, self.device)
        self.config = self._shard.of(self._checkpoint.config)  # of what this process holds
        self.has_head = head is not None
        is_whole = self._shard.size == 1 and not options.batch_invariant
        self.drafts_trees = self.has_head and self.device.type == "cuda" and is_whole
        self._head = open_head(head, path, self.config, self._checkpoint.name) if head is not None else None
        self.tokenizer = tokenizer or open_tokenizer(path, self.config.vocab_size)
        self.train_context = self.config.context

    def start(self, capacity: Capacity, threads: int) -> LoadedModel:
        plan = self.plan(capacity)
        plan.check(self.device, self.options.memory_utilization)
        if self.device.type == "cpu":
            torch.set_num_threads(max(threads // self._shard.size, 1))
        try:
            model = self._load(capacity, threads)
            weights = model.weights
            head = None if self._head is None else self._head.load(self.dtype, self.device, self._head_formats)
            runner = self.runner = TorchRunner(model, capacity, self.cache_dtype)
            if self._head is not None and head is not None:
                runner.attach(self._head.config, head, self._head.measured)
        except torch.OutOfMemoryError as error:
            raise out_of_memory(error, plan, self.device) from error
        return LoadedModel(
            runner=runner,
            tokenizer=self.tokenizer,
            description=f"{self._checkpoint.name} (torch, {self._numbers()} on {self.device})",
            num_parameters=weights.num_parameters,
            size_bytes=weights.num_bytes + (head.num_bytes if head is not None else 0),
        )

    def _numbers(self) -> str:
        cache = f", cache in {self.options.kv_cache_dtype}" if is_rounded(self.cache_dtype) else ""
        return f"{str(self.dtype).removeprefix('torch.')}{cache}"

    def _load(self, capacity: Capacity, threads: int) -> Model:
        """The model, or this process' part of it and, in processes of their own, the other parts."""
        if self._shard.size == 1:
            ops = ops_for(self.device, batch_invariant=self.options.batch_invariant)
            weights = load_weights(self._checkpoint, self.dtype, self.device, self._formats)
            return Model(self.config, weights, ops, capacity.max_context)
        from outpace.backends.torch.parallel.starting import start  # needs torch.distributed

        return start(
            self._path, self._checkpoint, self._shard, self.dtype, self.cache_dtype, self.device, capacity,
            num_pages(capacity), threads, self.options.quantization,
        )  # fmt: skip

    def plan(self, capacity: Capacity) -> MemoryPlan:
        c, size = self.config, self.dtype.itemsize
        # Workspace of the largest step: a few copies of its widest activations, and float32 logits. Graphs keep theirs.
        num_outputs = c.experts.per_token if c.experts else 1  # of MLPs, for each token
        widest = 2 * c.mlp_elements_per_token + c.q_size + 2 * c.kv_size + (3 + num_outputs) * c.width
        captured = num_captured_tokens(capacity.max_sequences) if self.device.type == "cuda" else 0
        num_scored = min(max_scored_tokens(c.vocab_size), capacity.max_step_tokens)
        # Verifying by distributions: those of two drafts, of the target, and what is left of them.
        num_kept = 5 * max_kept(capacity.max_sequences) if captured else 0
        num_logits = capacity.max_sequences + captured + num_scored + num_kept
        num_tokens = (2 if captured else 1) * capacity.max_step_tokens  # graphs have their own activations
        workspace = num_tokens * widest * size + num_logits * c.vocab_size * 4
        if self.options.batch_invariant:  # the shares of every context
            _, shares = fixed_shares(capacity.max_context + PAGE_TOKENS)
            workspace += 4 * num_tokens * shares * (c.q_size + 2 * c.num_heads)
        weights, head_cache = weight_bytes(self._checkpoint, self.dtype, self._formats), 0
        if self._shard.size > 1:
            weights = num_shard_bytes(self._checkpoint, self._shard, self.dtype, self._formats)
        if self._head is not None:
            meta = torch.device("meta")
            weights += allocate_head(self._head.config, self.dtype, meta, self._head_formats).num_bytes
            head_cache = self._head.config.cache_elements_per_token
        return MemoryPlan(
            name=self._checkpoint.name,
            weights=weights,
            workspace=workspace,
            cache_token=self.cache_token_bytes + head_cache * size,
            num_cache_tokens=num_pages(capacity) * PAGE_TOKENS,
        )

    @property
    def cache_token_bytes(self) -> int:
        """Of one token's keys and values; without a draft head's."""
        c = self.config
        return bytes_per_token(c.cache_elements_per_token, c.head_dim, self.cache_dtype)

    def close(self) -> None:
        pass


def open_tokenizer(path: Path, vocab_size: int) -> Tokenizer:
    """From a folder, its own tokenizer; from a GGUF, llama.cpp's, which loads only the vocabulary."""
    if path.is_dir():
        from outpace.models.hf_tokenizer import HFTokenizer

        return HFTokenizer(path, vocab_size)
    from outpace.models.gguf_tokenizer import LlamaTokenizer
    from outpace.models.llama_library import load_library

    return LlamaTokenizer(path, load_library(None))


class PlannedModel(Protocol):
    """A model that knows how much memory it will take."""

    device: torch.device

    def plan(self, capacity: Capacity) -> MemoryPlan: ...


def fitting_cache_tokens(models: Sequence[PlannedModel], capacity: Capacity, utilization: float) -> int | None:
    """Tokens of cache that fit on the GPU beside everything else; None if the models do not run on a GPU."""
    if not models or models[0].device.type != "cuda":
        return None
    plans = [model.plan(capacity) for model in models]
    usable = usable_bytes(models[0].device, utilization) or 0
    left = usable - sum(plan.weights + plan.workspace for plan in plans)
    wasted = num_pages(replace(capacity, cache_tokens=0)) * PAGE_TOKENS
    return max(left // sum(plan.cache_token for plan in plans) - wasted, 0)


def num_pages(capacity: Capacity) -> int:
    """Pages for all tokens, and three more per sequence: a partly used last page, a copied page, an early page."""
    return -(-capacity.cache_tokens // PAGE_TOKENS) + 3 * capacity.max_sequences


class TorchRunner:
    """A started model: its weights, its cache pages, and which sequence owns each page."""

    def __init__(self, model: Model, capacity: Capacity, cache_dtype: torch.dtype | None = None) -> None:
        """`cache_dtype`: by default, that of the weights."""
        config, embedding = model.config, model.weights.embedding
        self.model = model
        self.capacity = capacity
        self.executor = DeviceExecutor(self)
        self.follower: Follower | None = None  # starts to verify what this runner drafts
        self._may_keep_probs = False  # whether the target can verify drafts by their distributions on the device
        self.capabilities = Capabilities(
            can_rewind=True,
            executor=self.executor,
            drafter=self.draft,
            follow=self.follow,
            keep_path=self.keep_path if model.has_trees else None,
            num_prepared=self.num_prepared,
            scorer=score if embedding.is_cuda else None,  # in the host's memory, numpy is as fast
            states=self.states,
            state_width=config.width,
            captured=LARGEST_BUCKET if embedding.is_cuda else None,
            on_loss=model.on_loss,
        )
        self.vocab_size = config.vocab_size
        self.device = embedding.device
        self.pool = BlockPool(num_pages(capacity), PAGE_TOKENS)
        self._pages = Pages(
            config.num_layers, self.pool.num_blocks, config.num_kv_heads, config.head_dim,
            cache_dtype or embedding.dtype, self.device,
        )  # fmt: skip
        self.caches = self._pages.caches
        self._table_width = -(-capacity.max_context // PAGE_TOKENS) + 1
        self.tables = np.zeros((capacity.max_sequences, self._table_width), np.int32)  # the pages of each sequence
        self._open: set[int] = set()
        self._graphs: Graphs | None = Graphs(model, self.caches, self._table_width, capacity.max_sequences)
        self._head: TorchHead | None = None
        self._states: Tensor | None = None  # of the latest step, if its plan needed them
        self._taps: TapStore | None = None
        self._head_pages: Pages | None = None

    def attach(self, config: HeadConfig, weights: HeadWeights, measured: MeasuredAcceptance | None = None) -> None:
        """Draft with a head. Called before the first step."""
        assert self._graphs is not None
        c, model = config, self.model
        embedding = model.weights.embedding
        taps = model.taps = self._taps = TapStore(c.taps, self.pool.num_blocks, PAGE_TOKENS, c.tap_width, embedding)
        self._head_pages = Pages(
            1, self.pool.num_blocks, c.num_kv_heads, c.head_dim, embedding.dtype, self.device, first=1
        )
        [cache] = self._head_pages.caches
        head = HeadModel(c, weights, local_ops(model.ops), embedding, taps, cache, model.rope)
        self._head = TorchHead(head, measured, self, self._graphs)
        self.capabilities = replace(self.capabilities, head=self._head)

    @property
    def num_captured(self) -> int:
        """Graphs captured so far."""
        return self._graphs.num_captured if self._graphs else 0

    def num_prepared(self) -> int:
        """Graphs captured and kernels compiled so far; a step that adds one takes much longer than usual."""
        return self.num_captured + num_compiled()

    def forward(self, plan: StepPlan) -> NDArray[np.float32]:
        self.reserve_rows(plan.rows)
        found = self.launch(plan)[:]
        if not len(found) and self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()  # before the host buffer is filled again
        for row in plan.rows:
            self.pool.advance(row.seq, len(row.tokens))
        found.flags.writeable = False
        return found

    def draft(self, tasks: Sequence[DraftTask]) -> list[DraftedTokens]:
        """Draft with `DraftLoop`: one transfer for all tokens of all rows."""
        graphs = self.check_open()
        for task in tasks:
            self.reserve(task.row.seq, task.row.start, len(task.row.tokens) + task.depth - 1)
        longest = max(len(task.row.tokens) for task in tasks)
        width = longest if longest in WIDTHS else 0
        if not width:  # more tokens than a loop feeds
            prefill = self.launch(StepPlan([task.row for task in tasks]))
            graphs.loops.first_logits(len(tasks), self.device).copy_(prefill.some(range(len(tasks))))
        requests, depth = [task.request for task in tasks], max(task.depth for task in tasks)
        loop = graphs.loops.find(requests, width, depth, may_keep_probs=self._may_keep_probs)
        loop.fill(tasks, self.tables)
        run = loop.launch()
        loop.keep()
        ahead = self.follower(tasks, run) if self.follower is not None else None
        drafted = run.fetch(tasks)
        if ahead is not None:
            ahead.expect([each.tokens for each in drafted])
        for task in tasks:
            self.pool.advance(task.row.seq, len(task.row.tokens) + task.depth - 1)
        return drafted

    def follow(self, drafting: Runner) -> None:
        """Start to verify what another runner drafts before the plan arrives, if both are on one device."""
        if isinstance(drafting, TorchRunner) and drafting.device == self.device:
            drafting.follower = self.executor.begin_verifying
            drafting._may_keep_probs = drafting.vocab_size == self.vocab_size

    def holds(self, seq: int | None, num_tokens: int) -> bool:
        """Whether the cache of a sequence holds exactly this many tokens."""
        return seq in self._open and self.pool.length(seq) == num_tokens

    def is_prepared(self, plan: StepPlan, mode: Mode) -> bool:
        return self._graphs is not None and self._graphs.is_prepared(plan, mode)

    def launch(self, plan: StepPlan, drafted: Tensor | None = None, *, gives_peaks: bool = False) -> Launched:
        """Start a step; pages are reserved. `drafted` [depth, rows]: the tokens rows feed after their first.

        `gives_peaks`: it gives no logits, only what draws of mode `peaks` need.
        """
        graphs = self.check_open()
        num_logits = sum([row.num_logits for row in plan.rows])
        # Graphs have no outputs for states, and reuse their memory.
        bucket = None if plan.needs_states else graphs.find(plan, gives_peaks=gives_peaks)
        self._states = None
        if bucket is not None:
            self.fill(bucket.host, plan)
            bucket.launch(drafted)
            lines, device_lines = bucket.lines(num_logits)
            return Launched(bucket.logits, lines, device_lines, bucket.draws, bucket, gives_peaks)
        longest = max(len(row.tokens) for row in plan.rows)
        shape = StepShape(
            plan.num_tokens, len(plan.rows), num_logits, longest, self._table_width, gives_peaks=gives_peaks,
            has_trees=has_trees(plan),
        )  # fmt: skip
        host = HostStep(shape, pinned=self.device.type == "cuda")
        self.fill(host, plan)
        step = views(host.buffer.to(self.device), shape)
        if drafted is not None:
            for i, row in enumerate(plan.rows):
                begin, count = int(host.begins[i]), len(row.tokens) - 1
                step.tokens[begin + 1 : begin + 1 + count] = drafted[:count, i]
        states: list[Tensor] | None = [] if plan.needs_states else None
        logits = self.model.forward(step, self.caches, states=states)
        self._states = states[0] if states else None
        everything = torch.arange(num_logits, device=self.device)
        return Launched(
            logits, np.arange(num_logits), everything, lambda mode: Draws(logits, mode, None), None, gives_peaks
        )

    def states(self, begin: int, end: int) -> NDArray[np.float32]:
        if self._states is None:
            raise RuntimeError("the states of this step were not kept, because its plan did not need them")
        found: NDArray[np.float32] = self._states[begin:end].float().cpu().numpy()
        return found

    def fill(self, host: HostStep, plan: StepPlan) -> None:
        """Write a plan into a step's buffer, which may be larger than the plan needs."""
        staging.fill(host, plan.rows, self.tables)

    def reserve_rows(self, rows: Sequence[Row]) -> None:
        """Reserve pages for the rows' tokens."""
        for row in rows:
            self.reserve(row.seq, row.start, len(row.tokens))

    def reserve(self, seq: int, start: int, count: int) -> None:
        if seq not in self._open:
            self.pool.open(seq)
            self._open.add(seq)
        length = self.pool.length(seq)
        if start != length:
            raise BackendError(f"a row starts at {start}, but the cache of its sequence holds {length} tokens")
        if not self._take_pages(seq, length, count):
            raise BackendError(f"the cache has no room for {count} more tokens of a sequence that holds {length}")

    def try_reserve(self, seq: int, count: int) -> bool:
        """Reserve pages for `count` more tokens of a sequence; False, with nothing reserved, if too few are free."""
        return self._take_pages(seq, self.pool.length(seq), count)

    def try_reserve_until(self, seq: int, length: int) -> bool:
        """The same for as many tokens as make its length `length`."""
        return self.try_reserve(seq, length - self.pool.length(seq))

    def _take_pages(self, seq: int, length: int, count: int) -> bool:
        copies = self.pool.reserve(seq, count)
        for source, target in copies or ():
            self.model.copying_page(source, target)
            self._pages.copy(source, target)
            if self._taps is not None and self._head_pages is not None:
                self._taps.copy_page(source, target)
                self._head_pages.copy(source, target)
        if copies or (length - 1) // PAGE_TOKENS != (length + count - 1) // PAGE_TOKENS:
            self._update_table(seq)
        return copies is not None

    def _update_table(self, seq: int) -> None:
        blocks = self.pool.blocks(seq)
        self.tables[seq, : len(blocks)] = blocks

    def truncate(self, seq: int, num_tokens: int) -> None:
        self.executor.forget(seq, num_tokens)
        self.pool.rewind(seq, num_tokens)
        if self._head is not None:
            self._head.truncate(seq, num_tokens)

    def keep_path(self, seq: int, num_tokens: int, places: Sequence[int]) -> None:
        """Keep `num_tokens` and, of the tokens after them, those at `places`, which are ascending. They move together:
        their keys, values and hidden states, which are those of their depth in the tree, not of their place."""
        moved = [(num_tokens + place, num_tokens + i) for i, place in enumerate(places) if place != i]
        if moved and self.executor.moved.get(seq) != num_tokens:
            old, new = np.array(moved).T
            table = self.tables[seq]
            words = np.stack(
                [table[old // PAGE_TOKENS], old % PAGE_TOKENS, table[new // PAGE_TOKENS], new % PAGE_TOKENS]
            )
            self.move(*torch.from_numpy(words).long().to(self.device))  # one transfer
        self.truncate(seq, num_tokens + len(places))

    def move(self, pages: Tensor, slots: Tensor, to_pages: Tensor, to_slots: Tensor) -> None:
        """Move tokens to other places in the cache; all int64 [tokens]."""
        self._pages.move(pages, slots, to_pages, to_slots)
        if self._taps is not None:
            self._taps.move(pages, slots, to_pages, to_slots)

    def fork(self, source: int, target: int, num_tokens: int) -> None:
        self.free(target)
        self.pool.fork(source, target, num_tokens)
        self._open.add(target)
        self._update_table(target)
        if self._head is not None:
            self._head.entries.fork(source, target, num_tokens)

    def free(self, seq: int) -> None:
        if seq in self._open:
            self.executor.forget(seq)
            self.pool.close(seq)
            self._open.discard(seq)
            if self._head is not None:
                self._head.entries.free(seq)

    def check_open(self) -> Graphs:
        if self._graphs is None:
            raise BackendError("the model is closed; load it again to use it")
        return self._graphs

    def close(self) -> None:
        """Free the memory: a closed runner holds no tensors."""
        if self._graphs is not None:
            self._graphs = None
            self.executor.stop()
            self.model.close()
            self._head = self._taps = self._head_pages = None
            self.capabilities = replace(self.capabilities, head=None)
            del self.model, self.caches, self._pages
