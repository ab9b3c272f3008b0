"""What the engine asks of a backend. A runner owns weights, cache memory and kernels; it decides nothing.

Sequences are small integers below `capacity.max_sequences`. The engine keeps the books (see `kv/`): it never asks for
more than the capacity, always appends at the end of what a sequence holds, and says when tokens go away.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from outpace.core import Case, Request, Row, StepPlan, Verdict


@dataclass(frozen=True, slots=True)
class Capacity:
    max_sequences: int
    cache_tokens: int  # all sequences together; a token shared by several counts once
    max_context: int  # one sequence
    max_step_tokens: int  # one forward pass


class Verifier(Protocol):
    """From logits to tokens: a draft's, and the verdicts on all drafts of a step at once.

    `decoding/verification.py` is the reference. Every other one must say the same: which of them judges a request does
    not change what comes out, only how soon.
    """

    def verify(self, cases: Sequence[Case], logits: NDArray[np.float32]) -> list[Verdict]:
        """One verdict per case. Each has as many consecutive rows of `logits` as drafted tokens, and one more."""
        ...

    def own_token(self, request: Request, prefix: Sequence[int], logits: NDArray[np.float32]) -> int:
        """What a model with these logits says after `prefix`: its argmax, or what the noise at that place picks."""
        ...

    def probs(self, request: Request, prefix: Sequence[int], logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """The distribution that a model with these logits draws from after `prefix`."""
        ...

    def close(self) -> None:
        """Give back what it holds."""
        ...


class Logits(Protocol):
    """Lines of logits that may still lie on a device: asking for some brings those to the host."""

    def __getitem__(self, lines: slice) -> NDArray[np.float32]: ...


@dataclass(frozen=True, slots=True)
class Judged:
    """What came of a step."""

    logits: Logits  # those asked for, valid until the next step
    verdicts: list[Verdict]  # one per case
    forward_seconds: float  # what the model took; of judging, what could not be done meanwhile is not in it
    hidden_seconds: float = 0.0  # that it had been under way before: what the host did then cost nothing
    is_typical: bool = True  # both together are what such a step takes


class Judge(Protocol):
    """`Runner.forward` and `Verifier.verify` in one: how the engine has its steps run.

    `decoding/verification.py` makes one of any runner and verifier; a backend whose logits need not leave its device
    brings its own.
    """

    def __call__(
        self, plan: StepPlan, cases: Sequence[Case], meanwhile: Callable[[], None] | None = None
    ) -> Judged:  # fmt: skip
        """Cases are the rows of the plan that want logits, in their order; without any, the step is only run.

        `meanwhile` is what the host could well do while a device is at work; it is done nowhere else.
        """
        ...


@dataclass(slots=True)
class DraftTask:
    """Read the row, then say `depth` tokens in the request's own noise."""

    row: Row
    request: Request
    depth: int


class Drafter(Protocol):
    def __call__(self, tasks: Sequence[DraftTask]) -> list[list[int]]:
        """Appends each row's tokens and all but the last of those said to its sequence."""
        ...


@dataclass(frozen=True, slots=True)
class Capabilities:
    can_rewind: bool  # truncate to any length; without it requests decode plainly and share no prefixes
    exact_to_the_bit: bool = False  # a token's logits do not depend on what shares its step or how it got there
    verifier: Verifier | None = None  # judges drafts faster than the host's numpy
    judge: Judge | None = None  # runs steps and judges where the logits are
    drafter: Drafter | None = None  # drafts whole depths in one go
    follow: Callable[[Runner], None] | None = None  # begins to verify that runner's drafts before it is asked to
    num_prepared: Callable[[], int] | None = None  # things done once, such as captures: a step with one takes longer
    captured: tuple[int, int] | None = None  # up to so many rows, and tokens a row, steps are captured and replayed


class Runner(Protocol):
    capacity: Capacity
    capabilities: Capabilities
    vocab_size: int

    def forward(self, plan: StepPlan) -> NDArray[np.float32]:
        """Run the model once over all rows and append their tokens to their sequences.

        Returns the logits asked for, one line per token in row order, [sum of num_logits, vocab_size]. The array is the
        backend's own memory: read-only, and valid until the next forward.
        """
        ...

    def truncate(self, seq: int, num_tokens: int) -> None:
        """Keep the first num_tokens of a sequence."""
        ...

    def fork(self, source: int, target: int, num_tokens: int) -> None:
        """Make the empty sequence `target` begin with the first num_tokens of `source`."""
        ...

    def free(self, seq: int) -> None: ...

    def close(self) -> None: ...


class Tokenizer(Protocol):
    vocab_size: int
    bos_text: str
    eos_text: str
    chat_template: str | None

    @property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end a generation."""
        ...

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]: ...

    def token_bytes(self, token: int) -> bytes:
        """The bytes a token adds to the text; empty for control tokens."""
        ...

    def vocabulary(self) -> Sequence[tuple[bytes, int]]:
        """Raw text and attribute flags of every token, for comparing two models."""
        ...


class OpenModel(Protocol):
    """A model file that has been looked at and can be run; its weights may not have been read yet."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def train_context(self) -> int: ...

    def start(self, capacity: Capacity, threads: int) -> LoadedModel: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class LoadedModel:
    runner: Runner
    tokenizer: Tokenizer
    description: str
    num_parameters: int
    size_bytes: int
