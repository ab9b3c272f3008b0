"""`outpace bench compare`: what changed between two runs of `outpace bench --json`."""

from __future__ import annotations

import argparse
from pathlib import Path

_DESCRIPTION = """\
Compare two runs cell by cell and setting by setting: speed, speedup over plain decoding, tail, acceptance. The second
run is shown beside the first. Changes in tokens per second between two runs are changes of machine, model or code;
changes in speedup are changes of speculation, each run having its own plain decoding to compare with.

example:
  outpace bench compare before.json after.json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = _DESCRIPTION
    parser.add_argument("before", type=Path, metavar="A.json", help="written by outpace bench --json")
    parser.add_argument("after", type=Path, metavar="B.json", help="another one")


def execute(options: argparse.Namespace) -> int:
    from outpace.bench.compare import as_text
    from outpace.bench.results import load

    print(as_text(load(options.before), load(options.after)))
    return 0
