"""A library that ziglang compiled computes the bits of the system compiler's, with every instruction set.

Needs the package and a compiler: pip install ziglang==0.17.0 && pytest -m slow tests/backends/native/test_zig.py
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from outpace.backends.native import build
from outpace.backends.native.library import Library

pytestmark = pytest.mark.slow

ISAS = ("avx512vnni", "avx2", "portable") if platform.machine() == "x86_64" else ("neon", "portable")


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    compilers = {"system": build.find_system_compiler(), "zig": build.find_zig()}
    if None in compilers.values():
        pytest.skip(f"needs a C++ compiler and {build.ZIG_REQUIREMENT}")
    folder = tmp_path_factory.mktemp("libraries")
    return {name: build.build(folder / f"{name}.so", compiler) for name, compiler in compilers.items()}


def bits(path: Path, folder: Path, isa: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.backends.native.library_bits", str(path), str(folder)]
    environment = os.environ | {"OUTPACE_NATIVE_ISA": isa}
    found: dict[str, Any] = json.loads(subprocess.check_output(command, env=environment, text=True))
    return found


@pytest.mark.parametrize("isa", ISAS)
def test_both_compilers_give_the_same_bits(libraries, tmp_path, isa):
    expected, found = (bits(libraries[name], tmp_path, isa) for name in ("system", "zig"))
    if expected["isa"] != isa:
        pytest.skip(f"this processor has no {isa}")
    assert len(expected["digests"]) == len(set(expected["digests"].values())) > 30
    assert found == expected


def test_the_library_needs_only_an_old_glibc(libraries):
    """All versions that it names are at most the one it is built for, and it names no C++ run-time library."""
    content = libraries["zig"].read_bytes()
    versions = {tuple(map(int, word.split(b"."))) for word in _words_after(content, b"GLIBC_")}
    assert versions and max(versions) <= tuple(map(int, build.ZIG_GLIBC.split(".")))
    assert b"libstdc++.so" not in content and b"libgcc_s.so" not in content


def test_an_exception_inside_becomes_an_error_code(libraries):
    library = Library(libraries["zig"])
    assert library.verifier_create(-1, 1, None) != 0
    assert library.last_error().decode() == "the vocabulary has an impossible size"


def _words_after(content: bytes, prefix: bytes) -> list[bytes]:
    return [part.split(b"\0")[0] for part in content.split(prefix)[1:]]
