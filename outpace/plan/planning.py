"""Makes a plan: opens what was named, adds alternatives, judges all drafts, and reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from outpace.errors import ModelError, UsageError
from outpace.plan.advice import advise, precision_table
from outpace.plan.drafts import HEAD, PlannedDraft, open_draft
from outpace.plan.guesses import Conditions
from outpace.plan.known_models import find_known, smaller_siblings
from outpace.plan.memory import Deployment, divide
from outpace.plan.models import PlannedModel
from outpace.plan.pairing import Pairing, judge, obstacle, ranked
from outpace.plan.report import as_report

if TYPE_CHECKING:
    from outpace.plan.measure import Measurement
    from outpace.speculation.costs.curves import Costs, DraftCosts

_MOST_SIBLINGS = 3
_LARGE = 1 << 20
_CONTEXTS = (2048, 8192, 32768, 131072)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the user asks about."""

    target: PlannedModel
    named: tuple[PlannedDraft, ...]  # drafts that were named
    others: tuple[PlannedDraft, ...]  # alternatives and candidates
    skipped: dict[str, str]  # candidates that are no drafts, with the reason

    @property
    def drafts(self) -> tuple[PlannedDraft, ...]:
        return (*self.named, *self.others)


def open_wanted(
    target: PlannedModel, drafts: Sequence[str], draft_precision: str | None, candidates: Path | None
) -> Wanted:
    named = tuple(open_draft(reference, target, draft_precision) for reference in dict.fromkeys(drafts))
    found, skipped = _candidates(candidates, target) if candidates is not None else ([], {})
    others = [*found, *_alternatives(target, [*named, *found], draft_precision)]
    names = {draft.name for draft in named}
    return Wanted(target, named, tuple(each for each in others if each.name not in names), skipped)


def _candidates(folder: Path, target: PlannedModel) -> tuple[list[PlannedDraft], dict[str, str]]:
    """Every GGUF file and every folder with a config.json, but the target itself."""
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder; --candidates takes one with GGUF files or model folders")
    found, skipped = list[PlannedDraft](), dict[str, str]()
    for path in sorted(folder.iterdir()):
        is_file = path.suffix == ".gguf" and path.is_file()
        if not is_file and not (path.is_dir() and ((path / "config.json").is_file() or (path / "head.gguf").is_file())):
            continue
        if target.path is not None and path.resolve() == target.path.resolve():
            continue
        try:
            draft = open_draft(str(path), target)
        except (ModelError, UsageError) as error:
            skipped[path.name] = str(error)
            continue
        if draft.kind == "draft" and draft.parameters >= target.parameters:
            skipped[path.name] = f"it has {draft.parameters / 1e9:.3g}B parameters, no fewer than the target"
        else:
            found.append(replace(draft, name=path.name))
    if not found and not skipped:
        raise UsageError(f"{folder} has no GGUF file and no folder with a config.json")
    return found, skipped


def _alternatives(target: PlannedModel, given: Sequence[PlannedDraft], wanted: str | None) -> list[PlannedDraft]:
    """Lookups, a head, the target's quantised self, and smaller models of its family where none was named."""
    kinds = {draft.kind for draft in given}
    found = []
    known = find_known(target.name) or find_known(target.path.name if target.path is not None else "")
    if "draft" not in kinds and known is not None:
        found += [open_draft(each.name, target, wanted) for each in smaller_siblings(known)[:_MOST_SIBLINGS]]
    if "head" not in kinds:
        found.append(open_draft(HEAD, target))
    if "self" not in kinds and target.precision.nominal_bytes >= 1 and target.parameters > _LARGE:
        found.append(open_draft("self:int4", target))
    found.append(open_draft("ngram", target))
    return found


def make_plan(
    wanted: Wanted,
    to: Deployment,
    conditions: Conditions,
    *,
    measurement: Measurement | None = None,
    costs: Costs | None = None,
    costs_of_drafts: Mapping[str, DraftCosts] = MappingProxyType({}),
    costs_from: str | None = None,
) -> dict[str, Any]:
    """`costs`: measured ones of the target's steps; `costs_of_drafts`: likewise, by a draft's name. Returns the
    report."""
    target = wanted.target
    plain = divide(target, None, to)
    steps = costs if measurement is None else measurement.costs if measurement.is_of_machine else None
    without = replace(conditions, acceptance=()) if wanted.named else conditions
    pairings: list[Pairing] = [
        judge(
            target, draft, to, conditions if draft in wanted.named else without, plain_memory=plain, target_step=steps,
            measured=measurement.of(draft, conditions.temperature) if measurement is not None else None,
            draft_step=costs_of_drafts.get(draft.name),
        )
        for draft in wanted.drafts
        if draft in wanted.named or obstacle(draft, target, to) is None
    ]  # fmt: skip
    ordered = ranked(pairings)
    first_model = next((draft for draft in wanted.drafts if draft.kind == "draft"), None)
    has_formats = target.path is None or target.path.is_dir()
    precisions = precision_table(target, first_model, to) if has_formats else []
    names = [draft.name for draft in wanted.named]
    advice = advise(target, names, ordered, plain, to, conditions)
    measured = None
    if measurement is not None:
        measured = {
            name: {f"{temperature:g}": each.as_dict() for temperature, each in found.items()}
            for name, found in measurement.drafts.items()
        }
    source = costs_from or f"bandwidth and arithmetic of {to.machine.name}, at the shares that measured machines reach"
    best = next((each.draft for each in ordered if each.draft.exists and each.verdict in ("use", "maybe")), None)
    return as_report(
        target, to, conditions, plain, ordered, precisions, advice, contexts=_by_context(target, best, to),
        skipped=wanted.skipped, measured=measured, costs_from=source,
    )  # fmt: skip


def _by_context(target: PlannedModel, draft: PlannedDraft | None, to: Deployment) -> list[dict[str, Any]]:
    """How many sequences fit at several lengths, without a draft and with the best."""
    found = []
    for context in sorted({*_CONTEXTS, to.context}):
        if context <= target.shape.context:
            there = replace(to, context=context)
            with_draft = None if draft is None else divide(target, draft, there).sequences
            found.append({"context": context, "plain": divide(target, None, there).sequences, "with_draft": with_draft})
    return found
