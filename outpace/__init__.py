"""Outpace: LLM inference built around speculative decoding. Lossless, never slower, visible.

Names are loaded on first use, so `import outpace` loads neither numpy nor a model library.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outpace.config import SamplingParams as SamplingParams
    from outpace.config import SpeculationParams as SpeculationParams
    from outpace.errors import OutpaceError as OutpaceError
    from outpace.llm import LLM as LLM
    from outpace.structured import StructuredOutput as StructuredOutput

__version__ = "0.1.0"

_MODULES = {
    "LLM": "outpace.llm",
    "SamplingParams": "outpace.config",
    "SpeculationParams": "outpace.config",
    "StructuredOutput": "outpace.structured",
    "OutpaceError": "outpace.errors",
}

__all__ = ["LLM", "OutpaceError", "SamplingParams", "SpeculationParams", "StructuredOutput", "__version__"]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'outpace' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
