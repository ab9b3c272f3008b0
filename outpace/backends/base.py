"""The interface between the engine and a backend. A runner owns weights, cache memory and kernels.

Sequences are small integers below `capacity.max_sequences`. The engine does the accounting (see `kv/`): it never
exceeds the capacity, always appends at the end of a sequence, and tells the runner which tokens to remove.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from outpace.core import Case, MeasuredAcceptance, Request, Row, StepPlan, TokenLogprob, Verdict

if TYPE_CHECKING:
    from outpace.decoding.tree import Tree
    from outpace.errors import BackendLost
    from outpace.models.special_tokens import SpecialTokens


@dataclass(frozen=True, slots=True)
class Capacity:
    max_sequences: int
    cache_tokens: int  # all sequences together; a token shared by several counts once
    max_context: int  # one sequence
    max_step_tokens: int  # one forward pass


_SCORING_BYTES = 64 << 20


def max_scored_tokens(vocab_size: int) -> int:
    """Prompt tokens whose log-probabilities one step computes: each needs a row of logits, and memory is limited."""
    return max(1, _SCORING_BYTES // (4 * vocab_size))


class Verifier(Protocol):
    """Turns logits into tokens: draft tokens, and the verdicts on all drafts of a step.

    `decoding/verification.py` is the reference. Every other verifier must return the same results; only the speed may
    differ.
    """

    def verify(self, cases: Sequence[Case], logits: NDArray[np.float32]) -> list[Verdict]:
        """Return one verdict per case. A case has len(case.tokens) + 1 consecutive rows of `logits`."""
        ...

    def own_token(self, request: Request, prefix: Sequence[int], logits: NDArray[np.float32]) -> int:
        """The token after `prefix` for these logits: the argmax, or the token picked by the noise at that position."""
        ...

    def probs(self, request: Request, prefix: Sequence[int], logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """The distribution from which the token after `prefix` is drawn, for these logits."""
        ...

    def close(self) -> None:
        """Free its resources."""
        ...


class Logits(Protocol):
    """Rows of logits that may be on a device. Indexing copies the selected rows to the host."""

    def __getitem__(self, lines: slice) -> NDArray[np.float32]: ...


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a step."""

    logits: Logits  # the requested rows, valid until the next step
    verdicts: list[Verdict]  # one per case
    forward_seconds: float  # the forward pass, without verification on the host
    hidden_seconds: float = 0.0  # the device worked on the step this long before the call
    is_typical: bool = True  # forward_seconds + hidden_seconds is the normal duration of such a step


class StepExecutor(Protocol):
    """Runs a step: `Runner.forward` and `Verifier.verify` in one call.

    `decoding/verification.py` builds one from any runner and verifier. A backend that verifies on its device provides
    its own.
    """

    def __call__(
        self, plan: StepPlan, cases: Sequence[Case], meanwhile: Callable[[], None] | None = None
    ) -> StepResult:  # fmt: skip
        """`cases` are the rows of the plan with logits, in plan order, unless these only score a prompt; without cases
        the step is only run.

        `meanwhile` is host work to do while the device is busy. An executor may skip it.
        """
        ...


@dataclass(slots=True)
class DraftTask:
    """Run the row, then draft `depth` tokens: one after another, or as many nodes of a tree."""

    row: Row
    request: Request
    depth: int
    tree: Tree | None = None


@dataclass(frozen=True, slots=True)
class DraftedTokens:
    tokens: list[int]
    confidence: list[float]
    """Before each token was picked, and of the one before which a draft was stopped: the largest probability at
    temperature 1. Empty where nobody asks for it, or the drafter has none."""
    probs: Sequence[NDArray[np.float32]] | None = None
    """What each token was drawn from, until the next draft; None if `match` verifies it."""
    tree: Tree | None = None  # whose nodes the tokens are


class Drafter(Protocol):
    def __call__(self, tasks: Sequence[DraftTask]) -> list[DraftedTokens]:
        """Append each row's tokens, and its drafted tokens except the last, to its sequence."""
        ...


USUAL_UNCACHED = 8  # tokens that a head takes in a draft's first pass: a deep draft, or a few plain steps, leave them
MOST_CONFIDENT = 0.999  # of a model; 1 would mean that the target cannot disagree


class DraftStop(Protocol):
    """Ends a draft by its confidence, the probability of the likeliest token at temperature 1."""

    is_over: bool  # after a call: one more pass for the next token would not pay

    def __call__(self, confidence: float) -> bool:
        """Whether the next token is drafted; called before it is drawn."""
        ...


@dataclass(slots=True)
class HeadTask:
    """Draft up to `depth` tokens for a decoding request."""

    request: Request
    depth: int
    stop: DraftStop | None = None  # for heads that can stop early
    tree: Tree | None = None  # to be drafted instead, by a head that can; of one call, the same for all tasks


class Head(Protocol):
    """A draft head: it drafts from the target's hidden states, which the target's runner keeps for it."""

    size_bytes: int
    measured: MeasuredAcceptance | None  # when it was trained
    stops_early: bool  # it asks `HeadTask.stop` after each pass; else drafts have their full depth
    has_trees: bool  # it can draft trees

    def num_uncached(self, seq: int, num_tokens: int) -> int:
        """Tokens of a sequence, of this length with its latest token, that the head has yet to process."""
        ...

    def draft(self, tasks: Sequence[HeadTask]) -> list[DraftedTokens]:
        """All drafts of a step. The room for their full depth was reserved."""
        ...


class Scorer(Protocol):
    def __call__(self, logits: Logits, begin: int, tokens: Sequence[int], num_top: int) -> list[TokenLogprob]:
        """Log-probabilities of tokens: line begin + i of the latest step's logits precedes tokens[i]."""
        ...


class States(Protocol):
    def __call__(self, begin: int, end: int) -> NDArray[np.float32]:
        """Hidden states after the final norm, [end - begin, width], of these lines of the latest step's logits; a copy.
        The step's plan must have `needs_states`."""
        ...


@dataclass(frozen=True, slots=True)
class Capabilities:
    can_rewind: bool  # truncate to any length; without it there is no speculation and no prefix sharing
    exact_to_the_bit: bool = False  # logits do not depend on the batch or on the split into steps
    verifier: Verifier | None = None  # verifies drafts faster than numpy on the host
    executor: StepExecutor | None = None  # runs steps and verifies them where the logits are
    scorer: Scorer | None = None  # scores prompts faster than numpy on the host
    states: States | None = None  # gives hidden states, for embeddings
    state_width: int = 0  # of those
    head: Head | None = None  # drafts from this model's hidden states
    drafter: Drafter | None = None  # drafts all tokens of a draft in one call
    follow: Callable[[Runner], None] | None = None  # starts to verify that runner's drafts early
    keep_path: Callable[[int, int, Sequence[int]], None] | None = None
    """Of a sequence, keep so many tokens and, of those after them, the ones at these places, which follow one another.
    None: drafts cannot be trees."""
    num_prepared: Callable[[], int] | None = None  # count of one-time work, such as captures; it makes a step slow
    on_loss: Callable[[Callable[[BackendLost], None]], None] | None = None
    """Registers a function to call, in another thread, when the backend is lost; without a step nobody would notice."""
    captured: tuple[int, int] | None = None  # max rows, and max tokens per row, of captured steps
    floor_seconds: Callable[[], float | None] | None = None  # measures the time to read once what every step must read


class Runner(Protocol):
    capacity: Capacity
    capabilities: Capabilities
    vocab_size: int

    def forward(self, plan: StepPlan) -> NDArray[np.float32]:
        """Run the model once over all rows and append their tokens to their sequences.

        Returns the requested logits, one line per token in row order, [sum of num_logits, vocab_size]. The array is
        the backend's memory: read-only, and valid until the next forward.
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

    @property
    def specials(self) -> SpecialTokens:
        """Control tokens, and other tokens that are found in a text before it is split into words."""
        ...

    @property
    def longest_token(self) -> int | None:
        """Bytes of text that one token can stand for; None: no limit is known."""
        ...

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]: ...

    def pieces(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> Iterator[list[int]]:
        """What `encode` returns, piece by piece, so that a caller can stop before the end of a long text."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """The bytes a token adds to the text; empty for control tokens."""
        ...

    def vocabulary(self) -> Sequence[tuple[bytes, int]]:
        """Raw text and attribute flags of every token, for comparing two models."""
        ...


class OpenModel(Protocol):
    """A model file that the backend can run. Its weights may not be loaded yet."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def train_context(self) -> int: ...

    @property
    def has_head(self) -> bool:
        """Whether a draft head was opened with it."""
        ...

    @property
    def drafts_trees(self) -> bool:
        """Whether that head also drafts trees where they can pay: on a GPU."""
        ...

    def start(self, capacity: Capacity, threads: int) -> LoadedModel: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class LoadedModel:
    runner: Runner
    tokenizer: Tokenizer
    description: str
    num_parameters: int
    size_bytes: int
