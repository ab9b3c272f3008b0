"""How many draft tokens are accepted: measured, given, brought by a head's file, or guessed.

A guess starts from the policy's own prior (0.8 at temperature 0, less above) and is shifted, in log-odds, by what is
known about kinds of drafts; docs/plan.md lists the sources. A guess is only that: it comes with a range, and every
report says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, log2
from typing import Literal

from outpace.config import WORKLOADS
from outpace.errors import UsageError
from outpace.plan.drafts import PlannedDraft
from outpace.plan.models import PlannedModel
from outpace.plan.speed import Answer, Drafting, known_acceptance
from outpace.speculation.costs.curves import Costs, DraftCosts
from outpace.speculation.policy.acceptance import Acceptance, temperature_class

Source = Literal["measured", "given", "brought", "guessed"]
RULE = (8.0, 12.0)  # target to draft, in parameters: the rule of thumb
SPREAD = 0.7  # log-odds: the range of a guess
_PER_DOUBLING = 0.25  # log-odds lost with each halving of the draft below the rule's 1:12
_OTHER_FAMILY = -1.4  # 0.8 becomes 0.5: published pairs of different families accept 40 to 60%
_SIBLING_FAMILY = -0.3  # the same tokenizer, another training
_OF_KIND = {"self": 0.8, "head": -0.7, "draft": 0.0}  # 0.9, 0.66, 0.8 at temperature 0
_MATCH_SHARE = {"code": 0.2, "json": 0.25, "narrative": 0.05, "chat": 0.08, None: 0.12}  # of steps
_LOOKUP_CHANCE = 0.55  # with the share: 1.14x over all workloads, as docs/results.md has for SmolLM2 without its head


@dataclass(frozen=True, slots=True)
class Guess:
    """What was said or measured about a draft's acceptance."""

    source: Source
    chances: tuple[float, ...] = ()  # by position; empty for a guess, which is the policy's prior and a shift
    shift: float = 0.0
    match_share: float = 1.0
    note: str = ""


@dataclass(frozen=True, slots=True)
class Measured:
    """What `--measure` found for one draft."""

    chances: tuple[float, ...]
    match_share: float = 1.0
    draft_costs: DraftCosts | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Conditions:
    """For whom the plan is made."""

    temperature: float = 0.0
    workload: str | None = None
    rows: int = 1  # requests at once
    depth: int | None = None  # None: the best
    acceptance: tuple[float, ...] = ()
    output_tokens: int = 256  # of an answer

    def __post_init__(self) -> None:
        if self.workload is not None and self.workload not in WORKLOADS:
            raise UsageError(f"there is no workload {self.workload!r}; choose from {', '.join(WORKLOADS)}")
        if not 0 <= self.temperature <= 100:
            raise UsageError(f"the temperature must be between 0 and 100; got {self.temperature:g}")
        if any(not 0 <= chance <= 1 for chance in self.acceptance):
            raise UsageError("an acceptance is a share between 0 and 1, such as 0.75")


def guessed(
    target: PlannedModel, draft: PlannedDraft, ratio: float | None, conditions: Conditions, measured: Measured | None
) -> Guess:
    if measured is not None:
        return Guess("measured", measured.chances, match_share=measured.match_share, note=measured.note)
    share = _MATCH_SHARE[conditions.workload] if draft.kind == "lookup" else 1.0
    if conditions.acceptance:
        return Guess("given", conditions.acceptance, match_share=share)
    if draft.kind == "lookup":
        note = f"a match in {share:.0%} of the steps, guessed from the workload; copying text has far more"
        return Guess("guessed", (_LOOKUP_CHANCE,), match_share=share, note=note)
    if draft.measured is not None:
        chances = draft.measured.greedy if conditions.temperature == 0 else draft.measured.sampled
        return Guess("brought", chances, note="measured when the head was trained, on its held-out prompts")
    shift, notes = _OF_KIND[draft.kind], [_KIND_NOTES[draft.kind]]
    if draft.model is not None and draft.kind == "draft":
        if target.family != draft.model.family:
            is_sibling = target.tokenizer is not None and target.tokenizer == draft.model.tokenizer
            shift += _SIBLING_FAMILY if is_sibling else _OTHER_FAMILY
            notes.append("another training, the same tokenizer" if is_sibling else "another family")
        if ratio is not None and ratio > RULE[1]:
            shift -= _PER_DOUBLING * log2(ratio / RULE[1])
            notes.append(f"1:{ratio:.0f} is below the rule of 1:8 to 1:12")
    if conditions.workload is not None:
        shift += WORKLOADS[conditions.workload].log_odds
        notes.append(f"workload {conditions.workload}")
    return Guess("guessed", shift=shift, note=", ".join(notes))


_KIND_NOTES = {
    "draft": "the policy's prior for a draft model",
    "head": "as measured heads",
    "self": "a quantised copy mostly agrees with its original",
}


def drafting_of(costs: Costs, guess: Guess, conditions: Conditions, answer: Answer, by: float = 0.0) -> Drafting:
    """`by` shifts the chances of a guess, in log-odds; what was measured or given stays."""
    if guess.source != "guessed":
        return Drafting(costs, known_acceptance(guess.chances), match_share=guess.match_share, answer=answer)
    if guess.chances:
        shifted = tuple(_shifted(chance, by) for chance in guess.chances)
        share = _shifted(guess.match_share, by) if guess.match_share < 1 else 1.0
        return Drafting(costs, known_acceptance(shifted), match_share=share, answer=answer)
    temperature = temperature_class(conditions.temperature)
    return Drafting(costs, Acceptance(is_lookup=False), temperature, guess.shift + by, answer=answer)


def _shifted(chance: float, by: float) -> float:
    odds = chance / (1 - chance) * exp(by)
    return odds / (1 + odds)


def ratio_evidence(ratio: float) -> str:
    """What is known about such a size."""
    low, high = RULE
    if ratio < low:
        return (
            f"1:{ratio:.1f} is a larger draft than the rule of 1:8 to 1:12: it agrees more and costs more per token; "
            "the best depth is small"
        )
    if ratio <= high:
        return f"1:{ratio:.1f} is within the rule of 1:8 to 1:12"
    return (
        f"1:{ratio:.0f} is a smaller draft than the rule of 1:8 to 1:12, which weighs agreement and not the time of a "
        "pass. Published evidence is split: a 0.5B for a 70B (1:140, vLLM) gained 1.5x at one request a second and "
        "lost 1.4x under load; others report 70 to 85% for a 1B. Measure it"
    )
