"""`outpace doctor`: shows what this machine has and lacks, the lower bound of a step's time, and measured times."""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import statistics
from pathlib import Path
from typing import Any

import outpace
from outpace.commands import doctor_torch
from outpace.config import usable_cores
from outpace.errors import BackendError, ModelError
from outpace.models.resolve import resolve_model

_DESCRIPTION = """\
Show what Outpace finds on this machine: instruction set, compiler, native library, memory bandwidth, torch, GPUs. For a
model, show the floor of a decoding step (the time to read its weights once from memory) and the measured times of steps
of 1 to 16 tokens on each backend. Speculation pays where several tokens cost little more than one.

examples:
  outpace doctor
  outpace doctor --model target.gguf --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = _DESCRIPTION
    parser.add_argument("--model", metavar="FILE", help="a GGUF file (default: the embedded SmolLM2-135M-Instruct)")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: all usable cores)")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="measuring rounds (default: %(default)s)")
    parser.add_argument("--llama-library", metavar="FILE", help="a libllama to use instead of the installed one")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def execute(options: argparse.Namespace) -> int:
    threads = options.threads or usable_cores()
    report = {"machine": _machine(threads)} | _model(resolve_model(options.model), threads, options)
    bandwidth = report["machine"]["bytes_per_second"]
    if bandwidth and "bytes_per_step" in report:
        report["floor_ms"] = 1e3 * report["bytes_per_step"] / bandwidth
    print(json.dumps(report) if options.json else _as_text(report))
    return 0


def _machine(threads: int) -> dict[str, Any]:
    from outpace.backends.native.build import BuildError, find_compiler
    from outpace.backends.native.library import load_library
    from outpace.backends.native.runner import BANDWIDTH_BYTES

    found: dict[str, Any] = {
        "outpace": outpace.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": usable_cores(),
        "threads": threads,
        "compiler": None,
        "native_library": None,
        "native_missing": None,
        "instruction_set": None,
        "bytes_per_second": None,
        "torch": doctor_torch.torch_report(),
    }
    try:
        compiler = find_compiler()
        found["compiler"] = compiler.name if compiler.is_zig else shutil.which(compiler.command[0])
    except BuildError as error:
        found["compiler_missing"] = str(error)
    try:
        library = load_library()
        found["native_library"] = str(library.path)
        found["instruction_set"] = library.isa
        found["bytes_per_second"] = library.read_bandwidth(threads, BANDWIDTH_BYTES) or None
    except BackendError as error:
        found["native_missing"] = str(error)
    return found


def _model(path: Path, threads: int, options: argparse.Namespace) -> dict[str, Any]:
    """The times of steps on every backend that can run the model, and why the others cannot."""
    from outpace.backends.base import Capacity, Runner
    from outpace.backends.curve import CURVE_SIZES, measure_curves
    from outpace.backends.llamacpp.runner import LlamaModel
    from outpace.backends.native.runner import NativeModel, NativeRunner
    from outpace.models.gguf_model import Unsupported
    from outpace.models.llama_library import load_library

    capacity = Capacity(max_sequences=2, cache_tokens=512, max_context=512, max_step_tokens=128)
    llama = load_library(options.llama_library)
    runners: dict[str, Runner] = {}
    found: dict[str, Any] = {"model": path.name, "file_bytes": path.stat().st_size, "unavailable": {}, "curves": {}}
    try:
        native = NativeModel(path, llama).start(capacity, threads)
        assert isinstance(native.runner, NativeRunner)
        runners["native"] = native.runner
        found |= {"packed_bytes": native.size_bytes, "bytes_per_step": native.runner.bytes_per_step}
    except (Unsupported, BackendError) as reason:
        found["unavailable"]["native"] = str(reason)
    try:
        runners["llamacpp"] = LlamaModel(path, llama).start(capacity, threads).runner
    except (ModelError, BackendError) as reason:
        found["unavailable"]["llamacpp"] = str(reason)
    for name, seconds in measure_curves(runners, CURVE_SIZES, options.rounds).items():
        found["curves"][name] = {size: 1e3 * statistics.median(taken) for size, taken in seconds.items()}
    for runner in runners.values():
        runner.close()
    return found


def _as_text(report: dict[str, Any]) -> str:
    from outpace.backends.native.library import BENEFITS

    machine = report["machine"]
    lines = [
        f"outpace {machine['outpace']}, Python {machine['python']}, {machine['system']}, "
        f"{machine['cores']} usable cores, {machine['threads']} threads",
        f"compiler         {machine['compiler'] or 'none'}",
    ]
    if machine["native_library"]:
        lines.append(f"native library   {machine['native_library']}")
        lines.append(f"instruction set  {machine['instruction_set']}")
    else:
        lines.append(f"native library   missing: {machine['native_missing']}; {BENEFITS}")
    bandwidth = machine["bytes_per_second"]
    if bandwidth:
        lines.append(f"memory reads     {bandwidth / 1e9:.1f} GB/s with {machine['threads']} threads")
    lines += doctor_torch.as_lines(machine["torch"])
    lines += ["", f"{report['model']}: {report['file_bytes'] / 1e6:.0f} MB"]
    if "packed_bytes" in report:
        lines[-1] += f", packed into {report['packed_bytes'] / 1e6:.0f} MB"
    if "floor_ms" in report:
        lines.append(
            f"floor            {report['floor_ms']:.2f} ms a step ({report['bytes_per_step'] / 1e6:.0f} MB read)"
        )
    lines += [
        f"{name:16} cannot run it: {reason}"
        for name, reason in report["unavailable"].items()
        if reason != machine["native_missing"]  # said above
    ]
    return "\n".join([*lines, *_table(report["curves"])])


def _table(curves: dict[str, dict[int, float]]) -> list[str]:
    if not curves:
        return []
    sizes = list(next(iter(curves.values())))
    lines = [f"{'tokens in a step':16} " + "".join(f"{size:>9}" for size in sizes)]
    for name, curve in curves.items():
        lines.append(f"{name + ', ms':16} " + "".join(f"{curve[size]:9.2f}" for size in sizes))
        lines.append(f"{'  of one token':16} " + "".join(f"{curve[size] / curve[1]:8.2f}x" for size in sizes))
    return lines
