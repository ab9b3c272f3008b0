"""A small model that drafts for the target: same vocabulary, its own cache, one forward pass per draft token. (For a
model with another vocabulary, see `other_vocabulary.py`.)

All requests of a step are drafted together. A request's draft cache catches up only when a draft is made; after the
verdict it is rewound to the tokens that the target accepted. How tokens are drawn depends on how they are verified: if
they are compared with the target's own token, the draft uses the target's noise, so that both agree as often as
possible. Otherwise it draws independently and keeps the distribution.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from outpace.backends.base import MOST_CONFIDENT, Drafter, DraftStop, DraftTask, LoadedModel, Verifier
from outpace.core import Draft, MeasuredAcceptance, Request, Row, StepPlan, Verdict
from outpace.decoding.randomness import Purpose, key, uniform
from outpace.decoding.tree import Tree
from outpace.decoding.verification import HostVerifier, draw_weighted, matches_own_tokens
from outpace.errors import ModelError
from outpace.kv.cache import SequenceCache
from outpace.speculation.costs.calibration import measure_draft_model, warm_up
from outpace.speculation.costs.curves import DraftCosts
from outpace.speculation.costs.timing import DraftTiming
from outpace.speculation.proposers.base import DraftAsk

FloatRow = NDArray[np.float32]


@dataclass(slots=True)
class Drafting:
    """A request with a draft in this step."""

    request: Request
    seq: int
    depth: int
    to_feed: list[int]
    draft: Draft
    probs: list[FloatRow] | None  # what its tokens are drawn from; None if they are drawn with the target's noise
    goes_on: DraftStop | None


class DraftModelProposer:
    name = "draft"
    is_lookup = False
    tree: Tree | None = None
    measured: MeasuredAcceptance | None = None

    def __init__(self, model: LoadedModel, target_vocab_size: int, verifier: Verifier | None = None) -> None:
        """`verifier` is the target's, so that both draw in the same way."""
        if not model.runner.capabilities.can_rewind:
            raise ModelError(
                "the draft model's architecture cannot rewind its cache, which drafting needs; use another draft"
            )
        self._runner = model.runner
        self._cache = SequenceCache(model.runner)
        self._vocab_size = target_vocab_size
        self._verifier: Verifier = verifier or HostVerifier()
        self._sequences: OrderedDict[int, int] = OrderedDict()  # request id to sequence, least recently used first
        self._draws_on_device = model.runner.capabilities.drafter is not None
        self.drafts_whole = self._draws_on_device
        self.timing: DraftTiming | None = None

    def serves(self, request: Request) -> bool:
        return True

    def propose(self, asks: Sequence[DraftAsk]) -> list[Draft]:
        self.timing = DraftTiming()
        drafts = [Draft([], self.name) for _ in asks]
        asked = {ask.request.id for ask in asks}
        group: list[Drafting] = []
        for ask, draft in zip(asks, drafts, strict=True):
            drafting = self._begin(ask, draft, asked)
            if drafting is not None:
                group.append(drafting)
        if group:
            self._catch_up(group)
            if self._draws_on_device:
                assert self._runner.capabilities.drafter is not None
                self._draft_on_device(group, self._runner.capabilities.drafter)
                group = []
        while group:
            logits = self._feed(group)
            begin = perf_counter()
            group = [drafting for drafting, row in zip(group, logits, strict=True) if self._extend(drafting, row)]
            self.timing.draw_seconds += perf_counter() - begin
        self.timing.num_drawn = sum(len(draft.tokens) for draft in drafts)
        return drafts

    def observe(self, request: Request, verdict: Verdict) -> None:
        """Rewind to what the target accepted: everything before its own last token."""
        seq = self._sequences.get(request.id)
        if seq is not None:
            num_agreed = len(request.tokens) - 1
            self._cache.rewind(seq, min(self._cache.length(seq), num_agreed))

    def release(self, request: Request) -> None:
        seq = self._sequences.pop(request.id, None)
        if seq is not None:
            self._cache.close(seq)
            self._forget(request.id)

    def num_uncached(self, request: Request) -> int:
        seq = self._sequences.get(request.id)
        return len(request.tokens) - (self._cache.length(seq) if seq is not None else 0)

    def prepare(self, request: Request) -> None:
        pass  # it catches up when it drafts: the policy decides whether that is worth its cost

    def measure_costs(self, scratch: Request, patience: float = 1.0) -> DraftCosts:
        return measure_draft_model(self._runner, patience)

    def warm_up(self, scratch: Request) -> None:
        warm_up(self._runner)

    def forget(self) -> None:
        pass  # the draft cache holds running requests only

    def close(self) -> None:
        self._runner.close()

    def _begin(self, ask: DraftAsk, draft: Draft, asked: set[int]) -> Drafting | None:
        """Reserve cache room for catching up and drafting; None, and an empty draft, if there is none."""
        request = ask.request
        seq = self._sequences.get(request.id)
        if seq is not None:
            self._sequences.move_to_end(request.id)
        elif self._cache.num_unused_sequences or self._evict(asked):
            seq = self._sequences[request.id] = self._cache.open()
        else:
            return None
        to_feed = self._uncached(request, seq)
        if max(to_feed) >= self._runner.vocab_size:
            return None  # a padding token of the target's vocabulary that the draft model lacks
        if self._cache.length(seq) + len(to_feed) + ask.depth - 1 > self._runner.capacity.max_context:
            return None  # the text has more tokens in the draft model's vocabulary than its cache holds
        # The last drafted token is not fed, so depth tokens need depth - 1 places.
        while not self._cache.reserve(seq, len(to_feed) + ask.depth - 1):
            if not self._evict(asked):
                return None
        probs: list[FloatRow] | None = None
        if not self._draws_on_device and not self._drafts_text(request) and not matches_own_tokens(request.params):
            probs = draft.probs = []
        return Drafting(request, seq, ask.depth, to_feed, draft, probs, ask.goes_on)

    def _uncached(self, request: Request, seq: int) -> list[int]:
        """The request's tokens, as the draft model has them, that are not in its cache; at least one."""
        return request.tokens[self._cache.length(seq) :]

    def _evict(self, asked: set[int]) -> bool:
        """Drop the draft cache of the request whose last draft is oldest."""
        for request_id, seq in self._sequences.items():
            if request_id not in asked:
                del self._sequences[request_id]
                self._cache.close(seq)
                self._forget(request_id)
                return True
        return False

    def _forget(self, request_id: int) -> None:
        """Called when the request's cache was dropped."""

    def _fed_now(self, drafting: Drafting, tokens: list[int]) -> None:
        """Called when the tokens were added to the request's cache."""

    def _drafts_text(self, request: Request) -> bool:
        """Whether the draft is a text that the target's tokenizer splits, and so is one-hot."""
        return False

    def _catch_up(self, group: list[Drafting]) -> None:
        """Feed tokens without logits until the rest fits one forward pass; each request keeps at least one token."""
        limit = self._runner.capacity.max_step_tokens
        while sum(len(d.to_feed) for d in group) > limit:
            rows, budget = [], limit
            for drafting in group:
                chunk = drafting.to_feed[: min(len(drafting.to_feed) - 1, budget)]
                if chunk:
                    rows.append(self._row(drafting, chunk, num_logits=0))
                    self._fed_now(drafting, chunk)
                    drafting.to_feed = drafting.to_feed[len(chunk) :]
                    budget -= len(chunk)
            self._forward(rows, is_catching_up=True)

    def _draft_on_device(self, group: list[Drafting], drafter: Drafter) -> None:
        """Draft in a backend that draws on the device, to the full depth whatever the confidence."""
        assert self.timing is not None
        tasks = [DraftTask(self._row(d, d.to_feed, num_logits=1), d.request, d.depth) for d in group]
        begin = perf_counter()
        drafts = drafter(tasks)
        seconds = perf_counter() - begin
        depth = max(drafting.depth for drafting in group)
        context = sum(task.row.start for task in tasks) / len(tasks)
        if any(len(drafting.to_feed) > 2 for drafting in group):
            self.timing.undivided = (len(tasks), depth, context, seconds)
            self.timing.num_caught_up += sum(len(drafting.to_feed) for drafting in group)
        else:
            self.timing.forwards += [(len(tasks), len(tasks), context, seconds / depth)] * depth
        for drafting, drafted in zip(group, drafts, strict=True):
            self._cache.advance(drafting.seq, len(drafting.to_feed) + drafting.depth - 1)
            drafting.draft.tokens = self._cut_to_vocabulary(drafted.tokens)
            drafting.draft.probs = drafted.probs

    def _cut_to_vocabulary(self, tokens: list[int]) -> list[int]:
        """The tokens before the first one that the target's vocabulary lacks. A draft with distributions has none: both
        vocabularies are then the same."""
        if max(tokens, default=0) < self._vocab_size:
            return tokens
        return tokens[: next(i for i, token in enumerate(tokens) if token >= self._vocab_size)]

    def _feed(self, group: list[Drafting]) -> list[FloatRow]:
        rows = [self._row(d, d.to_feed, num_logits=1) for d in group]
        # A fully accepted draft leaves two tokens to feed; more than two means catching up.
        logits = self._forward(rows, is_catching_up=any(len(row.tokens) > 2 for row in rows))
        for drafting in group:
            self._fed_now(drafting, drafting.to_feed)
        return [self._fit(row) for row in logits]

    def _row(self, drafting: Drafting, tokens: list[int], *, num_logits: int) -> Row:
        return Row(drafting.seq, self._cache.length(drafting.seq), tokens, num_logits)

    def _forward(self, rows: list[Row], *, is_catching_up: bool) -> NDArray[np.float32]:
        plan = StepPlan(rows)
        begin = perf_counter()
        logits = self._runner.forward(plan)
        seconds = perf_counter() - begin
        assert self.timing is not None
        if is_catching_up:
            self.timing.catch_up_seconds += seconds
            self.timing.num_caught_up += plan.num_tokens
        else:
            context = sum(row.start for row in rows) / len(rows)
            self.timing.forwards.append((len(rows), plan.num_tokens, context, seconds))
        for row in rows:
            self._cache.advance(row.seq, len(row.tokens))
        return logits

    def _fit(self, row: FloatRow) -> FloatRow:
        """Fit logits to the target's vocabulary: padding may differ, and the target must know every drafted token."""
        missing = self._vocab_size - row.size
        if missing <= 0:
            return row[: self._vocab_size]
        return np.concatenate([row, np.full(missing, -np.inf, np.float32)])

    def _extend(self, drafting: Drafting, logits: FloatRow) -> bool:
        """Add a token unless the policy stops the draft; returns whether to draft further.

        The policy sees the distribution before a token is drawn, so stopping does not bias the drawn tokens.
        """
        draft = drafting.draft
        if drafting.goes_on is not None:
            confidence = _largest_share(logits)
            draft.confidence.append(confidence)  # also for the token before which it stops: learning uses it
            if not drafting.goes_on(confidence):
                return False
        token = self._draw(drafting, logits)
        if token is None:
            return False
        drafting.to_feed = [token]
        if len(draft.tokens) == drafting.depth:
            return False
        if drafting.goes_on is not None and drafting.goes_on.is_over:
            draft.confidence.append(draft.confidence[-1])  # that of the token which it will not draft is not known
            return False
        return True

    def _draw(self, drafting: Drafting, logits: FloatRow) -> int | None:
        """Add a token to the draft; returns the token to feed next, or None where the draft must end."""
        request, draft = drafting.request, drafting.draft
        if drafting.probs is None:
            token = self._verifier.own_token(request, draft.tokens, logits)
        else:
            anchor, offset = len(request.tokens), len(draft.tokens)
            probs = self._verifier.probs(request, draft.tokens, logits)
            token = draw_weighted(probs, uniform(key(request.seed, Purpose.DRAFT, anchor, offset)))
            drafting.probs.append(probs)
        draft.tokens.append(token)
        return token


def _largest_share(logits: FloatRow) -> float:
    """The confidence: the probability of the likeliest token at temperature 1."""
    return min(MOST_CONFIDENT, 1.0 / float(np.exp(logits - logits.max()).sum()))
