"""Judges a target with one way to draft: tokenizers, family, size, predicted speedup and where it ends.

`guesses.py` says how many draft tokens are accepted, `roofline.py` or a measurement what they cost, and `speed.py` how
fast that is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from outpace.errors import UsageError
from outpace.plan.bridge import Bridge, bridge_of, with_bridge
from outpace.plan.drafts import PlannedDraft
from outpace.plan.guesses import SPREAD, Conditions, Guess, Measured, drafting_of, guessed
from outpace.plan.memory import Deployment, MemoryPlan, divide
from outpace.plan.models import PlannedModel
from outpace.plan.roofline import completed, draft_costs, sampled, target_costs
from outpace.plan.speed import Answer, Drafting, Speed
from outpace.plan.vocabularies import Compatibility, compare
from outpace.speculation.costs.curves import Costs, DraftCosts

Verdict = Literal["use", "maybe", "no", "cannot"]
LOADS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
MOST_ROWS = 512  # requests at once that are compared, however many fit


@dataclass(frozen=True, slots=True)
class Pairing:
    """One way to draft for a target on a machine."""

    draft: PlannedDraft
    compatibility: Compatibility | None
    bridge: Bridge | None  # where the draft has another tokenizer
    ratio: float | None  # parameters of the target over those of the draft
    guess: Guess
    chance: float  # of a draft's first token
    memory: MemoryPlan
    cost_ratio: float  # a pass of the draft over a plain step of the target, at the wanted load; a lookup's is 0
    drafting: Drafting
    speed: Speed  # at the wanted load
    low: Speed  # at the low end of the range of a guess
    high: Speed
    by_load: tuple[Speed, ...]  # at the depth that is best at each load
    at_depth: tuple[Speed, ...]  # at the depth that is best at the wanted load, as an engine with a fixed depth runs
    break_even: float | None  # chance of a draft token, at that depth and load
    loss_from: int | None  # requests at once, from the wanted load on, at which that depth is slower than plain
    full_load: tuple[float, float]  # tokens a second when the cache is full: plain without the draft, and with it
    verdict: Verdict
    reason: str
    kept_when_full: float  # share of the plain throughput, at most 1: what its memory displaces is lost at any load


def judge(
    target: PlannedModel,
    draft: PlannedDraft,
    to: Deployment,
    conditions: Conditions,
    *,
    plain_memory: MemoryPlan,
    target_step: Costs | None = None,
    measured: Measured | None = None,
    draft_step: DraftCosts | None = None,
) -> Pairing:
    """`target_step`: measured costs of the target's steps; without them, those of the machine's table. `draft_step`:
    the same for the draft, where `measured` has none."""
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
    drafting_costs = draft_costs(draft, target, to.machine, to.draft_gpus, memory.context, to.cache_element_bytes)
    vocab_size = draft.model.shape.vocab_size if draft.model is not None else 0
    bridge = bridge_of(compatibility, conditions.temperature, drafting_costs.passes, vocab_size, to.machine)
    modelled.drafts[draft.kind] = with_bridge(drafting_costs, bridge)
    whole = modelled
    if target_step is not None:
        drafts = (measured.draft_costs if measured is not None else None) or draft_step
        seen = replace(target_step, drafts={draft.kind: drafts or modelled.drafts[draft.kind]})
        whole = completed(seen, modelled, to.machine)
    if conditions.temperature > 0.0:
        whole = sampled(whole, target.shape, to.machine)
    guess = guessed(target, draft, ratio, conditions, measured)
    answer = Answer.within(context, conditions.output_tokens)
    drafting = drafting_of(whole, guess, conditions, answer)
    rows = conditions.rows
    speed = (
        drafting.best(rows, context) if conditions.depth is None else drafting.fixed(rows, conditions.depth, context)
    )
    depth = speed.depth or conditions.depth or 1
    low, high = (
        drafting_of(whole, guess, conditions, answer, by).fixed(rows, depth, context) for by in (-SPREAD, SPREAD)
    )
    by_load = tuple(drafting.best(load, context) for load in LOADS)
    at_depth = tuple(drafting.fixed(load, depth, context) for load in LOADS)
    full = _full_load(drafting, plain_memory, memory, context)
    lost = 1 - memory.sequences / plain_memory.sequences if plain_memory.sequences else 0.0
    is_short = lost > 0 and memory.sequences < LOADS[-1]  # beyond that, room is not what is short
    kept = min(1.0, full[1] / full[0]) if is_short and full[0] else 1.0
    verdict, reason = _verdict(memory, plain_memory, speed, lost if kept < 1.0 else 0.0, low, guess)
    cannot = obstacle(draft, target, to)
    if cannot is not None:
        verdict, reason = "cannot", cannot
    return Pairing(
        draft=draft,
        compatibility=compatibility,
        bridge=bridge,
        ratio=ratio,
        guess=guess,
        chance=drafting.acceptance.forecast(drafting.temperature, 1, drafting.shift)[0],
        memory=memory,
        cost_ratio=drafting.cost_ratio(rows, context),
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
        kept_when_full=kept,
    )


def obstacle(draft: PlannedDraft, target: PlannedModel, to: Deployment) -> str | None:
    """Why the draft cannot run there, whatever room there is; None if it can."""
    if draft.kind == "self" and (to.gpus > 1 or not to.machine.is_gpu):
        return "Outpace rounds a copy of a model on a single GPU only"
    if draft.kind == "self" and target.shape.experts is not None and draft.name.startswith("self:int4"):
        return "Outpace rounds experts to fp8 or int8 only"
    shape = draft.model.shape if draft.model is not None else draft.head
    if shape is not None and shape.heads % to.draft_gpus:
        return f"its {shape.heads} attention heads do not divide over {to.draft_gpus} GPUs"
    return None


def _full_load(drafting: Drafting, without: MemoryPlan, with_draft: MemoryPlan, context: float) -> tuple[float, float]:
    """Tokens a second with as many sequences as fit: plain without the draft; with the draft, as fast as it gets."""
    rows, rows_beside = min(without.sequences, MOST_ROWS), min(with_draft.sequences, MOST_ROWS)
    plain = drafting.plain(rows, context) if rows else 0.0
    return plain, drafting.best(rows_beside, context).tokens_per_second if rows_beside else 0.0


def _verdict(
    memory: MemoryPlan, plain_memory: MemoryPlan, speed: Speed, lost: float, low: Speed, guess: Guess
) -> tuple[Verdict, str]:
    if not memory.fits and not plain_memory.fits:
        return "cannot", "the target does not fit"
    if not memory.fits:
        return "cannot", "the target fits, but not together with this draft"
    if speed.speedup <= 1.0:
        return "no", "it is not faster than plain decoding at this load"
    if lost > 0.1:
        return "maybe", (
            f"it is faster at this load, but takes {lost:.0%} of the concurrency, which outweighs its gain when the "
            "cache is full"
        )
    if guess.source == "guessed" and low.speedup < 1.0:
        return "maybe", "it pays if the guessed acceptance holds; measure it"
    return "use", "it is faster than plain decoding"


def ranked(pairings: Sequence[Pairing]) -> list[Pairing]:
    """Usable ones by their speed at the wanted load, times what is kept of the throughput with a full cache: where a
    draft does not pay, `auto` decodes plainly, but it does not give memory back. So a guess costs a draft no place, and
    the memory it takes does. Of equals, those that are certain and those that exist come first."""
    order = {"use": 0, "maybe": 0, "no": 1, "cannot": 2}

    def key(each: Pairing) -> tuple[float, ...]:
        value = round(each.speed.speedup * each.kept_when_full, 2)
        return order[each.verdict], -value, each.verdict == "maybe", not each.draft.exists

    return sorted(pairings, key=key)
