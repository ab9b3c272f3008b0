"""Which compiler builds the native library, and when a build asks for the package ziglang. Compilers are fakes here."""

from __future__ import annotations

import platform
import sys
from pathlib import Path

import pytest

from outpace.backends.native import build
from outpace.backends.native.build import BuildError, Compiler

if not build.IS_SUPPORTED:
    pytest.skip("the library is not built on this system", allow_module_level=True)

ANSWERS = 'case "$*" in *-dumpmachine*) echo x86_64-linux-gnu;; esac'
WORKS = f"#!/bin/sh\n{ANSWERS}\n"
STUB = "#!/bin/sh\necho 'error: no developer tools were found' >&2; exit 1\n"
TOO_OLD = f"#!/bin/sh\n{ANSWERS}\ncase \"$*\" in *avx512vnni*) echo 'error: unknown option' >&2; exit 1;; esac\n"


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder on the path, empty."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("CXX", raising=False)
    return folder


@pytest.fixture
def linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "zig_target", lambda: "x86_64-linux-gnu")


def install(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(script)
    (folder / name).chmod(0o755)


def set_zig(monkeypatch: pytest.MonkeyPatch, *, is_installed: bool) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if is_installed else None)


def test_a_machine_with_a_compiler_asks_for_nothing(programs, linux):
    install(programs, "g++", WORKS)
    assert build.build_requirements() == []
    assert build.find_compiler() == Compiler("g++", ["g++"], "x86_64-linux-gnu")


def test_a_machine_without_a_compiler_asks_for_ziglang(programs, linux):
    assert build.build_requirements() == [build.ZIG_REQUIREMENT]


@pytest.mark.parametrize("script", [STUB, TOO_OLD], ids=["stub", "too old"])
def test_a_compiler_that_does_not_work_is_passed_over(programs, linux, script):
    install(programs, "c++", script)
    assert build.build_requirements() == [build.ZIG_REQUIREMENT]
    install(programs, "clang++", WORKS)
    assert build.build_requirements() == []
    assert build.find_compiler().name == "clang++"


def test_a_named_compiler_that_does_not_work_is_an_error(programs, linux, monkeypatch):
    install(programs, "own++", STUB)
    install(programs, "g++", WORKS)
    monkeypatch.setenv("CXX", "own++ -O1")
    with pytest.raises(BuildError, match=r"^own\+\+ failed: error: no developer tools .*; correct or unset CXX$"):
        build.find_compiler()
    assert build.build_requirements() == []


def test_a_named_compiler_comes_first(programs, monkeypatch):
    install(programs, "own++", WORKS)
    install(programs, "c++", WORKS)
    monkeypatch.setenv("CXX", "own++ -m64")
    assert build.find_compiler().command == ["own++", "-m64"]


def test_ziglang_is_used_if_it_is_installed_and_nothing_else_is(programs, linux, monkeypatch):
    set_zig(monkeypatch, is_installed=True)
    compiler = build.find_compiler()
    assert compiler.is_zig and compiler.command[:4] == [sys.executable, "-m", "ziglang", "c++"]
    # Without a version of glibc, the library would need the newest one; without a target, this very processor.
    assert compiler.command[4:] == ["-target", "x86_64-linux-gnu.2.17"]
    install(programs, "c++", WORKS)
    assert not build.find_compiler().is_zig


def test_without_any_compiler_the_sentence_names_the_remedies(programs, linux, monkeypatch):
    set_zig(monkeypatch, is_installed=False)
    with pytest.raises(BuildError) as caught:
        build.find_compiler()
    assert str(caught.value).startswith("no working C++ compiler was found; install one (Debian: apt install g++")
    assert f"pip install {build.ZIG_REQUIREMENT}" in str(caught.value)
    monkeypatch.setattr(build, "zig_target", lambda: None)
    with pytest.raises(BuildError) as caught:
        build.find_compiler()
    assert "ziglang" not in str(caught.value)


@pytest.mark.parametrize(
    ("system", "machine", "libc", "target"),
    [
        ("linux", "x86_64", "glibc", "x86_64-linux-gnu"),
        ("linux", "aarch64", "glibc", "aarch64-linux-gnu"),
        ("linux", "x86_64", "", None),
        ("linux", "riscv64", "glibc", None),
        ("darwin", "x86_64", "glibc", None),
    ],
)
def test_ziglang_is_asked_for_only_where_it_was_tried(programs, monkeypatch, system, machine, libc, target):
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(platform, "libc_ver", lambda: (libc, "2.36"))
    assert build.zig_target() == target
    assert build.build_requirements() == ([build.ZIG_REQUIREMENT] if target else [])


def test_flags_of_an_instruction_set_follow_target_and_compiler():
    assert Compiler("g++", ["g++"], "x86_64-linux-gnu").isa_flags() == build.X86_FLAGS
    assert Compiler("g++", ["g++"], "aarch64-linux-gnu").isa_flags() == build.ARM_FLAGS
    assert Compiler("ziglang", ["zig"], "aarch64-linux-gnu").isa_flags() == build.ZIG_ARM_FLAGS
    assert Compiler("c++", ["c++"], "arm64-apple-darwin23.0").isa_flags() == {}
    assert Compiler("g++", ["g++"], "riscv64-linux-gnu").isa_flags() == {}


def test_the_compiler_leaves_no_cache_behind(programs, tmp_path, monkeypatch):
    names = ("ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR")
    install(programs, "c++", '#!/bin/sh\necho "$ZIG_GLOBAL_CACHE_DIR $ZIG_LOCAL_CACHE_DIR" > "$1"\n')
    compiler = Compiler("c++", ["c++"], "x86_64-linux-gnu")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    compiler.run([str(tmp_path / "told")], tmp_path / "folder")
    assert (tmp_path / "told").read_text().split() == [str(tmp_path / "folder" / "zig")] * 2
    monkeypatch.setenv(names[0], "kept")  # a developer's cache makes the next build fast
    compiler.run([str(tmp_path / "told")], tmp_path / "folder")
    assert (tmp_path / "told").read_text().split()[0] == "kept"
