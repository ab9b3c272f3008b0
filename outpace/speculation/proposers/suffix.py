"""Suffix lookup: drafts the most frequent continuation of the longest context that occurred before.

It searches the request's own tokens and the output of earlier requests with the same cache salt, which a bounded
store keeps; `store_tokens=0` disables the store. Requests of programs name their place in the program: the outputs at
one place have a store of their own, in which the place itself is a context. So a draft exists before the first token. A
draft is a fixed function of the past tokens, so its distribution is one-hot. The policy decides whether a draft is
worth verifying.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from outpace.core import Draft, Request
from outpace.speculation.proposers.base import DraftAsk, NoDraft
from outpace.speculation.proposers.suffix_automaton import Cursor, SuffixAutomaton

MIN_SURVIVAL = 0.1  # a token with a lower chance of being reached and accepted is never worth verifying
STORED_CONTEXT = 16  # prompt tokens stored before an output, to match the start of an answer
LOOKBACK = 64  # tokens with which a new cursor starts; a longer match does not predict better
# Stands before each output of a place. No token has such an id. By its length, the same place is as good a context as
# four tokens that agree.
PLACE_MARK = (-4, -3, -2, -1)


class SuffixProposer(NoDraft):
    name = "suffix"

    def __init__(self, store_tokens: int, min_match: int = 2) -> None:
        self._stores = _Stores(store_tokens)
        self._min_match = min_match
        self._contexts: dict[int, _Context] = {}

    def propose(self, asks: Sequence[DraftAsk]) -> list[Draft]:
        return [self._draft(ask.request, ask.depth, ask.prefix) for ask in asks]

    def prepare(self, request: Request) -> None:
        self._context(request)

    def release(self, request: Request) -> None:
        self._contexts.pop(request.id, None)
        self._stores.insert(request)

    def forget(self) -> None:
        self._stores.clear()

    def _context(self, request: Request) -> _Context:
        """The request's context, up to its last token."""
        context = self._contexts.get(request.id)
        if context is None:
            context = self._contexts[request.id] = _Context()
        context.catch_up(request, self._stores.generations(request.cache_salt, request.place))
        return context

    def _draft(self, request: Request, depth: int, prefix: Sequence[int]) -> Draft:
        context = self._context(request)
        best_score, best = 0.0, Draft([], self.name)
        for automaton, state, matched in context.contexts(prefix):
            if matched >= self._min_match:
                score, tokens, confidence = follow(automaton, state, matched, depth, self._min_match)
                if score > best_score:
                    best_score, best = score, Draft(tokens, self.name, confidence=confidence)
        return best


def follow(
    automaton: SuffixAutomaton, state: int, matched: int, depth: int, min_match: int
) -> tuple[float, list[int], list[float]]:
    """The expected number of accepted tokens of the most frequent continuation, its tokens, and the confidence in each
    given those before it.

    A token survives if it and all before it are accepted. Its chance is its frequency among the continuations seen,
    times the chance that text and source still agree. After m agreements in a row they agree once more with
    probability m / (m + 1), the rule of succession; i more times, with m / (m + i). Short matches thus get a low
    confidence.
    """
    score, survival = 0.0, 1.0
    tokens: list[int] = []
    confidence: list[float] = []
    while len(tokens) < depth:
        children = automaton.transitions[state]
        if not children:
            # The end of a text: continue from a shorter context. In the request's own text, this repeats a pattern
            # past the end.
            state = automaton.link[state]
            if automaton.length[state] < min_match:
                break
            if not tokens:  # the tokens beyond the shorter context do not count as matched
                matched = automaton.length[state]
            continue
        total = best_count = best_token = 0
        for token, child in children.items():
            count = automaton.count[child]
            total += count
            if count >= best_count:  # among equals, the one first seen most recently
                best_count, best_token = count, token
        agreed = matched + len(tokens)
        sure = best_count / total * agreed / (agreed + 1)
        survival *= sure
        if survival < MIN_SURVIVAL:
            break
        score += survival
        tokens.append(best_token)
        confidence.append(sure)
        state = children[best_token]
    return score, tokens, confidence


@dataclass(slots=True, eq=False)
class _Generation:
    """A part of the output of earlier requests."""

    automaton: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    is_of_place: bool = False
    num_tokens: int = 0
    stored: dict[int, int] = field(default_factory=dict)  # request id -> its length when stored

    def begin(self, request: Request) -> list[int]:
        """The context of a request whose tokens were not followed so far."""
        if not self.is_of_place:
            return request.tokens[-LOOKBACK:]
        return [*PLACE_MARK, *request.tokens[len(request.prompt) :]]


class _Store:
    """The outputs of earlier requests, in two generations of bounded size, young and old.

    Single texts cannot be removed from an automaton. When the young generation is full, it replaces the old one:
    memory is bounded and recent traffic stays.
    """

    __slots__ = ("_capacity", "_is_of_place", "generations")

    def __init__(self, capacity: int, *, is_of_place: bool) -> None:
        self._capacity = capacity  # of one generation
        self._is_of_place = is_of_place
        self.generations: tuple[_Generation, _Generation] = (self._generation(), self._generation())

    @property
    def num_tokens(self) -> int:
        return sum(generation.num_tokens for generation in self.generations)

    def insert(self, request: Request) -> None:
        """Store the request's output. A second release (preempted, then finished) adds only the new tokens."""
        young, old = self.generations
        prompt_length, length = len(request.prompt), len(request.tokens)
        start = max(young.stored.get(request.id, prompt_length), old.stored.get(request.id, prompt_length))
        if start == length:
            return
        if self._is_of_place and start == prompt_length:
            text = [*PLACE_MARK, *request.tokens[start : start + max(0, self._capacity - len(PLACE_MARK))]]
        else:
            text = request.tokens[max(0, start - STORED_CONTEXT, length - self._capacity) :]
        if young.num_tokens + len(text) > self._capacity:
            self.generations = (self._generation(), young)
            young = self.generations[0]
        young.automaton.start_text()
        young.automaton.extend(text)
        young.num_tokens += len(text)
        young.stored[request.id] = length

    def _generation(self) -> _Generation:
        return _Generation(is_of_place=self._is_of_place)


class _Stores:
    """One store per cache salt, and per salt and place. Together they hold at most `num_tokens`: the least recently
    used go first."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._by_key: OrderedDict[tuple[str, str], _Store] = OrderedDict()  # by salt and place

    def clear(self) -> None:
        self._by_key.clear()

    def generations(self, salt: str, place: str = "") -> tuple[_Generation, ...]:
        """Where to look for drafts: outputs of no place, and those of the request's place if it has one."""
        common = self._by_key.get((salt, ""))
        found = common.generations if common is not None else ()
        of_place = self._by_key.get((salt, place)) if place else None
        return found if of_place is None else (*found, *of_place.generations)

    def insert(self, request: Request) -> None:
        if self._num_tokens < 2:
            return
        key = (request.cache_salt, request.place)
        store = self._by_key.get(key)
        if store is None:
            store = self._by_key[key] = _Store(self._num_tokens // 2, is_of_place=bool(request.place))
        self._by_key.move_to_end(key)
        store.insert(request)
        while len(self._by_key) > 1 and sum(each.num_tokens for each in self._by_key.values()) > self._num_tokens:
            self._by_key.popitem(last=False)


class _Context:
    """A running request: its own text, and where its latest tokens occur in the store."""

    __slots__ = ("_cursors", "_generations", "_num_indexed", "_own")

    def __init__(self) -> None:
        self._own = SuffixAutomaton()
        self._cursors: list[Cursor] = []  # one per generation
        self._generations: tuple[_Generation, ...] = ()
        self._num_indexed = 0

    def catch_up(self, request: Request, generations: tuple[_Generation, ...]) -> None:
        new_tokens = request.tokens[self._num_indexed :]
        self._num_indexed = len(request.tokens)
        self._own.extend(new_tokens)
        for cursor in self._cursors:
            cursor.advance(new_tokens)
        if self._generations != generations:
            known = {id(cursor.automaton): cursor for cursor in self._cursors}
            self._cursors, self._generations = [], generations
            for generation in generations:
                cursor = known.get(id(generation.automaton)) or Cursor(generation.automaton)
                if id(generation.automaton) not in known:
                    cursor.advance(generation.begin(request))
                self._cursors.append(cursor)

    def contexts(self, prefix: Sequence[int] = ()) -> list[tuple[SuffixAutomaton, int, int]]:
        """(automaton, state, matched length) after the text and `prefix`, in the request's own text first."""
        cursors = [Cursor(self._own, *self._own.repeated_suffix()), *self._cursors]
        if prefix:
            cursors = [replace(cursor) for cursor in cursors]  # the prefix may not become the text
            for cursor in cursors:
                cursor.advance(prefix)
        return [(cursor.automaton, cursor.state, cursor.length) for cursor in cursors]
