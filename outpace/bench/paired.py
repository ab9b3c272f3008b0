"""The same requests under every setting, block by block in random order, in one process on one engine.

A noisy or throttled machine then hits all settings alike, and a ratio of two of them is worth something. Nothing a
setting's run leaves behind (kept prefixes, the suffix proposer's store) is there when the next one begins: no setting
profits from another's answers to the same prompts. Costs are known before the first measurement.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from outpace.bench.closed_loop import Job, Run, Trial, run_closed
from outpace.bench.settings import PLAIN, Setting
from outpace.bench.statistics import Estimate, ratio_of_rates
from outpace.bench.workloads import Prompt
from outpace.config import SamplingParams
from outpace.engine.engine import Engine
from outpace.llm import LLM

WARM_UP_TOKENS = 16


@dataclass(slots=True)
class Paired:
    """Runs by setting; the i-th of each are the same requests, one block."""

    settings: Sequence[Setting]
    concurrency: int
    runs: dict[str, list[Run]] = field(default_factory=dict)

    @property
    def num_blocks(self) -> int:
        return min((len(runs) for runs in self.runs.values()), default=0)

    def blocks(self, setting: str) -> list[Run]:
        """Of an interrupted comparison, only the blocks that every setting has finished."""
        return self.runs.get(setting, [])[: self.num_blocks]

    def trials(self, setting: str) -> list[Trial]:
        return [trial for run in self.blocks(setting) for trial in run.trials]

    def decode_rate(self, setting: str) -> float:
        """Tokens per second of decoding, all requests together."""
        runs = self.blocks(setting)
        return _over(sum(run.decode_tokens for run in runs), sum(run.decode_seconds for run in runs))

    def total_rate(self, setting: str) -> float:
        """Tokens per second from the first request's beginning to the last one's end, prompts included."""
        runs = self.blocks(setting)
        return _over(sum(run.num_tokens for run in runs), sum(run.seconds for run in runs))

    def decode_ratio(self, setting: str, base: str = PLAIN.name) -> Estimate:
        ours, theirs = self.blocks(setting), self.blocks(base)
        return ratio_of_rates(
            [run.decode_tokens for run in ours],
            [run.decode_seconds for run in ours],
            [run.decode_tokens for run in theirs],
            [run.decode_seconds for run in theirs],
        )

    def total_ratio(self, setting: str, base: str = PLAIN.name) -> Estimate:
        ours, theirs = self.blocks(setting), self.blocks(base)
        return ratio_of_rates(
            [run.num_tokens for run in ours],
            [run.seconds for run in ours],
            [run.num_tokens for run in theirs],
            [run.seconds for run in theirs],
        )

    def estimated_speedup(self, setting: str) -> float | None:
        """What the engine itself says it gained, over all requests; None where it did not draft."""
        counts = [trial.counts for trial in self.trials(setting)]
        plain, spent = sum(each.plain_seconds for each in counts), sum(each.decode_seconds for each in counts)
        return plain / spent if spent > 0 and any(each.num_drafted for each in counts) else None

    def num_unequal(self, setting: str, base: str = PLAIN.name) -> int:
        """Requests whose tokens are not the baseline's, though prompt and seed are."""
        pairs = zip(self.trials(setting), self.trials(base), strict=True)
        return sum(ours.token_ids != theirs.token_ids for ours, theirs in pairs)


def measure(
    engine: Engine,
    jobs: Sequence[Job],
    settings: Sequence[Setting],
    *,
    concurrency: int,
    block_size: int | None = None,
    order_seed: int = 0,
    on_run: Callable[[Setting, Run], None] | None = None,
) -> Paired:
    """Everything, unless interrupted: then what was measured so far."""
    paired = Paired(settings, concurrency, {setting.name: [] for setting in settings})
    warm_up(engine, jobs[0], settings)
    try:
        for setting, run in interleaved(engine, jobs, settings, concurrency, block_size, order_seed):
            paired.runs[setting.name].append(run)
            if on_run is not None:
                on_run(setting, run)
    except KeyboardInterrupt:
        if not paired.num_blocks:
            raise
    return paired


def interleaved(
    engine: Engine,
    jobs: Sequence[Job],
    settings: Sequence[Setting],
    concurrency: int,
    block_size: int | None = None,
    order_seed: int = 0,
) -> Iterator[tuple[Setting, Run]]:
    """One run after another, each as soon as it is done."""
    size = block_size or default_block_size(concurrency)
    shuffle = random.Random(order_seed).shuffle
    for begin in range(0, len(jobs), size):
        block = jobs[begin : begin + size]
        order = list(settings)
        shuffle(order)
        for setting in order:
            engine.forget()
            yield setting, run_closed(engine, [_under(setting, job) for job in block], concurrency)


def default_block_size(concurrency: int) -> int:
    """Alone, each prompt is a block. Together, twice as many as run at once: the load holds for half the block."""
    return 1 if concurrency == 1 else 2 * concurrency


def warm_up(engine: Engine, job: Job, settings: Sequence[Setting]) -> None:
    """Costs measured, memory touched, every proposer asked once."""
    engine.forget()
    if not engine.costs.is_known:
        engine.calibrate()
    short = replace(job, params=replace(job.params, max_tokens=min(WARM_UP_TOKENS, job.params.max_tokens)))
    for setting in settings:
        run_closed(engine, [_under(setting, short)], 1)


def make_jobs(llm: LLM, prompts: Sequence[Prompt], *, temperature: float, base_seed: int = 0) -> list[Job]:
    """The prompts as the engine takes them. Every one has its own seed, the same under every setting."""
    jobs = []
    for number, prompt in enumerate(prompts):
        chosen = temperature if prompt.temperature is None else prompt.temperature
        params = SamplingParams(temperature=chosen, seed=base_seed + number, max_tokens=prompt.max_tokens)
        jobs.append(Job(number, prompt.category, encode(llm, prompt), params))
    return jobs


def encode(llm: LLM, prompt: Prompt) -> list[int]:
    """Through the model's chat template; a model without one gets the bare text of the conversation."""
    if llm.tokenizer.chat_template is None:
        return llm.tokenizer.encode("\n\n".join(message["content"] for message in prompt.messages))
    return llm.encode_chat(prompt.messages)


def _under(setting: Setting, job: Job) -> Job:
    return replace(job, params=replace(job.params, speculation=setting.speculation))


def _over(amount: float, seconds: float) -> float:
    return amount / seconds if seconds > 0 else float("nan")
