"""The engine's loop. One step: schedule, decide, reserve, draft, run the target once, verify, commit, learn.

The engine takes token ids and returns deltas; text and model files are handled elsewhere. One thread calls `step` while
`has_requests` is true.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from outpace.backends.base import Capacity, LoadedModel, Logits, StepResult, max_scored_tokens
from outpace.config import ResolvedConfig, SamplingParams
from outpace.core import Case, Delta, Draft, Pooled, Request, Row, StepPlan, StepStats, Verdict, VerifiedDraft
from outpace.decoding.bad_words import as_token_ids
from outpace.decoding.constraints import Constraint, Constraints
from outpace.decoding.randomness import child_seed
from outpace.decoding.sampling import Shaper, token_logprob
from outpace.decoding.verification import executor_of, host_scores
from outpace.engine.collection import PausedCollection
from outpace.engine.output import OutputWriter
from outpace.engine.scheduler import Scheduler, Work
from outpace.errors import BackendLost, PromptTooLong, UsageError
from outpace.kv.cache import SequenceCache
from outpace.speculation.costs.calibration import measure
from outpace.speculation.costs.curves import Costs
from outpace.speculation.costs.file import CostFile
from outpace.speculation.policy.budget import Budget
from outpace.speculation.policy.decision import Decision
from outpace.speculation.policy.policy import Policy
from outpace.speculation.policy.state import Choice, Outcome
from outpace.speculation.proposers.base import Proposer
from outpace.speculation.proposers.prediction import Follower, read_prediction
from outpace.speculation.proposers.prediction_text import Prediction
from outpace.speculation.session import Session


@dataclass(slots=True)
class _Turn:
    """One request's part in a step."""

    work: Work
    choice: Choice

    @property
    def draft(self) -> Draft | None:
        """The draft that the target verifies; None without draft tokens."""
        draft = self.choice.draft
        return draft if draft is not None and draft.tokens else None


class Engine:
    def __init__(
        self,
        target: LoadedModel,
        proposers: Mapping[str, Proposer],
        config: ResolvedConfig,
        *,
        draft: LoadedModel | None = None,
        cost_file: CostFile | None = None,
    ) -> None:
        self._target = target
        self._runner = target.runner
        self._tokenizer = target.tokenizer
        self.constraints = Constraints(target.tokenizer, target.runner.vocab_size)
        self._forward_and_verify = executor_of(target.runner)
        self._scores = target.runner.capabilities.scorer or host_scores
        # With a runner that starts steps ahead, the host can learn while the device works. Others would wait for it.
        self._can_postpone = target.runner.capabilities.follow is not None
        models = [target] if draft is None else [target, draft]
        prepared = [model.runner.capabilities.num_prepared for model in models]
        self._prepared = [count for count in prepared if count is not None]
        self._num_prepared = self._count_prepared()  # at the end of the latest step
        self._proposers = dict(proposers)
        self._draft_model = draft
        if draft is not None and target.runner.capabilities.follow is not None:
            target.runner.capabilities.follow(draft.runner)
        self._config = config
        self.cost_file = cost_file
        self._ids = count()
        self._num_submitted = count()
        self.stats = StepStats()  # of the latest step
        self.floor_seconds: float | None = None  # the least time of a step; None: not measured
        self._start()
        self.policy = Policy(
            config,
            None,
            self._proposers,
            can_speculate=self._runner.capabilities.can_rewind,
            begins_ahead=self._runner.capabilities.captured is not None,
        )
        self._session = Session(self.policy, self._proposers)

    def _start(self) -> None:
        self._postponed: partial[None] | None = None  # learns from the latest step, during the next one
        can_rewind = self._runner.capabilities.can_rewind
        self._cache = SequenceCache(self._runner)
        self.scheduler = Scheduler(
            self._cache,
            max_running=self._config.max_sequences,
            max_step_tokens=self._config.max_step_tokens,
            prefix_reuse=self._config.prefix_reuse and can_rewind,
            max_scored_tokens=max_scored_tokens(self._runner.vocab_size),
        )

    @property
    def costs(self) -> Costs | None:
        """The measured costs of steps; None before calibration."""
        return self.policy.costs

    @property
    def budget(self) -> Budget:
        """The time that speculation has spent and saved since the start."""
        return self.policy.budget

    @property
    def config(self) -> ResolvedConfig:
        return self._config

    @property
    def capacity(self) -> Capacity:
        return self._runner.capacity

    @property
    def embedding_width(self) -> int:
        """0 if this backend makes no embeddings."""
        return self._runner.capabilities.state_width

    def on_loss(self, listener: Callable[[BackendLost], None]) -> None:
        """Call `listener`, in a thread of its own, if the backend is lost for good while no step runs."""
        if self._runner.capabilities.on_loss is not None:
            self._runner.capabilities.on_loss(listener)

    @property
    def methods(self) -> list[str]:
        """The names of the proposers that requests may use."""
        return [name for name in self._proposers if name != "none"]

    @property
    def exact_to_the_bit(self) -> bool:
        return self._runner.capabilities.exact_to_the_bit

    def measure_floor(self) -> None:
        """Measure the least time that a step can take, where the backend knows it. Only while nothing runs."""
        floor = self._runner.capabilities.floor_seconds
        self.floor_seconds = None if floor is None else floor()

    @property
    def max_running(self) -> int:
        return self._config.max_sequences

    @property
    def has_requests(self) -> bool:
        return self.scheduler.has_requests

    def submit(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        seed: int | None = None,
        cache_salt: str = "",
        priority: int = 0,
        prediction: Prediction | None = None,
        constraint: Constraint | None = None,
        keep_drafts: bool = False,
        place: str = "",
        scored_from: int = 1,
    ) -> Request:
        """Queue a request. `seed` replaces `params.seed`, for the n completions of one prompt. `prediction` is what
        `read_prediction` returned; without it, a prediction of the params is read here.

        Of the waiting requests, those with a lower `priority` start first, and equal ones in the order of submission.
        `constraint` is `params.structured`, compiled in another thread by `constraint_of`; otherwise it is compiled
        here, which may take longer than a step.

        Only requests with the same `cache_salt` share prefixes and what was learned from outputs: what one request
        left behind can be noticed by how fast another one is. Among them, those with the same `place` expect similar
        output. `prompt_logprobs` begin with the prompt's token `scored_from`; those before it may come from a cache.
        With `keep_drafts`, the request keeps every draft.
        """
        prompt = list(prompt)
        self.check(prompt, params)
        if params.seed is None and self._config.default_seed is not None:
            params = replace(params, seed=child_seed(self._config.default_seed, next(self._num_submitted)))
        if seed is None:
            seed = params.seed if params.seed is not None else secrets.randbits(64)
        request = self._request(prompt, params, seed, constraint or self.constraint_of(params))
        request.cache_salt, request.priority, request.place = cache_salt, priority, place
        request.scored_from = scored_from
        request.drafts = [] if keep_drafts else None
        prediction = prediction or self.read_prediction(params)
        request.predicted = Follower(prediction) if prediction is not None else None
        self.scheduler.add(request)
        return request

    def constraint_of(self, params: SamplingParams) -> Constraint | None:
        """Compile the structured output that the request asks for. Any thread may call it."""
        return None if params.structured is None else self.constraints.compile(params.structured)

    def read_prediction(self, params: SamplingParams, check: Callable[[], None] = lambda: None) -> Prediction | None:
        """Tokenise and index a prediction, which may take milliseconds. Any thread may call it; `check` may raise an
        error to stop it. None if there is none, or if the request does not speculate."""
        if not params.prediction or not self._may_speculate(params):
            return None
        return read_prediction(params.prediction, self._tokenizer, self._config.max_context, check)

    def _may_speculate(self, params: SamplingParams) -> bool:
        return (params.speculation.mode or self._config.speculation) != "off"

    def _request(
        self, prompt: list[int], params: SamplingParams, seed: int, constraint: Constraint | None = None
    ) -> Request:
        if any(isinstance(word, str) for word in params.bad_words):
            params = replace(params, bad_words=as_token_ids(params.bad_words, self._tokenizer))
        if constraint is not None:  # the grammar decides where the output may end
            params = replace(params, ignore_eos=False, min_tokens=0)
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._tokenizer.end_ids)
        matcher = None if constraint is None else constraint.matcher(stop_ids)
        return Request(
            id=next(self._ids),
            params=params,
            prompt=prompt,
            seed=seed,
            shaper=Shaper(params, prompt, stop_ids, matcher),
            matcher=matcher,
            writer=OutputWriter(self._tokenizer, params, stop_ids),
            max_length=min(len(prompt) + params.max_tokens, self._config.max_context),
            may_speculate=self._may_speculate(params),
            pooled=None if params.pooling is None else Pooled(),
            submitted_at=perf_counter(),
        )

    def calibrate(self, *, again: bool = False) -> None:
        """Load the costs of steps, or measure them if none are saved or `again` is set. Only while nothing runs."""
        costs = self.cost_file.load() if self.cost_file is not None and not again else None
        proposers = [proposer for name, proposer in self._proposers.items() if name != "none"]
        scratch = self._request([0], SamplingParams(), 0)
        self.scheduler.forget_kept()  # measuring and warming up use the runner's sequences
        if costs is not None and costs.drafts.keys() == {proposer.name for proposer in proposers}:
            for proposer in proposers:
                proposer.warm_up(scratch)
        else:
            costs = measure(self._runner, proposers, scratch)
            if self.cost_file is not None:
                self.cost_file.save(costs)
        self._num_prepared = self._count_prepared()
        self.policy.use_costs(costs)

    def keep_costs(self) -> None:
        """Save the costs, as corrected by the steps that ran, for the next start."""
        if self.cost_file is not None and self.costs is not None:
            self.cost_file.save(self.costs)

    def abort(self, request: Request) -> None:
        """End a request now, in any state; its writer keeps the text so far."""
        if request.finish_reason is None:
            request.finish_reason = "abort"
            request.writer.finish()
            self._end(request, keep_prefix=False)
            self.policy.release(request)

    def reset(self) -> None:
        """End all requests and clear the caches, after a step that failed or was interrupted."""
        ended = [*self.scheduler.running, *self.scheduler.waiting]
        self.restart()
        for request in ended:
            self.policy.release(request)
            request.finish_reason = request.finish_reason or "abort"
            request.finished_at = perf_counter()
            request.writer.finish()

    def restart(self, requests: Sequence[Request] = ()) -> None:
        """Clear all caches, then queue these requests; their tokens so far are computed again.

        The engine drops all other requests without ending them: the caller still holds them.
        """
        for request in [*self.scheduler.running, *self.scheduler.waiting, *requests]:
            for proposer in self._proposers.values():
                proposer.release(request)
            request.seq, request.num_computed = None, 0
        for seq in range(self._runner.capacity.max_sequences):
            self._runner.free(seq)
        self._start()
        for request in requests:
            self.scheduler.add(request)

    def forget(self, *, prefixes: bool = True) -> None:
        """Drop the data of finished requests: proposers' stores and, with `prefixes`, kept prefixes."""
        if prefixes:
            self.scheduler.forget_kept()
        for proposer in self._proposers.values():
            proposer.forget()

    def step(self) -> list[Delta]:
        """Advance every scheduled request by a prompt chunk, or by one token plus its accepted draft tokens.

        Calibrates first if the costs are unknown, nothing runs yet and a waiting request may speculate.
        """
        waiting = self.scheduler.waiting if self.costs is None and not self.scheduler.running else ()
        if any(request.may_speculate for request in waiting):
            self.calibrate()
        with PausedCollection():
            return self._step()

    def _step(self) -> list[Delta]:
        stats = self.stats = StepStats()
        work = self._schedule(stats)
        if not work:
            return []
        decision = self._session.choose([item.request for item in work if item.is_decoding], stats)
        turns = self._reserve(work, decision, stats)
        self._session.draft(decision, stats)
        drafted = perf_counter()
        plan, cases = _plan(turns)
        result = self._forward_and_verify(plan, cases, self._host_work(turns, cases))
        self._learn_postponed()  # unless it was done during the forward pass
        catch_up_seconds = self._learn_drafting(decision, result)
        deltas, outcomes = self._commit(turns, plan, result, stats)
        stats.forward_seconds, stats.hidden_seconds = result.forward_seconds, result.hidden_seconds
        stats.verify_seconds = perf_counter() - drafted - result.forward_seconds
        self._learn(decision, plan, result, outcomes, stats, catch_up_seconds)
        return deltas

    def _count_prepared(self) -> int:
        return sum([count() for count in self._prepared])

    def _schedule(self, stats: StepStats) -> list[Work]:
        """Schedule the step; proposers release preempted requests."""
        begin = perf_counter()
        work = self.scheduler.schedule()
        for request in self.scheduler.take_preempted():
            stats.num_preempted += 1
            for proposer in self._proposers.values():
                proposer.release(request)
        stats.num_decode_rows = sum([item.is_decoding for item in work])
        stats.num_prefill_tokens = sum([item.num_tokens for item in work if not item.is_decoding])
        stats.schedule_seconds = perf_counter() - begin
        return work

    def _reserve(self, work: Sequence[Work], decision: Decision, stats: StepStats) -> list[_Turn]:
        """Reserve cache for drafts before drafting; where less is free, drafts get shorter."""
        begin = perf_counter()
        choices = iter(decision.choices)
        turns = [_Turn(item, next(choices) if item.is_decoding else Choice.plain()) for item in work]
        budget = self._config.max_step_tokens - stats.num_decode_rows - stats.num_prefill_tokens
        for turn in turns:
            if turn.choice.depth:
                depth = self.scheduler.reserve_draft(turn.work.request, min(turn.choice.depth, budget))
                turn.choice.shorten(depth)
                budget -= depth
        stats.schedule_seconds += perf_counter() - begin
        return turns

    def _host_work(self, turns: Sequence[_Turn], cases: Sequence[Case]) -> Callable[[], None] | None:
        """Work for the host while the device runs: compute the masks that verification needs, learn from the last step,
        and let the lookup proposers prepare the requests whose prompts end in this step. None if there is none."""
        masked = [(case.request.matcher, case) for case in cases if case.request.matcher is not None]
        waiting: list[Request] = []
        if self.stats.num_prefill_tokens and self.costs is not None:
            begun = [turn.work.request for turn in turns if turn.work.emits and not turn.work.is_decoding]
            waiting = [request for request in begun if request.may_speculate]
        if self._postponed is None and not waiting and not masked:
            return None

        def learn_and_prepare() -> None:
            for matcher, case in masked:
                for i in range(len(case.tokens) + 1):
                    matcher.mask(case.prefix(i))  # the matcher keeps it
            self._learn_postponed(is_hidden=True)
            for request in waiting:
                for name in self.policy.lookups(request):
                    self._proposers[name].prepare(request)

        return learn_and_prepare

    def _learn_drafting(self, decision: Decision, result: StepResult) -> float:
        """Learn the costs of drafting, unless other work was done in that time.

        Returns the seconds that proposers spent on catching up.
        """
        is_typical = result.is_typical and self._count_prepared() == self._num_prepared
        return self._session.learn_drafting(decision, is_typical=is_typical)

    def _commit(
        self, turns: Sequence[_Turn], plan: StepPlan, result: StepResult, stats: StepStats
    ) -> tuple[list[Delta], list[Outcome]]:
        """Emit the verified tokens; keep their cache and drop the rest."""
        deltas: list[Delta] = []
        outcomes: list[Outcome] = []
        verdicts = iter(result.verdicts)
        at = 0
        for turn, row in zip(turns, plan.rows, strict=True):
            request = turn.work.request
            if row.num_scored and request.pooled is not None:
                assert self._runner.capabilities.states is not None
                request.pooled.add(self._runner.capabilities.states(at, at + row.num_scored))
            elif row.num_scored:
                self._score(request, row, result.logits, at)
            if turn.work.emits:
                wants_logprobs = request.params.logprobs is not None
                logits = result.logits[at + row.num_scored : at + row.num_logits] if wants_logprobs else None
                verdict = next(verdicts)
                if turn.work.is_decoding:
                    outcomes.append(Outcome(request, turn.choice, verdict))
                deltas.append(self._emit(turn, row, verdict, logits, stats))
            else:
                self._cache.commit(row.seq, len(row.tokens), len(row.tokens))
                request.num_computed += len(row.tokens)
                if turn.work.completes:
                    deltas.append(self._end_scored(request, stats))
            at += row.num_logits
        return deltas, outcomes

    def _score(self, request: Request, row: Row, logits: Logits, begin: int) -> None:
        """Log-probabilities of prompt tokens: each is in the logits of the token before it. Only they are kept."""
        num_top, first = request.params.prompt_logprobs, len(request.prompt_logprobs) + request.scored_from
        assert num_top is not None and first - 1 == row.start + len(row.tokens) - row.num_logits
        tokens = request.prompt[first : first + row.num_scored]
        # All or none: after a failed step the prompt is computed again, and what is missing here is scored then.
        request.prompt_logprobs += self._scores(logits, begin, tokens, num_top)

    def _end_scored(self, request: Request, stats: StepStats) -> Delta:
        """End a request that asked only for the log-probabilities or the embedding of its prompt."""
        request.finish_reason = "length" if request.pooled is None else "stop"
        request.writer.finish()
        stats.num_finished += 1
        self._end(request, keep_prefix=True)
        return Delta(request, [], request.finish_reason)

    def _emit(
        self, turn: _Turn, row: Row, verdict: Verdict, logits: NDArray[np.float32] | None, stats: StepStats
    ) -> Delta:
        """Emit the verdict's tokens one by one until the request ends; keep their cache, drop the rest."""
        request, choice = turn.work.request, turn.choice
        num_accepted, num_emitted = verdict.num_accepted, 0
        room_left = request.max_length - len(request.tokens)
        if request.drafts is not None and turn.draft is not None:
            tokens, num_lenient = turn.draft.tokens, verdict.num_lenient
            if verdict.tree is not None:
                tokens = [tokens[node] for node in verdict.tree.continued(verdict.path)]
            request.drafts.append(VerifiedDraft(request.num_output, choice.method, tokens, num_accepted, num_lenient))
        ending = None if request.matcher is None else request.matcher.ending(verdict.tokens)
        if ending is not None and ending.num_tokens == 0:  # the grammar failed here, and nothing can follow
            request.finish_reason = ending.reason
            request.writer.finish()
        for token in verdict.tokens if request.finish_reason is None else ():
            request.tokens.append(token)
            if logits is not None and request.params.logprobs is not None:
                line = logits[verdict.rows[num_emitted]]
                request.writer.logprobs.append(token_logprob(line, token, request.params.logprobs))
            drafted_by = choice.method if num_emitted < num_accepted else None
            num_emitted += 1
            ends = ending.reason if ending is not None and ending.num_tokens == num_emitted else None
            request.finish_reason = request.writer.add(
                token, drafted_by=drafted_by, room_left=room_left - num_emitted, ends=ends
            )
            if request.finish_reason:
                break
        emitted = verdict.tokens[:num_emitted]
        request.shaper.advance(emitted)
        # The cache holds all of the row's tokens. Of the draft, only accepted and emitted tokens stay.
        num_fed = len(row.tokens)
        num_kept = num_fed - verdict.num_drafted + min(num_accepted, num_emitted)
        path = None if verdict.tree is None else verdict.path[:num_emitted]
        self._cache.commit(row.seq, num_fed, num_kept, path)
        request.num_computed += num_kept
        request.spec.num_generated += num_emitted
        if request.first_token_at is None:
            request.first_token_at = perf_counter()
        if turn.work.is_decoding:
            request.spec.add(verdict, choice.method)
            stats.add_draft(choice.method, verdict)
        self._session.observe(request, choice, verdict)
        if request.finish_reason:
            stats.num_finished += 1
            self._end(request, keep_prefix=True)
        stats.num_emitted += num_emitted
        return Delta(request, emitted, request.finish_reason)

    def _end(self, request: Request, *, keep_prefix: bool) -> None:
        request.finished_at = perf_counter()
        self.scheduler.remove(request, keep_prefix=keep_prefix)
        for proposer in self._proposers.values():
            proposer.release(request)

    def _learn(
        self,
        decision: Decision,
        plan: StepPlan,
        result: StepResult,
        outcomes: Sequence[Outcome],
        stats: StepStats,
        catch_up_seconds: float,
    ) -> None:
        """Let the session learn from the step: now, or during the next step if the runner leaves the host time.

        It must be now if a request has ended, or if the next decision depends on this step's result.
        """
        num_prepared = self._count_prepared()
        stats.had_one_time_work = num_prepared > self._num_prepared or plan.num_scored > 0
        self._num_prepared = num_prepared
        learn = partial(
            self._session.learn, decision, outcomes, stats, catch_up_seconds, is_typical=result.is_typical
        )  # fmt: skip
        is_needed = decision.is_weighed and not decision.has_drafts
        if self._can_postpone and not (stats.num_finished or is_needed):
            self._postponed = learn
        else:
            learn()

    def _learn_postponed(self, *, is_hidden: bool = False) -> None:
        if self._postponed is not None:
            learn, self._postponed = self._postponed, None
            learn(is_hidden=is_hidden)

    def check(self, prompt: Sequence[int], params: SamplingParams) -> None:
        """Raise UsageError for a request that cannot run here. Reads only constant state, so any thread may call it."""
        if not prompt:
            raise UsageError("the prompt is empty; give at least one token of text")
        if len(prompt) + min(1, params.max_tokens) > self._config.max_context:
            left = "at least one must be left for the answer; " if params.max_tokens else ""
            raise PromptTooLong(
                f"the prompt has {len(prompt)} tokens and the context holds {self._config.max_context}; {left}"
                "shorten the prompt or raise max_context"
            )
        vocab_size = self._runner.vocab_size
        for name, ids in (
            ("prompt", prompt),
            ("logit_bias", params.logit_bias),
            ("stop_token_ids", params.stop_token_ids),
            ("bad_words", [token for word in params.bad_words if not isinstance(word, str) for token in word]),
        ):
            for token in ids:
                if not 0 <= token < vocab_size:
                    raise UsageError(f"token {token} in {name} is not in the vocabulary of {vocab_size} tokens")
        if params.pooling is not None and self._runner.capabilities.states is None:
            raise UsageError(
                "this backend gives no hidden states, so it makes no embeddings; use the native or the torch backend"
            )
        method = params.speculation.method
        if method not in (None, "none") and method not in self._proposers:
            raise UsageError(
                f"speculation method {method!r} is not loaded here; loaded: {', '.join(sorted(self._proposers))}"
            )


def _plan(turns: Sequence[_Turn]) -> tuple[StepPlan, list[Case]]:
    """What the target computes, and the rows to verify or sample."""
    drafts = [turn.draft for turn in turns]
    plan = StepPlan([_row(turn.work, draft) for turn, draft in zip(turns, drafts, strict=True)])
    plan.needs_states = any(turn.work.request.pooled is not None for turn in turns)
    cases = [Case(turn.work.request, draft) for turn, draft in zip(turns, drafts, strict=True) if turn.work.emits]
    return plan, cases


def _row(work: Work, draft: Draft | None) -> Row:
    request, start = work.request, work.request.num_computed
    assert request.seq is not None
    tokens = request.tokens[start : start + work.num_tokens]
    if not work.emits:
        num_lines = work.num_scored
        if work.completes and request.params.pooling == "last":
            num_lines = 1
        elif work.completes and request.pooled is None and num_lines:
            num_lines += 1  # lines are those of a row's last tokens; that of a prompt's last token is not used
        return Row(request.seq, start, tokens, num_lines, num_lines)
    if draft is None:
        return Row(request.seq, start, tokens, 1 + work.num_scored, work.num_scored)
    return Row(request.seq, start, tokens + draft.tokens, 1 + len(draft.tokens), tree=draft.tree)
