"""Suffix lookup: drafts the most frequent continuation of the longest context that occurred before.

It searches the request's own tokens and the output of earlier requests with the same cache salt, which a bounded
store keeps; `store_tokens=0` disables the store. A draft is a fixed function of the past tokens, so its distribution is
one-hot. The policy decides whether a draft is worth verifying.
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
        context.catch_up(request.tokens, self._stores.generations(request.cache_salt))
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


@dataclass(slots=True)
class _Generation:
    """A part of the output of earlier requests."""

    automaton: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    num_tokens: int = 0
    stored: dict[int, int] = field(default_factory=dict)  # request id -> its length when stored


class _Store:
    """The outputs of earlier requests, in two generations of bounded size, young and old.

    Single texts cannot be removed from an automaton. When the young generation is full, it replaces the old one:
    memory is bounded and recent traffic stays.
    """

    __slots__ = ("_capacity", "generations")

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity  # of one generation
        self.generations: tuple[_Generation, _Generation] = (_Generation(), _Generation())

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
        text = request.tokens[max(0, start - STORED_CONTEXT, length - self._capacity) :]
        if young.num_tokens + len(text) > self._capacity:
            self.generations = (_Generation(), young)
            young = self.generations[0]
        young.automaton.start_text()
        young.automaton.extend(text)
        young.num_tokens += len(text)
        young.stored[request.id] = length


class _Stores:
    """One store per cache salt. Together they hold at most `num_tokens`: the least recently used go first."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._by_salt: OrderedDict[str, _Store] = OrderedDict()

    def clear(self) -> None:
        self._by_salt.clear()

    def generations(self, salt: str) -> tuple[_Generation, ...]:
        store = self._by_salt.get(salt)
        return store.generations if store is not None else ()

    def insert(self, request: Request) -> None:
        if self._num_tokens < 2:
            return
        salt = request.cache_salt
        store = self._by_salt.get(salt)
        if store is None:
            store = self._by_salt[salt] = _Store(self._num_tokens // 2)
        self._by_salt.move_to_end(salt)
        store.insert(request)
        while len(self._by_salt) > 1 and sum(each.num_tokens for each in self._by_salt.values()) > self._num_tokens:
            self._by_salt.popitem(last=False)


class _Context:
    """A running request: its own text, and where its latest tokens occur in the store."""

    __slots__ = ("_cursors", "_generations", "_num_indexed", "_own")

    def __init__(self) -> None:
        self._own = SuffixAutomaton()
        self._cursors: list[Cursor] = []  # one per generation
        self._generations: tuple[_Generation, ...] = ()
        self._num_indexed = 0

    def catch_up(self, tokens: list[int], generations: tuple[_Generation, ...]) -> None:
        new_tokens = tokens[self._num_indexed :]
        self._num_indexed = len(tokens)
        self._own.extend(new_tokens)
        for cursor in self._cursors:
            cursor.advance(new_tokens)
        if self._generations is not generations:
            known = {id(cursor.automaton): cursor for cursor in self._cursors}
            self._cursors, self._generations = [], generations
            for generation in generations:
                cursor = known.get(id(generation.automaton)) or Cursor(generation.automaton)
                if id(generation.automaton) not in known:
                    cursor.advance(tokens[-LOOKBACK:])
                self._cursors.append(cursor)

    def contexts(self, prefix: Sequence[int] = ()) -> list[tuple[SuffixAutomaton, int, int]]:
        """(automaton, state, matched length) after the text and `prefix`, in the request's own text first."""
        cursors = [Cursor(self._own, *self._own.repeated_suffix()), *self._cursors]
        if prefix:
            cursors = [replace(cursor) for cursor in cursors]  # the prefix may not become the text
            for cursor in cursors:
                cursor.advance(prefix)
        return [(cursor.automaton, cursor.state, cursor.length) for cursor in cursors]
