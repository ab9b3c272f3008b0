"""The data types of a measurement: a job, its result (a trial), and a run of many."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from outpace.bench.workloads import Message
from outpace.config import SamplingParams
from outpace.core import SpeculationCounts


@dataclass(frozen=True, slots=True)
class Job:
    """One request to send. `prompt_id` identifies the prompt, so that runs can be compared."""

    prompt_id: int
    category: str
    tokens: Sequence[int]  # empty if the target is a server, which has the tokenizer
    params: SamplingParams
    messages: Sequence[Message] = ()


@dataclass(slots=True)
class Trial:
    """The result of one request. Times are in seconds from when the request was due."""

    prompt_id: int
    category: str
    num_prompt: int
    num_output: int
    text: str
    finish_reason: str | None
    time_to_first_token: float
    end_to_end: float
    token_ids: list[int] = field(default_factory=list)  # empty if only the text is known
    counts: SpeculationCounts = field(default_factory=SpeculationCounts)
    error: str | None = None  # why there is no answer; the other fields are then meaningless

    @property
    def num_later(self) -> int:
        """Tokens after the first, which `time_to_first_token` covers."""
        return max(self.num_output - 1, 0)

    @property
    def decode_seconds(self) -> float:
        return self.end_to_end - self.time_to_first_token if self.num_later else 0.0

    @property
    def time_per_output_token(self) -> float | None:
        return self.decode_seconds / self.num_later if self.num_later else None

    def same_answer(self, other: Trial) -> bool:
        if self.error or other.error:
            return False
        if self.token_ids or other.token_ids:
            return self.token_ids == other.token_ids
        return self.text == other.text


@dataclass(slots=True)
class DraftTotals:
    """Drafted and accepted tokens of a run, from its answers or from a server's metrics."""

    num_drafted: int = 0
    num_accepted: int = 0
    mean_accepted_length: float | None = None  # tokens per step, the target's own included
    drafted_per_position: list[int] = field(default_factory=list)
    accepted_per_position: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, counts: Sequence[SpeculationCounts]) -> DraftTotals:
        depth = max((len(each.drafted_per_position) for each in counts), default=0)
        steps = sum(each.steps for each in counts)
        accepted = sum(each.num_accepted for each in counts)
        return cls(
            num_drafted=sum(each.num_drafted for each in counts),
            num_accepted=accepted,
            mean_accepted_length=(accepted + steps) / steps if steps else None,
            drafted_per_position=[_at(i, [each.drafted_per_position for each in counts]) for i in range(depth)],
            accepted_per_position=[_at(i, [each.accepted_per_position for each in counts]) for i in range(depth)],
        )


def _at(index: int, lists: Sequence[Sequence[int]]) -> int:
    return sum(each[index] for each in lists if index < len(each))


@dataclass(slots=True)
class Run:
    """A set of requests run to the end under one setting.

    Decode figures cover the steps without prefill, which speculation can change. They are 0 for a server.
    """

    trials: list[Trial] = field(default_factory=list)  # in the order of the jobs
    seconds: float = 0.0
    decode_seconds: float = 0.0
    decode_tokens: int = 0
    draft_seconds: float = 0.0
    num_steps: int = 0
    reported: DraftTotals | None = None  # from a server's metrics, in case its answers have no draft counts

    @property
    def num_tokens(self) -> int:
        return sum(trial.num_output for trial in self.trials if not trial.error)
