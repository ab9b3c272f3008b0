"""Judges a target with one way to draft: tokenizers, family, size, predicted speedup and where it ends.

Acceptance is measured, given, or guessed. A guess starts from the policy's own prior (0.8 at temperature 0, less above)
and is shifted, in log-odds, by what is known about kinds of drafts; docs/plan.md lists the sources. A guess is only
that: it comes with a range, and every report says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp, log2
from typing import Literal

from outpace.config import WORKLOADS
from outpace.errors import UsageError
from outpace.plan.drafts import PlannedDraft
from outpace.plan.memory import Deployment, MemoryPlan, divide
from outpace.plan.models import PlannedModel
from outpace.plan.roofline import completed, draft_costs, target_costs
from outpace.plan.speed import Drafting, Speed, known_acceptance
from outpace.plan.vocabularies import Compatibility, compare
from outpace.speculation.costs.curves import Costs, DraftCosts
from outpace.speculation.policy.acceptance import Acceptance, temperature_class

Source = Literal["measured", "given", "brought", "guessed"]
RULE = (8.0, 12.0)  # target to draft, in parameters: the rule of thumb
LOADS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
MOST_ROWS = 512  # requests at once that are compared, however many fit
_SPREAD = 0.7  # log-odds: the range of a guess
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
class Conditions:
    """For whom the plan is made."""

    temperature: float = 0.0
    workload: str | None = None
    rows: int = 1  # requests at once
    depth: int | None = None  # None: the best
    acceptance: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.workload is not None and self.workload not in WORKLOADS:
            raise UsageError(f"there is no workload {self.workload!r}; choose from {', '.join(WORKLOADS)}")
        if not 0 <= self.temperature <= 100:
            raise UsageError(f"the temperature must be between 0 and 100; got {self.temperature:g}")
        if any(not 0 <= chance <= 1 for chance in self.acceptance):
            raise UsageError("an acceptance is a share between 0 and 1, such as 0.75")


@dataclass(frozen=True, slots=True)
class Pairing:
    """One way to draft for a target on a machine."""

    draft: PlannedDraft
    compatibility: Compatibility | None
    ratio: float | None  # parameters of the target over those of the draft
    guess: Guess
    chance: float  # of a draft's first token
    memory: MemoryPlan
    drafting: Drafting
    speed: Speed  # at the wanted load
    low: Speed  # at the low end of the range of a guess
    high: Speed
    by_load: tuple[Speed, ...]  # at the depth that is best at each load
    at_depth: tuple[Speed, ...]  # at the depth that is best at the wanted load, as an engine with a fixed depth runs
    break_even: float | None  # chance of a draft token, at that depth and load
    loss_from: int | None  # requests at once, from the wanted load on, at which that depth is slower than plain
    full_load: tuple[float, float]  # tokens a second when the cache is full: plain without the draft, and with it
    verdict: Literal["use", "maybe", "no", "cannot"]
    reason: str

    @property
    def is_usable(self) -> bool:
        return self.verdict != "cannot"


@dataclass(frozen=True, slots=True)
class Measured:
    """What `--measure` found for one draft."""

    chances: tuple[float, ...]
    match_share: float = 1.0
    draft_costs: DraftCosts | None = None
    note: str = ""


def judge(
    target: PlannedModel,
    draft: PlannedDraft,
    to: Deployment,
    conditions: Conditions,
    *,
    plain_memory: MemoryPlan,
    target_step: Costs | None = None,
    measured: Measured | None = None,
) -> Pairing:
    """`target_step`: measured costs of the target's steps; without them, those of the machine's table."""
    compatibility = compare(target, draft.model) if draft.kind == "draft" and draft.model is not None else None
    ratio = target.parameters / draft.parameters if draft.parameters else None
    if draft.kind == "draft" and ratio is not None and ratio < 1:
        raise UsageError(
            f"the draft {draft.name} has {draft.parameters / 1e9:.3g}B parameters and the target {target.name} "
            f"{target.parameters / 1e9:.3g}B; a draft must be smaller than its target, so name them the other way round"
        )
    memory = divide(target, draft, to)
    context = memory.context / 2  # on average, sequences are half as long as the longest
    modelled = target_costs(target, to.machine, to.gpus, memory.context, to.cache_element_bytes)
    modelled.drafts[draft.kind] = draft_costs(
        draft, target, to.machine, to.draft_gpus, memory.context, to.cache_element_bytes
    )
    whole = modelled
    if target_step is not None:
        drafts = measured.draft_costs if measured is not None else None
        seen = replace(target_step, drafts={draft.kind: drafts or modelled.drafts[draft.kind]})
        whole = completed(seen, modelled, to.machine)
    guess = guessed(target, draft, ratio, conditions, measured)
    drafting = _drafting(whole, guess, conditions)
    rows = conditions.rows
    speed = (
        drafting.best(rows, context) if conditions.depth is None else drafting.fixed(rows, conditions.depth, context)
    )
    depth = speed.depth or conditions.depth or 1
    low, high = (_drafting(whole, guess, conditions, by).fixed(rows, depth, context) for by in (-_SPREAD, _SPREAD))
    by_load = tuple(drafting.best(load, context) for load in LOADS)
    at_depth = tuple(drafting.fixed(load, depth, context) for load in LOADS)
    full = _full_load(drafting, plain_memory, memory, context)
    verdict, reason = _verdict(draft, compatibility, memory, plain_memory, speed, full, low, guess)
    return Pairing(
        draft=draft,
        compatibility=compatibility,
        ratio=ratio,
        guess=guess,
        chance=drafting.acceptance.forecast(drafting.temperature, 1, drafting.shift)[0],
        memory=memory,
        drafting=drafting,
        speed=speed,
        low=low,
        high=high,
        by_load=by_load,
        at_depth=at_depth,
        break_even=drafting.break_even(rows, depth, context),
        loss_from=next((each.rows for each in at_depth if each.rows >= rows and each.speedup < 1.0), None),
        full_load=full,
        verdict=verdict,
        reason=reason,
    )


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


def _drafting(costs: Costs, guess: Guess, conditions: Conditions, by: float = 0.0) -> Drafting:
    """`by` shifts the chances of a guess, in log-odds; what was measured or given stays."""
    if guess.source != "guessed":
        return Drafting(costs, known_acceptance(guess.chances), match_share=guess.match_share)
    if guess.chances:
        shifted = tuple(_shifted(chance, by) for chance in guess.chances)
        share = _shifted(guess.match_share, by) if guess.match_share < 1 else 1.0
        return Drafting(costs, known_acceptance(shifted), match_share=share)
    temperature = temperature_class(conditions.temperature)
    return Drafting(costs, Acceptance(is_lookup=False), temperature, guess.shift + by)


def _shifted(chance: float, by: float) -> float:
    odds = chance / (1 - chance) * exp(by)
    return odds / (1 + odds)


def _full_load(drafting: Drafting, without: MemoryPlan, with_draft: MemoryPlan, context: float) -> tuple[float, float]:
    """Tokens a second with as many sequences as fit: plain without the draft; with the draft, as fast as it gets."""
    rows, rows_beside = min(without.sequences, MOST_ROWS), min(with_draft.sequences, MOST_ROWS)
    plain = drafting.plain(rows, context) if rows else 0.0
    return plain, drafting.best(rows_beside, context).tokens_per_second if rows_beside else 0.0


def _verdict(
    draft: PlannedDraft, compatibility: Compatibility | None, memory: MemoryPlan, plain_memory: MemoryPlan,
    speed: Speed, full: tuple[float, float], low: Speed, guess: Guess,
) -> tuple[Literal["use", "maybe", "no", "cannot"], str]:  # fmt: skip
    if compatibility is not None and not compatibility.is_usable:
        return "cannot", f"{compatibility.sentence}; a draft must share the target's token ids"
    if not memory.fits and not plain_memory.fits:
        return "cannot", "the target does not fit"
    if not memory.fits:
        return "cannot", "the target fits, but not together with this draft"
    if speed.speedup <= 1.0:
        return "no", "it is not faster than plain decoding at this load"
    lost = 1 - memory.sequences / plain_memory.sequences if plain_memory.sequences else 0.0
    if lost > 0.1 and full[1] < full[0]:
        return "maybe", (
            f"it is faster at this load, but takes {lost:.0%} of the concurrency, which outweighs its gain when the "
            "cache is full"
        )
    if guess.source == "guessed" and low.speedup < 1.0:
        return "maybe", "it pays if the guessed acceptance holds; measure it"
    return "use", "it is faster than plain decoding"


def ranked(pairings: Sequence[Pairing]) -> list[Pairing]:
    """The fastest usable one first. A head that is still to be trained comes after equals that exist."""
    order = {"use": 0, "maybe": 1, "no": 2, "cannot": 3}
    return sorted(
        pairings, key=lambda each: (order[each.verdict], -round(each.speed.speedup, 2), not each.draft.exists)
    )


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
