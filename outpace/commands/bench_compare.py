"""`outpace bench compare`: shows the changes between two runs of `outpace bench --json`."""

from __future__ import annotations

import argparse
from pathlib import Path

_DESCRIPTION = """\
Compare two runs cell by cell and setting by setting: speed, speedup over plain decoding, tail, acceptance. Tokens per
second change with the machine, the model or the code. Speedup changes with speculation, because each run compares with
its own plain decoding.

example:
  outpace bench compare before.json after.json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = _DESCRIPTION
    parser.add_argument("before", type=Path, metavar="A.json", help="a file written by outpace bench --json")
    parser.add_argument("after", type=Path, metavar="B.json", help="the run to compare with it")


def execute(options: argparse.Namespace) -> int:
    from outpace.bench.compare import as_text
    from outpace.bench.results import load

    print(as_text(load(options.before), load(options.after)))
    return 0
