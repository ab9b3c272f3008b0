"""Ray's processes inherit a policy by which they interrupt no engine."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from threading import Thread

import pytest

from outpace.ray.priority import run_at_once, yield_to_engines

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_getscheduler"), reason="this system has no such policies")


def policy() -> int:
    return os.sched_getscheduler(0)


def policy_of_a_process() -> int:
    command = [sys.executable, "-c", "import os; print(os.sched_getscheduler(0))"]
    return int(subprocess.check_output(command))


def policy_of_a_thread() -> int:
    found = list[int]()
    thread = Thread(target=lambda: found.append(policy()))
    thread.start()
    thread.join()
    return found[0]


def test_a_policy_is_inherited_and_given_up_and_no_other_thread_gets_it():
    def run() -> list[int]:
        found = [policy()]
        for choose in (yield_to_engines, run_at_once):
            choose()
            found += [policy(), policy_of_a_thread(), policy_of_a_process()]
        return found

    before = policy()
    with ThreadPoolExecutor(1) as pool:  # a thread of its own, which ends with the test
        found = pool.submit(run).result()
    assert found == [before, *[os.SCHED_BATCH] * 3, *[os.SCHED_OTHER] * 3]
    assert policy() == before


def test_where_it_is_forbidden_the_policy_stays(monkeypatch):
    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    before = policy()
    yield_to_engines()
    assert policy() == before
