"""Drafts that are drawn independently of the target's noise, and their verification by rejection, on the device.

For unseeded requests this accepts more than comparing tokens drawn with shared noise: per token 1 - TV instead of
little more than (1 - TV) / (1 + TV), where TV is the distance of the two distributions. The distributions stay on the
device. Verification is launched while the target's step still runs, so that its many small launches cost no time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outpace.backends.torch.sampling import acceptance
from outpace.backends.torch.sampling.acceptance import Drafts
from outpace.backends.torch.sampling.draws import Draws
from outpace.config import MAX_DEPTH
from outpace.core import Case, Request, Verdict
from outpace.decoding.randomness import Purpose, key
from outpace.decoding.verification import matches_own_tokens

_MAX_KEPT = 256  # distributions of one step's drafts that are kept: 131 MB for a vocabulary of 128,000 tokens


def max_kept(max_rows: int) -> int:
    """Distributions of one step's drafts that are kept; a larger batch is drafted with the target's noise."""
    return min(_MAX_KEPT, MAX_DEPTH * max_rows)


def draws_independently(requests: Sequence[Request]) -> bool:
    """Whether a batch's drafts are drawn independently: some request is verified by rejection, and none needs the
    target's noise, or its logits on the host."""
    sampled = [request for request in requests if not request.params.is_greedy]
    return bool(sampled) and not any(
        matches_own_tokens(request.params) or request.shaper.may_adjust or request.params.logprobs is not None
        for request in sampled
    )


def draft_seed(request: Request) -> int:
    """The seed of one draft. The position where it begins is part of it, as in `verification.Dice`."""
    return key(request.seed, Purpose.DRAFT, len(request.tokens))


@dataclass(frozen=True, slots=True)
class DeviceProbs(Sequence[NDArray[np.float32]]):
    """What the tokens of one draft were drawn from; valid until the next draft."""

    buffer: Tensor  # [rows, depth, vocab]
    row: int
    length: int

    def __len__(self) -> int:
        return self.length

    @overload
    def __getitem__(self, at: int) -> NDArray[np.float32]: ...

    @overload
    def __getitem__(self, at: slice) -> DeviceProbs: ...

    def __getitem__(self, at: int | slice) -> NDArray[np.float32] | DeviceProbs:
        if isinstance(at, slice):
            begin, end, step = at.indices(self.length)
            assert begin == 0 and step == 1, "only the begin of a draft can be kept"
            return DeviceProbs(self.buffer, self.row, end)
        found: NDArray[np.float32] = self.tensor[at].cpu().numpy()
        return found

    @property
    def tensor(self) -> Tensor:
        return self.buffer[self.row, : self.length]


class Rejection:
    """The verification of a step's independent drafts, launched behind the step."""

    def __init__(self, cases: Sequence[Case], lines: NDArray[np.integer], draws: Draws) -> None:
        """`lines`: the lines of `draws` with the target's logits, one per drafted token and one more per case."""
        counts = np.array([len(case.tokens) + 1 for case in cases])
        begins = counts.cumsum() - counts
        probs = [case.draft.probs if case.draft is not None else None for case in cases]
        self._kept = {i: each for i, each in enumerate(probs) if isinstance(each, DeviceProbs) and len(each)}
        self._cases = cases
        self._result: Tensor | None = None
        self._event: Any | None = None
        if not self._kept:
            return
        chosen = [cases[i] for i in self._kept]
        lengths = counts[list(self._kept)] - 1
        depth = int(lengths.max())
        places = begins[list(self._kept)][:, None] + np.minimum(np.arange(depth + 1), lengths[:, None])
        drafts, rows = self._staged(chosen, lengths, lines[places], depth, draws.device)
        buffer = next(iter(self._kept.values())).buffer
        in_order = [each.row for each in self._kept.values()] == list(range(len(chosen)))
        draft_probs = (buffer[: len(chosen)] if in_order else buffer.index_select(0, rows))[:, :depth]
        target_probs, exact = draws.distributions()
        verdicts = acceptance.verify_block(drafts, draft_probs, target_probs)
        by_token = [case.request.params.speculation.acceptance == "rejection" for case in chosen]
        if any(by_token):
            asked = torch.tensor(by_token, device=draws.device)
            verdicts = acceptance.reject(drafts, draft_probs, target_probs).where(asked, verdicts)
        is_exact = (exact[drafts.row_of] != 0).all(dim=-1).long()
        found = torch.stack([verdicts.num_accepted, verdicts.final_token, is_exact], dim=1)
        self._result = torch.empty(found.shape, dtype=found.dtype, pin_memory=found.is_cuda)
        self._result.copy_(found, non_blocking=True)
        if found.is_cuda:
            self._event = torch.cuda.Event()
            self._event.record()

    @staticmethod
    def _staged(
        cases: Sequence[Case], lengths: NDArray[np.integer], row_of: NDArray[np.integer], depth: int, device: Any
    ) -> tuple[Drafts, Tensor]:
        """The drafts in one transfer that does not wait for the device, and their rows in the buffer of probs."""
        tokens = [[*case.tokens, *[0] * (depth - len(case.tokens))] for case in cases]
        rows = [case.draft.probs.row for case in cases if case.draft and isinstance(case.draft.probs, DeviceProbs)]
        seeds, anchors = [case.request.seed for case in cases], [len(case.request.tokens) for case in cases]
        noise = acceptance.noise_of(seeds, anchors, depth).view(np.int64)
        parts = [np.array(part, np.int64).ravel() for part in (tokens, row_of, noise, lengths, rows)]
        words = torch.from_numpy(np.concatenate(parts))
        words = words.pin_memory().to(device, non_blocking=True) if torch.device(device).type == "cuda" else words
        drafted, places, noises, num_drafted, kept_rows = words.split([part.size for part in parts])
        uniform = noises.view(torch.float64).view(len(cases), -1)
        drafts = Drafts(
            drafted.view(len(cases), -1), num_drafted, places.view(len(cases), -1), uniform[:, :depth],
            uniform[:, depth:],
        )  # fmt: skip
        return drafts, kept_rows

    def verdicts(self) -> dict[int, Verdict]:
        """By case, for those that it decides; waits for the device."""
        if self._result is None:
            return {}
        if self._event is not None:
            self._event.synchronize()
        return {
            i: Verdict([*self._cases[i].tokens[:accepted], final], len(self._cases[i].tokens), accepted)
            for i, (accepted, final, is_exact) in zip(self._kept, self._result.tolist(), strict=True)
            if is_exact
        }
