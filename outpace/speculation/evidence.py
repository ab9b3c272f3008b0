"""What a step says about acceptance: of drafts that were verified, and of guesses that were only compared."""

from __future__ import annotations

from collections.abc import Sequence

from outpace.acceptance import common_length
from outpace.core import Draft
from outpace.speculation.acceptance_model import AcceptanceModel
from outpace.speculation.seats import Outcome, Seat

_HIT_RATE = 0.2


def learn_from_guesses(acceptance: AcceptanceModel, seat: Seat, outcome: Outcome, guesses: Sequence[Draft]) -> None:
    """Every guess is compared with what was said, used or not: that costs no slot."""
    said = outcome.verdict.tokens
    for draft in guesses:
        if draft.tokens:
            hits = common_length(draft.tokens, said)
            tried = min(hits + 1, len(draft.tokens), len(said))
            acceptance.observe_guess(draft.proposer, seat.prospects, draft.confidence, hits, tried)
            known = seat.hits.get(draft.proposer, 0.0)
            seat.hits[draft.proposer] = known + _HIT_RATE * (hits / len(said) - known)


def learn_from_draft(acceptance: AcceptanceModel, seat: Seat, outcome: Outcome) -> None:
    """A draft that was asked for, and where it stopped for want of confidence."""
    drafted = outcome.choice.draft
    if drafted is None:
        return
    hits, num_drafted = outcome.verdict.num_accepted, len(drafted.tokens)
    tried = min(hits + 1, num_drafted)
    acceptance.observe(drafted.proposer, seat.prospects, drafted.confidence, hits, tried, num_drafted)
    if hits == num_drafted < len(drafted.confidence):
        acceptance.observe_unsaid(drafted.proposer, seat.prospects, drafted.confidence[-1], num_drafted)
