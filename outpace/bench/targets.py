"""A target runs jobs under a setting and a load. This one is the engine in this process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from outpace.bench.engine_load import run_load
from outpace.bench.loads import Closed, Load
from outpace.bench.settings import Setting
from outpace.bench.trials import Job, Run
from outpace.bench.workloads import Prompt
from outpace.config import Method, SamplingParams
from outpace.llm import LLM

WARM_UP_TOKENS = 16


class Target(Protocol):
    name: str

    @property
    def drafting(self) -> Method | None:
        """The method that drafts with a model or a head, besides lookups; None if there is none or it is unknown."""
        ...

    def jobs(self, prompts: Sequence[Prompt], *, temperature: float, base_seed: int = 0) -> list[Job]:
        """The prompts as requests. Each has its own seed, the same under every setting."""
        ...

    def warm_up(self, job: Job, settings: Sequence[Setting]) -> None:
        """Do all work that only a first request causes."""
        ...

    def run(self, jobs: Sequence[Job], setting: Setting, load: Load, seed: int = 0) -> Run:
        """Run all jobs to the end. `seed` fixes the arrival times."""
        ...

    def describe(self) -> dict[str, Any]:
        """What was measured, for the results file."""
        ...


class EngineTarget:
    """Each request carries its setting. The engine's caches are emptied between runs.

    With `keeps_prompts` the prefix cache is kept: for slow models, where only decoding is of interest.
    """

    name = "in process"

    def __init__(self, llm: LLM, *, keeps_prompts: bool = False) -> None:
        self.llm = llm
        self._keeps_prompts = keeps_prompts

    @property
    def drafting(self) -> Method | None:
        return next((name for name in ("head", "draft") if name in self.llm.config.methods), None)

    def jobs(self, prompts: Sequence[Prompt], *, temperature: float, base_seed: int = 0) -> list[Job]:
        return [
            Job(number, prompt.category, encode(self.llm, prompt), params, prompt.messages)
            for number, (prompt, params) in enumerate(
                zip(prompts, sampling(prompts, temperature, base_seed), strict=True)
            )
        ]

    def warm_up(self, job: Job, settings: Sequence[Setting]) -> None:
        engine = self.llm.engine
        engine.forget()
        if engine.costs is None:
            engine.calibrate()
        for setting in settings:
            self.run([limited(job, WARM_UP_TOKENS)], setting, Closed(1))

    def run(self, jobs: Sequence[Job], setting: Setting, load: Load, seed: int = 0) -> Run:
        self.llm.engine.forget(prefixes=not self._keeps_prompts)
        return run_load(self.llm.engine, [under(setting, job) for job in jobs], load, seed)

    def describe(self) -> dict[str, Any]:
        return {"target": self.name, "model": self.llm.description, "config": self.llm.config.as_dict()}


def sampling(prompts: Sequence[Prompt], temperature: float, base_seed: int) -> list[SamplingParams]:
    return [
        SamplingParams(
            temperature=temperature if prompt.temperature is None else prompt.temperature,
            seed=base_seed + number,
            max_tokens=prompt.max_tokens,
        )
        for number, prompt in enumerate(prompts)
    ]


def encode(llm: LLM, prompt: Prompt) -> list[int]:
    """With the model's chat template; without one, the plain text of the messages."""
    if llm.tokenizer.chat_template is None:
        return llm.tokenizer.encode("\n\n".join(message["content"] for message in prompt.messages))
    return llm.encode_chat(prompt.messages)


def limited(job: Job, max_tokens: int) -> Job:
    return replace(job, params=replace(job.params, max_tokens=min(max_tokens, job.params.max_tokens)))


def under(setting: Setting, job: Job) -> Job:
    return replace(job, params=replace(job.params, speculation=setting.speculation))
