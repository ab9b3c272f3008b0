"""Saves each simulation when it finishes, so that a long run can be interrupted and resumed.

A record is valid for the code that made it. It is ignored if the simulator's sources or, for our policy, the sources
of `outpace.speculation` have changed.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import outpace.speculation
from outpace.bench.simulation.runner import OURS
from outpace.bench.simulation.world import Result


@dataclass(frozen=True, slots=True)
class Record:
    """One policy in one scenario with one seed."""

    scenario: str
    quick: bool
    seed: int
    code: str
    result: Result


class RecordFile:
    """One line of JSON per finished simulation."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._known: dict[tuple[str, bool, int, str], Result] = {}
        if path is not None and path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                self._read(line)

    def _read(self, line: str) -> None:
        try:
            saved = json.loads(line)
            result = Result(**saved["result"])
            result.tpots = [(length, seconds) for length, seconds in result.tpots]
            if saved["code"] == code_of(result.policy):
                self._known[saved["scenario"], saved["quick"], saved["seed"], result.policy] = result
        except (ValueError, KeyError, TypeError):
            return  # the last line of a run that was killed while writing it

    def get(self, scenario: str, quick: bool, seed: int, policy: str) -> Result | None:
        return self._known.get((scenario, quick, seed, policy))

    def add(self, record: Record) -> None:
        self._known[record.scenario, record.quick, record.seed, record.result.policy] = record.result
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(record)) + "\n")


@cache
def code_of(policy: str) -> str:
    """A hash of the sources that a policy's figures depend on."""
    folders = [Path(__file__).parent]
    if policy == OURS:
        folders.append(Path(outpace.speculation.__file__).parent)
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]
