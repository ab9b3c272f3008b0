"""A small model that drafts for the target: same vocabulary, its own cache, one forward pass per draft token.

All requests of a step are drafted together. A request's draft cache is brought up to date when it is drafted for, not
before; after the verdict it is rewound to what the target kept. What is drawn, and how, depends on who will judge it:
where the target's own token decides, the draft uses the target's noise, so that both agree as often as they can;
otherwise it draws freely and keeps the distribution it drew from.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outpace.backends.base import Drafter, DraftTask, LoadedModel, Tokenizer, Verifier
from outpace.core import Draft, Request, Row, StepPlan, Verdict
from outpace.errors import ModelError
from outpace.kv.cache import SequenceCache
from outpace.randomness import Purpose, key, uniform
from outpace.speculation.base import DraftAsk
from outpace.verification import HostVerifier, draw_weighted, matches_own_tokens

FloatRow = NDArray[np.float32]
_UNUSED_TOKEN = 1 << 1  # llama.cpp's attribute of vocabulary entries that only pad the embedding table


@dataclass(slots=True)
class _Drafting:
    """A request being drafted for in this step."""

    request: Request
    seq: int
    depth: int
    to_feed: list[int]
    draft: Draft


class DraftModelProposer:
    name = "draft"

    def __init__(self, model: LoadedModel, target_vocab_size: int, verifier: Verifier | None = None) -> None:
        """`verifier` is the target's: both draw in the same way."""
        if not model.runner.capabilities.can_rewind:
            raise ModelError(
                "the draft model's architecture cannot rewind its cache, which drafting needs; use another draft"
            )
        self._runner = model.runner
        self._cache = SequenceCache(model.runner)
        self._vocab_size = target_vocab_size
        self._verifier: Verifier = verifier or HostVerifier()
        self._sequences: OrderedDict[int, int] = OrderedDict()  # request id to sequence, least recently used first

    def propose(self, asks: Sequence[DraftAsk]) -> list[Draft]:
        drafts = [Draft([], self.name) for _ in asks]
        asked = {ask.request.id for ask in asks}
        group: list[_Drafting] = []
        for ask, draft in zip(asks, drafts, strict=True):
            drafting = self._begin(ask, draft, asked)
            if drafting is not None:
                group.append(drafting)
        if group:
            self._catch_up(group)
            if self._runner.capabilities.drafter is not None:
                self._draft_in_one_go(group, self._runner.capabilities.drafter)
                return drafts
        while group:
            logits = self._feed(group)
            for drafting, row in zip(group, logits, strict=True):
                drafting.to_feed = [self._draw(drafting, row)]
            group = [drafting for drafting in group if len(drafting.draft.tokens) < drafting.depth]
        return drafts

    def observe(self, request: Request, verdict: Verdict) -> None:
        """Keep what the target kept: everything before its own last token."""
        seq = self._sequences.get(request.id)
        if seq is not None:
            num_agreed = len(request.tokens) - 1
            self._cache.rewind(seq, min(self._cache.length(seq), num_agreed))

    def release(self, request: Request) -> None:
        seq = self._sequences.pop(request.id, None)
        if seq is not None:
            self._cache.close(seq)

    def close(self) -> None:
        self._runner.close()

    def _begin(self, ask: DraftAsk, draft: Draft, asked: set[int]) -> _Drafting | None:
        """Take room for catching up and drafting; None, and an empty draft, if there is none to take."""
        request = ask.request
        if request.id in self._sequences:
            self._sequences.move_to_end(request.id)
        elif self._cache.num_unused_sequences or self._evict(asked):
            self._sequences[request.id] = self._cache.open()
        else:
            return None
        seq = self._sequences[request.id]
        to_feed = request.tokens[self._cache.length(seq) :]
        if max(to_feed) >= self._runner.vocab_size:
            return None  # padding of the target's vocabulary, in a prompt: the draft does not know it
        # The last drafted token is not fed, so depth tokens need depth - 1 places.
        while not self._cache.reserve(seq, len(to_feed) + ask.depth - 1):
            if not self._evict(asked):
                return None
        if not matches_own_tokens(request.params) and self._runner.capabilities.drafter is None:
            draft.probs = []
        return _Drafting(request, seq, ask.depth, to_feed, draft)

    def _evict(self, asked: set[int]) -> bool:
        """Forget the draft cache of the request that has gone longest without a draft."""
        for request_id, seq in self._sequences.items():
            if request_id not in asked:
                del self._sequences[request_id]
                self._cache.close(seq)
                return True
        return False

    def _catch_up(self, group: list[_Drafting]) -> None:
        """Feed all but what one forward pass can take, without logits; every request keeps at least one token."""
        limit = self._runner.capacity.max_step_tokens
        while sum(len(d.to_feed) for d in group) > limit:
            rows, budget = [], limit
            for drafting in group:
                chunk = drafting.to_feed[: min(len(drafting.to_feed) - 1, budget)]
                if chunk:
                    rows.append(self._row(drafting, chunk, num_logits=0))
                    drafting.to_feed = drafting.to_feed[len(chunk) :]
                    budget -= len(chunk)
            self._forward(rows)

    def _draft_in_one_go(self, group: list[_Drafting], drafter: Drafter) -> None:
        tasks = [DraftTask(self._row(d, d.to_feed, num_logits=1), d.request, d.depth) for d in group]
        for drafting, said in zip(group, drafter(tasks), strict=True):
            self._cache.advance(drafting.seq, len(drafting.to_feed) + drafting.depth - 1)
            known = next((i for i, token in enumerate(said) if token >= self._vocab_size), len(said))
            drafting.draft.tokens = said[:known]

    def _feed(self, group: list[_Drafting]) -> list[FloatRow]:
        logits = self._forward([self._row(d, d.to_feed, num_logits=1) for d in group])
        return [self._fit(row) for row in logits]

    def _row(self, drafting: _Drafting, tokens: list[int], *, num_logits: int) -> Row:
        return Row(drafting.seq, self._cache.length(drafting.seq), tokens, num_logits)

    def _forward(self, rows: list[Row]) -> NDArray[np.float32]:
        logits = self._runner.forward(StepPlan(rows))
        for row in rows:
            self._cache.advance(row.seq, len(row.tokens))
        return logits

    def _fit(self, row: FloatRow) -> FloatRow:
        """Vocabularies may differ in padding at the end; the draft never proposes what the target does not have."""
        missing = self._vocab_size - row.size
        if missing <= 0:
            return row[: self._vocab_size]
        return np.concatenate([row, np.full(missing, -np.inf, np.float32)])

    def _draw(self, drafting: _Drafting, logits: FloatRow) -> int:
        request, draft = drafting.request, drafting.draft
        anchor, offset = len(request.tokens), len(draft.tokens)
        if draft.probs is None:
            token = self._verifier.own_token(request, draft.tokens, logits)
        else:
            probs = self._verifier.probs(request, draft.tokens, logits)
            token = draw_weighted(probs, uniform(key(request.seed, Purpose.DRAFT, anchor, offset)))
            draft.probs.append(probs)
        draft.tokens.append(token)
        return token


def check_same_vocabulary(target: Tokenizer, draft: Tokenizer) -> None:
    """A draft speaks in token ids, so every id must mean the same to both; only unused padding may differ."""
    ours, theirs = target.vocabulary(), draft.vocabulary()
    for token, (our_entry, their_entry) in enumerate(zip(ours, theirs, strict=False)):
        if our_entry[0] != their_entry[0]:
            raise ModelError(
                f"the draft model has another vocabulary: token {token} is {_shown(our_entry[0])} in the target and "
                f"{_shown(their_entry[0])} in the draft; use a draft of the same model family"
            )
    longer, whose = (ours, "target") if len(ours) > len(theirs) else (theirs, "draft")
    for token in range(min(len(ours), len(theirs)), len(longer)):
        text, attributes = longer[token]
        if not attributes & _UNUSED_TOKEN:
            raise ModelError(
                f"the draft model has another vocabulary: token {token}, {_shown(text)}, exists only in the {whose}; "
                "use a draft of the same model family"
            )


def _shown(text: bytes) -> str:
    return repr(text.decode(errors="replace"))
