"""Follows one request through its grammar: which tokens may come next, after the emitted ones and part of a draft.

A matcher has one parser, which it moves along a draft by consuming tokens and back by rolling back. Its answers depend
only on the emitted tokens and the prefix, not on what was asked before. Masks along the latest draft are kept, so the
mask that was computed to cut a draft also serves its verification.

A mask takes ten times as long as one token's way through the parser, so `only_token` and `allows` answer without a mask
where they can. Tokens of a forced run are known from its beginning; the parser gets them only when it is needed again.

A parser that exceeds its limits, or finds that nothing can follow, is at a dead end. The request then ends there, with
the reason "length", as an incomplete answer does; the step goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from outpace.core import FinishReason
from outpace.decoding.acceptance import common_length
from outpace.decoding.forced_runs import ForcedRuns, Place
from outpace.decoding.masks import FloatRow, Mask, Masking, MaskMemory, allows, is_empty, mask_of, mask_of_all
from outpace.decoding.parser import Parser

_OTHERWISE_SPELLED = 0.8  # confidence in a token of forced text that other tokens may spell too


_NONE: list[int] = []  # an empty prefix


@dataclass(frozen=True, slots=True)
class Forced:
    """Tokens of text that must come next. Of the first `num_certain`, each is the only allowed token at its place."""

    tokens: list[int]
    num_certain: int

    @property
    def confidence(self) -> list[float]:
        return [1.0] * self.num_certain + [_OTHERWISE_SPELLED] * (len(self.tokens) - self.num_certain)


@dataclass(frozen=True, slots=True)
class Ending:
    """The request ends after this many of the given tokens."""

    num_tokens: int
    reason: FinishReason


class Matcher:
    def __init__(
        self,
        template: Parser,
        num_tokens: int,
        stop_ids: frozenset[int],
        tokenize: Callable[[bytes], list[int]],
        runs: ForcedRuns | None = None,
    ) -> None:
        """`template` is a parser at the start, which is only copied; `tokenize` splits forced text into tokens. `runs`
        may be shared by all matchers of a template.

        Any token of `stop_ids` ends the request, so the parser never gets one.
        """
        self._template = template
        self._parser = template.deep_copy()
        self._tokenize = tokenize
        self._stop_ids = stop_ids
        self._stop_bits = mask_of(stop_ids, num_tokens)
        self._all = mask_of_all(num_tokens)
        self._masking = Masking()
        self._memory = MaskMemory(self._stop_bits.size)
        self._runs = runs or ForcedRuns()
        self._emitted: list[int] = []
        self._num_owed = 0  # the last emitted tokens, of a forced run, which the parser has not consumed
        self._path: list[int] = []  # tokens that the parser has consumed after the emitted ones
        self._places = [Place()]  # after each number of tokens of the path
        self.is_too_complex = False  # the parser has exceeded a limit
        self._dead_end: tuple[list[int], FinishReason] | None = None  # a path after which no token is possible

    def mask(self, prefix: Sequence[int] = _NONE) -> Mask:
        """The tokens allowed after `prefix`; stop tokens exactly where the grammar may end. Do not change it.

        All tokens, if no token after `prefix` can be emitted: it has a forbidden token, or the request ends before.
        """
        known = self._known_mask(prefix)
        if known is not None:
            return known
        if not self._seek(prefix):
            return self._all
        place = self._places[-1]
        if place.mask is None:
            place.mask = self._computed()
        return self._all if place.mask is None else place.mask

    def only_token(self, prefix: Sequence[int] = _NONE) -> int | None:
        """The only token of the mask after `prefix`, where forced text leaves one; None elsewhere."""
        if self._places[0].begins_run(prefix):
            return self._places[0].run[len(prefix)]
        place = self._explored(prefix)
        return place.run[0] if place is not None and place.run else None

    def allows(self, token: int, prefix: Sequence[int] = _NONE) -> bool:
        """Whether the mask after `prefix` has this token, mostly without computing the mask.

        The mask has what the parser accepts, except where text is forced: there it has one spelling only.
        """
        place = self._explored(prefix)
        if place is not None and place.run:
            return token == place.run[0]
        if place is None or place.is_forced or place.mask is not None or token in self._stop_ids:
            return allows(self.mask(prefix), token)
        return self._path[len(prefix) :][:1] == [token] or self._seek([*prefix, token])

    def allows_text(self) -> bool:
        """Whether another token than a stop token may come next."""
        return self.ending(()) is None and bool((self.mask() & ~self._stop_bits).any()) and self._dead_end is None

    def count_allowed(self, draft: Sequence[int]) -> int:
        """How many leading tokens of a draft are allowed; those after the end of the grammar are not."""
        self._seek(draft)
        if self._dead_end is not None and _begins_with(draft, self._dead_end[0]):
            return len(self._dead_end[0])
        num_allowed = len(self._path)
        if num_allowed < len(draft) and draft[num_allowed] in self._stop_ids and self._parser.is_accepting():
            num_allowed += 1
        ending = self.ending(draft[:num_allowed])
        return num_allowed if ending is None else ending.num_tokens

    def masked(self, logits: FloatRow, prefix: Sequence[int]) -> FloatRow:
        """A copy of the logits, with -inf for the tokens that are not allowed after `prefix`."""
        return self._masking(logits, self.mask(prefix))

    def forced(self, prefix: Sequence[int] = _NONE) -> Forced:
        """The text that must follow `prefix`, as the tokenizer splits it."""
        if not self._seek(prefix) or self._parser.is_stopped():
            return _NOTHING_FORCED
        text = self._parser.compute_ff_bytes()
        if not text:
            return _NOTHING_FORCED
        tokens = self._tokenize(text)
        return Forced(tokens, common_length(tokens, self._parser.compute_ff_tokens()))

    def ending(self, tokens: Sequence[int]) -> Ending | None:
        """Where the grammar ends, or fails, if these tokens are emitted. A stop token ends a request anyway."""
        if self._places[0].begins_run(tokens):
            return None  # more must follow
        at_end = self._seek(tokens)
        if self._dead_end is not None and _begins_with(tokens, self._dead_end[0]):
            return Ending(len(self._dead_end[0]), self._dead_end[1])
        if self._parser.is_stopped():
            return Ending(len(self._path), "stop")
        # A forbidden token has probability zero. If one came all the same, the answer ends before it.
        is_forbidden = not at_end and tokens[len(self._path)] not in self._stop_ids
        return Ending(len(self._path), "length") if is_forbidden else None

    def advance(self, tokens: Sequence[int]) -> None:
        """Record emitted tokens."""
        if not self._path and self._places[0].begins_run(tokens):
            self._num_owed += len(tokens)
            self._emitted += tokens
            self._places = [self._places[0].after(tokens)]
            return
        self._seek(tokens)
        if self._dead_end is not None:
            path, reason = self._dead_end
            self._dead_end = (path[len(tokens) :], reason) if _begins_with(path, tokens) else None
        self._emitted += self._path
        self._path, self._places = [], self._places[-1:]

    def _seek(self, prefix: Sequence[int]) -> bool:
        """Move the parser along `prefix`; False if it stands before a stop token, a forbidden one or a dead end."""
        if self._num_owed:
            self._consume_owed()
        path = self._path
        if path == prefix and self._dead_end is None:
            return True
        same = len(path)
        if path != list(prefix[:same]):
            same = common_length(path, prefix)
            self._parser.rollback(len(path) - same)
            del path[same:], self._places[same + 1 :]
        if self._dead_end is not None and _begins_with(prefix, self._dead_end[0]):
            return False
        if same < len(prefix):
            rest = list(prefix[same:])
            if not self._stop_ids.isdisjoint(rest):
                del rest[next(i for i, token in enumerate(rest) if token in self._stop_ids) :]
            del rest[self._parser.try_consume_tokens(rest) :]
            path += rest
            for token in rest:
                self._places.append(self._places[-1].after([token]))
            if self._parser.is_error():
                self._die("length")
        return len(self._path) == len(prefix)

    def _consume_owed(self) -> None:
        owed = self._emitted[len(self._emitted) - self._num_owed :]
        self._num_owed = 0
        if self._parser.try_consume_tokens(owed) < len(owed):
            self._die("length")  # it has exceeded a limit

    def _known_mask(self, prefix: Sequence[int]) -> Mask | None:
        """A mask on the path of the latest draft; the parser need not go back for it."""
        place = self._known_place(prefix)
        return None if place is None else place.mask

    def _known_place(self, prefix: Sequence[int]) -> Place | None:
        length = len(prefix)
        is_known = length < len(self._places) and (not length or self._path[:length] == list(prefix))
        return self._places[length] if is_known else None

    def _explored(self, prefix: Sequence[int]) -> Place | None:
        """The place after `prefix`, with what is forced there; None if the parser cannot get there."""
        place = self._known_place(prefix)
        if place is not None and place.is_forced is not None:
            return place
        if not self._seek(prefix):
            return None
        place, parser = self._places[-1], self._parser
        is_stopped = parser.is_stopped()
        text = b"" if is_stopped else parser.compute_ff_bytes()
        place.is_forced = is_stopped or bool(text)
        if text and not parser.is_accepting():
            place.run = self._runs.at(parser, text, self._stop_ids)
        return place

    def _computed(self) -> Mask | None:
        """The mask at the parser's place; None if nothing can follow or the parser fails."""
        mask, address = self._memory.take()
        self._parser.unsafe_compute_mask_ptr(address, mask.nbytes)
        is_accepting = not self._parser.is_error() and self._parser.is_accepting()
        if is_accepting:
            mask |= self._stop_bits
        if self._parser.is_error() or is_empty(mask):
            self._die("stop" if is_accepting else "length")
            return None
        return mask

    def _die(self, reason: FinishReason) -> None:
        """Remember the path as a dead end, and start a parser at the emitted tokens: a failed one cannot go back."""
        self._dead_end = self._path, reason
        if self._parser.is_error() and not self._parser.get_error().startswith("NoExtension"):
            self.is_too_complex = True
        self._parser = self._template.deep_copy()
        self._parser.try_consume_tokens(self._emitted)
        self._path, self._places = [], [Place()]


def _begins_with(tokens: Sequence[int], beginning: Sequence[int]) -> bool:
    return list(tokens[: len(beginning)]) == list(beginning)


_NOTHING_FORCED = Forced([], 0)
