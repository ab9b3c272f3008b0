"""Costs of steps and drafts from bandwidth and arithmetic, as the policy's own `StepCosts` and `DraftCosts`.

A step reads its weights once, whatever its number of tokens, and multiplies them with every token. Few tokens are bound
by memory, many by arithmetic; a mixture of experts reads more weights the more tokens there are. docs/plan.md derives
the formulas and compares them with measurements.
"""

from __future__ import annotations

import math

from outpace.plan.drafts import PlannedDraft
from outpace.plan.machines import Machine
from outpace.plan.models import PlannedModel
from outpace.plan.shapes import Shape
from outpace.speculation.costs.communication import all_reduce_seconds
from outpace.speculation.costs.curves import SIZES, Costs, DraftCosts, StepCosts

_MANY = (1536, 2048, 4096)
_LOOKUP_SECONDS = 2e-5
_ACTIVATION_BYTES = 2.0


def target_costs(target: PlannedModel, machine: Machine, gpus: int, context: int, cache_bytes: float) -> Costs:
    kind = machine.kind
    steps = step_costs(target, machine, gpus, context, cache_bytes)
    return Costs(steps, {}, token_seconds=kind.token_seconds, schedule_seconds=kind.step_seconds)


def step_costs(model: PlannedModel, machine: Machine, gpus: int, context: int, cache_bytes: float) -> StepCosts:
    """`context` is the length at which the cost of a token of context is taken: windows make it fall with length."""
    shape = model.shape
    elements = shape.cached_elements(context) / max(context, 1)
    return StepCosts(
        {size: _seconds(model, machine, gpus, size) for size in (*SIZES, *_MANY)},
        row_context_seconds=elements
        * _share(shape, gpus)
        * cache_bytes
        / (machine.bandwidth * machine.kind.bandwidth_share),
    )


def draft_costs(draft: PlannedDraft, target: PlannedModel, machine: Machine, gpus: int, context: int,
                cache_bytes: float) -> DraftCosts:  # fmt: skip
    """`gpus`: those that the draft is sharded over."""
    if draft.model is not None:
        return DraftCosts(step_costs(draft.model, machine, gpus, context, cache_bytes))
    if draft.head is None:
        return DraftCosts(lookup_seconds=_LOOKUP_SECONDS)
    share = draft.head.parameters_read / draft.head.parameters
    read, operations = draft.head_bytes * share / gpus, 2.0 * draft.head.parameters_read / gpus
    points = {}
    for size in (*SIZES, *_MANY):
        arithmetic = size * operations / _operations(target, machine)
        points[size] = _joined(read, arithmetic, machine, machine.kind.bandwidth_share) + machine.kind.layer_seconds
    return DraftCosts(StepCosts(points))


def extended(measured: StepCosts, modelled: StepCosts) -> StepCosts:
    """Measured costs, continued beyond their largest size with the slope of modelled ones: a calibration stops at a few
    hundred tokens, where a large batch with drafts only begins."""
    points, saved = measured.points, measured.as_dict()
    last = max(points)
    for size in modelled.points:
        if size > last:
            points[size] = points[last] + max(0.0, modelled.seconds(1, size) - modelled.seconds(1, last))
    names = ("row_seconds", "context_seconds", "row_context_seconds", "token_context_seconds")
    return StepCosts(points, **{name: saved[name] for name in names})


def completed(measured: Costs, modelled: Costs, machine: Machine) -> Costs:
    """The same for all costs; a calibration leaves out host time, which the kind of machine gives."""
    kind = machine.kind
    drafts = {}
    for name, costs in measured.drafts.items():
        by = modelled.drafts.get(name)
        passes, first = costs.passes, costs.first
        if by is not None and by.passes is not None:
            passes, first = (each and extended(each, by.passes) for each in (passes, first))
        drafts[name] = DraftCosts(
            passes, costs.catch_up, first=first, one_pass=costs.one_pass, lookup_seconds=costs.lookup_seconds,
            draw_seconds=costs.draw_seconds,
        )  # fmt: skip
    return Costs(
        extended(measured.target, modelled.target), drafts, measured.token_seconds or kind.token_seconds,
        measured.schedule_seconds or kind.step_seconds,
    )  # fmt: skip


def sampled(costs: Costs, shape: Shape, machine: Machine) -> Costs:
    """The costs above temperature 0: calibrations are greedy."""
    seconds, saved = machine.kind.sample_seconds * shape.vocab_size, costs.target.as_dict()
    saved["points"] = {size: each + size * seconds for size, each in costs.target.points.items()}
    return Costs(StepCosts.from_dict(saved), costs.drafts, costs.token_seconds, costs.schedule_seconds)


def _seconds(model: PlannedModel, machine: Machine, gpus: int, tokens: int) -> float:
    shape, kind = model.shape, machine.kind
    arithmetic = tokens * 2.0 * shape.active_parameters / gpus / _operations(model, machine)
    fixed = shape.layers * kind.layer_seconds
    if gpus > 1:
        num_bytes = tokens * shape.width * _ACTIVATION_BYTES
        fixed += 2 * shape.layers * all_reduce_seconds(gpus, num_bytes, machine.link, is_nvlink=machine.has_nvlink)
    share = kind.packed_share if model.precision.nominal_bytes < 1 else kind.bandwidth_share
    return _joined(model.bytes_read(tokens) / gpus, arithmetic, machine, share) + fixed


def _joined(num_bytes: float, arithmetic: float, machine: Machine, share: float) -> float:
    """`share` is what is reached of the bandwidth."""
    memory, p = num_bytes / (machine.bandwidth * share), machine.kind.overlap
    return math.pow(memory**p + arithmetic**p, 1 / p)


def _operations(model: PlannedModel, machine: Machine) -> float:
    return machine.arithmetic(model.precision.arithmetic) * machine.kind.arithmetic_share


def _share(shape: Shape, gpus: int) -> float:
    return 1.0 if shape.latent is not None else math.ceil(shape.kv_heads / gpus) / shape.kv_heads
