"""`outpace doctor` on a tiny model: what it finds, and what it reports as missing."""

from __future__ import annotations

import json

import pytest

from outpace.backends.native import library
from outpace.cli import main
from outpace.errors import BackendError
from tests.tiny_gguf import write_model


@pytest.fixture
def path(tmp_path) -> str:
    return str(write_model(tmp_path / "tiny.gguf"))


def test_it_measures_every_backend_that_can_run_the_model(path, capsys):
    assert main(["doctor", "--model", path, "--rounds", "1", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert list(report["curves"]["llamacpp"]) == ["1", "2", "3", "4", "6", "8", "12", "16"]
    if report["machine"]["native_library"]:
        assert all(milliseconds > 0 for milliseconds in report["curves"]["native"].values())
        assert report["floor_ms"] > 0 and report["machine"]["instruction_set"]


def test_it_says_what_is_missing_and_what_that_would_bring(path, capsys, monkeypatch):
    def absent() -> None:
        raise BackendError("the native library was not built (no C++ compiler was found)")

    monkeypatch.setattr(library, "load_library", absent)
    monkeypatch.setattr("outpace.backends.native.runner.load_library", absent)
    assert main(["doctor", "--model", path, "--rounds", "1"]) == 0
    text = capsys.readouterr().out
    assert "native library   missing: the native library was not built" in text
    assert text.count("the native library was not built") == text.count("the library gives faster decoding") == 1
    assert "llamacpp, ms" in text and "native, ms" not in text


def test_it_says_why_a_model_does_not_run_natively(tmp_path, capsys):
    path = write_model(tmp_path / "tiny.gguf", metadata={"attention.sliding_window": 64})
    assert main(["doctor", "--model", str(path), "--rounds", "1"]) == 0
    assert "cannot run it:" in capsys.readouterr().out
