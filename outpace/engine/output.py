"""Turns tokens into text that can be shown: whole characters only, and nothing that may become a stop string.

Tokens are added one at a time, in order, even if a step emits several, so a request ends at the same token with and
without speculation. Without stop strings, tokens are only stored and are decoded when the text is read, outside the
step.
"""

from __future__ import annotations

import codecs
from dataclasses import replace

from outpace.backends.base import Tokenizer
from outpace.config import SamplingParams
from outpace.core import FinishReason, Segment, TokenLogprob


class OutputWriter:
    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, stop_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._params = params
        self._stop_ids = stop_ids
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._longest_stop = max((len(s) for s in params.stop), default=0)
        self._undecoded: list[tuple[int, str | None]] = []  # tokens not decoded yet, and the proposer of each
        self._held: list[Segment] = []  # text that may be the start of a stop string
        self._shown: list[Segment] = []
        self._num_taken = 0  # segments that `take` has returned
        self._num_decoded = 0  # tokens
        self.num_tokens = 0
        self.logprobs: list[TokenLogprob] = []
        self.stopped_by: str | None = None  # the stop string that ended the output
        self._finished = False
        self._names = _names_of_controls(tokenizer, params)

    @property
    def text(self) -> str:
        return self.text_after(0)

    @property
    def num_segments(self) -> int:
        """Segments of text shown so far; `text_after(n)` gives the text after the first n."""
        self._decode()
        return len(self._shown)

    def text_after(self, num_segments: int) -> str:
        return "".join([segment.text for segment in self.segments_after(num_segments)])

    def segments_after(self, num_segments: int) -> list[Segment]:
        self._decode()
        return self._shown[num_segments:]

    def add(
        self, token: int, *, drafted_by: str | None, room_left: int, ends: FinishReason | None = None
    ) -> FinishReason | None:
        """Add the next token; returns why the request ends, if it does.

        `drafted_by`: the proposer of an accepted draft token; `room_left`: tokens that may still follow;
        `ends`: why the request ends after this token in any case.
        """
        self.num_tokens += 1
        if token in self._stop_ids and self.num_tokens >= self._params.min_tokens:
            if self._params.include_stop_str_in_output:
                self._undecoded.append((token, drafted_by))
            self.finish()
            return "stop"
        self._undecoded.append((token, drafted_by))
        if self._longest_stop and self._decode():
            return "stop"
        if ends is None and room_left <= 0:
            ends = "length"
        if ends is not None:
            self.finish()
        return ends

    def finish(self) -> None:
        """End the output: show the held text, and an unfinished character as U+FFFD."""
        if self._finished:
            return
        self._decode()
        self._finished = True
        rest = self._decoder.decode(b"", final=True)
        if rest:
            self._held.append(Segment(rest, token=self._num_decoded - 1))
        self._release(keep=0)

    def take(self) -> list[Segment]:
        """Text that became final since the last call."""
        fresh = self.segments_after(self._num_taken)
        self._num_taken += len(fresh)
        return fresh

    def _decode(self) -> bool:
        """Decode the stored tokens; whether a stop string was found."""
        undecoded, self._undecoded = self._undecoded, []
        first, self._num_decoded = self._num_decoded, self._num_decoded + len(undecoded)
        for place, (token, drafted_by) in enumerate(undecoded, first):
            piece = self._decoder.decode(self._names.get(token) or self._tokenizer.token_bytes(token))
            if piece and not self._longest_stop:
                self._shown.append(Segment(piece, drafted_by, place))
            elif piece:
                self._held.append(Segment(piece, drafted_by, place))
                if self.num_tokens >= self._params.min_tokens and self._stop_found(len(piece)):
                    return True
                self._release(keep=self._length_of_possible_stop())
        return False

    def _held_text(self) -> str:
        return "".join(segment.text for segment in self._held)

    def _stop_found(self, num_new: int) -> bool:
        """Whether a stop string ends in the last num_new characters. Earlier text was checked or is exempt."""
        text = self._held_text()
        old = len(text) - num_new
        finds = ((text.find(stop, max(0, old - len(stop) + 1)), len(stop)) for stop in self._params.stop)
        places = [found for found in finds if found[0] >= 0]
        if not places:
            return False
        place, length = min(places)
        self.stopped_by = text[place : place + length]
        end = place + length if self._params.include_stop_str_in_output else place
        self._release(keep=len(text) - end)
        self._held.clear()
        self._finished = True
        return True

    def _length_of_possible_stop(self) -> int:
        """The length of the longest suffix of the held text that is a prefix of a stop string."""
        text = self._held_text()
        for length in range(min(len(text), self._longest_stop - 1), 0, -1):
            ending = text[-length:]
            if any(stop.startswith(ending) for stop in self._params.stop):
                return length
        return 0

    def _release(self, keep: int) -> None:
        """Show all held text except its last `keep` characters."""
        to_show = sum(len(segment.text) for segment in self._held) - keep
        while self._held and to_show > 0:
            segment = self._held.pop(0)
            if len(segment.text) > to_show:
                self._held.insert(0, replace(segment, text=segment.text[to_show:]))
                segment = replace(segment, text=segment.text[:to_show])
            to_show -= len(segment.text)
            self._shown.append(segment)


def _names_of_controls(tokenizer: Tokenizer, params: SamplingParams) -> dict[int, bytes]:
    """Control tokens have no bytes; where they are shown, their names are their text."""
    shows_all, visible = not params.skip_special_tokens, params.visible_tokens
    if not (shows_all or visible):
        return {}
    controls = tokenizer.specials.controls.tokens
    return {token.id: token.as_bytes() for token in controls if shows_all or token.id in visible}
