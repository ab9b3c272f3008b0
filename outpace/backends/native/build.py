r"""Compiles the native library with the system's C++ compiler: at install time, or later by hand.

    python -m outpace.backends.native.build                 # (re)build in place, as `pip install` does
    python -m outpace.backends.native.build --test          # build and run the C++ tests
    python -m outpace.backends.native.build --test --sanitize   # the same under AddressSanitizer and UBSan
    CXX=aarch64-linux-gnu-g++ python -m outpace.backends.native.build --test --emulator \
        "qemu-aarch64-static -cpu max -L /usr/aarch64-linux-gnu"    # the same for another processor

It uses only the standard library and imports nothing from Outpace, because the build hook loads it by path.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCES = HERE / "csrc"
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


class BuildError(Exception):
    """Says why the library could not be built."""


def find_compiler() -> list[str]:
    """Return $CXX or the first usual compiler name. It must support GCC's flags and vector types."""
    if os.name == "nt":
        raise BuildError("the native backend is not built on Windows; llama.cpp runs every model there")
    named = shlex.split(os.environ.get("CXX", ""))
    for candidate in (named, ["c++"], ["g++"], ["clang++"]):
        if candidate and shutil.which(candidate[0]):
            return candidate
    raise BuildError("no C++ compiler was found; install one (Debian: apt install g++, macOS: xcode-select --install)")


def find_target(compiler: list[str]) -> str:
    """Return the compiler's target, such as x86_64-linux-gnu or arm64-apple-darwin23.0."""
    return _run([*compiler, "-dumpmachine"]).strip().lower()


def flags_for(source: Path, target: str) -> list[str]:
    machine = target.split("-")[0]
    flags = X86_FLAGS if machine in ("x86_64", "amd64") else ARM_FLAGS if machine in ("aarch64", "arm64") else {}
    if "darwin" in target and flags is ARM_FLAGS:
        return []
    return next((extra for suffix, extra in flags.items() if source.stem.endswith(suffix)), [])


def _run(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise BuildError(f"{command[0]} could not be started ({error.strerror})") from error
    if done.returncode:
        lines = (
            [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines() or ["no output"]
        )
        raise BuildError(f"{command[0]} failed: {lines[0]}")
    return done.stdout


def _compile(compiler: list[str], sources: Sequence[Path], mode: list[str], folder: Path) -> list[str]:
    target = find_target(compiler)

    def one(source: Path) -> str:
        made = str(folder / f"{source.stem}.o")
        flags = [*COMMON_FLAGS, *mode, *flags_for(source, target)]
        _run([*compiler, *flags, f"-I{SOURCES}", "-c", str(source), "-o", made])
        return made

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(one, sources))


def build(target: Path = HERE / LIBRARY_NAME) -> Path:
    """Compile everything and put the library at `target` atomically."""
    compiler = find_compiler()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        objects = _compile(compiler, sorted(SOURCES.glob("*.cpp")), FAST, folder)
        # Link to a temporary name and rename: a process that has the old library mapped keeps it.
        unfinished = target.with_suffix(".unfinished")
        _run([*compiler, "-shared", "-pthread", *objects, "-o", str(unfinished)])
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
            _run([*compiler, *mode, "-pthread", test_object, *objects, "-o", str(program)])
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
