"""A short run of the fuzzer of requests, and that it notices what it must."""

from __future__ import annotations

import pytest

from outpace.server.state import ServerState
from outpace.server.streaming import EventStream
from tests.server.request_fuzzer import Fuzzer


def test_hostile_requests_get_no_500_leave_no_traceback_and_block_nobody():
    fuzzer = Fuzzer(seed=20)
    fuzzer.run(cases=1500)
    assert fuzzer.failures == []
    assert fuzzer.counts.total() == 1500
    for kind in ("whole: 200", "whole: 400", "whole: 413", "half_closed: 200", "broken: 400", "vanishing: left"):
        assert fuzzer.counts[kind] > 0, fuzzer.counts


@pytest.mark.parametrize(
    ("part", "name", "sign"), [(ServerState, "check_model", ": 500"), (EventStream, "_write", "log: outpace.server")]
)
def test_the_fuzzer_notices_failures(monkeypatch, part, name, sign):
    def broken(*_: object) -> None:
        raise RuntimeError("broken on purpose")

    monkeypatch.setattr(part, name, broken)
    fuzzer = Fuzzer(seed=20)
    fuzzer.run(cases=300)
    assert any(sign in failure for failure in fuzzer.failures), fuzzer.failures
