"""Acceptance without an engine: how often a draft agrees with a text that the target wrote, position by position.

The target writes its answers plainly, once. With a seed, its token at a position is a fixed function of its
probabilities, the seed and the position; a draft token is accepted where it equals that token, and a draft draws its
tokens by the same function. So walking along the finished text and comparing gives, at any temperature, exactly what
the engine accepts for the same prompts, seeds and depth. A draft model needs one pass over the text for that, with the
target's tokens as its context (teacher forcing); a head, and a model with another tokenizer, draft again at every step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from time import perf_counter
from typing import Any, cast

from outpace.backends.base import Head, HeadTask, Runner
from outpace.config import SamplingParams
from outpace.core import Draft, Request, Row, StepPlan
from outpace.decoding.sampling import Shaper
from outpace.decoding.verification import HostVerifier
from outpace.speculation.proposers.base import DraftAsk, Proposer
from outpace.speculation.proposers.other_vocabulary import OtherVocabularyProposer

_ids = count()
_verifier = HostVerifier()
DraftAt = Callable[[int, int], Sequence[int]]  # from a place in the output and a depth to draft tokens


@dataclass(slots=True)
class Text:
    """A prompt and the target's answer."""

    prompt: list[int]
    params: SamplingParams  # seeded
    end_ids: frozenset[int]
    output: list[int] = field(default_factory=list)

    def request(self, num_output: int = 0) -> Request:
        """A request that has emitted the first tokens of the answer."""
        assert self.params.seed is not None
        tokens = [*self.prompt, *self.output[:num_output]]
        return Request(
            id=next(_ids), params=self.params, prompt=self.prompt, seed=self.params.seed,
            shaper=Shaper(self.params, self.prompt, self.end_ids, None), writer=cast(Any, None),
            max_length=len(self.prompt) + self.params.max_tokens, tokens=tokens,
        )  # fmt: skip


@dataclass(slots=True)
class Walk:
    """What a draft of one depth did along one text; index i is the (i+1)-th token of a draft."""

    drafted: list[int]
    accepted: list[int]
    asked: list[int] = field(default_factory=list)
    """In steps with a draft. A text in another tokenizer's tokens may have fewer tokens than were asked for."""
    steps: int = 0  # those with nothing drafted included
    num_drafts: int = 0

    @property
    def tokens_per_step(self) -> float:
        return 1.0 + sum(self.accepted) / self.steps if self.steps else 1.0


def write_answers(runner: Runner, texts: Sequence[Text], tick: Callable[[], object] = lambda: None) -> None:
    """Let the target answer, several texts at a time, with plain decoding."""
    size = runner.capacity.max_sequences
    for first in range(0, len(texts), size):
        _write(runner, texts[first : first + size], tick)


def _write(runner: Runner, texts: Sequence[Text], tick: Callable[[], object]) -> None:
    running = list(enumerate(texts))
    try:
        for seq, text in running:
            logits = _prefill(runner, seq, text.prompt)
            text.output.append(_verifier.own_token(text.request(), (), logits))
        while running := [(seq, text) for seq, text in running if not _is_done(text, tick)]:
            rows = [Row(seq, len(text.prompt) + len(text.output) - 1, text.output[-1:], 1) for seq, text in running]
            logits_of_all = runner.forward(StepPlan(rows)).copy()
            for (_, text), logits in zip(running, logits_of_all, strict=True):
                text.output.append(_verifier.own_token(text.request(len(text.output)), (), logits))
    finally:
        for seq in range(len(texts)):
            runner.free(seq)


def _is_done(text: Text, tick: Callable[[], object]) -> bool:
    done = len(text.output) >= text.params.max_tokens or text.output[-1] in text.end_ids
    if done:
        tick()
    return done


def _prefill(runner: Runner, seq: int, tokens: Sequence[int]) -> Any:
    """Run a prompt; returns the last logits."""
    chunk = runner.capacity.max_step_tokens
    logits: Any = None
    for at in range(0, len(tokens), chunk):
        part = list(tokens[at : at + chunk])
        logits = runner.forward(StepPlan([Row(seq, at, part, 1)]))
    return logits[-1].copy()


def walk(text: Text, depth: int, draft_at: DraftAt) -> Walk:
    """Follow the text as an engine with drafts of this depth does. Prefill gives the first token."""
    found = Walk([0] * depth, [0] * depth, [0] * depth)
    at, length, limit = 1, len(text.output), text.params.max_tokens
    while at < length:
        asked = min(depth, limit - at - 1)
        tokens = draft_at(at, asked) if asked > 0 else ()
        num_accepted = next(
            (i for i, t in enumerate(tokens) if at + i >= length or t != text.output[at + i]), len(tokens)
        )
        found.steps += 1
        found.num_drafts += bool(tokens)
        for i in range(asked if tokens else 0):
            found.asked[i] += 1
        for i in range(len(tokens)):
            found.drafted[i] += 1
            found.accepted[i] += i < num_accepted
        at += num_accepted + 1
    return found


def by_model(runner: Runner, text: Text) -> DraftAt:
    """A draft model: its own token at every place of the text, from one pass over it."""
    own = list(_own_tokens(runner, text))

    def draft_at(at: int, depth: int) -> Sequence[int]:
        """Valid up to the first disagreement: after it, the draft's context would be another one."""
        return own[at : at + depth]

    return draft_at


def _own_tokens(runner: Runner, text: Text) -> Iterator[int]:
    tokens, start = [*text.prompt, *text.output[:-1]], len(text.prompt) - 1
    request, chunk = text.request(), runner.capacity.max_step_tokens
    try:
        for first in range(0, len(tokens), chunk):
            part = tokens[first : first + chunk]
            num_logits = min(len(part), max(0, first + len(part) - start))
            logits = runner.forward(StepPlan([Row(0, first, part, num_logits)]))
            for i in range(num_logits):
                place = first + len(part) - num_logits + i - start  # of the token that follows, in the output
                yield _verifier.own_token(request, text.output[:place], logits[i])
    finally:
        runner.free(0)


class HeadWalk:
    """Drafts of a head along a text. The target runs over the accepted tokens after each, as in an engine."""

    def __init__(self, runner: Runner, head: Head, text: Text) -> None:
        self._runner, self._head, self._text = runner, head, text
        _prefill(runner, 0, text.prompt)
        self._num_computed = len(text.prompt)

    def __call__(self, at: int, depth: int) -> Sequence[int]:
        request = self._text.request(at)
        last = len(request.tokens) - 1
        if last > self._num_computed:
            begin = self._num_computed
            self._runner.forward(StepPlan([Row(0, begin, request.tokens[begin:last], 1)]))
            self._runner.truncate(0, last)
            self._num_computed = last
        request.seq, request.num_computed = 0, last
        tokens = self._head.draft([HeadTask(request, depth)])[0].tokens
        self._runner.truncate(0, last)
        return tokens

    def close(self) -> None:
        self._runner.free(0)


class BridgedWalk:
    """Drafts of a model with another tokenizer along a text."""

    def __init__(self, proposer: OtherVocabularyProposer, text: Text) -> None:
        self._proposer, self._text, self._request = proposer, text, text.request(0)
        self.seconds, self.num_drawn = 0.0, 0  # of all drafts but the first, which reads the prompt

    def __call__(self, at: int, depth: int) -> Sequence[int]:
        request = self._request
        is_first = len(request.tokens) == len(self._text.prompt)
        request.tokens += self._text.output[len(request.tokens) - len(self._text.prompt) : at]
        begin = perf_counter()
        [draft] = self._proposer.propose([DraftAsk(request, depth)])
        if not is_first and self._proposer.timing is not None:
            self.seconds += perf_counter() - begin
            self.num_drawn += self._proposer.timing.num_drawn
        return draft.tokens

    def close(self) -> None:
        self._proposer.release(self._request)


def by_lookup(proposer: Proposer, text: Text) -> DraftAt:
    request = text.request(0)

    def draft_at(at: int, depth: int) -> Sequence[int]:
        request.tokens += text.output[len(request.tokens) - len(text.prompt) : at]
        found: list[Draft] = proposer.propose([DraftAsk(request, depth)])
        return found[0].tokens

    return draft_at


def chances(walks: Iterable[Walk], *, is_lookup: bool = False) -> tuple[float, ...]:
    """For each position, the share of its tokens that were accepted where all before them were; it ends before the
    first position that was never reached. A token that a model was asked for and did not draft counts as rejected;
    where a lookup ends, nothing is verified either."""
    all_walks = list(walks)
    if not all_walks:
        return ()
    offered = [each.drafted if is_lookup else each.asked for each in all_walks]
    depth = len(all_walks[0].drafted)
    reached, found = sum(each[0] for each in offered), list[float]()
    for i in range(depth):
        if not reached:
            break
        accepted = sum(each.accepted[i] for each in all_walks)
        found.append(accepted / reached)
        reached = min(accepted, sum(each[i + 1] for each in offered)) if i + 1 < depth else 0
    return tuple(found)
