"""Says in a few sentences what to do: which draft or none, precision, depth, flags to paste, and what to watch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from outpace.plan.drafts import PlannedDraft
from outpace.plan.guesses import Conditions, ratio_evidence
from outpace.plan.launch import launch
from outpace.plan.memory import Deployment, MemoryPlan, divide
from outpace.plan.models import PlannedModel
from outpace.plan.pairing import MOST_ROWS, Pairing
from outpace.plan.precision import PRECISIONS

Decision = Literal["this_draft", "another_draft", "no_draft", "does_not_fit"]
_QUANTISED = ("fp8", "int8", "int4")
_BASIS = {
    "measured": "measured acceptance",
    "given": "the given acceptance",
    "brought": "the acceptance that its training measured",
    "guessed": "a guessed acceptance",
}


@dataclass(slots=True)
class Advice:
    decision: Decision
    headline: str
    sentences: list[str] = field(default_factory=list)
    watch: list[str] = field(default_factory=list)
    commands: dict[str, str] = field(default_factory=dict)  # by engine


@dataclass(frozen=True, slots=True)
class PrecisionRow:
    """One line of the table of precisions: a target and a draft, each in a format."""

    target: str
    draft: str | None
    memory: MemoryPlan


def precision_table(target: PlannedModel, draft: PlannedDraft | None, to: Deployment) -> list[PrecisionRow]:
    """What each format would leave for the cache. Files in a fixed format are shown as they are."""
    rows = []
    model = draft.model if draft is not None and draft.kind == "draft" else None
    eight = "fp8" if to.machine.fp8 and not to.nominal else "int8"
    for ours, theirs in (("bf16", "bf16"), (eight, "bf16"), (eight, eight), ("int4", "bf16"), ("int4", "int4")):
        if model is None and theirs != "bf16":
            continue
        quantised = PlannedDraft("draft", model.name, model.at(PRECISIONS[theirs])) if model is not None else None
        memory = divide(target.at(PRECISIONS[ours]), quantised, to)
        rows.append(PrecisionRow(ours, theirs if model is not None else None, memory))
    return rows


def advise(
    target: PlannedModel,
    named: Sequence[str],
    pairings: Sequence[Pairing],
    plain: MemoryPlan,
    to: Deployment,
    conditions: Conditions,
) -> Advice:
    """`pairings` are ranked; `named` are the drafts that the user asked about."""
    if not plain.fits:
        return _does_not_fit(target, plain, to)
    paying = [each for each in pairings if each.verdict in ("use", "maybe") and each.draft.exists]
    trainable = next((each for each in pairings if each.verdict == "use" and not each.draft.exists), None)
    best = paying[0] if paying else None
    if best is None:
        advice = Advice("no_draft", f"Run {target.name} without a draft: no candidate here is faster at this load.")
    else:
        chosen: Decision = "this_draft" if not named or best.draft.name in named else "another_draft"
        advice = Advice(chosen, _headline(best, named, chosen))
        advice.sentences += _about(best, plain, to, conditions)
        sure = next((each for each in paying if each.verdict == "use"), None)
        if best.verdict == "maybe" and sure is not None:
            advice.sentences.append(
                f"This is not certain: {best.reason}. {sure.draft.name} is surer: {sure.speed.speedup:.2f}x at depth "
                f"{sure.speed.depth}."
            )
    advice.sentences += [_why_not(each) for each in pairings if each.draft.name in named and each is not best]
    if trainable is not None and (best is None or trainable.speed.speedup > 1.05 * best.speed.speedup):
        advice.sentences.append(
            f"A head, trained by `outpace distill` in about half an hour on a GPU, would predict "
            f"{trainable.speed.speedup:.2f}x and takes {_gb(trainable.draft.weight_bytes)}."
        )
    if plain.sequences < conditions.rows:
        advice.sentences.append(
            f"Only {plain.sequences:,} sequences of {plain.context:,} tokens fit at once; of {conditions.rows:,} "
            "requests (--concurrency) the others wait."
        )
    advice.sentences += _about_precision(target, to)
    advice.watch = _watch(best, conditions)
    found = launch(target, best, to, conditions)
    advice.commands = found.commands
    advice.sentences += found.notes
    return advice


def _headline(best: Pairing, named: Sequence[str], decision: Decision) -> str:
    how = f"{best.speed.speedup:.2f}x plain decoding at depth {best.speed.depth}"
    basis = _BASIS[best.guess.source]
    instead = f" instead of {', '.join(named)}" if decision == "another_draft" else ""
    verb = "Use" if best.verdict == "use" else "Try"
    return f"{verb} {best.draft.name}{instead}: {how}, with {basis}."


def _about(best: Pairing, plain: MemoryPlan, to: Deployment, conditions: Conditions) -> list[str]:
    found = []
    if best.guess.source == "guessed":
        found.append(
            f"The guess is {best.chance:.0%} for the first token ({best.guess.note}). With its range the speedup is "
            f"{best.low.speedup:.2f} to {best.high.speedup:.2f}; --measure, or --acceptance with a figure of your own, "
            "replaces it."
        )
    if best.draft.parameters:
        found.append(
            f"A pass of it takes {best.cost_ratio:.0%} of a plain step of the target, {_requests(conditions.rows)}."
        )
    if best.break_even is not None:
        found.append(
            f"It breaks even where {best.break_even:.0%} of the draft tokens are accepted, each after accepted ones, "
            f"at depth {best.speed.depth} and {_requests(conditions.rows)}."
        )
    if best.loss_from is not None:
        found.append(
            f"At that fixed depth it is slower than plain decoding with {best.loss_from} requests at once. "
            "Outpace's `auto` lowers the depth before that and then decodes plainly."
        )
    else:
        found.append(f"At that depth it stays faster up to {best.at_depth[-1].rows} requests at once.")
    if best.drafting.reading_seconds:
        found.append(_about_reading(best, conditions))
    if best.draft.weight_bytes and plain.sequences:
        lost = plain.sequences - best.memory.sequences
        place = "the first GPU" if to.gpus > 1 and to.draft_gpus == 1 else "each GPU" if to.gpus > 1 else "the machine"
        found.append(
            f"It takes {_gb(best.memory.gpus[0].draft)} on {place} and leaves room for {best.memory.sequences:,} "
            f"instead of {plain.sequences:,} sequences of {plain.context:,} tokens."
        )
        if lost and 1 < best.memory.sequences < MOST_ROWS:
            found.append(_full_load(best, plain, to))
    if best.ratio is not None and best.draft.kind == "draft":
        found.append(f"Size: {ratio_evidence(best.ratio)}.")
    if best.compatibility is not None:
        found.append(f"Tokenizers: {best.compatibility.sentence}.{_about_bridge(best)}")
    return found


def _about_reading(best: Pairing, conditions: Conditions) -> str:
    answer, seconds = best.drafting.answer, best.drafting.reading_seconds
    share = seconds * best.speed.tokens_per_second / answer.tokens
    return (
        f"It reads every prompt as well: {_time(seconds)} for {answer.prompt_tokens:,} tokens, {share:.0%} of the "
        f"decode time of answers of {answer.tokens:,.0f} tokens, {_requests(conditions.rows)}. The speedup includes "
        "that; with shorter answers (--output-tokens) it weighs more."
    )


def _about_bridge(pairing: Pairing) -> str:
    return f" {pairing.bridge.sentence}." if pairing.bridge is not None else ""


def _full_load(best: Pairing, plain: MemoryPlan, to: Deployment) -> str:
    without, with_draft = best.full_load
    outcome = "the gain outweighs that" if with_draft >= without else "that outweighs the gain"
    sentence = (
        f"With the cache full, {best.memory.sequences:,} sequences with the draft give {with_draft:,.0f} tokens a "
        f"second, {min(plain.sequences, MOST_ROWS):,} without it {without:,.0f}: {outcome}."
    )
    if with_draft < without and to.gpus > 1 and to.draft_gpus == 1:
        sentence += f" Sharding the draft (--draft-gpus {to.gpus}) halves what it takes of the fullest GPU."
    return sentence


def _why_not(pairing: Pairing) -> str:
    speed = f"{pairing.speed.speedup:.2f}x at depth {pairing.speed.depth}; "
    sentence = f"{pairing.draft.name}: {speed if pairing.verdict in ('use', 'maybe') else ''}{pairing.reason}."
    if pairing.compatibility is None or pairing.compatibility.verdict == "identical":
        return sentence
    return f"{sentence} Tokenizers: {pairing.compatibility.sentence}.{_about_bridge(pairing)}"


def _about_precision(target: PlannedModel, to: Deployment) -> list[str]:
    if to.nominal or target.precision.nominal_bytes < 2 or not to.machine.is_gpu:
        return []
    smaller = target.at(PRECISIONS["fp8" if to.machine.fp8 else "int8"])
    memory, now = divide(smaller, None, to), divide(target, None, to)
    if memory.sequences < 1.5 * max(now.sequences, 1):
        return []
    return [
        f"Precision: in {smaller.precision} the target takes {_gb(smaller.weight_bytes)} instead of "
        f"{_gb(target.weight_bytes)} and leaves room for {memory.sequences:,} instead of {now.sequences:,} sequences. "
        "Its answers change slightly; the draft may stay in bf16."
    ]


def _does_not_fit(target: PlannedModel, plain: MemoryPlan, to: Deployment) -> Advice:
    gpu = plain.tightest
    room = f"{_gb(gpu.weights)} of weights" + (" on each GPU" if to.gpus > 1 else "")
    advice = Advice(
        "does_not_fit",
        f"{target.name} in {target.precision} does not fit {to.gpus} x {to.machine.name}: {room}, {_gb(gpu.buffers)} "
        f"of buffers, {_gb(gpu.usable)} usable, and a sequence of {plain.context:,} tokens needs "
        f"{_gb(plain.sequence_tokens * gpu.token)} of cache.",
    )
    for name in _QUANTISED:
        smaller = target.at(PRECISIONS[name])
        if smaller.weight_bytes < target.weight_bytes and divide(smaller, None, to).fits:
            sequences = divide(smaller, None, to).sequences
            advice.sentences.append(
                f"In {name} it fits, with {_gb(smaller.weight_bytes)} of weights and room for {sequences:,} sequences "
                f"of {plain.context:,} tokens: --precision {name}."
            )
    for gpus in (2, 4, 8, 16):
        if gpus > to.gpus and target.shape.heads % gpus == 0 and to.machine.is_gpu:
            wider = divide(target, None, _on(to, gpus))
            if wider.fits:
                advice.sentences.append(f"On {gpus} of them it fits as it is: --gpus {gpus}.")
                break
    if not advice.sentences:
        advice.sentences.append("Choose a smaller model, a larger machine, or a shorter --context.")
    return advice


def _on(to: Deployment, gpus: int) -> Deployment:
    return Deployment(to.machine, gpus, to.utilization, 1, to.cache_precision, to.context, to.sequences,
                      to.step_tokens, to.nominal)  # fmt: skip


def _watch(best: Pairing | None, conditions: Conditions) -> list[str]:
    if best is None:
        return ["time per output token under your load; `outpace bench` compares it with every way to draft"]
    needed = f"{best.break_even:.0%}" if best.break_even is not None else "its break-even"
    return [
        f"accepted over tried draft tokens (metrics vllm:spec_decode_num_*, in Outpace too): below {needed} "
        "drafting at this depth loses time",
        "P99 beside P50 of the time per output token: a fixed depth slows requests that accept little",
        *(
            ["the time between the first two tokens: there the draft reads the prompt"]
            if best.drafting.reading_seconds
            else []
        ),
        *(
            ["acceptance at your own temperature: this plan is for temperature 0"]
            if conditions.temperature == 0
            else []
        ),
    ]


def _requests(rows: int) -> str:
    return "one request at a time" if rows == 1 else f"{rows} requests at once"


def _time(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if abs(num_bytes) >= 1e9 else f"{num_bytes / 1e6:.0f} MB"
