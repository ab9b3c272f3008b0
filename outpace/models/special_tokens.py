"""Finds special tokens (control tokens and other added ones) in a text, as llama.cpp does, in near-linear time.

llama.cpp looks for the longest token first, in the whole text, then for the next one in what is left. Its own search
takes time that grows with the square of the number of tokens found.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

_PREFIX_CHARS = 4  # enough to tell special tokens from ordinary text
_SPACE = " \t\n\v\f\r"  # what llama.cpp strips beside a token


@dataclass(frozen=True, slots=True)
class SpecialToken:
    id: int
    text: str
    is_control: bool  # without `parse_special` it is plain text
    strips_left: bool = False  # white space before it belongs to it
    strips_right: bool = False

    @property
    def num_bytes(self) -> int:
        return len(self.as_bytes())

    def as_bytes(self) -> bytes:
        """The text in a file need not be UTF-8."""
        return self.text.encode(errors="surrogateescape")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a special token is, with the white space that it strips."""

    start: int
    end: int
    token: SpecialToken


class SpecialTokens:
    def __init__(self, tokens: Iterable[SpecialToken], normalize: Callable[[str], str] | None = None) -> None:
        """`normalize`: what the tokenizer does to a text before it looks for some of them."""
        self.normalize = normalize
        found = [token for token in tokens if token.text]
        # The order in which llama.cpp looks for them.
        self.tokens: Sequence[SpecialToken] = sorted(found, key=lambda token: (-token.num_bytes, token.id))
        self._ranks: dict[str, int] = {}
        for rank, token in enumerate(self.tokens):
            self._ranks.setdefault(token.text, rank)

    @cached_property
    def controls(self) -> SpecialTokens:
        return SpecialTokens((token for token in self.tokens if token.is_control), self.normalize)

    @cached_property
    def others(self) -> SpecialTokens:
        return SpecialTokens(token for token in self.tokens if not token.is_control)

    @cached_property
    def longest(self) -> int:
        """Characters of the longest one."""
        return max((len(text) for text in self._ranks), default=0)

    @cached_property
    def beginnings(self) -> frozenset[str]:
        """Every text that begins a special token and is shorter than it."""
        return frozenset(text[:n] for text in self._ranks for n in range(1, len(text)))

    @cached_property
    def has_clear_order(self) -> bool:
        """Whether no two tokens of equal length can overlap: which of them llama.cpp takes is not known."""
        owners: dict[tuple[int, str], set[str]] = defaultdict(set)
        for token in self.tokens:
            for n in range(1, len(token.text)):
                owners[token.num_bytes, token.text[:n]].add(token.text)
        return all(
            owners.get((token.num_bytes, token.text[-n:]), set()) <= {token.text}
            for token in self.tokens
            for n in range(1, len(token.text))
        )

    def starts(self, text: str) -> Iterator[int]:
        """Every position at which a special token is written, also inside another one."""
        return (start for start, _ in self._written(text))

    def places(self, text: str) -> list[Place]:
        """The special tokens of a text, in the order of the text; they do not overlap."""
        waiting: dict[int, list[int]] = defaultdict(list)  # starts, by the rank of the longest token written there
        for start, rank in self._written(text):
            waiting[rank].append(start)
        taken = bytearray(len(text))
        places: list[Place] = []
        for rank, token in enumerate(self.tokens) if waiting else ():
            for start in sorted(waiting.pop(rank, ())):
                end = start + len(token.text)
                if taken[start]:
                    continue
                if taken[end - 1]:  # tokens taken before are at least as long, so one end tells
                    shorter = self._longest_at(text, start, self._lengths_before[token.text])
                    if shorter is not None:
                        waiting[shorter].append(start)
                    continue
                place = _with_stripped_space(text, start, end, token, taken)
                taken[place.start : place.end] = b"\1" * (place.end - place.start)
                places.append(place)
        return sorted(places, key=lambda place: place.start)

    def cuts(self, text: str) -> list[Place]:
        """Places of special tokens, after which the text can be cut without a change to what is found."""
        return self.places(text) if self.has_clear_order else self._groups(text)

    def _groups(self, text: str) -> list[Place]:
        """Places with all tokens that overlap each other: no token crosses their ends, whichever is taken."""
        groups: list[Place] = []
        for start, rank in self._written(text):
            token = self.tokens[rank]
            end = start + len(token.text)
            if groups and start < groups[-1].end:
                last = groups.pop()
                start, end = last.start, max(last.end, end)
            groups.append(Place(start, end, token))
        if not any(token.strips_right for token in self.tokens):
            return groups
        return [group for group in groups if text[group.end : group.end + 1] not in _SPACE]  # it may be stripped

    def _written(self, text: str) -> Iterator[tuple[int, int]]:
        """Each position at which tokens are written, and the rank of the longest of them."""
        if not self._ranks:
            return
        search = self._prefix_pattern.search
        match = search(text)
        while match is not None:
            start = match.start()
            rank = self._longest_at(text, start, self._lengths_by_prefix[match[0]])
            if rank is not None:
                yield start, rank
            match = search(text, start + 1)

    def _longest_at(self, text: str, start: int, lengths: Sequence[int]) -> int | None:
        for n in lengths:
            rank = self._ranks.get(text[start : start + n])
            if rank is not None:
                return rank
        return None

    @cached_property
    def _prefix_pattern(self) -> re.Pattern[str]:
        longest_first = sorted(self._lengths_by_prefix, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)))

    @cached_property
    def _lengths_by_prefix(self) -> dict[str, list[int]]:
        """For each prefix of the pattern, the lengths of the tokens that may be written there, longest first."""
        lengths: dict[str, set[int]] = defaultdict(set)
        for text in self._ranks:
            lengths[text[:_PREFIX_CHARS]].add(len(text))
        for prefix, known in lengths.items():
            known |= {n for n in range(1, len(prefix)) if prefix[:n] in self._ranks}
        return {prefix: sorted(known, reverse=True) for prefix, known in lengths.items()}

    @cached_property
    def _lengths_before(self) -> dict[str, list[int]]:
        """For each token, the lengths of the tokens that it begins with, longest first."""
        return {text: [n for n in range(len(text) - 1, 0, -1) if text[:n] in self._ranks] for text in self._ranks}


def _with_stripped_space(text: str, start: int, end: int, token: SpecialToken, taken: bytearray) -> Place:
    if token.strips_left:
        while start > 0 and not taken[start - 1] and text[start - 1] in _SPACE:
            start -= 1
    if token.strips_right:
        while end < len(text) and not taken[end] and text[end] in _SPACE:
            end += 1
    return Place(start, end, token)
