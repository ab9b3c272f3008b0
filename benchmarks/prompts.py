"""Prompts from the files people have: Spec-Bench and HumanEval as published, or JSON lines with a `prompt`."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from outpace.bench.workloads import evenly


def load_prompts(path: Path, count: int | None = None) -> list[str]:
    """All prompts of a file, or `count` of them."""
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    records = [json.loads(line) for line in data.splitlines() if line.strip()]
    prompts = [record["turns"][0] if "turns" in record else record["prompt"] for record in records]
    return prompts if count is None else evenly(prompts, count)
