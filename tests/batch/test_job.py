"""A batch: its answers are the server's, every line gets one result, and it may end at any time."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import random
import resource
import signal
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from outpace.batch.answering import EngineEnded
from outpace.batch.job import Job
from outpace.core import StepPlan
from outpace.errors import OutpaceError, UsageError
from tests.batch.child import answer_all, fake_answerer
from tests.batch.child import main as child_main
from tests.fakes import ByteTokenizer, fake_engine, runner_of
from tests.server_helper import live

CHAT, TEXT, EMBEDDINGS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"


def line(custom_id: str, url: str, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def chat(custom_id: str, text: str = "Hello", **body: Any) -> dict[str, Any]:
    return line(custom_id, CHAT, messages=[{"role": "user", "content": text}], **{"max_tokens": 4, **body})


def write(path: Path, *lines: dict[str, Any] | bytes) -> Path:
    path.write_bytes(
        b"".join((each if isinstance(each, bytes) else json.dumps(each).encode()) + b"\n" for each in lines)
    )
    return path


def results(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text().splitlines()]


def answer(source: Path, target: Path, **options: Any) -> Job:
    job = Job(source, target, **options)
    try:
        asyncio.run(answer_all(job, fake_answerer()))
    finally:
        job.close()
    return job


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "in.jsonl", tmp_path / "out.jsonl"


def without_names(body: Any) -> Any:
    """An answer without what differs between two answers to one request: ids, times and what was measured."""
    if isinstance(body, dict):
        differs = ("id", "created", "created_at", "completed_at", "speculation")
        return {name: without_names(value) for name, value in body.items() if name not in differs}
    return [without_names(each) for each in body] if isinstance(body, list) else body


def test_answers_are_those_of_the_server(files):
    lines = [
        chat("greedy", temperature=0, logprobs=True, top_logprobs=2),
        chat("seeded", seed=7, n=2),
        line("text", TEXT, prompt=["abc", "abcd"], max_tokens=5, seed=3, echo=True),
        line("vector", EMBEDDINGS, input=["abc", "xyz"]),
        line("response", RESPONSES, input="Hello", max_output_tokens=6, temperature=0),
        chat("too long", "x" * 600),
        chat("wrong", temperature=-1),
        chat("elsewhere", model="gpt-4o"),
    ]
    answer(write(files[0], *lines), files[1])
    found = {each["custom_id"]: each["response"] for each in results(files[1])}
    assert sorted(found) == sorted(each["custom_id"] for each in lines)
    with live(fake_engine(max_context=512, cache_tokens=4096, max_sequences=8), ByteTokenizer(), 512) as server:
        for each in lines:
            status, body, _ = server.post(each["url"], each["body"])
            assert found[each["custom_id"]]["status_code"] == status
            assert without_names(found[each["custom_id"]]["body"]) == without_names(body), each["custom_id"]
    assert [found[name]["status_code"] for name in ("too long", "wrong", "elsewhere")] == [400, 400, 404]


def test_every_line_has_one_result_also_if_it_is_no_request(files):
    bad: list[dict[str, Any] | bytes] = [
        b"{broken",
        b"[1, 2]",
        b'{"method": "POST"}',
        {"custom_id": "url", "method": "POST", "url": "/v1/images", "body": {}},
        {"custom_id": "method", "method": "GET", "url": CHAT, "body": {}},
        {"custom_id": "body", "method": "POST", "url": CHAT, "body": "hi"},
        {**chat("field"), "temperature": 0},
        chat("stream", stream=True),
        chat("fine", "again"),
    ]
    job = answer(write(files[0], chat("fine"), b"", *bad), files[1])
    found = results(files[1])
    assert len(found) == 10 and job.tally.num_failed == 9
    codes = {each["error"]["code"] for each in found if each["error"]}
    assert codes == {
        "invalid_json_line",
        "missing_required_parameter",
        "invalid_url",
        "invalid_method",
        "unknown_parameter",
        "unsupported_parameter",
        "duplicate_custom_id",
    }
    assert all(each["response"] is None for each in found if each["error"])


def test_a_second_run_answers_what_was_added_and_writes_nothing_twice(files):
    answer(write(files[0], chat("a"), chat("b")), files[1])
    before = files[1].read_bytes()
    assert answer(files[0], files[1]).tally.num_new == 0
    assert files[1].read_bytes() == before
    write(files[0], chat("b"), chat("new"), chat("a"))  # in another order
    assert answer(files[0], files[1]).tally.num_new == 1
    assert files[1].read_bytes().startswith(before)


def test_an_incomplete_last_line_is_cut_off_and_answered_again(files):
    answer(write(files[0], *(chat(f"{i}") for i in range(5))), files[1], seed=1)
    whole = files[1].read_bytes()
    for cut in (1, 50, 200):
        files[1].write_bytes(whole[:-cut])
        assert answer(files[0], files[1], seed=1).tally.num_new == 1
        assert sorted(contents(files[1])) == sorted(contents_of(whole))


def contents(path: Path) -> list[tuple[str, Any]]:
    return contents_of(path.read_bytes())


def contents_of(data: bytes) -> list[tuple[str, Any]]:
    found = [json.loads(each) for each in data.splitlines()]
    return [(each["custom_id"], each["response"]["body"]["choices"][0]["message"]["content"]) for each in found]


def test_failed_lines_are_answered_again_only_if_asked_to(files):
    answer(write(files[0], chat("good"), chat("bad", model="other")), files[1])
    assert answer(files[0], files[1]).tally.num_new == 0
    assert answer(files[0], files[1], retry=True).tally.num_new == 1
    assert sorted(each["custom_id"] for each in results(files[1])) == ["bad", "good"]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b'{"some": "json"}\n', "line 1 of .* is not the result of a batch"),
        (None, "has a result for 'old', and no line of .* is the one it answers"),
    ],
)
def test_an_output_of_something_else_is_refused_and_left_alone(files, content, sentence):
    if content is None:
        answer(write(files[0], chat("old")), files[1])
    else:
        files[1].write_bytes(content)
    before = files[1].read_bytes()
    with pytest.raises(UsageError, match=sentence):
        Job(write(files[0], chat("new")), files[1])
    assert files[1].read_bytes() == before
    answer(files[0], files[1], overwrite=True)
    assert [each["custom_id"] for each in results(files[1])] == ["new"]


def test_two_batches_cannot_write_one_file_nor_over_the_input(files):
    write(files[0], chat("a"))
    job = Job(*files)
    with pytest.raises(UsageError, match="another batch is writing"):
        Job(*files)
    job.close()
    with pytest.raises(UsageError, match="is the input"):
        Job(files[0], files[0])


def test_a_dead_engine_ends_the_run_and_spoils_no_line(files, monkeypatch):
    answerer = fake_answerer()
    runner = runner_of(answerer.engine.engine)
    forward = runner.forward

    def failing(plan: StepPlan) -> Any:
        if runner.num_forwards > 20:
            raise SystemExit("the device is gone")
        return forward(plan)

    monkeypatch.setattr(runner, "forward", failing)
    job = Job(write(files[0], *(chat(f"{i}") for i in range(60))), files[1], seed=1)
    with pytest.raises(EngineEnded, match="the engine has stopped"):
        asyncio.run(answer_all(job, answerer))
    job.close()
    assert 0 < job.tally.num_done < 60 and not job.tally.num_failed
    assert answer(files[0], files[1], seed=1).tally.is_complete


def test_a_full_disk_is_one_sentence_and_spoils_no_line(files):
    job = Job(write(files[0], *(chat(f"{i}") for i in range(9))), files[1], seed=1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))  # the file may have this size
    try:
        with pytest.raises(OutpaceError, match=r"cannot write .*; what is in it stays valid"):
            asyncio.run(answer_all(job, fake_answerer()))
        job.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert 0 < files[1].read_bytes().count(b"\n") < 9
    assert answer(files[0], files[1], seed=1).tally.is_complete
    assert len(contents(files[1])) == 9


def test_an_output_that_is_no_file_is_refused(files):
    with pytest.raises(UsageError, match="/dev/full is not a file that can be continued"):
        Job(write(files[0], chat("a")), Path("/dev/full"))


def start(source: Path, target: Path) -> BaseProcess:
    context = multiprocessing.get_context("forkserver")  # the imports take seconds, and are done once for all runs
    context.set_forkserver_preload(["tests.batch.child"])
    child = context.Process(target=child_main, args=(str(source), str(target)))
    child.start()
    return child


def wait_for_lines(target: Path, count: int, child: BaseProcess) -> None:
    while child.is_alive() and (not target.exists() or target.read_bytes().count(b"\n") < count):
        time.sleep(0.002)


def test_ctrl_c_waits_for_the_answers_that_run(files):
    write(files[0], *(chat(f"{i}", max_tokens=30) for i in range(300)))
    child = start(*files)
    wait_for_lines(files[1], 20, child)
    assert child.pid is not None
    os.kill(child.pid, signal.SIGINT)
    child.join(60)
    assert child.exitcode == 1
    found = results(files[1])
    assert 20 <= len(found) < 300
    assert all(each["response"]["status_code"] == 200 for each in found)
    assert answer(files[0], files[1], seed=1).tally.num_new == 300 - len(found)


def kill_and_resume(source: Path, target: Path, num_lines: int, num_kills: int) -> None:
    """Kill runs at random moments; at the end, every line has the answer of a run that nothing interrupted."""
    chance = random.Random(num_lines)
    write(source, *(chat(f"{i}", f"{i * 7919}") for i in range(num_lines)))
    for stop in sorted(chance.sample(range(1, num_lines), num_kills)):
        child = start(source, target)
        wait_for_lines(target, stop, child)
        time.sleep(chance.random() * 0.01)
        child.kill()
        child.join()
    assert target.read_bytes().count(b"\n") < num_lines, "no run was killed before its end"
    child = start(source, target)
    child.join()
    assert child.exitcode == 0
    whole = target.with_name("whole.jsonl")
    answer(source, whole, seed=1)
    assert len(results(target)) == num_lines
    assert sorted(contents(target)) == sorted(contents(whole))


def test_killed_five_times_a_batch_loses_and_doubles_no_line(files):
    kill_and_resume(files[0], files[1], 400, 5)


@pytest.mark.slow
def test_killed_five_times_a_batch_of_5000_loses_and_doubles_no_line(files):
    kill_and_resume(files[0], files[1], 5000, 5)
