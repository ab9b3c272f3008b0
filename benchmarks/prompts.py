"""Prompts from the files people have: Spec-Bench and HumanEval as published, or JSON lines with a `prompt`."""

from __future__ import annotations

import gzip
import json
from pathlib import Path


def load_prompts(path: Path, count: int) -> list[str]:
    """`count` prompts spread evenly over the file, so that every kind it holds is represented."""
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    records = [json.loads(line) for line in data.splitlines() if line.strip()]
    prompts = [record["turns"][0] if "turns" in record else record["prompt"] for record in records]
    count = min(count, len(prompts))
    return [prompts[i * len(prompts) // count] for i in range(count)]
