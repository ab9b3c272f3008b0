"""`outpace bench peers`: compares Outpace with other installed engines on the same prompts."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import get_args

from outpace.bench.workloads import BUILT_IN
from outpace.config import BackendName

_DESCRIPTION = """\
Answer the same prompts, greedily, one at a time, with Outpace and with other engines that can run the same GGUF file
with and without speculation: llama.cpp's own server (inside xllamacpp), transformers (prompt lookup and assisted
generation), OpenVINO GenAI, vLLM. Runs are interleaved on one machine; speed and texts are compared. The report names
engines that were skipped because they are not installed.

examples:
  outpace bench peers
  outpace bench peers --model target.gguf --draft draft.gguf --peers llama.cpp,transformers --json peers.json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = _DESCRIPTION
    parser.add_argument("--model", metavar="FILE", help="a GGUF file (default: the embedded SmolLM2-135M-Instruct)")
    parser.add_argument("--draft", metavar="FILE", help="a smaller GGUF with the same vocabulary, to draft with")
    parser.add_argument("--backend", choices=get_args(BackendName), default="auto", help="of Outpace (default: auto)")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads of every engine (default: all usable)")
    parser.add_argument("--peers", metavar="NAME,...", help="engines to compare with (default: all that are installed)")
    parser.add_argument("--workloads", default=",".join(BUILT_IN), metavar="NAME,...", help="(default: all built in)")
    parser.add_argument(
        "--requests", type=int, default=2, metavar="N", help="requests per workload (default: %(default)s)"
    )
    parser.add_argument("--max-tokens", type=int, default=96, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--depth", type=int, default=4, metavar="K", help="draft tokens a step (default: %(default)s)")
    parser.add_argument("--time-budget", type=float, default=480.0, metavar="S", help="(default: %(default).0f s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all measurements")


def execute(options: argparse.Namespace) -> int:
    from outpace.bench.peers import run

    return run(options)
