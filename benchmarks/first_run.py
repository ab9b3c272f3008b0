"""How long the first run takes, in a fresh process, beside another checkout of this project.

    python -m benchmarks.first_run --other CHECKOUT [--rounds 9] [--json FILE]

`outpace run` answers a short prompt with the embedded model, from each checkout in turns, timed from the start of the
process to the first character and to its end. The first run has a cache folder that holds the model file and nothing
else; the second uses what the first left there, such as measured costs. Both checkouts need their native library built.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter

from benchmarks.report import provenance, spread, write_json
from outpace.models.resolve import resolve_model

HERE = Path(__file__).resolve().parents[1]
COMMAND = [sys.executable, "-m", "outpace", "run", "What is a bicycle?", "--temperature", "0", "--max-tokens", "16"]
MARKS = ("first character", "end")


def seconds_of_run(checkout: Path, cache: Path) -> tuple[float, float]:
    """From the start of the process to the first character of the answer, and to its end."""
    environment = os.environ | {"OUTPACE_CACHE_DIR": str(cache), "PYTHONPATH": str(checkout)}
    begin = perf_counter()
    with subprocess.Popen(
        COMMAND, cwd=checkout, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--other", type=Path, required=True, help="another checkout, with its native library")
    parser.add_argument("--rounds", type=int, default=9, help="(default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    checkouts = {"this": HERE, "other": options.other.resolve()}
    seconds: dict[str, list[float]] = {}
    for i in range(-1, options.rounds):  # the first round reads the files from disk
        for name in sorted(checkouts, reverse=i % 2 == 0):
            with tempfile.TemporaryDirectory() as folder:
                fill(Path(folder))
                for run in ("first run", "second run"):
                    for mark, taken in zip(MARKS, seconds_of_run(checkouts[name], Path(folder)), strict=True):
                        if i >= 0:
                            seconds.setdefault(f"{name}, {run}, {mark}", []).append(taken)
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
