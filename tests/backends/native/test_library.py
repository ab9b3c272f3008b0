"""The native library as it is found at run time: its instruction set, and what is said where it is missing."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from pathlib import Path

import pytest

from outpace import LLM, backends
from outpace.backends.native import build, library
from outpace.cli import main
from outpace.errors import BackendError
from tests.tiny_gguf import write_model

NEEDED = {
    "avx512vnni": {"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni"},
    "avx2": {"avx2", "fma", "f16c"},
    "portable": set[str](),
}
CPUINFO = Path("/proc/cpuinfo")


@pytest.mark.skipif(platform.machine() != "x86_64" or not CPUINFO.exists(), reason="reads the flags of Linux on x86-64")
@pytest.mark.skipif("OUTPACE_NATIVE_ISA" in os.environ, reason="OUTPACE_NATIVE_ISA chooses the instruction set")
def test_the_instruction_set_is_the_best_that_the_kernel_lists():
    try:
        isa = library.load_library().isa
    except BackendError as error:
        pytest.skip(str(error))
    listed = next(line for line in CPUINFO.read_text().splitlines() if line.startswith("flags")).split()
    assert isa == next(name for name, needed in NEEDED.items() if needed <= set(listed))


@pytest.fixture
def without_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As after an install that could not compile: no library, no compiler, no ziglang."""
    monkeypatch.setattr(library, "LIBRARY_PATH", tmp_path / "absent.so")
    monkeypatch.setattr(build, "find_system_compiler", lambda: None)
    monkeypatch.setattr(build, "find_zig", lambda: None)
    monkeypatch.setattr(build, "zig_target", lambda: "x86_64-linux-gnu")
    monkeypatch.setattr(backends, "_told", set())
    library.load_library.cache_clear()
    yield
    library.load_library.cache_clear()


MISSING = "the native library was not built (no working C++ compiler was found; install one ("
REMEDY = f"pip install {build.ZIG_REQUIREMENT}), then run {library.REBUILD}); {library.BENEFITS}"


def test_auto_warns_once_that_the_library_is_missing(without_library, tmp_path, caplog):
    path = str(write_model(tmp_path / "tiny.gguf"))
    for _ in range(2):  # as with a draft model, which is opened too
        with LLM(path, speculation="off") as llm:
            assert llm.config.backend == "llamacpp"
    (record,) = [each for each in caplog.records if each.levelname == "WARNING" and each.name == "outpace.backends"]
    line = record.getMessage()
    assert line.startswith(f"tiny.gguf runs on llama.cpp: {MISSING}") and line.endswith(REMEDY)
    assert "\n" not in line


def test_nothing_is_said_to_who_asks_for_llamacpp(without_library, tmp_path, caplog):
    with LLM(str(write_model(tmp_path / "tiny.gguf")), backend="llamacpp", speculation="off"):
        assert not [each for each in caplog.records if each.name == "outpace.backends"]


def test_nothing_is_warned_of_where_the_library_cannot_be_built(without_library, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(build, "IS_SUPPORTED", False)
    monkeypatch.setattr(library, "IS_SUPPORTED", False)
    with LLM(str(write_model(tmp_path / "tiny.gguf")), speculation="off"):
        assert not [each for each in caplog.records if each.levelname == "WARNING"]


def test_the_doctor_says_it_once_too(without_library, tmp_path, capsys):
    assert main(["doctor", "--model", str(write_model(tmp_path / "tiny.gguf")), "--rounds", "1"]) == 0
    text = capsys.readouterr().out
    (line,) = [each for each in text.splitlines() if "no working C++ compiler" in each]
    assert line.startswith(f"native library   missing: {MISSING}") and line.endswith(REMEDY)
    assert "compiler         none" in text


def test_an_explicit_native_is_an_error_with_the_remedy(without_library, tmp_path):
    with pytest.raises(BackendError, match=r"no working C\+\+ compiler was found; .* then run python -m"):
        LLM(str(write_model(tmp_path / "tiny.gguf")), backend="native")


def test_a_compiler_installed_since_is_named(without_library, monkeypatch):
    monkeypatch.setattr(library, "find_compiler", lambda: build.Compiler("g++", ["g++"], "x86_64-linux-gnu"))
    with pytest.raises(BackendError, match=r"not built \(g\+\+ is installed now; build it: python -m"):
        library.load_library()
