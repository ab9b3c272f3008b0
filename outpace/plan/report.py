"""The result of a plan as one JSON object; the terminal and the page are made from it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import outpace
from outpace.plan.advice import Advice, PrecisionRow
from outpace.plan.guesses import Conditions
from outpace.plan.machines import BUSY
from outpace.plan.memory import Deployment, GpuMemory, MemoryPlan
from outpace.plan.models import PlannedModel
from outpace.plan.pairing import Pairing
from outpace.plan.speed import Speed

FORMAT = 1
Report = Mapping[str, Any]


def as_report(
    target: PlannedModel,
    to: Deployment,
    conditions: Conditions,
    plain: MemoryPlan,
    pairings: Sequence[Pairing],
    precisions: Sequence[PrecisionRow],
    advice: Advice,
    *,
    contexts: Sequence[Mapping[str, Any]],
    skipped: Mapping[str, str],
    measured: Mapping[str, Any] | None,
    costs_from: str,
) -> dict[str, Any]:
    """`contexts`: sequences that fit, by length. `skipped`: files of --candidates that are no drafts, with the reason.
    `costs_from`: where costs come from."""
    return {
        "format": FORMAT,
        "outpace": outpace.__version__,
        "target": _model(target),
        "machine": _machine(to),
        "conditions": {
            "context": plain.context,
            "output_tokens": conditions.output_tokens,
            "concurrency": conditions.rows,
            "temperature": conditions.temperature,
            "workload": conditions.workload,
            "nominal": to.nominal,
        },
        "memory": _memory(plain),
        "contexts": list(contexts),
        "precisions": [{"target": row.target, "draft": row.draft, **_memory(row.memory)} for row in precisions],
        "drafts": [_pairing(each) for each in pairings],
        "skipped": dict(skipped),
        "advice": {
            "decision": advice.decision,
            "headline": advice.headline,
            "sentences": advice.sentences,
            "watch": advice.watch,
            "commands": advice.commands,
        },
        "assumptions": _assumptions(target, to, pairings, conditions, costs_from),
        "measured": measured,
    }


def _model(model: PlannedModel) -> dict[str, Any]:
    shape = model.shape
    return {
        "name": model.name,
        "family": model.family,
        "parameters": model.parameters,
        "active_parameters": shape.active_parameters,
        "precision": model.precision.name,
        "weight_bytes": model.weight_bytes,
        "layers": shape.layers,
        "kv_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size,
        "context": shape.context,
    }


def _machine(to: Deployment) -> dict[str, Any]:
    machine = to.machine
    return {
        "name": machine.name,
        "count": to.gpus,
        "draft_gpus": to.draft_gpus,
        "memory_bytes": machine.nominal_bytes if to.nominal else machine.memory_bytes,
        "utilization": to.utilization,
        "bandwidth": machine.bandwidth,
        "operations": machine.bf16,
        "is_gpu": machine.is_gpu,
        "is_measured": machine.is_measured,
        "taken_by_others": machine.taken_by_others,
    }


def _memory(plan: MemoryPlan) -> dict[str, Any]:
    return {
        "weights": plan.weights,
        "left": plan.left,
        "fits": plan.fits,
        "cache_tokens": plan.cache_tokens,
        "sequences": plan.sequences,
        "context": plan.context,
        "cache_bytes_per_token": sum(gpu.token for gpu in plan.gpus),
        "gpus": [_gpu(gpu) for gpu in plan.gpus],
    }


def _gpu(gpu: GpuMemory) -> dict[str, float]:
    return {name: getattr(gpu, name) for name in ("total", "usable", "weights", "draft", "buffers", "cache", "token")}


def _speed(speed: Speed) -> dict[str, float]:
    return {
        "concurrency": speed.rows,
        "depth": speed.depth,
        "tokens_per_step": speed.tokens_per_step,
        "step_seconds": speed.seconds,
        "tokens_per_second": speed.tokens_per_second,
        "speedup": speed.speedup,
    }


def _pairing(pairing: Pairing) -> dict[str, Any]:
    draft, found = pairing.draft, pairing.compatibility
    return {
        "name": draft.name,
        "kind": draft.kind,
        "exists": draft.exists,
        "precision": draft.model.precision.name if draft.model is not None else None,
        "parameters": draft.parameters,
        "weight_bytes": draft.weight_bytes,
        "family": draft.model.family if draft.model is not None else None,
        "ratio": pairing.ratio,
        "cost_ratio": pairing.cost_ratio,
        "tokenizer": None
        if found is None
        else {
            "verdict": found.verdict,
            "overlap": found.overlap,
            "first_difference": found.first_difference,
            "shared": found.shared,
            "sentence": found.sentence,
        },
        "bridge": None
        if pairing.bridge is None
        else {
            "way": pairing.bridge.way,
            "token_seconds": pairing.bridge.token_seconds,
            "sentence": pairing.bridge.sentence,
        },
        "acceptance": {
            "source": pairing.guess.source,
            "first_token": pairing.chance,
            "chances": list(pairing.guess.chances),
            "match_share": pairing.guess.match_share,
            "note": pairing.guess.note,
        },
        "reading": {
            "prompt_tokens": pairing.drafting.answer.prompt_tokens,
            "seconds": pairing.drafting.reading_seconds,
        },
        "speed": _speed(pairing.speed),
        "range": [pairing.low.speedup, pairing.high.speedup],
        "by_load": [_speed(each) for each in pairing.by_load],
        "at_depth": [_speed(each) for each in pairing.at_depth],
        "break_even": pairing.break_even,
        "loss_from": pairing.loss_from,
        "full_load": {"plain": pairing.full_load[0], "with_draft": pairing.full_load[1]},
        "memory": _memory(pairing.memory),
        "verdict": pairing.verdict,
        "reason": pairing.reason,
    }


def _assumptions(
    target: PlannedModel, to: Deployment, pairings: Sequence[Pairing], conditions: Conditions, costs_from: str
) -> list[str]:
    found = [f"Costs: {costs_from}."]
    if to.context > target.shape.context:
        found.append(
            f"Sequences have at most {target.shape.context:,} tokens, all that {target.name} was trained for: not the "
            f"{to.context:,} of --context."
        )
    if to.machine.taken_by_others > BUSY:
        found.append(
            f"While this machine was measured, {to.machine.taken_by_others:.0%} of its processor time went to other "
            "programs, so its bandwidth and arithmetic are too low here. Plan again when it is idle."
        )
    if to.nominal:
        found.append(
            "Nominal arithmetic: round parameter counts, 2, 1 or 0.5 bytes a weight, the maker's memory, weights only."
        )
    else:
        source = "the driver" if to.machine.is_gpu else "the system"
        found.append(
            f"Memory: {to.utilization:.0%} of what {source} reports; buffers as the torch backend plans them for "
            f"{to.sequences} running requests; weights with their scales, embeddings and output head in bf16 where a "
            "serving format quantises layers only."
        )
    found.append("Sequences are half as long as the longest on average, when steps are timed.")
    reads = next((each.drafting.answer for each in pairings if each.drafting.reading_seconds), None)
    if reads is not None:
        found.append(
            "Speed is that of decoding, after the target's prefill. What drafts with a model reads the prompt once "
            f"more: {reads.prompt_tokens:,} tokens for an answer of {reads.tokens:,.0f} (--context, --output-tokens)."
        )
    if to.gpus > 1:
        place = "on the first GPU"
        if to.draft_gpus > 1:
            place = "sharded like the target, as other engines can do it (Outpace runs it whole on the first GPU)"
        found.append(f"The draft is {place}; two all-reduces follow every layer of a sharded model.")
    if any(each.guess.source == "guessed" for each in pairings):
        found.append(
            "Acceptance is guessed unless a source is named: the policy's prior, shifted by kind, family and size."
        )
    return found


def finite(value: Any) -> Any:
    """The same value for strict JSON, which has no NaN and no infinity."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(each) for key, each in value.items()}
    return [finite(each) for each in value] if isinstance(value, list | tuple) else value
