"""A draft whose tokenizer is not the target's: which way the engine takes, and what that costs.

The engine bridges the two tokenizers (`speculation/proposers/other_vocabulary.py`): the draft model reads the target's
text in tokens of its own, and drafts either text, which the target's tokenizer splits, or tokens that both models have.
Both are exact. What they cost more than a draft with the target's own ids is here, for the predicted speed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from outpace.plan.machines import Machine
from outpace.plan.vocabularies import Compatibility
from outpace.speculation.costs.curves import DraftCosts, StepCosts
from outpace.speculation.proposers.text_bridge import ENOUGH_SHARED, ways_of

Way = Literal["text", "tokens"]
# Measured with SmolLM2-135M drafting for Qwen2.5-Coder 1.5B (benchmarks/bridge_time.py, results/bridge_time.json).
HOST_SECONDS = 3e-5  # for each draft token: reading the target's text, splitting the draft's
REREAD_TOKENS = 1  # of the draft model's, before a draft: what the target said last may be split in another way
_USUAL_DEPTH = 4  # over which the reading is spread
_LOGIT_BYTES = 4.0
_PCIE = 25e9  # bytes a second, over which a GPU's logits reach the host


@dataclass(frozen=True, slots=True)
class Bridge:
    """How a draft with another tokenizer is used, and its price for each draft token."""

    way: Way  # at the plan's temperature
    shared: float | None  # of the draft's tokens; None: not known without the files
    token_seconds: float

    @property
    def sentence(self) -> str:
        return (
            f"Outpace bridges the tokenizers: {ways_of(self.shared)}. No answer changes. Each draft token costs about "
            f"{1e6 * self.token_seconds:,.0f} us more than with the target's own tokenizer, which the predicted "
            "speed includes"
        )


def bridge_of(
    compatibility: Compatibility | None, temperature: float, passes: StepCosts | None, vocab_size: int, machine: Machine
) -> Bridge | None:
    """None where the draft's ids are the target's. `passes` and `vocab_size` are the draft model's."""
    if compatibility is None or not compatibility.needs_bridge or passes is None:
        return None
    shared = compatibility.shared
    has_enough = shared is None or shared >= ENOUGH_SHARED
    seconds = HOST_SECONDS + (passes.seconds(1, 1 + REREAD_TOKENS) - passes.seconds(1, 1)) / _USUAL_DEPTH
    if machine.is_gpu:  # a GPU draws in the draft's own vocabulary, so here the host draws
        seconds += machine.kind.step_seconds + _LOGIT_BYTES * vocab_size / _PCIE
    return Bridge("tokens" if temperature > 0 and has_enough else "text", shared, seconds)


def with_bridge(costs: DraftCosts, bridge: Bridge | None) -> DraftCosts:
    if bridge is None:
        return costs
    return DraftCosts(
        costs.passes, costs.catch_up, first=costs.first, one_pass=costs.one_pass, lookup_seconds=costs.lookup_seconds,
        draw_seconds=costs.draw_seconds + bridge.token_seconds,
    )  # fmt: skip
