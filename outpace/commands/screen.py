"""What `outpace run` and `outpace chat` show of an answer: its text, safe and coloured on a terminal, and one line of
figures about it.

A model may write anything, and a terminal obeys escape sequences: they could change its title, its clipboard or what is
already on the screen. On a terminal, control characters are therefore shown as signs. A pipe or a file gets the text as
it is.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from outpace.config import SamplingParams
    from outpace.core import CompletionOutput, Segment

ACCEPTED = "\033[36m"
DIM = "\033[2m"
PLAIN = "\033[0m"
# Red is left out, because it looks like an error. A proposer that is not listed has the colour of a draft model.
_COLOURS = {
    "draft": ACCEPTED,
    "head": "\033[94m",
    "suffix": "\033[32m",
    "ngram": "\033[33m",
    "prediction": "\033[35m",
    "grammar": "\033[95m",
}
_CONTROL_PICTURES, _DELETE_PICTURE, _REPLACEMENT = 0x2400, 0x2421, 0xFFFD
_SIGNS = (
    {code: _CONTROL_PICTURES + code for code in range(0x20) if chr(code) not in "\n\t"}
    | {0x7F: _DELETE_PICTURE}
    | dict.fromkeys(range(0x80, 0xA0), _REPLACEMENT)  # these begin escape sequences too, and have no pictures
)


def has_colour(stream: TextIO) -> bool:
    return stream.isatty() and not os.environ.get("NO_COLOR")


def visible(text: str) -> str:
    """The text with a sign in place of each control character, except line feeds and tabs."""
    return text.translate(_SIGNS)


def colour_of(proposer: str) -> str:
    return _COLOURS.get(proposer, ACCEPTED)


def legend(proposers: Sequence[str]) -> str:
    """One line that names the colours of the proposers."""
    names = " ".join(f"{colour_of(name)}{name}{PLAIN}" for name in proposers)
    return f"{DIM}text from accepted draft tokens, by proposer:{PLAIN} {names}"


class AnswerWriter:
    """Writes the text of an answer as it arrives."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_terminal, self._has_colour = stream.isatty(), has_colour(stream)

    def write(self, segments: Iterable[Segment]) -> None:
        for proposer, group in groupby(segments, lambda segment: segment.drafted_by):
            text = "".join(segment.text for segment in group)
            if self._is_terminal:
                text = visible(text)
            if self._has_colour and proposer is not None:
                text = f"{colour_of(proposer)}{text}{PLAIN}"
            self._stream.write(text)
        self._stream.flush()

    def end(self) -> None:
        self._stream.write("\n")
        self._stream.flush()


def print_summary(output: CompletionOutput, params: SamplingParams) -> None:
    """Print the line of figures, on stderr so that a pipe gets only the text."""
    print_dim(f"[{'; '.join(_figures(output, params))}]")


def print_dim(line: str) -> None:
    print(f"{DIM}{line}{PLAIN}" if has_colour(sys.stderr) else line, file=sys.stderr, flush=True)


def _figures(output: CompletionOutput, params: SamplingParams) -> list[str]:
    spec, timing = output.speculation, output.timing
    seconds = (timing.total or 0.0) - (timing.time_to_first_token or 0.0)
    num_later = len(output.token_ids) - 1
    parts = [f"{len(output.token_ids)} tokens"]
    if num_later > 0 and seconds > 0:
        parts[0] += f", {num_later / seconds:.1f} a second"
    if spec.num_drafted:
        parts.append(
            f"{', '.join(sorted(spec.proposers))}: {spec.num_accepted} of {spec.num_drafted} draft tokens accepted, "
            f"{spec.mean_accepted_length:.2f} tokens a step"
        )
    else:
        parts.append("no drafts: plain decoding")
    if spec.estimated_speedup is not None:
        parts.append(f"about {spec.estimated_speedup:.2f}x plain")
    if params.speculation.is_lossy:
        parts.append(f"LOSSY ({params.speculation.acceptance}): {spec.num_lenient} tokens accepted only by this rule")
    return parts
