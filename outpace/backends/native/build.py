r"""Compiles the native library: at install time, or later by hand.

The compiler is the system's or, where there is none, the Python package ziglang. Both give the same bits.

    python -m outpace.backends.native.build                 # (re)build in place, as `pip install` does
    python -m outpace.backends.native.build --test          # build and run the C++ tests
    python -m outpace.backends.native.build --test --sanitize   # the same under AddressSanitizer and UBSan
    CXX=aarch64-linux-gnu-g++ python -m outpace.backends.native.build --test --emulator \
        "qemu-aarch64-static -cpu max -L /usr/aarch64-linux-gnu"    # the same for another processor

It uses only the standard library and imports nothing from Outpace, because the build hook loads it by path.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
SOURCES = HERE / "csrc"
IS_SUPPORTED = os.name != "nt"
LIBRARY_NAME = "_native.dylib" if sys.platform == "darwin" else "_native.so"

# -ffp-contract=off: fused multiply-adds chosen by the compiler would give different bits in different files.
COMMON_FLAGS = [
    "-std=c++17",
    "-ffp-contract=off",
    "-fPIC",
    "-pthread",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
    "-Wno-psabi",
]
FAST = ["-O3", "-DNDEBUG"]
SANITIZED = ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]

# Kernels are selected at run time, so only the file of an instruction set may be compiled with its flags.
X86_FLAGS = {
    "_avx2": ["-mavx2", "-mfma", "-mf16c"],
    "_avx512": ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni", "-mfma", "-mf16c"],
}
ARM_FLAGS = {"_neon": ["-march=armv8.2-a+dotprod"]}

# A C++ compiler that is a Python package. The version is fixed, because it is the one whose results were compared.
ZIG_PACKAGE = "ziglang"
ZIG_REQUIREMENT = f"{ZIG_PACKAGE}==0.17.0"
# The oldest glibc that the wheels of Outpace's dependencies run on.
ZIG_GLIBC = "2.17"
ZIG_ARM_FLAGS = {"_neon": ["-mcpu=generic+v8_2a+dotprod"]}  # zig has its own names for processors


class BuildError(Exception):
    """Says why the library could not be built."""


class Compiler(NamedTuple):
    name: str
    command: list[str]
    target: str  # such as x86_64-linux-gnu or arm64-apple-darwin23.0

    @property
    def is_zig(self) -> bool:
        return self.name == ZIG_PACKAGE

    def isa_flags(self) -> dict[str, list[str]]:
        """The flags of a source file by the end of its name."""
        machine = self.target.split("-")[0]
        if machine in ("x86_64", "amd64"):
            return X86_FLAGS
        if machine in ("aarch64", "arm64") and "darwin" not in self.target:
            return ZIG_ARM_FLAGS if self.is_zig else ARM_FLAGS
        return {}

    def link_flags(self) -> list[str]:
        # zig links its C++ run-time library into ours.
        return ["-s", f"-Wl,--version-script={SOURCES / 'exports.map'}"] if self.is_zig else []

    def run(self, arguments: Sequence[str], folder: Path) -> None:
        """Run it. Caches that it needs go to `folder`, so that nothing is left in the user's home."""
        caches = {name: str(folder / "zig") for name in ("ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR")}
        _run([*self.command, *arguments], self.name, caches | os.environ)


def find_compiler() -> Compiler:
    """Return the system's compiler or, if there is none, the package ziglang."""
    compiler = find_system_compiler() or find_zig()
    if compiler is None:
        without_root = f", without root: pip install {ZIG_REQUIREMENT}" if zig_target() else ""
        raise BuildError(
            "no working C++ compiler was found; install one "
            f"(Debian: apt install g++, macOS: xcode-select --install{without_root})"
        )
    return compiler


def find_system_compiler() -> Compiler | None:
    """Return $CXX or the first usual compiler that works. A $CXX that does not work is an error."""
    if not IS_SUPPORTED:
        raise BuildError("the native backend is not built on Windows; llama.cpp runs every model there")
    named = shlex.split(os.environ.get("CXX", ""))
    if named and shutil.which(named[0]):
        try:
            return _tried(named)
        except BuildError as error:
            raise BuildError(f"{error}; correct or unset CXX") from error
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name):
            with suppress(BuildError):
                return _tried([name])
    return None


def find_zig() -> Compiler | None:
    target = zig_target()
    if target is None or importlib.util.find_spec(ZIG_PACKAGE) is None:
        return None
    command = [sys.executable, "-m", ZIG_PACKAGE, "c++", "-target", f"{target}.{ZIG_GLIBC}"]
    return Compiler(ZIG_PACKAGE, command, target)


def zig_target() -> str | None:
    """This machine in zig's words; None if we do not build with zig here."""
    machine = platform.machine().lower()
    if sys.platform != "linux" or platform.libc_ver()[0] != "glibc" or machine not in ("x86_64", "aarch64"):
        return None
    return f"{machine}-linux-gnu"


def build_requirements() -> list[str]:
    """The packages that a build on this machine needs: ziglang where no compiler works, else none."""
    try:
        is_needed = find_system_compiler() is None and zig_target() is not None
    except BuildError:
        return []
    return [ZIG_REQUIREMENT] if is_needed else []


def _tried(command: list[str]) -> Compiler:
    """Compile and link one line with every flag: a compiler may be a stub, too old, or without headers or linker."""
    compiler = Compiler(command[0], command, _run([*command, "-dumpmachine"], command[0]).strip().lower())
    with tempfile.TemporaryDirectory() as name:
        source, made = Path(name) / "probe.cpp", Path(name) / "probe.so"
        source.write_text("#include <string>\n")
        isa_flags = chain.from_iterable(compiler.isa_flags().values())
        compiler.run([*COMMON_FLAGS, *isa_flags, "-shared", str(source), "-o", str(made)], Path(name))
    return compiler


def _run(command: Sequence[str], name: str, environment: Mapping[str, str] | None = None) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    except OSError as error:
        raise BuildError(f"{name} could not be started ({error.strerror})") from error
    if done.returncode:
        lines = (
            [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines() or ["no output"]
        )
        raise BuildError(f"{name} failed: {lines[0]}")
    return done.stdout


def _compile(compiler: Compiler, sources: Sequence[Path], mode: list[str], folder: Path) -> list[str]:
    isa_flags = compiler.isa_flags()

    def one(source: Path) -> str:
        made = str(folder / f"{source.stem}.o")
        own = next((flags for suffix, flags in isa_flags.items() if source.stem.endswith(suffix)), [])
        compiler.run([*COMMON_FLAGS, *mode, *own, f"-I{SOURCES}", "-c", str(source), "-o", made], folder)
        return made

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(one, sources))


def build(target: Path = HERE / LIBRARY_NAME, compiler: Compiler | None = None) -> Path:
    """Compile everything and put the library at `target` atomically."""
    compiler = compiler or find_compiler()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        objects = _compile(compiler, sorted(SOURCES.glob("*.cpp")), FAST, folder)
        # Link to a temporary name and rename: a process that has the old library mapped keeps it.
        unfinished = target.with_suffix(".unfinished")
        arguments = ["-shared", *FAST, "-pthread", *compiler.link_flags(), *objects, "-o", str(unfinished)]
        compiler.run(arguments, folder)
        os.replace(unfinished, target)
    return target


def run_tests(*, sanitize: bool, emulator: Sequence[str] = ()) -> int:
    """Build and run every program in csrc/tests; return the first exit status that is not 0."""
    compiler, mode = find_compiler(), SANITIZED if sanitize else FAST
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        objects = _compile(compiler, sorted(SOURCES.glob("*.cpp")), mode, folder)
        for test in sorted((SOURCES / "tests").glob("*.cpp")):
            program = folder / test.stem
            (test_object,) = _compile(compiler, [test], mode, folder)
            compiler.run([*mode, "-pthread", test_object, *objects, "-o", str(program)], folder)
            print(f"{test.stem}:", flush=True)
            status = subprocess.run([*emulator, str(program)], check=False).returncode
            if status:
                return status
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--test", action="store_true", help="build and run the C++ tests instead")
    parser.add_argument("--sanitize", action="store_true", help="use AddressSanitizer and UBSan; needs --test")
    parser.add_argument("--emulator", default="", help="command that runs the programs $CXX compiles; needs --test")
    options = parser.parse_args()
    try:
        if options.test:
            return run_tests(sanitize=options.sanitize, emulator=shlex.split(options.emulator))
        print(f"built {build()}")
    except BuildError as error:
        print(f"the native library could not be built: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
