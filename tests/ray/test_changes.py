"""Replicas that are replaced or added while clients ask: python -m pytest -m ray tests/ray (minutes)."""

from __future__ import annotations

import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="ray is not installed; pip install outpace[ray]")

from outpace import LLM, SamplingParams
from tests.ray.cluster import Clients, Cluster
from tests.server_helper import wait_until
from tests.tiny_gguf import write_model

pytestmark = pytest.mark.ray
NUM_CLIENTS, NUM_TOKENS = 8, 64
FLAGS = ("--max-model-len", "256", "--log-level", "info", "--served-model-name", "tiny")


def offline(model: Path) -> list[str]:
    """The offline engine's answer to each client's question."""
    with LLM(str(model), max_context=256, threads=1) as llm:
        params = [sampling(number) for number in range(NUM_CLIENTS)]
        return [each.outputs[0].text for each in llm.generate([prompt(i) for i in range(NUM_CLIENTS)], params)]


def sampling(number: int) -> SamplingParams:
    return SamplingParams(max_tokens=NUM_TOKENS, seed=number, temperature=0.8, ignore_eos=True)


def prompt(number: int) -> str:
    return f"{number} and {number} and {number} and"


def asking(cluster: Cluster) -> Callable[[int, bool], str]:
    client = cluster.client(max_retries=0).with_options(timeout=180)

    def ask(number: int, is_streamed: bool) -> str:
        options: dict[str, Any] = {"max_tokens": NUM_TOKENS, "seed": number, "temperature": 0.8}
        found = client.completions.create(
            model="tiny", prompt=prompt(number), stream=is_streamed, extra_body={"ignore_eos": True}, **options
        )
        if not is_streamed:
            return str(found.choices[0].text)
        parts = list(found)
        assert parts[-1].choices[0].finish_reason == "length", "the stream ended early"
        return "".join(part.choices[0].text for part in parts)

    return ask


def test_an_update_of_weights_and_one_of_the_policy_lose_no_answer(tmp_path):
    old, new = (write_model(tmp_path / f"{seed}.gguf", seed=seed) for seed in (0, 1))
    expected = list(zip(offline(old), offline(new), strict=True))
    settings = tmp_path / "settings.yaml"

    def write(model: Path, *lines: str) -> None:
        settings.write_text("\n".join([f"model: {model}", "replicas: 2", *lines]) + "\n")

    write(old, "speculation: 'off'")
    cluster = Cluster(2, "--config", str(settings), *FLAGS)
    num_settled = list[list[int]]()  # per change: answers of each client when the last old replica was gone
    try:
        with Clients(NUM_CLIENTS, asking(cluster)) as clients:
            for lines in (("speculation: 'off'",), ("speculation: 'on'", "method: ngram")):
                clients.wait_for_answers()
                before = cluster.replicas()
                write(new, *lines)
                cluster.process.send_signal(signal.SIGHUP)
                wait_until(partial(is_replaced, cluster, before), 240)
                num_settled.append([len(each) for each in clients.answers])
                clients.wait_for_answers()
    finally:
        cluster.stop()
    assert not clients.errors
    for number, (answers, first) in enumerate(zip(clients.answers, num_settled[0], strict=True)):
        assert answers[0] == expected[number][0] and set(answers) <= set(expected[number])
        assert set(answers[first + 1 :]) == {expected[number][1]}, "an old replica answered"
    num_answers = sum(map(len, clients.answers))
    print(f"{num_answers} answers equal to the offline engine's, none lost; the longest took {clients.longest:.1f} s")


def is_replaced(cluster: Cluster, before: set[int]) -> bool:
    return len(cluster.replicas()) == 2 and not cluster.replicas() & before


def test_wrong_settings_leave_the_replicas_as_they_are_and_requests_wait_for_the_only_one(tmp_path, capfd):
    settings = tmp_path / "settings.yaml"
    good = f"model: {write_model(tmp_path / 'tiny.gguf')}\nreplicas: 1\n"
    settings.write_text(good)
    cluster = Cluster(1, "--config", str(settings), *FLAGS)

    def is_logged(sentence: str) -> bool:
        return sentence in capfd.readouterr().err

    try:
        ask = asking(cluster)
        expected, before = ask(0, False), cluster.replicas()
        for wrong, sentence in (
            (good + "max-num-seqs: many\n", "the settings were not changed: in "),
            (good + "host: 0.0.0.0\n", "host and port cannot change while it serves"),
        ):
            settings.write_text(wrong)
            cluster.process.send_signal(signal.SIGHUP)
            wait_until(partial(is_logged, sentence), 30)
            assert cluster.replicas() == before and ask(0, True) == expected
        with Clients(2, lambda _, is_streamed: ask(0, is_streamed)) as clients:
            settings.write_text(f"model: {tmp_path / 'missing.gguf'}\nreplicas: 1\n")
            cluster.process.send_signal(signal.SIGHUP)
            wait_until(partial(is_logged, "the old settings are used"), 240)
            clients.wait_for_answers()
            restored = cluster.replicas()
            settings.write_text(good + "max-num-seqs: 3\n")
            cluster.process.send_signal(signal.SIGHUP)
            wait_until(lambda: len(cluster.replicas()) == 1 and not cluster.replicas() & restored, 240)
            clients.wait_for_answers()
    finally:
        cluster.stop()
    assert not clients.errors, "with one replica there is none meanwhile, so requests wait"
    assert [set(each) for each in clients.answers] == [{expected}] * 2
    with capfd.disabled():
        print(f"{sum(map(len, clients.answers))} answers, none lost; the longest took {clients.longest:.1f} s")


def test_a_long_queue_adds_a_replica_and_a_short_one_removes_it_without_losing_an_answer(tmp_path):
    model = write_model(tmp_path / "tiny.gguf")
    expected = offline(model)
    limits = ("--replicas", "auto", "--min-replicas", "1", "--max-replicas", "2", "--max-num-seqs", "2")
    delays = ("--upscale-delay", "1", "--downscale-delay", "2")
    cluster = Cluster(1, str(model), *limits, *delays, *FLAGS)
    try:
        ask = asking(cluster)
        with Clients(NUM_CLIENTS, ask) as many:
            wait_until(lambda: len(cluster.replicas()) == 2, 180)
            many.wait_for_answers()
        with Clients(1, ask) as one:
            wait_until(lambda: len(cluster.replicas()) == 1, 240)
            one.wait_for_answers()
    finally:
        cluster.stop()
    assert not many.errors and not one.errors
    for clients in (many, one):
        assert [set(each) for each in clients.answers] == [{text} for text in expected[: len(clients.answers)]]
