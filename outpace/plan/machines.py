"""Accelerators and CPUs: memory, memory bandwidth, arithmetic, links. `here()` looks at this machine.

Figures are the makers' data sheets, dense (without sparsity): NVIDIA's of each card, with 32-bit accumulation for RTX
cards, AMD's of MI300X and MI325X; of CPUs, channels times the fastest memory that is specified. Those of A10, A100, L4,
L40S, T4, V100, H20, H100, H200, B200, RTX 4090 and the MI300 series were compared with public collections
(citsjtu2020/LLM-Prof, winston-zhang-orz/gpu-specs, astroC86/gpu-datasheet); B200's bandwidth is that of the HGX board.
`memory_bytes` is what the driver reports for a GPU, which is neither the nominal figure nor its multiple of 2^30. What
part of a data sheet steps reach is measured once, on an H200 and on an EPYC (`benchmarks/plan_check.py`), and used for
all machines of the kind.
"""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

from outpace.errors import UsageError, suggestion
from outpace.plan.precision import Arithmetic

_GIB, _GB, _TERA = 1 << 30, 1e9, 1e12
BUSY = 0.1  # share of the processor time; if others took more, what was measured is too low


@dataclass(frozen=True, slots=True)
class Kind:
    """What steps reach on machines of one kind."""

    bandwidth_share: float  # of the data sheet, by products of one token
    packed_share: float  # the same for weights of fewer than 8 bits, which have to be unpacked
    arithmetic_share: float  # of the data sheet, by products of many tokens
    layer_seconds: float  # fixed time of a layer: launches, norms, attention over a short context
    overlap: float
    """A step takes (memory^p + arithmetic^p)^(1/p) seconds with this p: 1 adds both, infinity takes the larger."""
    step_seconds: float  # of the host, for each step
    token_seconds: float  # of the host, for each emitted token
    sample_seconds: float
    """Of drawing from the distribution of a token and, if it was drafted, of rejecting it: for each entry of the
    vocabulary. Greedy decoding does not need it."""
    reserved_bytes: float  # by driver and libraries


# On a GPU the host works while the device runs.
GPU = Kind(0.90, 0.60, 0.80, 13e-6, 1.3, 0.0, 0.0, 1.6e-11, 0.5e9)
CPU = Kind(0.80, 0.80, 1.0, 1e-5, 3.0, 5e-5, 2e-5, 0.0, 0.1e9)


@dataclass(frozen=True, slots=True)
class Machine:
    name: str
    nominal_bytes: float  # memory as its maker names it
    memory_bytes: float  # memory as a program sees it
    bandwidth: float  # bytes a second
    bf16: float  # operations a second
    fp8: float = 0.0  # 0: none; weights are converted, and the arithmetic is bf16's
    int8: float = 0.0
    link: float = 32 * _GB  # bytes a second between two of them, in one direction; PCIe 4.0 x16 unless known
    has_nvlink: bool = False  # or another link over which a GPU reads the others' memory
    kind: Kind = GPU
    is_measured: bool = False
    taken_by_others: float = 0.0  # share of the processor time while it was measured

    def arithmetic(self, wanted: Arithmetic) -> float:
        found = {"bf16": self.bf16, "fp8": self.fp8, "int8": self.int8}[wanted]
        return found or self.bf16

    @property
    def is_gpu(self) -> bool:
        return self.kind is GPU


def _gpu(
    name: str, nominal: float, gib: float, gb_per_s: float, bf16: float, fp8: float = 0.0, int8: float = 0.0,
    link: float = 0.0,
) -> Machine:  # fmt: skip
    """In GB, GiB as the driver reports, GB/s, tera-operations a second, and GB/s of NVLink in one direction."""
    sizes = (nominal * _GB, gib * _GIB, gb_per_s * _GB, bf16 * _TERA, fp8 * _TERA, int8 * _TERA)
    if not link:
        return Machine(name, *sizes)
    return Machine(name, *sizes, link=link * _GB, has_nvlink=True)


def _cpu(name: str, cores: int, gb_per_s: float, ops_per_core: float, memory: float) -> Machine:
    """Giga-operations of 8-bit products per core; memory in GB as such machines usually have it."""
    ops = cores * ops_per_core * 1e9
    return Machine(name, memory * _GB, memory * _GB, gb_per_s * _GB, ops / 2, 0.0, ops, kind=CPU)


MACHINES: dict[str, Machine] = {
    each.name: each
    for each in (
        _gpu("b300", 288, 267.7, 8000, 2250, 4500, 0, 900),
        _gpu("b200", 192, 178.4, 7700, 2250, 4500, 4500, 900),
        _gpu("gh200", 96, 94.5, 4000, 989, 1979, 1979, 450),
        _gpu("h200", 141, 139.8, 4800, 989, 1979, 1979, 450),
        _gpu("h100", 80, 79.1, 3350, 989, 1979, 1979, 450),
        _gpu("h100-pcie", 80, 79.1, 2000, 756, 1513, 1513),
        _gpu("h100-nvl", 94, 93.1, 3900, 835, 1670, 1670, 300),
        _gpu("h20", 96, 95.0, 4000, 148, 296, 296, 450),
        _gpu("a100-80gb", 80, 79.1, 2039, 312, 0, 624, 300),
        _gpu("a100-40gb", 40, 39.4, 1555, 312, 0, 624, 300),
        _gpu("l40s", 48, 44.4, 864, 362, 733, 733),
        _gpu("l4", 24, 22.0, 300, 121, 242, 242),
        _gpu("a10", 24, 22.0, 600, 125, 0, 250),
        _gpu("a6000", 48, 47.4, 768, 155, 0, 310),
        _gpu("t4", 16, 14.6, 320, 65, 0, 130),
        _gpu("v100-32gb", 32, 31.7, 900, 125, 0, 0, 150),
        _gpu("rtx-pro-6000", 96, 95.0, 1792, 504, 1007, 1007),
        _gpu("rtx-6000-ada", 48, 47.4, 960, 364, 728, 728),
        _gpu("rtx-5090", 32, 31.4, 1792, 210, 419, 838),
        _gpu("rtx-4090", 24, 23.6, 1008, 165, 330, 660),
        _gpu("rtx-3090", 24, 23.7, 936, 71, 0, 284),
        _gpu("mi300x", 192, 191.7, 5300, 1307, 2615, 2615, 64),
        _gpu("mi325x", 256, 255.7, 6000, 1307, 2615, 2615, 64),
        _cpu("epyc-9654", 96, 460, 285, 384),
        _cpu("epyc-9755", 128, 576, 320, 768),
        _cpu("xeon-8480", 56, 307, 260, 256),
        _cpu("xeon-6980p", 128, 844, 260, 768),
        _cpu("graviton4", 96, 537, 150, 768),
        _cpu("ryzen-7950x", 16, 83, 330, 64),
        _cpu("core-i9-14900k", 24, 89, 150, 64),
        _cpu("m4-max", 16, 546, 160, 64),
        _cpu("m2-ultra", 24, 800, 130, 128),
    )
}
_ALIASES = {
    "a100": "a100-80gb", "h100-sxm": "h100", "h100-sxm5": "h100", "h200-sxm": "h200", "6000-pro": "rtx-pro-6000",
    "rtx6000pro": "rtx-pro-6000", "4090": "rtx-4090", "5090": "rtx-5090", "3090": "rtx-3090", "v100": "v100-32gb",
    "a10g": "a10", "mi300": "mi300x", "rtx-a6000": "a6000", "h100-80gb": "h100",
}  # fmt: skip


def machine(name: str) -> Machine:
    """The machine of that name. Raises UsageError with the known ones."""
    word = (
        name.lower().strip().removeprefix("nvidia").removeprefix("amd").strip(" -").replace(" ", "-").replace("_", "-")
    )
    found = MACHINES.get(_ALIASES.get(word, word))
    if found is None:
        hint = suggestion(word, [*MACHINES, *_ALIASES])
        raise UsageError(
            f"the table has no machine {name!r}{'; ' + hint if hint else '.'} It has {', '.join(MACHINES)}; for "
            "another one give --memory, --bandwidth and --tflops as well"
        )
    return found


def custom(name: str, memory: float, bandwidth: float, tflops: float) -> Machine:
    """A GPU that the table does not have: GB, GB/s and tera-operations a second in bf16."""
    return _gpu(name, memory, memory * _GB / _GIB, bandwidth, tflops)


def here(threads: int) -> Machine:
    """This machine: its first GPU where it has one, else its processor, with its bandwidth measured in a moment."""
    return _own_gpu() or _own_cpu(threads)


def _own_gpu() -> Machine | None:
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if found.returncode or "," not in found.stdout:
        return None
    name, _, mebibytes = found.stdout.splitlines()[0].rpartition(",")
    memory = float(mebibytes) * (1 << 20)
    return replace(_listed(name, memory), memory_bytes=memory)


def _listed(name: str, memory: float) -> Machine:
    """The table's entry for a GPU that a driver calls `name`, as in NVIDIA A100-SXM4-80GB: the one with the most words
    in that name, of the nearest memory."""
    written = name.lower().replace("-", " ").split()
    words = {*written, *(_ALIASES.get(word, word) for word in written)}

    def num_found(each: Machine) -> int:
        parts = [part for part in each.name.split("-") if not part.endswith("gb")]
        return len(parts) if words.issuperset(parts) else 0

    gpus = [each for each in MACHINES.values() if each.is_gpu and num_found(each)]
    if not gpus:
        raise UsageError(
            f"this machine has a {name.strip()}, which the table does not have; give --memory, --bandwidth and --tflops"
        )
    return min(gpus, key=lambda each: (-num_found(each), abs(each.memory_bytes - memory)))


def _own_cpu(threads: int) -> Machine:
    from outpace.backends.memory import available_bytes
    from outpace.plan.probe import probe

    memory = float(available_bytes() or 0)
    if not memory:
        raise UsageError("this system does not report its memory; give --memory, --bandwidth and --tflops")
    found, kind = probe(threads), replace(CPU, bandwidth_share=1.0, packed_share=1.0)
    return Machine(
        f"this machine ({_processor()}, {threads} threads)", memory, memory, found.bandwidth, found.operations, 0.0,
        found.operations, kind=kind, is_measured=True, taken_by_others=found.others,
    )  # fmt: skip


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return "CPU"
