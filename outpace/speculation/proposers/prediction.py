"""Predicted output: drafts from a text that the client expects, such as a file before an edit.

A `Follower` keeps the place in the prediction that a request's output has reached. Where the output departs from the
prediction, the follower searches the prediction for the latest output and goes on there: so it comes back after
inserted, deleted and replaced text. It also repeats replacements: after a name was replaced once, drafts have the new
name. A draft is a fixed function of the past tokens, so its distribution is one-hot: a wrong prediction costs time, but
changes no token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from outpace.backends.base import Tokenizer
from outpace.core import Draft, Request
from outpace.decoding.acceptance import common_length
from outpace.speculation.costs.curves import DraftCosts
from outpace.speculation.proposers.base import DraftAsk, NoDraft
from outpace.speculation.proposers.prediction_text import MOST_MATCHED, Prediction

_EXPECTED_RUN = 12.0  # tokens; a client sends a prediction because it expects the output to begin like it
_TRUSTED_RUN = 3.0  # tokens that agree before a new place replaces the one before
_LONGEST_REPLACED = 8  # tokens, old and new; a longer one is hardly repeated
_DOUBT_PER_MISS = 0.5
"""After a place that did not last, the next one is believed less: the output may be in a text of its own. Over 150
changes of files in this project's history, beside a head, one step in 54 drafts nothing right instead of one in 34;
with the prediction of another file one in 63 instead of one in 18."""
_MOST_SINCE = 32  # output tokens kept since the last certain place: more than a replacement and what follows it


def read_prediction(text: str, tokenizer: Tokenizer, max_tokens: int, check: Callable[[], None]) -> Prediction:
    """The prediction of a text; more than `max_tokens` are not read. `check` may raise an error to stop.

    This takes milliseconds for a long text and belongs into a thread that is not the engine's.
    """
    tokens: list[int] = []
    for piece in tokenizer.pieces(text, add_special=False):
        check()
        tokens += piece
        if len(tokens) >= max_tokens:
            break
    return Prediction(tokens[:max_tokens], tokenizer.token_bytes)


class PredictionProposer(NoDraft):
    """Has no state of its own: each request holds its follower, also while it is preempted."""

    name = "prediction"

    def serves(self, request: Request) -> bool:
        return request.predicted is not None

    def propose(self, asks: Sequence[DraftAsk]) -> list[Draft]:
        return [self._draft(ask.request, ask.depth) for ask in asks]

    def release(self, request: Request) -> None:
        follower = request.predicted
        if follower is None or request.finish_reason is None:
            return
        if follower.is_used:
            follower.read(request)
            request.spec.accepted_prediction_tokens = follower.num_accepted
            request.spec.rejected_prediction_tokens = follower.num_tokens - follower.num_accepted
        request.predicted = None

    def _draft(self, request: Request, depth: int) -> Draft:
        if request.predicted is None:
            return Draft([], self.name)
        request.predicted.read(request)
        tokens, confidence = request.predicted.draft(depth)
        return Draft(tokens, self.name, confidence=confidence)

    def measure_costs(self, scratch: Request) -> DraftCosts:
        """Time lookups of an output that always departs from its prediction: the most expensive kind."""
        backwards = Prediction([-i % 37 for i in range(256)], lambda token: b"%4d" % token)
        scratch.predicted = Follower(backwards)
        try:
            return super().measure_costs(scratch)
        finally:
            scratch.predicted = None


@dataclass(frozen=True, slots=True)
class _Replacement:
    old: list[int]
    new: list[int]
    times: int  # it was made so often in a row


class _Replacements:
    """What the output has in place of tokens of the prediction. Only what was done last to a text is remembered."""

    __slots__ = ("_by_first", "_tokens")

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = tokens
        self._by_first: dict[int, _Replacement] = {}  # by the first old token

    def at(self, first: int | None) -> _Replacement | None:
        """The replacement of the prediction's tokens from `first` on."""
        if not self._by_first or first is None or first >= len(self._tokens):
            return None
        known = self._by_first.get(self._tokens[first])
        return known if known is not None and self._tokens[first : first + len(known.old)] == known.old else None

    def learn(self, old: list[int], new: list[int]) -> None:
        known = self._by_first.get(old[0])
        is_repeated = known is not None and (known.old, known.new) == (old, new)
        self._by_first[old[0]] = _Replacement(old, new, known.times + 1 if known is not None and is_repeated else 1)

    def forget(self, known: _Replacement) -> None:
        del self._by_first[known.old[0]]


class Follower:
    """Where one request's output is in its prediction, and how much of the prediction it has used."""

    __slots__ = (
        "_anchor",
        "_begin",
        "_doubt",
        "_latest",
        "_num_followed",
        "_num_misses",
        "_num_read",
        "_place",
        "_prediction",
        "_replacements",
        "_run",
        "_since",
        "_used",
    )

    def __init__(self, prediction: Prediction) -> None:
        self._prediction = prediction
        self._num_read = 0  # tokens of the request, its prompt included
        self._latest = b""  # the last bytes of the output
        self._run = _EXPECTED_RUN  # tokens that agreed before the place, or evidence as good as that; 0: lost
        self._num_followed = _TRUSTED_RUN  # tokens that agreed since the place was found, or as good as that
        self._num_misses = 0  # places in a row that did not last
        self._doubt = 0.0  # part of the run that drafts do not count on, because of them
        self._begin = self._place = 0  # the output goes on at the place; from the beginning to there it agreed
        self._anchor = 0  # the last place that was beyond doubt
        self._since: list[int] = []  # output tokens since then
        self._replacements = _Replacements(prediction.tokens)
        self._used = bytearray(len(prediction.tokens))  # 1: the output has this token, too

    @property
    def is_used(self) -> bool:
        """Whether drafts from it were ever asked for."""
        return self._num_read > 0

    @property
    def num_tokens(self) -> int:
        return len(self._used)

    @property
    def num_accepted(self) -> int:
        """Tokens of the prediction that are in the output, in stretches of at least a few."""
        used = bytearray(self._used)
        self._mark(used)
        return sum(used)

    def read(self, request: Request) -> None:
        """Follow the output to its end."""
        for token in request.tokens[max(self._num_read, len(request.prompt)) :]:
            piece = self._prediction.token_bytes(token)
            if piece:
                self._latest = (self._latest + piece)[-MOST_MATCHED:]
                if len(self._since) < _MOST_SINCE:
                    self._since.append(token)
                if self._run and self._prediction.text.startswith(piece, self._place):
                    self._follow(len(piece))
                else:
                    self._realign()
        self._num_read = len(request.tokens)

    def draft(self, depth: int) -> tuple[list[int], list[float]]:
        """The next tokens of the prediction, with the replacements so far, and the confidence in each."""
        text, tokens, confidence = self._prediction.tokens, list[int](), list[float]()
        run = self._run - self._doubt
        at = self._prediction.boundary_at(self._place) if self._run else None
        begun = self._begun_replacement()
        if begun is not None:
            run, tokens, at = _TRUSTED_RUN, *begun
            confidence += [1.0 - 1.0 / (run + i + 1.0) for i in range(len(tokens))]
        while at is not None and at < len(text) and len(tokens) < depth:
            sure = 1.0 - 1.0 / (run + len(tokens) + 1.0)
            replaced = self._replacements.at(at)
            if replaced is not None:
                tokens += replaced.new
                confidence += [min(sure, 1.0 - 1.0 / (replaced.times + 2.0))] + [sure] * (len(replaced.new) - 1)
                at += len(replaced.old)
            else:
                tokens.append(text[at])
                confidence.append(sure)
                at += 1
        return tokens[:depth], confidence[:depth]

    def _begun_replacement(self) -> tuple[list[int], int] | None:
        """If the output is inside a replacement that it has made before: the rest of the new text, and the token of
        the prediction after the old text."""
        at = self._prediction.boundary_at(self._anchor) if self._since else None
        known, num_begun = self._replacements.at(at), len(self._since)
        if at is None or known is None or known.new[:num_begun] != self._since:
            return None
        return known.new[num_begun:], at + len(known.old)

    def _follow(self, num_bytes: int) -> None:
        """The output goes on as predicted."""
        kept = self._replacements.at(self._prediction.boundary_at(self._place))
        if kept is not None:
            self._replacements.forget(kept)
        self._place += num_bytes
        self._run += 1.0
        self._num_followed += 1.0
        if self._num_followed >= _TRUSTED_RUN:
            self._doubt = 0.0
        if self._run >= _TRUSTED_RUN and self._prediction.boundary_at(self._place) is not None:
            self._anchor = self._place
            self._since.clear()

    def _realign(self) -> None:
        """The output departs from the prediction: find where it goes on."""
        self._mark(self._used)
        self._num_misses = 0 if self._num_followed >= _TRUSTED_RUN else self._num_misses + 1
        self._num_followed = self._doubt = 0.0
        match = self._prediction.find(self._latest, self._anchor)
        if match is None:
            self._run, self._begin = 0.0, self._place
            return
        self._run, self._place, self._begin = match.evidence, match.place, match.place - match.num_bytes
        self._doubt = match.evidence * (1.0 - 1.0 / (1.0 + _DOUBT_PER_MISS * self._num_misses))
        self._learn_replacement()

    def _mark(self, used: bytearray) -> None:
        """Mark the tokens where the output agreed last. A few that agree may be a coincidence and do not count."""
        if self._run >= _TRUSTED_RUN:
            for token in self._prediction.tokens_between(self._begin, self._place):
                used[token] = 1

    def _learn_replacement(self) -> None:
        """From the anchor to the new place, the prediction has an old text where the output has a new one, and the same
        tokens after it."""
        prediction = self._prediction
        first, last = prediction.boundary_at(self._anchor), prediction.boundary_at(self._place)
        if first is None or last is None or last - first > _MOST_SINCE or len(self._since) == _MOST_SINCE:
            return
        num_same = common_length(prediction.tokens[first:last][::-1], self._since[::-1])
        old, new = prediction.tokens[first : last - num_same], self._since[: len(self._since) - num_same]
        if num_same and 1 <= len(old) <= _LONGEST_REPLACED and 1 <= len(new) <= _LONGEST_REPLACED:
            self._replacements.learn(old, new)
