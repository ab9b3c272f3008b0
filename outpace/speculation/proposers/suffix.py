"""Guessing by counting: what mostly followed the longest context seen before, here or in earlier requests.

Knows token sequences and their frequencies; refuses to know the model and what a step costs: whether a draft
is worth verifying is the policy's to say. A draft is a fixed function of the past, so its distribution is
one-hot. Requests share what they said through a bounded store; `store_tokens=0` keeps each to itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from outpace.core import Draft, Request
from outpace.speculation.proposers.base import DraftAsk, NoDraft
from outpace.speculation.proposers.suffix_automaton import Cursor, SuffixAutomaton

MIN_SURVIVAL = 0.1  # a token less likely than this to be reached and right is not worth a slot in any step
STORED_CONTEXT = 16  # prompt tokens stored before an output: enough to recognise where an answer begins
LOOKBACK = 64  # tokens a cursor reads on first meeting a generation: a longer match would say no more


class SuffixProposer(NoDraft):
    name = "suffix"

    def __init__(self, store_tokens: int, min_match: int = 2) -> None:
        self._store_tokens = store_tokens
        self._store = _Store(store_tokens // 2)
        self._min_match = min_match
        self._contexts: dict[int, _Context] = {}

    def propose(self, asks: Sequence[DraftAsk]) -> list[Draft]:
        return [self._draft(ask.request, ask.depth) for ask in asks]

    def prepare(self, request: Request) -> None:
        self._context(request)

    def release(self, request: Request) -> None:
        self._contexts.pop(request.id, None)
        self._store.insert(request)

    def forget(self) -> None:
        self._store = _Store(self._store_tokens // 2)

    def _context(self, request: Request) -> _Context:
        """Up to the request's last token."""
        context = self._contexts.get(request.id)
        if context is None:
            context = self._contexts[request.id] = _Context()
        context.catch_up(request.tokens, self._store)
        return context

    def _draft(self, request: Request, depth: int) -> Draft:
        context = self._context(request)
        best_score, best = 0.0, Draft([], self.name)
        for automaton, state, matched in context.contexts():
            if matched >= self._min_match:
                score, tokens, confidence = follow(automaton, state, matched, depth, self._min_match)
                if score > best_score:
                    best_score, best = score, Draft(tokens, self.name, confidence=confidence)
        return best


def follow(
    automaton: SuffixAutomaton, state: int, matched: int, depth: int, min_match: int
) -> tuple[float, list[int], list[float]]:
    """How many tokens of a matched context's most frequent continuation should survive, those tokens, and how sure
    each of them is given those before it.

    A token survives where it and all before it are accepted. Among the continuations seen, its frequency says
    how likely that is, if text and source go on agreeing at all. Having agreed m times in a row they agree
    once more with probability m / (m + 1), the rule of succession; i more times, with m / (m + i). So short
    matches are doubted.
    """
    score, survival = 0.0, 1.0
    tokens: list[int] = []
    confidence: list[float] = []
    while len(tokens) < depth:
        children = automaton.transitions[state]
        if not children:
            # The end of a text: ask what followed a shorter context. In the request's own text this is how a
            # repeated pattern is copied past the end.
            state = automaton.link[state]
            if automaton.length[state] < min_match:
                break
            if not tokens:  # what matched beyond that context has nothing to say
                matched = automaton.length[state]
            continue
        total = best_count = best_token = 0
        for token, child in children.items():
            count = automaton.count[child]
            total += count
            if count >= best_count:  # of equals, the one that turned up last
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
    """Part of what earlier requests said."""

    automaton: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    num_tokens: int = 0
    stored: dict[int, int] = field(default_factory=dict)  # request id -> its length when stored


class _Store:
    """The outputs of earlier requests, in two generations of bounded size, young and old.

    An automaton cannot forget piecemeal. When the young generation is full it becomes the old one, and the
    old one goes: memory is bounded and recent traffic stays.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity  # of one generation
        self.generations: tuple[_Generation, ...] = (_Generation(), _Generation()) if capacity else ()

    def insert(self, request: Request) -> None:
        """Store what the request said. Released twice (preempted, then finished), it adds what is new."""
        if not self.generations:
            return
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


class _Context:
    """What is known of one running request: its own text, and where in the store its latest tokens occur."""

    __slots__ = ("_cursors", "_generations", "_num_read", "_own")

    def __init__(self) -> None:
        self._own = SuffixAutomaton()
        self._cursors: list[Cursor] = []  # one in each of
        self._generations: tuple[_Generation, ...] = ()
        self._num_read = 0

    def catch_up(self, tokens: list[int], store: _Store) -> None:
        unread = tokens[self._num_read :]
        self._num_read = len(tokens)
        self._own.extend(unread)
        for cursor in self._cursors:
            cursor.advance(unread)
        if self._generations is not store.generations:
            known = {id(cursor.automaton): cursor for cursor in self._cursors}
            self._cursors, self._generations = [], store.generations
            for generation in store.generations:
                cursor = known.get(id(generation.automaton)) or Cursor(generation.automaton)
                if id(generation.automaton) not in known:
                    cursor.advance(tokens[-LOOKBACK:])
                self._cursors.append(cursor)

    def contexts(self) -> list[tuple[SuffixAutomaton, int, int]]:
        """(automaton, state, matched length), the request's own text first."""
        own = (self._own, *self._own.repeated_suffix())
        return [own, *((cursor.automaton, cursor.state, cursor.length) for cursor in self._cursors)]
