"""What an engine has learned, in a form that a new engine for the same model can begin with: costs and acceptance.

Costs are taken over on an equal machine only, acceptance on any: it belongs to the models and the traffic.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from outpace.engine.engine import Engine
from outpace.speculation.costs.curves import Costs
from outpace.speculation.policy.acceptance import Acceptance


@dataclass(frozen=True, slots=True)
class Learned:
    fingerprint: Mapping[str, Any] | None  # of machine, model and setting, if costs are kept
    costs: dict[str, Any] | None
    acceptances: dict[str, Acceptance]  # by proposer


def setting_of(engine: Engine) -> str:
    """Engines with the same one can learn from each other."""
    config = engine.config
    return json.dumps([config.model, config.draft, config.backend, config.tensor_parallel_size])


def learned_by(engine: Engine) -> Learned:
    """A copy, so only between two steps."""
    file = engine.cost_file
    costs = engine.costs.as_dict() if file is not None and engine.costs is not None else None
    return Learned(None if file is None else file.fingerprint, costs, deepcopy(engine.policy.acceptances))


def take(engine: Engine, learned: Learned) -> None:
    """Begin with what another engine has learned. Called before calibration and the first request."""
    file = engine.cost_file
    if file is not None and learned.costs is not None and learned.fingerprint == file.fingerprint:
        with suppress(ValueError):  # costs that cannot be are measured anew
            file.save(Costs.from_dict(learned.costs))
    for name, acceptance in learned.acceptances.items():
        if name in engine.policy.acceptances:
            engine.policy.acceptances[name] = deepcopy(acceptance)
