"""Divides text by where it came from: which draft, and whether its tokens were accepted from it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

from outpace.core import Segment, VerifiedDraft


@dataclass(slots=True)
class Stretch:
    """Consecutive text of one origin."""

    text: str
    draft: VerifiedDraft | None = None  # that the step verified; None: it had none
    is_accepted: bool = False  # the text is of accepted draft tokens, not the target's own


def stretches(segments: Sequence[Segment], drafts: Sequence[VerifiedDraft]) -> list[Stretch]:
    """`drafts`: all of the request, in order."""
    found: list[Stretch] = []
    for segment in segments:
        draft = _draft_of(segment.token, drafts)
        is_accepted = draft is not None and segment.token < draft.start + draft.num_accepted
        if found and found[-1].draft is draft and found[-1].is_accepted == is_accepted:
            found[-1].text += segment.text
        else:
            found.append(Stretch(segment.text, draft, is_accepted))
    return found


def _draft_of(token: int, drafts: Sequence[VerifiedDraft]) -> VerifiedDraft | None:
    """The draft of the step that emitted this token."""
    place = bisect_right(drafts, token, key=attrgetter("start"))
    if place and token <= drafts[place - 1].start + drafts[place - 1].num_accepted:
        return drafts[place - 1]
    return None
