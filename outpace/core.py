"""The data types of the engine. This module imports nothing local at run time, so every other package may use it.

A *draft* is a guess at the target's next tokens, which the target *accepts* or rejects. After the accepted tokens the
target adds exactly one token of its own: *recovered* if a draft token was rejected, *bonus* if all were accepted. Mean
accepted length counts that token too: (accepted + steps) / steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from outpace.config import SamplingParams
    from outpace.decoding.matcher import Matcher
    from outpace.decoding.sampling import Shaper
    from outpace.decoding.tree import Tree
    from outpace.engine.output import OutputWriter
    from outpace.speculation.proposers.prediction import Follower

    FloatRow = NDArray[np.float32]
    FloatRows = NDArray[np.float32]

FinishReason = Literal["stop", "length", "abort"]
MIN_ESTIMATE_TOKENS = 32  # with fewer generated tokens, an estimated speedup is mostly measurement noise


@dataclass(slots=True, eq=False)
class Request:
    """One sequence being generated. `tokens` is append-only: emitted tokens never change."""

    id: int
    params: SamplingParams
    prompt: Sequence[int]
    seed: int  # the user's, or drawn at submission
    shaper: Shaper
    writer: OutputWriter
    max_length: int  # prompt and output together never exceed this
    cache_salt: str = ""  # only requests with the same salt share cached prefixes and stored output
    place: str = ""  # of a program: what earlier requests said at the same place is likely to be said again
    priority: int = 0  # a waiting request of a lower number starts first
    may_speculate: bool = True  # by the request's own setting, or else the engine's
    predicted: Follower | None = None  # the text that the client expects, if it sent one
    matcher: Matcher | None = None  # of its structured output; the shaper's
    tokens: list[int] = field(default_factory=list)
    scored_from: int = 1  # the first prompt token whose log-probability is wanted, if any is
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)  # from prompt[scored_from] on, if asked for
    pooled: Pooled | None = None  # if the request is for an embedding
    seq: int | None = None  # the cache sequence held while running
    num_computed: int = 0  # leading tokens whose keys and values are in the target's cache
    finish_reason: FinishReason | None = None
    num_preemptions: int = 0
    num_shared: int = 0  # leading prompt tokens taken from another sequence's cache
    spec: SpeculationCounts = field(default_factory=lambda: SpeculationCounts())
    drafts: list[VerifiedDraft] | None = None  # all so far, if the client wants to see them
    submitted_at: float = 0.0
    admitted_at: float | None = None  # when its first step began
    first_token_at: float | None = None
    finished_at: float | None = None

    def __post_init__(self) -> None:
        if not self.tokens:
            self.tokens = list(self.prompt)

    @property
    def num_output(self) -> int:
        return len(self.tokens) - len(self.prompt)

    @property
    def num_pending(self) -> int:
        """Tokens not yet in the cache: at first the whole prompt, one while decoding."""
        return len(self.tokens) - self.num_computed

    @property
    def is_decoding(self) -> bool:
        num_tokens = len(self.tokens)
        return num_tokens - self.num_computed == 1 and num_tokens > len(self.prompt)

    @property
    def num_unscored(self) -> int:
        """Prompt tokens whose log-probabilities or hidden states were asked for and are not known yet. The first token
        has no log-probability."""
        if self.pooled is not None:
            return len(self.prompt) - self.pooled.num_tokens if self.params.pooling == "mean" else 0
        if self.params.prompt_logprobs is None:
            return 0
        return len(self.prompt) - self.scored_from - len(self.prompt_logprobs)

    @property
    def num_scored(self) -> int:
        """Leading tokens that are not needed again for `num_unscored`."""
        return self.scored_from - 1 + len(self.prompt_logprobs) if self.pooled is None else self.pooled.num_tokens

    @property
    def num_shareable(self) -> int:
        """Leading tokens that may come from another sequence's cache. The logits of all later tokens are needed: of the
        last token for the output, and of every token that precedes an unscored one."""
        return self.num_scored if self.num_unscored else len(self.tokens) - 1

    @property
    def has_output(self) -> bool:
        """False: only the prompt is scored or embedded."""
        return self.max_length > len(self.prompt)

    @property
    def max_useful_depth(self) -> int:
        """The largest depth worth drafting: a step emits up to depth + 1 tokens, and no more than max_length allows."""
        left = self.max_length - len(self.tokens) - 1
        return left if left > 0 else 0


@dataclass(slots=True)
class Pooled:
    """The sum of the hidden states of a prompt's first tokens."""

    num_tokens: int = 0
    total: NDArray[np.float64] | None = None

    def add(self, states: FloatRows) -> None:
        """`states` [tokens, width]: those of the next tokens. They are added one by one, in the same order always."""
        for state in states.astype("float64"):
            self.total = state if self.total is None else self.total + state
            self.num_tokens += 1

    def embedding(self) -> FloatRow:
        """The sum with length 1; of a mean the direction is the same."""
        assert self.total is not None
        length = float((self.total * self.total).sum()) ** 0.5
        return (self.total / (length or 1.0)).astype("float32")


@dataclass(slots=True)
class SpeculationCounts:
    """What speculation did for one request; index i of the `_per_position` lists is the (i+1)-th draft token."""

    num_generated: int = 0  # tokens, the one that prefill gives included
    steps: int = 0  # decoding steps, plain ones included
    num_drafts: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_lenient: int = 0  # accepted only by a lossy rule
    drafted_per_position: list[int] = field(default_factory=list)
    accepted_per_position: list[int] = field(default_factory=list)
    proposers: set[str] = field(default_factory=set)
    accepted_prediction_tokens: int = 0  # of the text that the client predicted: those in the output
    rejected_prediction_tokens: int = 0  # the others; both are known when the request ends, and 0 if it was not used
    decode_seconds: float = 0.0  # of the steps it took part in
    plain_seconds: float = 0.0  # for plain decoding of the same tokens, by the cost curve

    def add(self, verdict: Verdict, proposer: str) -> None:
        self.steps += 1
        self.num_accepted += verdict.num_accepted
        self.num_lenient += verdict.num_lenient
        if not verdict.num_drafted:
            return
        self.num_drafts += 1
        self.num_drafted += verdict.num_drafted
        self.proposers.add(proposer)
        drafted, accepted = self.drafted_per_position, self.accepted_per_position
        for i in range(verdict.depth):
            if i == len(drafted):
                drafted.append(0)
                accepted.append(0)
            drafted[i] += 1
            accepted[i] += i < verdict.num_accepted

    @property
    def mean_accepted_length(self) -> float | None:
        """Tokens per decoding step, the target's own token included: 1.0 is plain decoding."""
        return (self.num_accepted + self.steps) / self.steps if self.steps else None

    @property
    def estimated_speedup(self) -> float | None:
        return estimated_speedup([self])


def estimated_speedup(counts: Sequence[SpeculationCounts]) -> float | None:
    """Of several requests together, by the rule of `speedup_or_none`."""
    return speedup_or_none(
        sum(each.plain_seconds for each in counts),
        sum(each.decode_seconds for each in counts),
        num_generated=sum(each.num_generated for each in counts),
        num_drafted=sum(each.num_drafted for each in counts),
    )


def speedup_or_none(
    plain_seconds: float, spent_seconds: float, *, num_generated: int, num_drafted: int
) -> float | None:
    """Every speedup that the engine reports. None where it would be noise: nothing was drafted, or hardly anything was
    generated."""
    is_known = num_drafted > 0 and num_generated >= MIN_ESTIMATE_TOKENS and plain_seconds > 0 and spent_seconds > 0
    return plain_seconds / spent_seconds if is_known else None


@dataclass(frozen=True, slots=True)
class MeasuredAcceptance:
    """How often a proposer was right on other prompts: for each position of a draft, the chance of its token if all
    before it were accepted."""

    greedy: tuple[float, ...]
    sampled: tuple[float, ...]  # at temperature 1


@dataclass(slots=True)
class Draft:
    """Draft tokens. tokens[i] was drawn from exactly the distribution `probs[i]`; None means one-hot."""

    tokens: list[int]
    proposer: str
    probs: Sequence[FloatRow] | None = None
    confidence: list[float] = field(default_factory=list, compare=False)
    """The proposer's confidence in each token, given those before it; it needs calibration. It may depend on earlier
    tokens and on whole distributions, never on which token was drawn from them. 1 means that no other is possible."""
    tree: Tree | None = None  # its shape; None: each token follows the one before. Trees have no `probs`

    @property
    def depth(self) -> int:
        """The most tokens that can be accepted."""
        return len(self.tokens) if self.tree is None else self.tree.depth

    @property
    def parents(self) -> Sequence[int]:
        """The token before each token, by its number; -1: the one before the draft."""
        return range(-1, len(self.tokens) - 1) if self.tree is None else self.tree.parents


@dataclass(slots=True)
class Case:
    """A request whose next tokens are to be verified or sampled, and its draft.

    The target's output is needed before the draft, and after each of its tokens: those are the rows 0, 1, 2, ...
    """

    request: Request
    draft: Draft | None

    @property
    def tokens(self) -> Sequence[int]:
        return self.draft.tokens if self.draft is not None else ()

    @property
    def tree(self) -> Tree | None:
        return self.draft.tree if self.draft is not None else None

    @property
    def offsets(self) -> Sequence[int]:
        """Of each row: how many draft tokens precede it."""
        tree = self.tree
        return range(len(self.tokens) + 1) if tree is None else (0, *tree.depths)

    def prefix(self, row: int) -> Sequence[int]:
        """The draft tokens that precede a row."""
        tree, tokens = self.tree, self.tokens
        return tokens[:row] if tree is None else [tokens[node] for node in tree.path(row - 1)]


@dataclass(slots=True)
class Row:
    """One sequence's tokens in a step, at positions start, start+1, ...; rows may differ in length.

    Logits are needed for the last `num_logits` tokens: 0 inside a prompt, depth + 1 for a draft. The first `num_scored`
    of them score prompt tokens; the others, if any, are for the row's case.

    With a tree, the row's last tokens are its nodes. They lie in the cache one after another, as other tokens do, until
    `Capabilities.keep_path` keeps some of them; their positions are those of the texts that they are part of.
    """

    seq: int
    start: int
    tokens: Sequence[int]
    num_logits: int
    num_scored: int = 0
    tree: Tree | None = None


@dataclass(slots=True)
class StepPlan:
    """Everything the target computes in one forward pass."""

    rows: list[Row]
    needs_states: bool = False  # the hidden states of all tokens with logits too

    @property
    def num_tokens(self) -> int:
        return sum([len(row.tokens) for row in self.rows])

    @property
    def num_scored(self) -> int:
        return sum([row.num_scored for row in self.rows])

    def lines_of_cases(self) -> list[int]:
        """Of the requested logits, the lines that do not score a prompt."""
        lines: list[int] = []
        at = 0
        for row in self.rows:
            lines += range(at + row.num_scored, at + row.num_logits)
            at += row.num_logits
        return lines


@dataclass(slots=True)
class Verdict:
    """The result of verifying a draft: the accepted tokens, then the target's own token."""

    tokens: list[int]
    num_drafted: int
    num_accepted: int
    num_lenient: int = 0
    tree: Tree | None = None  # of the draft
    path: Sequence[int] = ()  # its accepted nodes

    @property
    def depth(self) -> int:
        """The most tokens that could be accepted."""
        return self.num_drafted if self.tree is None else self.tree.depth

    @property
    def rows(self) -> Sequence[int]:
        """For each token, the row of the case that decided it."""
        return range(len(self.tokens)) if self.tree is None else (0, *(node + 1 for node in self.path))


@dataclass(frozen=True, slots=True)
class VerifiedDraft:
    """A draft and its verdict: output tokens `start`, `start` + 1, ... are the accepted ones, the next is the target's
    own. Of a tree, the accepted tokens and the first guesses after them."""

    start: int
    proposer: str
    tokens: Sequence[int]
    num_accepted: int
    num_lenient: int = 0


@dataclass(slots=True)
class MethodCounts:
    """Counts of one proposer's drafts."""

    num_drafts: int = 0
    num_drafted: int = 0
    num_accepted: int = 0


@dataclass(slots=True)
class StepStats:
    """What one step did and how long its parts took, in seconds. All metrics come from here."""

    num_prefill_tokens: int = 0
    num_decode_rows: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_emitted: int = 0
    num_finished: int = 0
    num_preempted: int = 0
    num_plain_rows: int = 0  # decode rows without a draft
    depths: list[int] = field(default_factory=list)  # draft tokens verified, for each row with a draft
    accepted: list[int] = field(default_factory=list)  # draft tokens accepted, in the same order
    drafts_by_method: dict[str, MethodCounts] = field(default_factory=dict)
    schedule_seconds: float = 0.0
    policy_seconds: float = 0.0  # deciding what to draft
    learning_seconds: float = 0.0  # learning from the step before
    lookup_seconds: float = 0.0  # lookups by proposers without a model, before deciding
    draft_seconds: float = 0.0
    forward_seconds: float = 0.0
    verify_seconds: float = 0.0
    hidden_seconds: float = 0.0  # the pass ran this long while the host did other work, which thus cost no time
    had_one_time_work: bool = False  # other work, such as a graph capture or scoring a prompt, took part of the time

    def add_draft(self, method: str, verdict: Verdict) -> None:
        """Count the result of one decode row."""
        if not verdict.num_drafted:
            self.num_plain_rows += 1
            return
        counts = self.drafts_by_method.get(method)
        if counts is None:
            counts = self.drafts_by_method[method] = MethodCounts()
        counts.num_drafts += 1
        counts.num_drafted += verdict.num_drafted
        counts.num_accepted += verdict.num_accepted
        self.num_drafted += verdict.num_drafted
        self.num_accepted += verdict.num_accepted
        self.depths.append(verdict.num_drafted)
        self.accepted.append(verdict.num_accepted)

    @property
    def host_seconds(self) -> float:
        """Time outside forward passes; those of a draft model count as drafting, not as host time."""
        return self.schedule_seconds + self.speculation_seconds + self.verify_seconds

    @property
    def speculation_seconds(self) -> float:
        """Host time spent on speculation, without drafting."""
        return self.policy_seconds + self.learning_seconds + self.lookup_seconds

    @property
    def deciding_seconds(self) -> float:
        """`speculation_seconds` that were not hidden behind a running pass; with drafting, none are hidden."""
        hidden = 0.0 if self.draft_seconds else self.hidden_seconds
        return max(0.0, self.speculation_seconds - hidden)

    @property
    def total_seconds(self) -> float:
        return self.host_seconds + self.draft_seconds + self.forward_seconds


@dataclass(slots=True)
class TokenLogprob:
    token_id: int
    logprob: float
    top: list[tuple[int, float]]  # the most likely tokens, best first
    rank: int  # 1 for the likeliest token; tokens of equal probability share a rank


@dataclass(slots=True)
class Segment:
    """A piece of final text, and the proposer whose accepted draft had the token that completed it."""

    text: str
    drafted_by: str | None = None  # None: the target's own token
    token: int = field(default=-1, compare=False)  # the number of that token in the output, from 0


@dataclass(slots=True)
class Delta:
    """What one step added to one request."""

    request: Request
    token_ids: list[int]
    finish_reason: FinishReason | None
    _segments: list[Segment] | None = None

    @property
    def segments(self) -> list[Segment]:
        """Text that became final since the last read: this delta's own, if deltas are read as they arrive."""
        if self._segments is None:
            self._segments = self.request.writer.take()
        return self._segments


@dataclass(slots=True)
class CompletionOutput:
    """One finished (or interrupted) completion."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    logprobs: list[TokenLogprob] | None
    speculation: SpeculationCounts
    timing: Timing
    tool_calls: Sequence[ToolCall] = ()  # with tools: the calls, which are then no part of the text


@dataclass(frozen=True, slots=True)
class ToolCall:
    name: str
    arguments: str  # a JSON object, unless the answer was cut


@dataclass(slots=True)
class Timing:
    time_to_first_token: float | None
    total: float | None


@dataclass(slots=True)
class RequestOutput:
    """A prompt and its n completions."""

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[TokenLogprob | None] | None = None  # one per prompt token, if asked for; the first has none
    embedding: FloatRow | None = None  # of length 1, if `pooling` asked for it
