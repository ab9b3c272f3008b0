"""`outpace.decoding.verification` on the device, for the cases that drawing alone does not decide.

These are penalties, biases and masks, lossy rules, drafts with probabilities, and rows whose filters keep more tokens
than `kernels/drawing.py` searches. They are rare, so plain torch functions over the whole vocabulary verify all such
cases of a step together. Only a few numbers per case are copied to the host.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from outpace.backends.torch.sampling import acceptance
from outpace.backends.torch.sampling.acceptance import Drafts, Verdicts
from outpace.backends.torch.sampling.adjust import Adjustments, adjust
from outpace.backends.torch.sampling.filters import RowParams, choose, greedy_tokens, probs
from outpace.backends.torch.sampling.independent import DeviceProbs
from outpace.backends.torch.sampling.noise import signed
from outpace.core import Case, Verdict
from outpace.decoding.acceptance import match_known_tree
from outpace.decoding.verification import matches_own_tokens

_MOST_NUMBERS = 1 << 25  # probabilities per group of cases, to bound memory


def verify(cases: Sequence[Case], logits: Tensor) -> list[Verdict]:
    """One verdict per case; each has one row of `logits` per drafted token, and one more."""
    verdicts: list[Verdict] = []
    group: list[Case] = []
    begin = end = 0
    for case in cases:
        num_rows = len(case.tokens) + 1
        if group and (end - begin + num_rows) * logits.shape[1] > _MOST_NUMBERS:
            verdicts += _verify(group, logits[begin:end])
            group, begin = [], end
        group.append(case)
        end += num_rows
    return verdicts + (_verify(group, logits[begin:end]) if group else [])


def _verify(cases: Sequence[Case], logits: Tensor) -> list[Verdict]:
    device = logits.device
    rows = [(case, i) for case in cases for i in range(len(case.tokens) + 1)]
    if any(case.request.shaper.may_adjust for case in cases):
        logits = adjust(logits, _adjustments(rows, device))
    params = RowParams.of([case.request.params for case, _ in rows], device)
    target_probs = probs(logits, params)
    addresses = [(signed(case.request.seed), len(case.request.tokens) + case.offsets[i]) for case, i in rows]
    seeds, positions = torch.tensor(addresses, device=device).unbind(1)
    own = torch.where(params.is_greedy, greedy_tokens(logits), choose(target_probs, seeds, positions))
    drafts = _drafts(cases, device)
    verdicts = acceptance.match(drafts, own, _lenient(cases, drafts, target_probs))
    is_sampled = [
        case.draft is not None and case.draft.probs is not None and not matches_own_tokens(case.request.params)
        for case in cases
    ]
    if any(is_sampled):
        verdicts = _sampled(cases, is_sampled, drafts, target_probs, verdicts)
    found = torch.stack([verdicts.num_accepted, verdicts.final_token, verdicts.num_lenient], dim=1).tolist()
    trees = _trees(cases, own) if any(case.tree is not None for case in cases) else {}
    return [
        trees.get(i) or Verdict([*case.tokens[:accepted], final], len(case.tokens), accepted, lenient)
        for i, (case, (accepted, final, lenient)) in enumerate(zip(cases, found, strict=True))
    ]


def _trees(cases: Sequence[Case], own: Tensor) -> dict[int, Verdict]:
    """The verdicts on trees, by case; `own` [rows], the target's own tokens. There is no lossy rule for them."""
    tokens, found, at = own.tolist(), dict[int, Verdict](), 0
    for i, case in enumerate(cases):
        begin, at = at, at + len(case.tokens) + 1
        if case.tree is not None:
            found[i] = match_known_tree(case.tokens, case.tree, tokens[begin:at])
    return found


def _drafts(cases: Sequence[Case], device: torch.device) -> Drafts:
    depth = max(1, *(len(case.tokens) for case in cases))
    lengths = np.array([len(case.tokens) for case in cases])
    first_rows = np.cumsum(lengths + 1) - lengths - 1
    row_of = first_rows[:, None] + np.minimum(np.arange(depth + 1), lengths[:, None])
    seeds, anchors = [case.request.seed for case in cases], [len(case.request.tokens) for case in cases]
    noise = torch.from_numpy(acceptance.noise_of(seeds, anchors, depth)).to(device)
    return Drafts(
        tokens=torch.tensor([[*case.tokens, *[0] * (depth - len(case.tokens))] for case in cases], device=device),
        num_drafted=torch.from_numpy(lengths).to(device),
        row_of=torch.from_numpy(row_of).to(device),
        accept_noise=noise[:, :depth],
        recover_noise=noise[:, depth:],
    )


def _lenient(cases: Sequence[Case], drafts: Drafts, target_probs: Tensor) -> Tensor | None:
    rules = [case.request.params.speculation for case in cases]
    if not any(rule.is_lossy for rule in rules):
        return None

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=target_probs.device)

    never = float("inf")
    threshold = column([rule.threshold or 0.0 if rule.acceptance == "threshold" else never for rule in rules])
    typical = column([rule.posterior_threshold if rule.acceptance == "typical" else never for rule in rules])
    alpha = column([rule.posterior_alpha if rule.acceptance == "typical" else never for rule in rules])
    return acceptance.threshold_leniency(drafts, target_probs, threshold) | acceptance.typical_leniency(
        drafts, target_probs, typical, alpha
    )


def _sampled(
    cases: Sequence[Case], is_sampled: Sequence[bool], drafts: Drafts, target_probs: Tensor, matched: Verdicts
) -> Verdicts:
    device = target_probs.device
    draft_probs = torch.zeros((*drafts.tokens.shape, target_probs.shape[1]), device=device)
    for i, case in enumerate(cases):
        if is_sampled[i] and case.draft is not None and case.draft.probs:
            kept = case.draft.probs
            on_device = kept.tensor if isinstance(kept, DeviceProbs) else torch.from_numpy(np.stack(kept))
            draft_probs[i, : len(case.tokens)] = on_device[: len(case.tokens)].to(device)
    is_by_token = [case.request.params.speculation.acceptance == "rejection" for case in cases]
    by_block = acceptance.verify_block(drafts, draft_probs, target_probs)
    by_token = acceptance.reject(drafts, draft_probs, target_probs)
    result = by_token.where(torch.tensor(is_by_token, device=device), by_block)
    return result.where(torch.tensor(is_sampled, device=device), matched)


def _adjustments(rows: Sequence[tuple[Case, int]], device: torch.device) -> Adjustments:
    shapers = [case.request.shaper for case, _ in rows]
    params = [shaper.params for shaper in shapers]
    token_counts = [shaper.token_counts for shaper in shapers]

    def padded(lists: Sequence[Sequence[float]], filler: float, dtype: torch.dtype) -> Tensor:
        width = max(map(len, lists))
        filled = [[*values, *[filler] * (width - len(values))] for values in lists]
        return torch.tensor(filled, dtype=dtype, device=device).view(len(lists), width)

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device)

    return Adjustments(
        bias_ids=padded([list(p.logit_bias) for p in params], -1, torch.int64),
        bias=padded([list(p.logit_bias.values()) for p in params], 0.0, torch.float32),
        seen_ids=padded([list(counts) for counts in token_counts], -1, torch.int64),
        output_counts=padded([list(counts.values()) for counts in token_counts], 0, torch.int64),
        prefix=padded([case.prefix(i) for case, i in rows], -1, torch.int64),
        repetition_penalty=column([p.repetition_penalty for p in params]),
        presence_penalty=column([p.presence_penalty for p in params]),
        frequency_penalty=column([p.frequency_penalty for p in params]),
        stop_ids=padded([shaper.stop_ids.tolist() for shaper in shapers], -1, torch.int64),
        num_forbidden=torch.tensor([s.params.min_tokens - s.num_output for s in shapers], device=device),
        forbidden_ids=padded([case.request.shaper.forbidden(case.prefix(i)) for case, i in rows], -1, torch.int64),
        masks=_masks(rows, device),
    )


def _masks(rows: Sequence[tuple[Case, int]], device: torch.device) -> Tensor | None:
    """The masks of the rows' grammars; a row without one allows every token."""
    found = [(shaper.matcher, case.prefix(i)) for case, i in rows for shaper in (case.request.shaper,)]
    masks = [None if matcher is None else matcher.mask(prefix) for matcher, prefix in found]
    known = next((mask for mask in masks if mask is not None), None)
    if known is None:
        return None
    every = np.full_like(known, 0xFFFFFFFF)
    stacked = np.stack([every if mask is None else mask for mask in masks])
    return torch.from_numpy(stacked.view(np.int32)).to(device)
