"""How long the first run takes, in a fresh process, beside another checkout of this project.

    python -m benchmarks.first_run --other CHECKOUT [--rounds 9] [--json FILE]
    python -m benchmarks.first_run --other CHECKOUT --install [--rounds 3]     # from nothing, with downloads

`outpace run` answers a short prompt with the embedded model, from each checkout in turns, timed from the start of the
process to the first character and to its end. The first run has a cache folder that holds the model file and nothing
else; the second uses what the first left there, such as measured costs. Both checkouts need their native library built.

With `--install` a round is the two commands of a new user: `pip install` of a wheel of each checkout into a new virtual
environment, and the first `outpace run`, which fetches the model. Everything is downloaded anew.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

from benchmarks.report import provenance, spread, write_json
from outpace.models.resolve import resolve_model

HERE = Path(__file__).resolve().parents[1]
COMMAND = ["-m", "outpace", "run", "What is a bicycle?", "--temperature", "0", "--max-tokens", "16"]
MARKS = ("first character", "end")


def seconds_of_run(checkout: Path, cache: Path, python: str = sys.executable) -> tuple[float, float]:
    """From the start of the process to the first character of the answer, and to its end."""
    environment = os.environ | {"OUTPACE_CACHE_DIR": str(cache), "PYTHONPATH": str(checkout)}
    begin = perf_counter()
    with subprocess.Popen(
        [python, *COMMAND], cwd=checkout, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as run:
        assert run.stdout is not None
        first = run.stdout.read(1)
        at_first = perf_counter() - begin
        run.stdout.read()
    if run.returncode or not first:
        raise SystemExit(
            f"`outpace run` failed in {checkout} with status {run.returncode}; build its native library first"
        )
    return at_first, perf_counter() - begin


def fill(cache: Path) -> None:
    """With the model file and the note that it was verified, as a download leaves them, and nothing else."""
    models = cache / "models"
    models.mkdir()
    for file in resolve_model(None).parent.iterdir():
        (models / file.name).symlink_to(file)


def timed_runs(checkout: Path) -> dict[str, float]:
    found = dict[str, float]()
    with tempfile.TemporaryDirectory() as folder:
        fill(Path(folder))
        for run in ("first run", "second run"):
            for mark, taken in zip(MARKS, seconds_of_run(checkout, Path(folder)), strict=True):
                found[f"{run}, {mark}"] = taken
    return found


def wheel_of(checkout: Path, folder: Path) -> Path:
    folder.mkdir()
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(checkout)],
        check=True,
    )
    return next(folder.glob("*.whl"))


def timed_installation(wheel: Path) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        new = Path(folder)
        subprocess.run([sys.executable, "-m", "venv", str(new / "venv")], check=True)
        python = str(new / "venv" / "bin" / "python")
        begin = perf_counter()
        subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-cache-dir", str(wheel)], check=True)
        installing = perf_counter() - begin
        (new / "cache").mkdir()
        _, running = seconds_of_run(new / "venv", new / "cache", python)
    return {"installing": installing, "first run, with the model's download": running, "both": installing + running}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--other", type=Path, required=True, help="another checkout, with its native library")
    parser.add_argument("--install", action="store_true", help="time a new user's two commands, downloads included")
    parser.add_argument("--rounds", type=int, default=9, help="(default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    checkouts = {"this": HERE, "other": options.other.resolve()}
    seconds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        measure: Callable[[Path], dict[str, float]] = timed_runs
        if options.install:
            checkouts = {name: wheel_of(each, Path(folder) / name) for name, each in checkouts.items()}
            measure = timed_installation
        for i in range(0 if options.install else -1, options.rounds):  # round -1 reads the files from disk
            for name in sorted(checkouts, reverse=i % 2 == 0):
                for key, taken in measure(checkouts[name]).items():
                    if i >= 0:
                        seconds.setdefault(f"{name}, {key}", []).append(taken)
    ratios = {}
    for key, times in seconds.items():
        print(f"{key}: {statistics.median(times):.3f} s ({spread(times, '.3f')})")
        if key.startswith("this"):
            others = seconds[key.replace("this", "other", 1)]
            ratios[key.removeprefix("this, ")] = [a / b for a, b in zip(times, others, strict=True)]
    for key, each in ratios.items():
        print(f"{key}: {statistics.median(each):.3f} of the other's ({spread(each, '.3f')})")
    if options.json:
        write_json(
            options.json, {"provenance": provenance([resolve_model(None)]), "seconds": seconds, "ratios": ratios}
        )


if __name__ == "__main__":
    main()
