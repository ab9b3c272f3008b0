"""Outpace, driven step by step, with SmolLM2 and its head padded to an 8B."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import gpu_experiment, gpu_padded_model
from benchmarks import gpu_peers_checkpoint as checkpoint
from benchmarks.gpu_cells import Pair, speculation_params
from benchmarks.gpu_experiment import Experiment, Report
from benchmarks.gpu_models import shape_config
from benchmarks.gpu_padded_model import PaddedModel, Small
from benchmarks.gpu_peers_settings import CONTEXT, NEW_TOKENS, STEP_CONTEXT, STEP_TOKENS, TEMPERATURES, PeerSettings
from benchmarks.gpu_peers_window import Step
from outpace.backends.base import Capacity
from outpace.backends.torch.device import choose_device, choose_dtype
from outpace.config import DeviceName, SamplingParams
from outpace.core import Request
from outpace.engine.engine import Engine

_PREFILL_TOKENS = 4096  # of one step
_WARM_UP_SECONDS = 150.0  # what is not prepared then is prepared in steps that are not measured


class DrivenOutpace:
    """One engine with one setting: 'plain', 'auto', or a proposer and its depth."""

    def __init__(self, pair: Pair, engine: Engine, setting: str) -> None:
        self._pair, self._engine, self._setting = pair, engine, setting
        self._requests: list[Request] = []
        self._lengths: list[int] = []

    def submit(self, prompts: Sequence[Sequence[int]], temperature: float, max_tokens: int) -> None:
        self._engine.forget()  # otherwise proposers would copy the answers of earlier runs of the same prompts
        params = SamplingParams(
            max_tokens=max_tokens, temperature=temperature, ignore_eos=True,
            speculation=speculation_params(self._setting),
        )  # fmt: skip
        self._requests = [self._engine.submit(prompt, params) for prompt in prompts]
        self._lengths = [len(prompt) for prompt in prompts]

    def step(self) -> Step:
        num_prepared = self._pair.num_prepared
        self._engine.step()
        emitted = {}
        for i, request in enumerate(self._requests):
            length = len(request.tokens)
            if length > self._lengths[i]:
                emitted[i] = request.tokens[self._lengths[i] :]
                self._lengths[i] = length
        return Step(emitted, is_one_time=self._pair.num_prepared > num_prepared)

    def abort(self) -> None:
        for request in self._requests:
            self._engine.abort(request)
        self._requests = []


class OutpacePeer:
    """The models, and an engine for every cell of `auto`, because its policy learns."""

    def __init__(
        self,
        settings: PeerSettings,
        model: Path,
        head: Path,
        folder: Path,
        prompts: list[list[int]],
        concurrency: Sequence[int],
        device: DeviceName,
    ) -> None:
        on, most = choose_device(device), max(concurrency)
        room = Capacity(most + 1, most * (STEP_CONTEXT + STEP_TOKENS) + CONTEXT, CONTEXT, _PREFILL_TOKENS)
        small = Small.load(model, head, on)
        shape = shape_config(gpu_padded_model.SHAPE)
        vocabulary = gpu_padded_model.DRAFT_VOCABULARY
        dtype = choose_dtype("auto", on)
        self.models = PaddedModel.start(small, dtype, shape, vocabulary, room, settings.quantization)
        self._settings, self._prompts, self._concurrency = settings.settings, prompts, tuple(concurrency)
        self._folder = folder
        self._experiment = self._new_experiment()

    def write(self, model: Path, head: Path) -> None:
        """Write the padded model and head for other engines."""
        target = self.models.pair.runners[0].model
        checkpoint.write_model(model, target.config, target.weights)
        checkpoint.write_head(head, self.models.head, self.models.head_weights, target.config)

    def warm_up(self) -> None:
        """Compile kernels and capture graphs. The costs found here are not used: other engines start meanwhile."""
        begin = time.perf_counter()
        self._experiment.calibrate(max(self._concurrency))
        for concurrency in self._concurrency:
            is_prepared = "auto" in self._settings and concurrency <= gpu_experiment.MAX_PREPARED
            settings = gpu_experiment.SETTINGS if is_prepared else self._settings  # with the depths `auto` may choose
            for temperature in TEMPERATURES:
                if time.perf_counter() - begin > _WARM_UP_SECONDS:
                    print(f"not prepared: {concurrency} at once, temperature {temperature}", flush=True)
                    continue
                self._experiment.warm_up(concurrency, temperature, settings)

    def begin(self) -> dict[str, Any]:
        """Measure the costs of steps, now that no other engine works."""
        self._experiment = self._new_experiment()
        self._experiment.calibrate(max(self._concurrency))
        return {"costs": self._experiment.costs.as_dict()}

    def driven(self, setting: str, concurrency: int, temperature: float) -> DrivenOutpace:
        return DrivenOutpace(self.models.pair, self._experiment.engine(setting, concurrency, temperature), setting)

    def describe(self) -> dict[str, Any]:
        runner = self.models.pair.runners[0]
        return {
            "parameters": self.models.sizes,
            "dtype": str(self.models.dtype),
            "captured_graphs": runner.num_captured,
        }

    def _new_experiment(self) -> Experiment:
        return Experiment(self.models, self._prompts, Report(self._folder, {}), NEW_TOKENS, self._settings)
