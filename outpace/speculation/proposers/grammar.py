"""Drafts the text that a request's grammar forces, such as the names of a JSON object's members.

Most of it is certain: the mask allows one token. The last tokens may be spelled otherwise, together with what follows.
The target verifies both. Requests without a grammar get no drafts.
"""

from __future__ import annotations

from collections.abc import Sequence

from outpace.core import Draft, Request
from outpace.speculation.proposers.base import DraftAsk, NoDraft


class GrammarProposer(NoDraft):
    name = "grammar"

    def serves(self, request: Request) -> bool:
        return request.matcher is not None

    def propose(self, asks: Sequence[DraftAsk]) -> list[Draft]:
        return [self._draft(ask) for ask in asks]

    def _draft(self, ask: DraftAsk) -> Draft:
        matcher = ask.request.matcher
        if matcher is None:
            return Draft([], self.name)
        forced = matcher.forced(ask.prefix)
        return Draft(forced.tokens[: ask.depth], self.name, confidence=forced.confidence[: ask.depth])
