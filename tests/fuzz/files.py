"""Tries hostile model files: each must run or be refused with one sentence. No abort, no traceback, no hang.

`python -m tests.fuzz.files --seed 1 --count 1000` is the long run; `test_files.py` is the short one. Each file depends
only on the seed, its number and --kind, so `--only 37` repeats one. A file that fails is kept and named.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from tests.fuzz import folders, gguf_files, templates
from tests.fuzz.jail import Jail, Outcome

SECONDS = 45.0  # llama.cpp may take 20 of them before a file is given up
Write = Callable[[random.Random, Path], Path]


class Target(NamedTuple):
    kind: str
    backend: str
    write: Write

    @property
    def name(self) -> str:
        return f"{self.kind} on {self.backend}" if self.backend else self.kind


TARGETS = (
    Target("gguf", "auto", gguf_files.write_hostile),
    Target("gguf", "llamacpp", gguf_files.write_hostile),
    Target("folder", "torch", folders.write_hostile),
    Target("template", "", templates.write_hostile),
)


class Trial(NamedTuple):
    number: int
    target: Target
    outcome: Outcome
    path: Path


def available(kind: str | None = None) -> list[Target]:
    has_torch = all(importlib.util.find_spec(name) for name in ("torch", "safetensors", "tokenizers"))
    found = [target for target in TARGETS if has_torch or target.backend != "torch"]
    return [target for target in found if kind in (None, target.kind)]


def trials(seed: int, numbers: range, folder: Path, kind: str | None = None) -> Iterator[Trial]:
    """Number i goes to the target i modulo the number of targets."""
    targets = available(kind)
    with Jail(folder / "cache", SECONDS) as jail:
        for number in numbers:
            target = targets[number % len(targets)]
            path = target.write(random.Random(f"{seed} {number}"), folder)
            yield Trial(number, target, jail.attempt(target.kind, path, target.backend), path)


def keep(trial: Trial, seed: int, kept: Path) -> Path:
    kept.mkdir(parents=True, exist_ok=True)
    place = kept / f"{seed}-{trial.number}-{trial.path.name}"
    if trial.path.is_dir():
        shutil.copytree(trial.path, place, dirs_exist_ok=True)
    else:
        shutil.copy(trial.path, place)
    return place


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--only", type=int, help="the number of one file")
    parser.add_argument("--kind", choices=sorted({target.kind for target in TARGETS}), help="all, if not given")
    parser.add_argument("--keep", type=Path, default=Path(tempfile.gettempdir()) / "outpace-fuzz", help="for failures")
    parser.add_argument("--verbose", action="store_true", help="print every refusal")
    options = parser.parse_args()
    numbers = range(options.count) if options.only is None else range(options.only, options.only + 1)
    counts: Counter[tuple[str, str]] = Counter()
    begin, failures = time.monotonic(), 0
    with tempfile.TemporaryDirectory() as name:
        for trial in trials(options.seed, numbers, Path(name), options.kind):
            counts[trial.target.name, trial.outcome.kind] += 1
            if not trial.outcome.is_fine:
                failures += 1
                place = keep(trial, options.seed, options.keep)
                print(f"{trial.number} {trial.target.name}: {trial.outcome.kind} ({place})")
                print(trial.outcome.words[-2000:])
            elif options.verbose:
                print(f"{trial.number} {trial.target.name}: {trial.outcome.kind} {trial.outcome.words}")
    for (target, kind), count in sorted(counts.items()):
        print(f"{target}: {count} {kind}")
    print(f"{sum(counts.values())} files, {failures} failures, {time.monotonic() - begin:.0f} s")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
