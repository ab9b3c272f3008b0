"""Replicas and batches on a real Ray cluster on this machine: python -m pytest -m ray tests/ray (minutes)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("ray", reason="ray is not installed; pip install outpace[ray]")

from openai import APIError

from outpace import LLM, SamplingParams
from tests.ray.cluster import Cluster
from tests.server_helper import wait_until

pytestmark = [pytest.mark.ray, pytest.mark.model]
NUM_REPLICAS, NUM_CLIENTS, SECONDS = 3, 8, 40.0
OPTIONS = ["--max-model-len", "512", "--log-level", "warning", "--generation-config", "vllm"]


def messages(number: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"Count from {number} upwards."}]


@pytest.fixture(scope="module")
def expected() -> list[str]:
    """The offline engine's answers."""
    with LLM(max_context=512, threads=1) as llm:
        params = [SamplingParams(max_tokens=24, seed=number, temperature=1.0) for number in range(NUM_CLIENTS)]
        outputs = llm.chat([messages(number) for number in range(NUM_CLIENTS)], params)
    return [output.outputs[0].text for output in outputs]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    cluster = Cluster(NUM_REPLICAS, "--replicas", str(NUM_REPLICAS), *OPTIONS)
    yield cluster
    cluster.stop()


def test_a_killed_replica_spoils_no_answer(cluster, expected):
    complete, wrong, errors = [0] * NUM_CLIENTS, list[str](), list[str]()
    end = time.monotonic() + SECONDS

    def ask(number: int) -> None:
        client = cluster.client(max_retries=0)
        while time.monotonic() < end:
            is_streamed = bool(complete[number] % 2)
            try:
                text = answer(client, number, is_streamed)
            except (APIError, httpx.HTTPError) as error:  # the latter: a stream that has begun ends before its end
                errors.append(repr(error))
                text = answer(client, number, is_streamed)  # a retry mends it
            if text == expected[number]:
                complete[number] += 1
            else:
                wrong.append(text)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(NUM_CLIENTS)]
    for thread in threads:
        thread.start()
    time.sleep(SECONDS / 4)
    before = cluster.replicas()
    os.kill(min(before), signal.SIGKILL)
    for thread in threads:
        thread.join()
    assert not wrong and all(complete)
    wait_until(lambda: len(cluster.replicas()) == NUM_REPLICAS, 120)
    assert cluster.replicas() - before, "no replica was added"
    print(f"{sum(complete)} answers equal to the offline engine's, {len(errors)} errors that a retry mended: {errors}")


def answer(client: Any, number: int, is_streamed: bool) -> str:
    options: dict[str, Any] = {"model": "SmolLM2-135M-Instruct", "max_tokens": 24, "seed": number}
    if not is_streamed:
        reply = client.chat.completions.create(messages=messages(number), temperature=1.0, **options)
        return str(reply.choices[0].message.content)
    parts = client.chat.completions.create(messages=messages(number), temperature=1.0, stream=True, **options)
    return "".join(part.choices[0].delta.content or "" for part in parts)


def test_errors_and_metrics_pass_through_the_front(cluster):
    client = cluster.client(max_retries=0)
    with pytest.raises(APIError, match="is not served here"):
        client.chat.completions.create(model="other", messages=[{"role": "user", "content": "Hi"}])
    from urllib.request import urlopen

    def num_replicas() -> int:
        with urlopen(f"http://127.0.0.1:{cluster.port}/metrics") as response:
            text = response.read().decode()
        lines = [line for line in text.splitlines() if line.startswith("vllm:num_requests_running{")]
        return sum("replica=" in line for line in lines)

    wait_until(lambda: num_replicas() == NUM_REPLICAS, 60)


def test_only_engines_and_what_serves_requests_interrupt_other_threads(cluster):
    for replica in cluster.replicas():
        policies = {os.sched_getscheduler(int(thread.name)) for thread in Path(f"/proc/{replica}/task").iterdir()}
        assert policies == {os.SCHED_OTHER, os.SCHED_BATCH}  # the engine and its event loop; Ray's threads
    assert os.sched_getscheduler(cluster.process.pid) == os.SCHED_BATCH


def test_a_batch_on_the_cluster_gives_the_answers_of_one_without(tmp_path):
    source = tmp_path / "in.jsonl"
    lines: list[Any] = [
        {"custom_id": f"{number}", "method": "POST", "url": "/v1/chat/completions",
         "body": {"messages": messages(number), "max_tokens": 8}}
        for number in range(20)
    ]  # fmt: skip
    source.write_text("".join(json.dumps(line) + "\n" for line in lines) + "broken\n")
    found = []
    for name, more in (("alone", []), ("ray", ["--ray", "--engines", "2", "--engine-cpus", "0.5"])):
        target = tmp_path / f"{name}.jsonl"
        command = [sys.executable, "-m", "outpace", "batch", str(source), str(target), "--seed", "1", *more]
        assert subprocess.run(command, timeout=400).returncode == 1  # one line is broken
        results = [json.loads(line) for line in target.read_text().splitlines()]
        assert len(results) == 21
        found.append({each["id"]: content(each) for each in results})
    assert found[0] == found[1]


def content(result: dict[str, Any]) -> Any:
    if result["response"] is None:
        return result["error"]
    return result["response"]["body"]["choices"][0]["message"]["content"]
