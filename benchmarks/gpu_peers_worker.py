"""One engine of the comparison, in a process of its own. It reads commands and writes answers as JSON lines.

Its first answer says that it is ready. What libraries print goes to the log, because answers use a copy of stdout.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from benchmarks.gpu_peers_settings import NEW_TOKENS, STEP_PROMPT, STEP_TOKENS, TEMPERATURES, PeerSettings
from benchmarks.gpu_peers_window import Driven, measure
from benchmarks.prompts import block_of

COMPLETE = "complete"  # the file that says that the checkpoint is written
_WARM_UP_TOKENS = 8
_TOKENS = range(10, 40_000)  # those of random prompts; SmolLM2 knows more


class Peer(Protocol):
    def describe(self) -> dict[str, Any]: ...

    def begin(self) -> dict[str, Any]:
        """Called once, when every engine of the wave is ready and this one alone works."""
        ...

    def driven(self, setting: str, concurrency: int, temperature: float) -> Driven: ...


class VllmPeer:
    def __init__(self, settings: PeerSettings, model: Path, head: Path) -> None:
        from benchmarks.gpu_peers_vllm import DrivenVllm

        self._driven = DrivenVllm(settings, model, head)

    def warm_up(self, prompts: Sequence[Sequence[int]], concurrency: Sequence[int]) -> None:
        """Triton compiles kernels at the first use of a shape."""
        for number in concurrency:
            for temperature in TEMPERATURES:
                measure(self._driven, prompts[:number], number, temperature, _WARM_UP_TOKENS)

    def describe(self) -> dict[str, Any]:
        return self._driven.describe()

    def begin(self) -> dict[str, Any]:
        return {}

    def driven(self, setting: str, concurrency: int, temperature: float) -> Driven:
        return self._driven


def start(job: dict[str, Any], prompts: list[list[int]]) -> Peer:
    settings = PeerSettings.from_dict(job["peer"])
    folder, concurrency = Path(job["folder"]), job["concurrency"]
    model, head = folder / "model", folder / "head"
    complete = folder / COMPLETE
    if settings.kind == "outpace":
        from benchmarks.gpu_peers_outpace import OutpacePeer

        own = OutpacePeer(
            settings, Path(job["model"]), Path(job["head"]), folder, prompts, concurrency, job["device"]
        )  # fmt: skip
        if not complete.exists():
            own.write(model, head)
            complete.touch()
        own.warm_up()
        return own
    import vllm  # noqa: F401  (takes long; meanwhile the checkpoint is written)

    while not complete.exists():
        time.sleep(0.1)
    peer = VllmPeer(settings, model, head)
    peer.warm_up(prompts, concurrency)
    return peer


def answer(peer: Peer, command: dict[str, Any], prompts: list[list[int]]) -> dict[str, Any]:
    if command["do"] == "begin":
        return peer.begin()
    number = command["concurrency"]
    if command["do"] == "steps":
        driven = peer.driven("plain", number, 0.0)
        return measure(driven, random_prompts(number), number, 0.0, STEP_TOKENS).as_dict()
    temperature = command["temperature"]
    driven = peer.driven(command["setting"], number, temperature)
    chosen = block_of(prompts, number, command["block"])
    return measure(driven, chosen, number, temperature, NEW_TOKENS).as_dict()


def random_prompts(count: int) -> list[list[int]]:
    rng = random.Random(count)
    return [rng.choices(_TOKENS, k=STEP_PROMPT) for _ in range(count)]


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    job = json.loads(sys.argv[1])
    prompts = json.loads(Path(job["tokens"]).read_text())["prompts"]

    def say(values: dict[str, Any]) -> None:
        answers.write(json.dumps(values) + "\n")

    try:
        begin = time.perf_counter()
        peer = start(job, prompts)
        say({"ready": peer.describe() | {"start_s": time.perf_counter() - begin}})
    except Exception as error:
        traceback.print_exc()
        say({"error": f"{type(error).__name__}: {error}"})
        os._exit(1)  # threads of a half-started engine may never end
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "quit":
            os._exit(0)  # an orderly end takes seconds, and the parent ends what is left
        try:
            say({"found": answer(peer, command, prompts)})
        except Exception as error:
            traceback.print_exc()
            say({"error": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    main()
