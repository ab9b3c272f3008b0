"""Keeps measured costs on disk for the next start.

The file holds a fingerprint of the machine, model and version. If the fingerprint differs or the file cannot be read,
costs are measured again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import outpace
from outpace.config import ResolvedConfig, usable_cores
from outpace.speculation.costs.curves import Costs

_log = logging.getLogger("outpace.costs")

_FORMAT = 9


@dataclass(frozen=True, slots=True)
class CostFile:
    """The file with the costs of one setting on this machine."""

    path: Path
    fingerprint: Mapping[str, Any]

    @classmethod
    def for_config(cls, config: ResolvedConfig, folder: Path) -> CostFile:
        """One file per model, draft, backend, threads and sequences; the fingerprint covers the rest."""
        setting: list[Any] = [config.model, config.draft, config.backend, config.threads, config.max_sequences]
        setting += [config.quantization, config.draft_quantization]
        if config.kv_cache_dtype != "auto":
            setting.append(config.kv_cache_dtype)
        if config.batch_invariant:
            setting.append("batch_invariant")
        if config.tensor_parallel_size > 1:
            setting.append(config.tensor_parallel_size)
        name = hashlib.sha256(json.dumps(setting).encode()).hexdigest()[:16]
        fingerprint = {
            "format": _FORMAT,
            "outpace": outpace.__version__,
            "machine": [platform.machine(), _processor(), usable_cores()],
            "setting": setting,
            "model": _stamp(config.model),
            "draft": _stamp(config.draft) if config.draft else None,
        }
        return cls(folder / "costs" / f"{name}.json", fingerprint)

    def load(self) -> Costs | None:
        """The saved costs. None if there is no file or, with a log line, if it cannot be used."""
        try:
            saved = json.loads(self.path.read_text(encoding="utf-8"))
            wrong = [name for name, value in self.fingerprint.items() if saved["fingerprint"].get(name) != value]
            if wrong:
                _log.info("costs were measured with another %s; measuring again", " and ".join(wrong))
                return None
            return Costs.from_dict(saved["costs"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError, AssertionError) as error:
            _log.warning("the file of measured costs cannot be used (%s: %s); measuring again", self.path, error)
            return None

    def save(self, costs: Costs) -> None:
        """Write a temporary file and move it into place, so that a reader never sees a partial file."""
        text = json.dumps({"fingerprint": self.fingerprint, "costs": costs.as_dict()}, indent=1)
        partial = self.path.with_suffix(f".{os.getpid()}.tmp")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(text, encoding="utf-8")
            partial.replace(self.path)
        except OSError as error:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
            _log.warning("measured costs could not be saved (%s); the next start measures them again", error)


def _stamp(path: str) -> list[int]:
    """Size and time of a file: they change when the model is replaced."""
    found = Path(path)
    if not found.exists():
        return []
    status = found.stat()
    return [status.st_size, status.st_mtime_ns]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()
