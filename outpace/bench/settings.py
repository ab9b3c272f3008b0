"""The decoding settings to compare: plain, chosen by the policy, or a fixed proposer and depth."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import get_args

from outpace.config import Method, SpeculationParams
from outpace.errors import UsageError


@dataclass(frozen=True, slots=True)
class Setting:
    name: str
    speculation: SpeculationParams

    @property
    def is_fixed(self) -> bool:
        return self.speculation.mode == "on"


PLAIN = Setting("off", SpeculationParams(mode="off"))
AUTO = Setting("auto", SpeculationParams(mode="auto"))


def fixed(method: Method, depth: int) -> Setting:
    return Setting(f"{method}:{depth}", SpeculationParams(mode="on", method=method, max_depth=depth))


def fixed_settings(methods: Iterable[Method], depths: Iterable[int]) -> list[Setting]:
    return [fixed(method, depth) for method in methods for depth in depths]


def parse_setting(text: str) -> Setting:
    """`off`, `auto`, or METHOD:DEPTH as in `suffix:4`."""
    if text in ("off", "auto"):
        return PLAIN if text == "off" else AUTO
    method, _, depth = text.partition(":")
    known = [name for name in get_args(Method) if name != "none"]
    if method not in known or not depth.isdecimal() or int(depth) == 0:
        raise UsageError(f"a setting is off, auto, or METHOD:DEPTH such as suffix:4 ({', '.join(known)}); got {text!r}")
    return fixed(method, int(depth))  # type: ignore[arg-type]
