"""What a program adds to its state: text, messages, generations and selections; and what it gets back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, Protocol

from outpace.config import SamplingParams
from outpace.errors import OutpaceError, UsageError
from outpace.structured import StructuredOutput

Scoring = Literal["total", "mean"]
_CONSTRAINTS = tuple(one.name for one in fields(StructuredOutput) if one.name != "after")
_SAMPLING = frozenset(one.name for one in fields(SamplingParams)) - {"n", "pooling", "prompt_logprobs", "structured"}


@dataclass(frozen=True, slots=True)
class Gen:
    """A text that the model writes."""

    name: str | None
    sampling: Mapping[str, Any]
    structured: StructuredOutput | None
    place: str | None

    def params(self, defaults: SamplingParams) -> SamplingParams:
        return replace(defaults, **self.sampling, structured=self.structured)


@dataclass(frozen=True, slots=True)
class Select:
    """One of several texts: the one that the model is likeliest to write."""

    name: str | None
    choices: tuple[str, ...]
    by: Scoring

    def chosen(self, logprobs: Sequence[Sequence[float]]) -> Answer:
        """The best choice, by the log-probabilities of each choice's tokens; of equal ones the first."""
        scores = {
            choice: sum(each) / (len(each) if self.by == "mean" else 1)
            for choice, each in zip(self.choices, logprobs, strict=True)
        }
        return Answer(max(scores, key=lambda choice: scores[choice]), "stop", scores)


@dataclass(frozen=True, slots=True)
class Message:
    role: str
    text: str


Part = str | Message | Gen | Select


def gen(name: str | None = None, *, place: str | None = None, **options: Any) -> Gen:
    """A generation. `state[name]` is its text.

    Options are the fields of `SamplingParams` (`max_tokens`, `stop`, `temperature`, ...) and, at most one, those of
    `StructuredOutput` (`regex`, `json_schema`, `json_object`, `choice`, `grammar`). What was generated at the same
    `place` before is a draft for later programs; by default the place is the program's name and `name`.
    """
    constraints = {key: options.pop(key) for key in _CONSTRAINTS if key in options}
    unknown = sorted(set(options) - _SAMPLING)
    if unknown:
        raise UsageError(
            f"gen does not know the option {unknown[0]!r}; it takes the fields of SamplingParams, such as max_tokens, "
            f"and one of {', '.join(_CONSTRAINTS)}"
        )
    SamplingParams(**options)  # a mistake is reported where it was made
    return Gen(name, options, StructuredOutput(**constraints) if constraints else None, place)


def select(name: str | None, choices: Sequence[str], *, by: Scoring = "total") -> Select:
    """The choice to which the model gives the highest probability, or with `by="mean"` the highest mean log-probability
    of its tokens, which favours long choices less. `state.answer(name).scores` has the scores of all."""
    if isinstance(choices, str) or not choices or not all(isinstance(each, str) and each for each in choices):
        raise UsageError(f"select needs a list of at least one non-empty text; got {choices!r}")
    if by not in ("total", "mean"):
        raise UsageError(f"select scores by 'total' or by 'mean'; got {by!r}")
    return Select(name, tuple(choices), by)


def system(text: str) -> Message:
    return Message("system", text)


def user(text: str) -> Message:
    return Message("user", text)


def tool(text: str) -> Message:
    """The result of a tool, for models whose template knows the role."""
    return Message("tool", text)


def assistant(text: str) -> Message:
    """An answer that is given, such as in an example. What the model itself writes needs no message."""
    return Message("assistant", text)


@dataclass(frozen=True, slots=True)
class Prompt:
    """Everything before a generation: a plain text, or messages and how the open answer begins."""

    text: str
    messages: tuple[Message, ...] = ()

    def with_text(self, text: str) -> Prompt:
        return Prompt(self.text + text, self.messages)

    def as_messages(self) -> list[dict[str, str]]:
        """With the beginning of the answer, if there is one, as the last message."""
        opened = (Message("assistant", self.text),) if self.text else ()
        return [{"role": each.role, "content": each.text} for each in (*self.messages, *opened)]


@dataclass(slots=True)
class Answer:
    """What a generation or a selection gave."""

    text: str
    finish_reason: str | None = None
    scores: dict[str, float] = field(default_factory=dict)  # of a selection: the score of each choice
    num_prompt_tokens: int = 0  # of a selection, of all choices together
    num_cached_tokens: int = 0  # prompt tokens that did not have to be computed
    num_tokens: int = 0  # generated
    num_accepted: int = 0  # of those, from accepted drafts


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """A generation or selection that is due. `done` is called once, in any thread, unless the call is cancelled."""

    part: Gen | Select
    prompt: Prompt
    params: SamplingParams
    place: str
    priority: int  # calls of a program that was started earlier come first
    goes_on: bool  # there were generations in this text before
    done: Callable[[Answer | OutpaceError], None]


class Backend(Protocol):
    """Where programs run. Its methods may be called in any thread."""

    def submit(self, call: Call) -> None: ...

    def cancel(self, calls: Sequence[Call]) -> None:
        """Stop working on these calls; results that arrive later are ignored."""
        ...

    def close(self) -> None: ...
