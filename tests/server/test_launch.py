"""A server in a longer-lived process leaves that process's garbage collection as it was."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from tests.fakes import ByteTokenizer, fake_engine
from tests.server_helper import live


@pytest.fixture
def thawed() -> Iterator[None]:
    gc.unfreeze()
    yield
    gc.freeze()


def test_objects_older_than_the_server_are_frozen_while_it_runs(thawed):
    threshold = gc.get_threshold()
    with live(fake_engine(), ByteTokenizer(), 256):
        assert gc.get_freeze_count() > 0 and gc.get_threshold()[2] > threshold[2]
    assert gc.get_freeze_count() == 0 and gc.get_threshold() == threshold


def test_what_the_program_froze_itself_stays_frozen(thawed):
    gc.freeze()
    frozen = gc.get_freeze_count()
    with live(fake_engine(), ByteTokenizer(), 256):
        pass
    assert gc.get_freeze_count() > frozen / 2  # some of them are garbage by now
