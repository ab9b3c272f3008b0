"""Answers a batch with the fake model, in a process that a test can kill."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

from outpace.batch.answering import Answerer, unlimited
from outpace.batch.job import Job, run
from outpace.server.config import ServerConfig
from tests.fakes import ByteTokenizer, fake_engine


def fake_answerer(**options: Any) -> Answerer:
    settings: dict[str, Any] = {"max_context": 512, "cache_tokens": 4096, "max_sequences": 8, "speculation": "off"}
    engine = fake_engine(**{**settings, **options})
    config = unlimited(ServerConfig(model_names=("fake",)))
    return Answerer(engine, ByteTokenizer(), config, max_context=512)


async def answer_all(job: Job, answerer: Answerer) -> None:
    async with answerer:
        await run(job, answerer)


def main(source: str, target: str) -> None:
    """Exit status 0 if every line has a result."""
    job = Job(Path(source), Path(target), seed=1)
    asyncio.run(answer_all(job, fake_answerer()))
    job.close()
    sys.exit(0 if job.tally.is_complete else 1)
