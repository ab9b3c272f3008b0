"""What is measured: the engines and their settings, in the order of their importance, and the cells."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

CONCURRENCY = (1, 8, 32, 128)
TEMPERATURES = (0.0, 1.0)
CONTEXT = 1408  # tokens of a request, at most
STEP_CONTEXT = 1024  # mean context of the plain steps
STEP_TOKENS = 128  # measured steps
STEP_PROMPT = STEP_CONTEXT - STEP_TOKENS // 2
NEW_TOKENS = 96  # mean of a request in the other cells

_CACHE_STEPS = 20 * 10**9  # bytes for 128 requests of 1,100 tokens of an 8B
_CACHE_CELLS = 12 * 10**9  # for as many prompts of Spec-Bench and their answers

Kind = Literal["outpace", "vllm"]


@dataclass(frozen=True, slots=True)
class PeerSettings:
    """One engine in a process of its own."""

    name: str
    kind: Kind
    settings: tuple[str, ...] = ("plain",)  # what it is measured with; Outpace takes several
    quantization: str | None = None
    method: str | None = None  # of vLLM's speculation
    depth: int = 0
    draft_sampling: str = "greedy"
    in_process: bool = False  # vLLM's engine in the caller's process, not in its own
    cache_bytes: int = _CACHE_CELLS
    has_steps: bool = False  # plain steps with 1,024 tokens of context are measured
    has_cells: bool = True  # prompts of Spec-Bench are measured

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> PeerSettings:
        return cls(**values | {"settings": tuple(values["settings"])})


def _vllm(name: str, **values: Any) -> PeerSettings:
    settings = ("plain",) if values.get("method") is None else (name.removeprefix("vllm-"),)
    return PeerSettings(name, "vllm", settings, **values)


_STEPS: dict[str, Any] = {"has_steps": True, "cache_bytes": _CACHE_STEPS}

# Engines of a wave start at the same time and are then measured in turns, one at a time. A wave fits into 139 GiB.
WAVES: tuple[tuple[PeerSettings, ...], ...] = (
    (
        PeerSettings("outpace", "outpace", ("plain", "auto", "head:3"), has_steps=True),
        _vllm("vllm-plain", **_STEPS),
        _vllm("vllm-eagle3:3", method="eagle3", depth=3, draft_sampling="probabilistic"),
    ),
    (
        PeerSettings("outpace-fp8", "outpace", ("plain",), quantization="fp8", has_steps=True, has_cells=False),
        _vllm("vllm-fp8", quantization="fp8", has_cells=False, **_STEPS),
        _vllm("vllm-ngram:5", method="ngram", depth=5),
        _vllm("vllm-eagle3:5", method="eagle3", depth=5),
    ),
    (
        _vllm("vllm-plain-in-process", in_process=True, **_STEPS),
        _vllm("vllm-fp8-in-process", quantization="fp8", in_process=True, has_cells=False, **_STEPS),
        _vllm("vllm-eagle3:2", method="eagle3", depth=2, draft_sampling="probabilistic"),
    ),
)  # fmt: skip
