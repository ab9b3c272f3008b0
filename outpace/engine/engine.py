"""The visible loop. One step: schedule, decide, draft, run the target once, verify, commit, write.

The engine knows requests, not texts or files: tokens come in, deltas come out. It is driven by calling `step` from one
thread for as long as `has_requests`.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from outpace.backends.base import LoadedModel, Logits, Verifier
from outpace.config import ResolvedConfig, SamplingParams
from outpace.core import Case, Delta, Draft, Request, Row, StepPlan, StepStats, Verdict
from outpace.engine.output import OutputWriter
from outpace.engine.scheduler import Scheduler, Work
from outpace.errors import UsageError
from outpace.kv.cache import SequenceCache
from outpace.sampling import Shaper, token_logprob
from outpace.speculation.base import DraftAsk, Proposer
from outpace.speculation.costs import CostCurve
from outpace.speculation.policy import Choice, Policy
from outpace.verification import HostVerifier


@dataclass(slots=True)
class _Turn:
    """One request's part in a step."""

    work: Work
    choice: Choice
    guess: Draft | None = None  # what the proposer said
    draft: Draft | None = None  # what of it the target is asked to verify

    @property
    def request(self) -> Request:
        return self.work.request


class Engine:
    def __init__(self, target: LoadedModel, proposers: Mapping[str, Proposer], config: ResolvedConfig) -> None:
        self._target = target
        self._runner = target.runner
        self._tokenizer = target.tokenizer
        self._verifier: Verifier = target.runner.capabilities.verifier or HostVerifier()
        self._proposers = dict(proposers)
        self._config = config
        self._ids = count()
        self.stats = StepStats()  # of the latest step
        self.costs = CostCurve()
        self._start()

    def _start(self) -> None:
        can_rewind = self._runner.capabilities.can_rewind
        self._cache = SequenceCache(self._runner)
        self.scheduler = Scheduler(
            self._cache,
            max_running=self._config.max_sequences,
            max_step_tokens=self._config.max_step_tokens,
            prefix_reuse=self._config.prefix_reuse and can_rewind,
        )
        self.policy = self._new_policy()

    def _new_policy(self) -> Policy:
        return Policy(self._config, self.costs, can_speculate=self._runner.capabilities.can_rewind)

    @property
    def has_requests(self) -> bool:
        return self.scheduler.has_requests

    def submit(self, prompt: Sequence[int], params: SamplingParams, *, seed: int | None = None) -> Request:
        """Queue a request. `seed` replaces the parameters' own, for the n completions of one prompt."""
        prompt = list(prompt)
        self._check(prompt, params)
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._tokenizer.end_ids)
        if seed is None:
            seed = params.seed if params.seed is not None else secrets.randbits(64)
        request = Request(
            id=next(self._ids),
            params=params,
            prompt=prompt,
            seed=seed,
            shaper=Shaper(params, prompt, stop_ids),
            writer=OutputWriter(self._tokenizer, params, stop_ids),
            max_length=min(len(prompt) + params.max_tokens, self._config.max_context),
            submitted_at=perf_counter(),
        )
        may_speculate = (params.speculation.mode or self._config.speculation) != "off"
        if may_speculate and not self.costs.is_known and not self.has_requests:
            self.calibrate()
        self.scheduler.add(request)
        return request

    def calibrate(self) -> None:
        """Measure the target's cost curve. Only while nothing runs: it borrows a sequence."""
        self.scheduler.forget_kept()
        self.costs = CostCurve.measure(self._runner)
        self.policy = self._new_policy()

    def abort(self, request: Request) -> None:
        """End a request now, wherever it stands; what it said so far stays in its writer."""
        if request.finish_reason is None:
            request.finish_reason = "abort"
            request.writer.finish()
            self._end(request, keep_prefix=False)

    def reset(self) -> None:
        """Forget all requests and caches: the way back from a step that was interrupted half way."""
        for request in [*self.scheduler.running, *self.scheduler.waiting]:
            for proposer in self._proposers.values():
                proposer.release(request)
            request.finish_reason = request.finish_reason or "abort"
            request.finished_at = perf_counter()
            request.writer.finish()
            request.seq = None
        for seq in range(self._runner.capacity.max_sequences):
            self._runner.free(seq)
        self._start()

    def step(self) -> list[Delta]:
        """Advance every scheduled request by a prompt chunk or by one token and what its draft adds to it."""
        stats = self.stats = StepStats()
        begin = perf_counter()
        turns = self._schedule(stats)
        if not turns:
            return []
        scheduled = perf_counter()
        self._draft(turns)
        drafted = perf_counter()
        plan = StepPlan([_row(turn) for turn in turns])
        cases = [Case(turn.request, turn.draft) for turn in turns if turn.work.completes]
        logits: Logits
        if (judge := self._runner.capabilities.judge) is not None:
            logits, verdicts = judge(plan, cases)
            computed = perf_counter()
        else:
            logits = forwarded = self._runner.forward(plan)
            computed = perf_counter()
            verdicts = self._verifier.verify(cases, forwarded)
        deltas = self._conclude(turns, plan, logits, verdicts, stats)
        verified = perf_counter()
        stats.schedule_seconds = scheduled - begin
        stats.draft_seconds = drafted - scheduled
        stats.forward_seconds = computed - drafted
        stats.verify_seconds = verified - computed
        self._account(turns, plan, deltas, stats)
        return deltas

    def _schedule(self, stats: StepStats) -> list[_Turn]:
        """Pick the work, choose depths, and take cache room for drafts before anything is drafted."""
        work = self.scheduler.schedule()
        for request in self.scheduler.take_preempted():
            stats.num_preempted += 1
            for proposer in self._proposers.values():
                proposer.release(request)
        decoding = [item.request for item in work if item.request.is_decoding]
        choices = iter(self.policy.decide(decoding) if decoding else ())
        plain = Choice("none", 0)
        turns = [_Turn(item, next(choices) if item.request.is_decoding else plain) for item in work]
        budget = self._config.max_step_tokens - sum(item.num_tokens for item in work)
        for turn in turns:
            if turn.choice.verify and turn.choice.depth:
                turn.choice.depth = self.scheduler.reserve_draft(turn.request, min(turn.choice.depth, budget))
                budget -= turn.choice.depth
        stats.num_decode_rows = len(decoding)
        stats.num_prefill_tokens = sum(item.num_tokens for item in work if not item.request.is_decoding)
        return turns

    def _draft(self, turns: Sequence[_Turn]) -> None:
        by_method: dict[str, list[_Turn]] = {}
        for turn in turns:
            if turn.choice.depth:
                by_method.setdefault(turn.choice.method, []).append(turn)
        for method, group in by_method.items():
            begin = perf_counter()
            drafts = self._proposers[method].propose([DraftAsk(t.request, t.choice.depth) for t in group])
            self.policy.observe_drafting(method, sum(len(d.tokens) for d in drafts), perf_counter() - begin)
            for turn, draft in zip(group, drafts, strict=True):
                turn.guess = draft
                if turn.choice.verify and draft.tokens:
                    turn.draft = draft

    def _conclude(
        self, turns: Sequence[_Turn], plan: StepPlan, logits: Logits, verdicts: Sequence[Verdict], stats: StepStats
    ) -> list[Delta]:
        deltas = []
        left = iter(verdicts)
        at = 0
        for turn, row in zip(turns, plan.rows, strict=True):
            if turn.work.completes:
                wants_logprobs = turn.request.params.logprobs is not None
                rows = logits[at : at + row.num_logits] if wants_logprobs else None
                deltas.append(self._commit(turn, row, next(left), rows, stats))
            else:
                self._cache.commit(row.seq, len(row.tokens), len(row.tokens))
                turn.request.num_computed += len(row.tokens)
            at += row.num_logits
        return deltas

    def _commit(
        self, turn: _Turn, row: Row, verdict: Verdict, logits: NDArray[np.float32] | None, stats: StepStats
    ) -> Delta:
        """Say the verdict's tokens, one by one until something ends the request; keep their cache, drop the rest."""
        request = turn.request
        was_decoding = request.is_decoding
        num_said = len(request.tokens)
        for i, token in enumerate(verdict.tokens):
            request.tokens.append(token)
            if logits is not None and request.params.logprobs is not None:
                request.writer.logprobs.append(token_logprob(logits[i], token, request.params.logprobs))
            request.finish_reason = request.writer.add(
                token, from_draft=i < verdict.num_accepted, room_left=request.max_length - len(request.tokens)
            )
            if request.finish_reason:
                break
        said = request.tokens[num_said:]
        request.shaper.advance(said)
        # In the cache are the row's tokens; of the draft among them, what was accepted and said.
        num_kept = len(row.tokens) - verdict.num_drafted + min(verdict.num_accepted, len(said))
        self._cache.commit(row.seq, len(row.tokens), num_kept)
        request.num_computed += num_kept
        if request.first_token_at is None:
            request.first_token_at = perf_counter()
        if was_decoding:
            request.spec.add(verdict, turn.draft.proposer if turn.draft else "none")
            self.policy.observe(request, turn.choice, turn.guess.tokens if turn.guess else (), verdict)
        if turn.guess is not None:
            self._proposers[turn.choice.method].observe(request, verdict)
        if request.finish_reason:
            stats.num_finished += 1
            self._end(request, keep_prefix=True)
        stats.num_drafted += verdict.num_drafted
        stats.num_accepted += verdict.num_accepted
        stats.num_emitted += len(said)
        return Delta(request, said, request.writer.take(), request.finish_reason)

    def _end(self, request: Request, *, keep_prefix: bool) -> None:
        request.finished_at = perf_counter()
        self.scheduler.remove(request, keep_prefix=keep_prefix)
        self.policy.release(request)
        for proposer in self._proposers.values():
            proposer.release(request)

    def _account(self, turns: Sequence[_Turn], plan: StepPlan, deltas: Sequence[Delta], stats: StepStats) -> None:
        """Compare pure decoding steps with what plain decoding of the same tokens costs; learn costs from them."""
        if stats.num_prefill_tokens or not stats.num_decode_rows or not self.costs.is_known:
            return
        self.costs.observe(plan.num_tokens, stats.forward_seconds)
        num_rows = stats.num_decode_rows
        plain_step = self.costs.seconds(num_rows) + stats.host_seconds
        for delta in deltas:
            delta.request.spec.decode_seconds += stats.total_seconds / num_rows
            delta.request.spec.plain_seconds += len(delta.token_ids) * plain_step / num_rows

    def _check(self, prompt: Sequence[int], params: SamplingParams) -> None:
        if not prompt:
            raise UsageError("the prompt is empty; give at least one token of text")
        if len(prompt) >= self._config.max_context:
            raise UsageError(
                f"the prompt has {len(prompt)} tokens and the context holds {self._config.max_context}, where at least "
                "one must be left for the answer; shorten the prompt or raise max_context"
            )
        vocab_size = self._runner.vocab_size
        for name, ids in (
            ("prompt", prompt),
            ("logit_bias", params.logit_bias),
            ("stop_token_ids", params.stop_token_ids),
        ):
            for token in ids:
                if not 0 <= token < vocab_size:
                    raise UsageError(f"token {token} in {name} is not in the vocabulary of {vocab_size} tokens")
        method = params.speculation.method
        if method not in (None, "none") and method not in self._proposers:
            raise UsageError(
                f"speculation method {method!r} is not loaded here; loaded: {', '.join(sorted(self._proposers))}"
            )


def _row(turn: _Turn) -> Row:
    request = turn.request
    assert request.seq is not None
    start = request.num_computed
    tokens = request.tokens[start : start + turn.work.num_tokens]
    if not turn.work.completes:
        return Row(request.seq, start, tokens, 0)
    draft = turn.draft.tokens if turn.draft else []
    return Row(request.seq, start, tokens + draft, 1 + len(draft))
