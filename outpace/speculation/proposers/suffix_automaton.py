"""A suffix automaton: every substring of the texts added so far, how often it occurred, and what followed it.

A state stands for the substrings that end at the same places: its longest one, and the suffixes of that down to, but
not including, the longest one of the state it links to. State 0, the root, is the empty string. States are indexes
into flat lists, because a request creates thousands of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

# Each token adds one to the counts along its chain of suffix links. In ordinary text that chain has a few
# links; in repetitive text it is as long as the text, and counting it all would take quadratic time. The walk
# starts at the longest context, and drafts are made from long contexts, so only short contexts of repetitive
# text are undercounted.
MAX_COUNTED_LINKS = 64


class SuffixAutomaton:
    """Built online, in amortised constant time per token. No substring spans two texts."""

    __slots__ = ("count", "last", "length", "link", "transitions")

    def __init__(self) -> None:
        self.length = [0]  # of the state's longest substring
        self.link = [-1]  # the state of the longest suffix that also ends elsewhere
        self.transitions: list[dict[int, int]] = [{}]  # token -> state, in the order of first occurrence
        self.count = [0]  # occurrences; the root's are not counted
        self.last = 0  # the state of the whole current text

    def start_text(self) -> None:
        self.last = 0

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens to the current text."""
        length, link, transitions, count = self.length, self.link, self.transitions, self.count
        last = self.last
        for token in tokens:
            known = transitions[last].get(token)
            if known is not None:  # the text so far occurs in an earlier text, so its states exist
                last = self._exact(last, token, known)
            else:
                new = len(length)
                length.append(length[last] + 1)
                link.append(0)
                transitions.append({})
                count.append(0)
                state = last
                while state >= 0 and token not in transitions[state]:
                    transitions[state][token] = new
                    state = link[state]
                if state >= 0:
                    link[new] = self._exact(state, token, transitions[state][token])
                last = new
            state, budget = last, MAX_COUNTED_LINKS
            while state and budget:
                count[state] += 1
                state = link[state]
                budget -= 1
        self.last = last

    def repeated_suffix(self) -> tuple[int, int]:
        """State and length of the longest suffix that also occurs earlier; for an automaton with a single text."""
        state = self.link[self.last] if self.last else 0
        return state, self.length[state]

    def _exact(self, source: int, token: int, target: int) -> int:
        """The state whose longest substring is source's with the token added. Where `target` holds longer
        ones too, split it: the shorter ones are about to end at one more place."""
        length, link, transitions = self.length, self.link, self.transitions
        if length[target] == length[source] + 1:
            return target
        clone = len(length)
        length.append(length[source] + 1)
        link.append(link[target])
        transitions.append(transitions[target].copy())
        self.count.append(self.count[target])
        link[target] = clone
        while source >= 0 and transitions[source].get(token) == target:
            transitions[source][token] = clone
            source = link[source]
        return clone


@dataclass(slots=True)
class Cursor:
    """Follows a separate text and keeps its longest suffix that occurs in an automaton.

    The automaton may grow between calls. The earlier match still holds; `advance` corrects its state if that was
    split. A longer match that became possible is found only as further tokens arrive.
    """

    automaton: SuffixAutomaton
    state: int = 0
    length: int = 0

    def advance(self, tokens: Iterable[int]) -> None:
        lengths, link, transitions = self.automaton.length, self.automaton.link, self.automaton.transitions
        state, length = self.state, self.length
        while state and length <= lengths[link[state]]:
            state = link[state]
        for token in tokens:
            while state and token not in transitions[state]:
                state = link[state]
                length = lengths[state]
            following = transitions[state].get(token)
            if following is not None:
                state = following
                length += 1
        self.state, self.length = state, length
