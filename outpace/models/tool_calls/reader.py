"""Separates the calls in a model's answer from its text, piece by piece as the answer is generated.

A call counts from the moment at which its function, one of those that the request offers, and the beginning of its
arguments are known. Up to there, text that only looks like a call is held back, and given out as text if it is none.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from outpace.models.held_text import length_of_beginning
from outpace.models.tool_calls.json_text import Nesting, NotACall, Reading, after_space, require, string
from outpace.models.tool_calls.syntax import CallSyntax

_ARGUMENT_KEYS = ("arguments", "parameters")
_OTHER_KEYS = ("id", "type")  # some models add them


@dataclass(slots=True)
class CallDelta:
    """What was added to a call. Only the first one has the name."""

    index: int
    name: str | None = None
    arguments: str = ""


@dataclass(slots=True)
class Found:
    """What a piece of an answer added: text, and at most one delta for each call."""

    content: str = ""
    calls: list[CallDelta] = field(default_factory=list)

    def joined(self, later: Found) -> Found:
        """This and what the end of the answer added, where no call begins or grows."""
        assert not later.calls
        return Found(self.content + later.content, self.calls)


class CallReader:
    def __init__(self, syntax: CallSyntax, names: Collection[str], *, max_calls: int | None = None) -> None:
        """`names` are the functions that may be called. Calls after the first `max_calls` are dropped."""
        self._syntax = syntax
        self._names = frozenset(names)
        self._max_calls = max_calls
        self._is_start = syntax.begins_bare
        self._held = ""  # white space, and what may be the beginning of an opener
        self._reading: Reading[None] | None = None  # set in a call, or what looks like one
        self._unused: list[str] = []  # what was read there and is text if it is no call
        self._is_used = False  # the latest character showed that it is one
        self._has_call = False  # since the latest opener
        self._nesting: Nesting | None = None  # set in arguments
        self._write: Callable[[str], None] = self._unused.append  # takes the text of arguments
        self._content: list[str] = []
        self._deltas: dict[int, CallDelta] = {}
        self.num_calls = 0

    def feed(self, text: str) -> Found:
        text, self._held = self._held + text, ""
        place = 0
        while place < len(text):
            place = self._read_text(text, place) if self._reading is None else self._read_call(text, place)
        return self._found()

    def finish(self) -> Found:
        """The rest, at the end of the answer. White space and unfinished closers after a call are dropped."""
        if not self._has_call:
            self._content.append("".join(self._unused))
        if not self.num_calls or self._held.strip():
            self._content.append(self._held)
        self._unused.clear()
        self._held, self._reading, self._nesting = "", None, None
        return self._found()

    def _found(self) -> Found:
        found = Found("".join(self._content), [self._deltas[index] for index in sorted(self._deltas)])
        self._content.clear()
        self._deltas.clear()
        return found

    # ---- text

    def _read_text(self, text: str, place: int) -> int:
        """Give out text up to the next opener, and read on behind it. Returns where to continue."""
        opener = self._syntax.opener
        if self._is_start:
            first = len(text) - len(text[place:].lstrip())
            if first == len(text):
                self._held = text[place:]
                return len(text)
            self._is_start = False
            if text[first] in "[{":
                self._begin_call(text[place:first])
                return first
        start = text.find(opener, place)
        end = start if start >= 0 else len(text) - length_of_beginning(text, opener)
        shown = text[place:end].rstrip()  # white space before a call belongs to it
        self._content.append(shown)
        rest = text[place + len(shown) : start + len(opener) if start >= 0 else len(text)]
        if start < 0:
            self._held = rest
            return len(text)
        self._begin_call(rest)
        return start + len(opener)

    def _begin_call(self, before: str) -> None:
        self._unused.append(before)
        self._is_used = self._has_call = False
        self._reading = self._calls()
        next(self._reading)

    # ---- calls

    def _read_call(self, text: str, place: int) -> int:
        """Read characters of a call until its end, or until it turns out to be none."""
        reading = self._reading
        assert reading is not None
        while place < len(text):
            if self._nesting is not None:
                end = self._nesting.advance(text, place)
                self._write(text[place:end])
                place = end
                if self._nesting.depth:
                    continue
                self._nesting = None
                reading.send("")  # the arguments are complete
                continue
            try:
                reading.send(text[place])
            except StopIteration:
                self._unused.clear()
                self._reading = None
                return place + 1
            except NotACall:
                self._content.append("".join(self._unused))
                self._unused.clear()
                self._reading = None
                return place  # this character is text again
            if self._is_used:
                self._unused.clear()
                self._is_used = False
            elif self._nesting is None:
                self._unused.append(text[place])
            place += 1
        return place

    def _calls(self) -> Reading[None]:
        """What follows an opener, the closer included."""
        syntax, char = self._syntax, (yield from after_space())
        if char == "[":
            char = yield from after_space()
            while char != "]":
                require(char == "{")
                yield from self._call()
                char = yield from after_space()
                require(char in ",]")
                if char == ",":
                    char = yield from after_space()
        else:
            require(char == "{")
            yield from self._call()
            while syntax.separator:  # until something else follows
                require((yield from after_space()) == syntax.separator.strip())
                require((yield from after_space()) == "{")
                yield from self._call()
        if syntax.closer:
            char = yield from after_space()
            for expected in syntax.closer[:-1]:
                require(char == expected)
                char = yield
            require(char == syntax.closer[-1])

    def _call(self) -> Reading[None]:
        """One call, after its opening brace."""
        name: str | None = None
        early: list[str] | None = None  # the arguments, if they come before the name
        index: int | None = None
        char = yield from after_space()
        while char != "}":
            require(char == '"')
            key = yield from string()
            require((yield from after_space()) == ":")
            char = yield from after_space()
            if key in _ARGUMENT_KEYS:
                require(char == "{" and early is None and index is None)
                if name is not None:
                    index = self._open(name)
                else:
                    early = []
                self._write = self._writer(index, early)
                self._write("{")
                self._nesting = Nesting()
                yield
            else:
                require(char == '"' and (key == "name" or key in _OTHER_KEYS))
                value = yield from string()
                if key == "name":
                    require(name is None and value in self._names)
                    name = value
                    if early is not None:
                        index = self._open(name)
                        self._writer(index, None)("".join(early))
            char = yield from after_space()
            require(char in ",}")
            if char == ",":
                char = yield from after_space()
                require(char == '"')
        require(name is not None)
        if index is None and name is not None:
            self._writer(self._open(name), None)("{}")
        self._is_used = True

    def _open(self, name: str) -> int:
        index = self.num_calls
        self.num_calls += 1
        self._is_used = self._has_call = True
        if self._is_wanted(index):
            self._deltas[index] = CallDelta(index, name)
        return index

    def _is_wanted(self, index: int) -> bool:
        return self._max_calls is None or index < self._max_calls

    def _writer(self, index: int | None, early: list[str] | None) -> Callable[[str], None]:
        """Where the text of arguments goes."""

        def write(text: str) -> None:
            if early is not None:
                early.append(text)
                self._unused.append(text)
            elif index is not None and self._is_wanted(index):
                self._deltas.setdefault(index, CallDelta(index)).arguments += text

        return write
