"""Drafts for requests with a grammar: one rule for every proposer.

A draft is cut before its first forbidden token. If it comes with the distributions that its tokens were drawn from,
each is restricted to the allowed tokens: a token that is kept was drawn from that. A draw outside of them ends the
draft. So its length depends on independent chance only, and verification stays exact.

Looked-up drafts are also joined with the text that the grammar forces: before them, and again wherever they end or come
to such text, while depth lasts. A model drafts only where no text is forced.
"""

from __future__ import annotations

from collections.abc import Sequence

from outpace.core import Draft
from outpace.decoding.masks import FloatRow, Mask, allows, without_forbidden
from outpace.decoding.matcher import Matcher
from outpace.decoding.numerics import total
from outpace.speculation.proposers.base import DraftAsk, Proposer


def propose(proposer: Proposer, asks: Sequence[DraftAsk]) -> list[Draft]:
    """The proposer's drafts, with those of requests that have a grammar cut and joined."""
    if all(ask.request.matcher is None for ask in asks):
        return proposer.propose(asks)
    if not proposer.is_lookup:
        return _with_model(proposer, asks)
    free = [ask for ask in asks if ask.request.matcher is None]
    found = iter(proposer.propose(free) if free else ())
    return [next(found) if ask.request.matcher is None else _join(proposer, ask, ask.request.matcher) for ask in asks]


def _with_model(proposer: Proposer, asks: Sequence[DraftAsk]) -> list[Draft]:
    """Forced text where there is some, and a draft of the model, cut, where there is none."""
    forced = [None if ask.request.matcher is None else ask.request.matcher.forced() for ask in asks]
    free = [ask for ask, text in zip(asks, forced, strict=True) if text is None or not text.tokens]
    if not free:
        proposer.timing = None  # the model did not run
    found = iter(proposer.propose(free) if free else ())
    return [
        Draft(text.tokens[: ask.depth], proposer.name, confidence=text.confidence[: ask.depth])
        if text is not None and text.tokens
        else cut(ask.request.matcher, next(found))
        for ask, text in zip(asks, forced, strict=True)
    ]


def cut(matcher: Matcher | None, draft: Draft) -> Draft:
    """The draft up to its first forbidden token."""
    if matcher is None:
        return draft
    tokens, probs = draft.tokens, draft.probs
    num_allowed = matcher.count_allowed(tokens)
    if probs is not None:
        masks = [matcher.mask(tokens[:i]) for i in range(num_allowed)]
        # The parser may accept more spellings of forced text than the mask allows.
        num_allowed = next((i for i, mask in enumerate(masks) if not allows(mask, tokens[i])), num_allowed)
        probs = [restricted(probs[i], masks[i]) for i in range(num_allowed)]
    # The confidence in the token before which a draft stops is kept too, as for drafts that stop by themselves.
    return Draft(tokens[:num_allowed], draft.proposer, probs, draft.confidence[: num_allowed + 1])


def restricted(probs: FloatRow, mask: Mask) -> FloatRow:
    """The distribution of a draw that is known to be allowed; `probs` itself if it allows nothing else."""
    kept = without_forbidden(probs, mask)
    if (kept == probs).all():
        return probs
    kept /= total(kept)
    return kept


def _join(proposer: Proposer, ask: DraftAsk, matcher: Matcher) -> Draft:
    joined = _Joined(matcher, ask.depth)
    joined.add_forced()
    while joined.room:
        [draft] = proposer.propose([DraftAsk(ask.request, joined.room, prefix=joined.tokens)])
        if not joined.add(draft):
            break
    return Draft(joined.tokens[: ask.depth], proposer.name, confidence=joined.confidence[: ask.depth])


class _Joined:
    """A draft that grows by forced text and by parts of looked-up drafts."""

    def __init__(self, matcher: Matcher, depth: int) -> None:
        self._matcher = matcher
        self._depth = depth
        self.tokens: list[int] = []
        self.confidence: list[float] = []

    @property
    def room(self) -> int:
        return max(0, self._depth - len(self.tokens))

    def add_forced(self) -> int:
        """Add the text that is forced here; returns the number of its tokens."""
        forced = self._matcher.forced(self.tokens)
        self.tokens += forced.tokens
        self.confidence += forced.confidence
        return len(forced.tokens)

    def add(self, draft: Draft) -> bool:
        """Add allowed tokens of the draft, and forced text between them; whether the source may be asked again.

        Where forced text differs from what the draft has next, the rest of the draft continues another text.
        """
        at, tokens = 0, draft.tokens
        while at < len(tokens) and self.room:
            if self._matcher.count_allowed([*self.tokens, tokens[at]]) <= len(self.tokens):
                break
            self.tokens.append(tokens[at])
            self.confidence.append(draft.confidence[at])
            at += 1
            num_forced = self.add_forced()
            if num_forced and self.tokens[-num_forced:] != tokens[at : at + num_forced]:
                return True
            at += num_forced
        return False
