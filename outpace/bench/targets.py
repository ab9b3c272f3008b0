"""What is measured: anything that can run jobs under a setting and a load. Here, the engine in this process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from outpace.bench.engine_load import run_load
from outpace.bench.loads import Closed, Load
from outpace.bench.settings import Setting
from outpace.bench.trials import Job, Run
from outpace.bench.workloads import Prompt
from outpace.config import SamplingParams
from outpace.llm import LLM

WARM_UP_TOKENS = 16


class Target(Protocol):
    name: str

    def jobs(self, prompts: Sequence[Prompt], *, temperature: float, base_seed: int = 0) -> list[Job]:
        """The prompts as requests; every one has its own seed, the same under every setting."""
        ...

    def warm_up(self, job: Job, settings: Sequence[Setting]) -> None:
        """Everything that only the first request pays for."""
        ...

    def run(self, jobs: Sequence[Job], setting: Setting, load: Load, seed: int = 0) -> Run:
        """All jobs to the end. `seed` fixes the moments of arrival."""
        ...

    def describe(self) -> dict[str, Any]:
        """What was measured, for the record."""
        ...


class EngineTarget:
    """Settings differ by what each request asks for; between runs the engine forgets what the last one left.

    Where it `keeps_prompts`, a prompt that was read stays read: for slow models, when only decoding is of interest.
    """

    name = "in process"

    def __init__(self, llm: LLM, *, keeps_prompts: bool = False) -> None:
        self.llm = llm
        self._keeps_prompts = keeps_prompts

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
    """Through the model's chat template; a model without one gets the bare text of the conversation."""
    if llm.tokenizer.chat_template is None:
        return llm.tokenizer.encode("\n\n".join(message["content"] for message in prompt.messages))
    return llm.encode_chat(prompt.messages)


def limited(job: Job, max_tokens: int) -> Job:
    return replace(job, params=replace(job.params, max_tokens=min(max_tokens, job.params.max_tokens)))


def under(setting: Setting, job: Job) -> Job:
    return replace(job, params=replace(job.params, speculation=setting.speculation))
