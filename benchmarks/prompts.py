"""Prompts from files as published: Spec-Bench, HumanEval, Self-Instruct, GSM8K, or JSON lines with a `prompt`."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outpace.bench.workloads import evenly

FEWEST = 4  # prompts of a block


def load_prompts(path: Path, count: int | None = None) -> list[str]:
    """All prompts of a file, or `count` of them."""
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    records = [json.loads(line) for line in data.splitlines() if line.strip()]
    prompts = [_prompt(record) for record in records]
    return prompts if count is None else evenly(prompts, count)


def _prompt(record: dict[str, Any]) -> str:
    if "turns" in record:
        return str(record["turns"][0])
    if "instruction" in record:
        given = record["instances"][0]["input"] if record.get("instances") else ""
        return f"{record['instruction']}\n{given}".strip()
    return str(record["question"] if "question" in record else record["prompt"])


def block_of(prompts: Sequence[list[int]], concurrency: int, block: int, fewest: int = FEWEST) -> list[list[int]]:
    """The prompts of one block of a GPU measurement; each block has others, as far as there are."""
    count = max(concurrency, fewest)
    return [prompts[(block * count + i) % len(prompts)] for i in range(count)]
