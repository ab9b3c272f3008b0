"""Runs steps, draws tokens and verifies drafts on the device, so that only tokens are copied to the host.

During plain decoding, the next step is started before its plan arrives: rows feed the token just drawn, which is
already on the device. If the plan is as expected, its step is half done, and the host's work (scheduling, detokenising)
costs no time. If a row's plan differs (its request ended, or has a draft to verify), its result is dropped; its cache
entry lies after the sequence's tokens and is overwritten. Such a row needs a second step, which costs more than a right
guess gains; `early_start.py` decides whether to start early.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from time import perf_counter
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from outpace.backends.base import DraftTask, Logits, StepResult
from outpace.backends.torch.execution.ahead import Ahead, Verifying, drawing_mode, needs_only_tokens
from outpace.backends.torch.execution.ahead import begin as begin_ahead
from outpace.backends.torch.execution.drafting import LoopRun
from outpace.backends.torch.execution.early_start import EarlyStart
from outpace.backends.torch.execution.foresight import Foresight, rows_of
from outpace.backends.torch.execution.graphs import Bucket
from outpace.backends.torch.execution.launched import DiscardedLogits, Launched
from outpace.backends.torch.execution.tree_drafting import TreeRun
from outpace.backends.torch.model.model import Model
from outpace.backends.torch.sampling import scoring
from outpace.backends.torch.sampling import verifier as device_verifier
from outpace.backends.torch.sampling.draws import Draws, Fetch, Mode, mode_for
from outpace.backends.torch.sampling.independent import DeviceProbs
from outpace.backends.torch.sampling.rejection import KeptDraft, Rejection
from outpace.core import Case, Request, StepPlan, TokenLogprob, Verdict
from outpace.decoding.acceptance import match_known, match_known_tree
from outpace.decoding.verification import matches_own_tokens

if TYPE_CHECKING:
    from outpace.backends.torch.runner import TorchRunner

_WAITED = 20e-6  # seconds; after a shorter wait, the step was already done

# The draft that runs behind the verification of these cases; waits until the device has verified them. Or None.
NextDraft = Callable[[Sequence[Case]], "FollowingDraft | None"]


@dataclass(frozen=True, slots=True)
class FollowingDraft:
    """A draft that runs behind a verification."""

    run: LoopRun
    verifying: list[Verifying]  # how it will be verified
    accepted: list[int]  # of each case that is verified now: the tokens that the device has accepted
    last: list[int]  # and the token after them

    def follows(self, verdicts: Sequence[Verdict]) -> bool:
        """Not if the host had to verify again."""
        return all(
            verdict.num_accepted == accepted and verdict.tokens[-1] == last
            for verdict, accepted, last in zip(verdicts, self.accepted, self.last, strict=True)
        )


@dataclass(slots=True)
class _Chain:
    """A bucket that continues without the host, and the requests of its rows."""

    bucket: Bucket
    draws: Draws
    requests: list[Request]
    pages: list[tuple[int, ...]]


@dataclass(slots=True)
class _Begun:
    """A step started before its plan arrived."""

    chain: _Chain
    lines: dict[int, int]  # by sequence; without those whose cache has changed since
    starts: list[int]  # position of the token that each line feeds
    fetch: Fetch
    fed: list[int] = field(default_factory=list)  # those tokens, by line, once known
    since: float = 0.0  # when they became known and the device started this step

    def feed(self, tokens: list[int]) -> None:
        self.fed, self.since = tokens, perf_counter()


def _is_plain(case: Case) -> bool:
    """No draft, and the device decides the token."""
    return not case.tokens and needs_only_tokens(case.request)


class DeviceExecutor:
    def __init__(self, runner: TorchRunner) -> None:
        self._runner = runner
        self._begun: _Begun | None = None
        self._early_start = EarlyStart()
        self._expected: dict[int, int] = {}  # after a plain step: by sequence, the position of its next token
        self._is_never_drafted = False  # whether those sequences never use drafts
        self._ahead: Ahead | None = None
        self.next_draft: NextDraft | None = None
        self.foresight = Foresight()
        self.moved: dict[int, int] = {}  # of the latest step: `Ahead.moved`
        self._num_rows = 0  # of the latest plan
        self.num_steps = 0

    def stop(self) -> None:
        """Drop the steps that were started early."""
        self._begun = self._ahead = None

    def forget(self, seq: int, num_kept: int | None = None) -> None:
        """The cache of a sequence changes: drop what was started early for it, unless it continues the kept tokens."""
        self._expected.pop(seq, None)
        if self._begun is not None:
            self._begun.lines.pop(seq, None)
        if self._ahead is not None and self._ahead.starts.get(seq, num_kept) != num_kept:
            self._drop_ahead()

    def begin_verifying(self, tasks: Sequence[DraftTask], run: LoopRun | TreeRun) -> Ahead | None:
        """Start to verify a draft that still runs; not if the plan will have more rows, which need a second step."""
        self._drop_ahead()
        # Each row must be one token and a draft.
        can_wait = all(
            len(task.request.tokens) == task.request.num_computed + 1
            and self._runner.holds(task.request.seq, task.request.num_computed)
            for task in tasks
        )
        if len(tasks) == self._num_rows and can_wait:
            self._launch_ahead([Verifying.of(task) for task in tasks], run)
        return self._ahead

    def _launch_ahead(self, verifying: list[Verifying], run: LoopRun | TreeRun) -> None:
        begin = perf_counter()
        self._ahead = begin_ahead(self._runner, verifying, run)
        if self._ahead is not None:
            self.foresight.learn_launched(perf_counter() - begin)

    def verifies(self, tasks: Sequence[DraftTask]) -> Ahead | None:
        """The verification of these drafts, if it began early. The drafts began behind the last verification."""
        self.foresight.learn_asked(perf_counter())
        if self._ahead is None:
            return None
        begun = rows_of(self._ahead.rows)
        asked = [(task.request.seq, task.request.num_computed, 1 + task.depth) for task in tasks]
        return self._ahead if begun == asked else None

    def _begin_next(self, cases: Sequence[Case]) -> FollowingDraft | None:
        """Start the next verification before this one's verdicts are made and committed, if its plan can be foreseen.

        It overwrites the logits of this one."""
        begin = perf_counter()
        self.foresight.learn_verified(self.num_steps, begin)
        found = None if self.next_draft is None else self.next_draft(cases)
        if found is not None:
            self.foresight.expect([(each.seq, each.start, each.num_tokens) for each in found.verifying])
            if self.foresight.is_worth():
                found.run.loop.keep()
                self._launch_ahead(found.verifying, found.run)
            self.foresight.learn_begun(perf_counter() - begin)
        return found

    def _drop_ahead(self) -> None:
        if self._ahead is not None:
            self._ahead.fetch.wait()  # the device reads its buffers until then
            self._ahead.rejection.wait()
            self._ahead = None

    def __call__(
        self, plan: StepPlan, cases: Sequence[Case], meanwhile: Callable[[], None] | None = None
    ) -> StepResult:  # fmt: skip
        begin = perf_counter()
        runner, begun = self._runner, self._begun
        self._begun = None
        runner.reserve_rows(plan.rows)
        is_plain = len(cases) == plan.num_tokens == len(plan.rows) and all(map(_is_plain, cases))
        self._num_rows = len(plan.rows)
        self.num_steps += 1
        self.moved = {}
        self.foresight.learn_plan(plan.rows)
        self._update_early_start(plan, cases, is_plain, begin)
        can_use = bool(cases) and not plan.num_scored  # steps that were started early have no logits of prompts
        answered = self._expected_rows(begun, plan, cases) if begun is not None and can_use else {}
        verified = self._ahead.is_in(plan, cases) if self._ahead is not None and can_use else None
        if verified is None or (len(verified) < len(plan.rows) and _any_logprobs(cases)):
            self._drop_ahead()
        if plan.num_scored:
            result = self._run_scored(plan, cases, begin, meanwhile)
        elif self._ahead is not None and verified is not None:
            result = self._take_ahead(plan, cases, verified, begin, meanwhile)
        elif begun is not None and is_plain and len(answered) == len(plan.rows):
            result = self._take(begun, plan, cases, list(answered.values()), begin)
        elif begun is not None and answered and not _any_logprobs(cases):
            result = self._take_some(begun, plan, cases, answered, begin)
        else:
            result = self._run(plan, cases, is_plain, begin, meanwhile)
        for row in plan.rows:
            runner.pool.advance(row.seq, len(row.tokens))
        now = perf_counter()
        self._early_start.end(now, now - begin if is_plain and begun is None else None)
        was_wasted = begun is not None and len(answered) < len(begun.chain.requests)
        return replace(result, is_typical=False) if was_wasted else result

    def _update_early_start(self, plan: StepPlan, cases: Sequence[Case], is_plain: bool, now: float) -> None:
        """Tell `EarlyStart` whether the plan continues the last one, if that was plain and has live sequences."""
        self._early_start.begin(now, is_plain)
        expected = self._expected
        if expected:
            goes_on = is_plain and all(expected.get(row.seq) == row.start for row in plan.rows)
            self._early_start.learn(self._is_never_drafted, goes_on)
        self._expected = {row.seq: row.start + 1 for row in plan.rows} if is_plain else {}
        if is_plain and not (expected and goes_on):
            self._is_never_drafted = all(case.request.params.speculation.mode == "off" for case in cases)

    def _expected_rows(self, begun: _Begun, plan: StepPlan, cases: Sequence[Case]) -> dict[int, int]:
        """Rows of the plan that are as expected: row to line."""
        found = {}
        waiting = iter(cases)
        for i, row in enumerate(plan.rows):
            if not row.num_logits:
                continue
            case, line = next(waiting), begun.lines.get(row.seq)
            if (
                line is not None
                and len(row.tokens) == 1
                and row.start == begun.starts[line]
                and row.tokens[0] == begun.fed[line]
                and case.request is begun.chain.requests[line]
                and _is_plain(case)
            ):
                found[i] = line
        return found

    def _run(
        self,
        plan: StepPlan,
        cases: Sequence[Case],
        is_plain: bool,
        begin: float,
        meanwhile: Callable[[], None] | None = None,
    ) -> StepResult:
        """Run a step that was not started early."""
        mode = _drawing_mode(cases, self._runner.model)
        launched = self._runner.launch(plan, gives_peaks=mode == "peaks")
        if not cases:
            if meanwhile is not None:
                meanwhile()
            if self._runner.device.type == "cuda":
                torch.cuda.current_stream().synchronize()
            return StepResult(launched, [], perf_counter() - begin)
        requests = [case.request for case in cases for _ in range(len(case.tokens) + 1)]
        positions = [len(case.request.tokens) + offset for case in cases for offset in case.offsets]
        draws = launched.drawn(mode, requests, positions)
        fetch = draws.fetch()
        if is_plain and launched.bucket is not None:
            pages = [self._runner.pool.blocks(row.seq) for row in plan.rows]
            self._start_next(_Chain(launched.bucket, draws, requests, pages), plan)
        rejection = _launch_rejection(cases, launched, draws)
        if meanwhile is not None:
            meanwhile()
        tokens, exact = (found[launched.lines].tolist() for found in fetch.wait())
        if self._begun is not None:
            self._begun.feed(tokens)
            return self._concluded(plan, cases, tokens, exact, begin)
        seconds = perf_counter() - begin
        return StepResult(launched, _verdicts(cases, tokens, exact, launched, rejection), seconds)

    def _run_scored(
        self, plan: StepPlan, cases: Sequence[Case], begin: float, meanwhile: Callable[[], None] | None
    ) -> StepResult:
        """Run a step that also scores prompts. Its logits stay on the device until the engine asks for them."""
        launched = self._runner.launch(plan)
        if meanwhile is not None:
            meanwhile()
        verdicts = device_verifier.verify(cases, launched.some(plan.lines_of_cases())) if cases else []
        if self._runner.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        return StepResult(launched, verdicts, perf_counter() - begin)

    def _take(
        self, begun: _Begun, plan: StepPlan, cases: Sequence[Case], lines: list[int], begin: float
    ) -> StepResult:  # fmt: skip
        """Finish a step that was started early; first start the next one, if its rows are still the same."""
        if lines == list(range(len(begun.chain.requests))):
            self._start_next(begun.chain, plan)
        asked = perf_counter()
        tokens, exact = (found[lines].tolist() for found in begun.fetch.wait())
        if self._begun is not None:
            self._begun.feed(tokens)
        result = self._concluded(plan, cases, tokens, exact, begin)
        has_waited = begin + result.forward_seconds - asked > _WAITED
        return replace(result, hidden_seconds=begin - begun.since if has_waited else 0.0, is_typical=has_waited)

    def _take_some(
        self, begun: _Begun, plan: StepPlan, cases: Sequence[Case], answered: dict[int, int], begin: float
    ) -> StepResult:  # fmt: skip
        """Some rows were started early; the others run in a second step."""
        case_of = _by_row(plan, cases)
        verdicts = self._run_rest(plan, case_of, answered, begin)
        tokens, exact = (found[list(answered.values())].tolist() for found in begun.fetch.wait())
        known = self._concluded(
            StepPlan([plan.rows[i] for i in answered]), [case_of[i] for i in answered], tokens, exact, begin
        )  # fmt: skip
        verdicts |= dict(zip(answered, known.verdicts, strict=True))
        return StepResult(DiscardedLogits(), [verdicts[i] for i in case_of], known.forward_seconds)

    def _take_ahead(
        self,
        plan: StepPlan,
        cases: Sequence[Case],
        verified: dict[int, Case],
        begin: float,
        meanwhile: Callable[[], None] | None,
    ) -> StepResult:
        """Finish a verification that was started early; rows that are not in it run in a second step."""
        ahead, self._ahead = self._ahead, None
        assert ahead is not None
        self.moved = ahead.moved
        expected = list(verified.values())
        if meanwhile is not None:
            meanwhile()
        tokens, exact = (found[ahead.launched.lines] for found in ahead.fetch.wait())
        foreseen = None
        if len(verified) == len(plan.rows) and not ahead.needs_logits(exact):
            foreseen = self._begin_next(expected)
        seconds, hidden = perf_counter() - begin, begin - ahead.since
        verdicts = _verdicts(expected, tokens.tolist(), exact.tolist(), ahead.launched, ahead.rejection)
        if foreseen is not None and not foreseen.follows(verdicts):
            self._drop_ahead()
        known = dict(zip(verified, verdicts, strict=True))
        if len(verified) == len(plan.rows):
            return StepResult(ahead.launched, list(known.values()), seconds, hidden)
        case_of = _by_row(plan, cases)
        known |= self._run_rest(plan, case_of, verified, begin)
        return StepResult(DiscardedLogits(), [known[i] for i in case_of], perf_counter() - begin)

    def _run_rest(
        self, plan: StepPlan, case_of: dict[int, Case], known: Collection[int], begin: float
    ) -> dict[int, Verdict]:  # fmt: skip
        """Run the rows that are not in `known` in a step of their own."""
        rest = [i for i in range(len(plan.rows)) if i not in known]
        result = self._run(
            StepPlan([plan.rows[i] for i in rest]), [case_of[i] for i in rest if i in case_of], False, begin
        )  # fmt: skip
        return dict(zip([i for i in rest if i in case_of], result.verdicts, strict=True))

    def _concluded(
        self, plan: StepPlan, cases: Sequence[Case], tokens: list[int], exact: list[int], begin: float
    ) -> StepResult:  # fmt: skip
        seconds = perf_counter() - begin
        verdicts = [Verdict([token], 0, 0) for token in tokens]
        unsure = [i for i, is_exact in enumerate(exact) if not is_exact]
        if unsure:  # their logits are overwritten, and the step started early may feed wrong tokens
            self._begun = None
            again = self._runner.launch(StepPlan([plan.rows[i] for i in unsure]))
            result = device_verifier.verify([cases[i] for i in unsure], again.some(range(len(unsure))))
            for i, verdict in zip(unsure, result, strict=True):
                verdicts[i] = verdict
        return StepResult(DiscardedLogits(), verdicts, seconds)

    def _start_next(self, chain: _Chain, plan: StepPlan) -> None:
        """Start the next step early, if it is likely to be needed and its pages are free."""
        runner = self._runner
        is_likely = self._early_start.is_worth(self._is_never_drafted) and not all(
            len(request.tokens) + 1 >= request.max_length for request in chain.requests
        )
        if not is_likely or any(row.start + 2 > runner.capacity.max_context for row in plan.rows):
            return
        changed = {}
        for i, row in enumerate(plan.rows):
            if not runner.try_reserve(row.seq, 2):
                return
            pages = runner.pool.blocks(row.seq)
            if pages != chain.pages[i]:
                chain.pages[i] = changed[i] = pages
        if changed:
            chain.bucket.change_tables(changed)
        chain.bucket.replay()
        chain.draws.replay()
        lines = {row.seq: i for i, row in enumerate(plan.rows)}
        self._begun = _Begun(chain, lines, [row.start + 1 for row in plan.rows], chain.draws.fetch())


def score(logits: Logits, begin: int, tokens: Sequence[int], num_top: int) -> list[TokenLogprob]:
    """Score prompt tokens on the device."""
    assert isinstance(logits, Launched)
    return scoring.score(logits.some(range(begin, begin + len(tokens))), tokens, num_top)


def _by_row(plan: StepPlan, cases: Sequence[Case]) -> dict[int, Case]:
    return dict(zip([i for i, row in enumerate(plan.rows) if row.num_logits], cases, strict=True))


def _drawing_mode(cases: Sequence[Case], model: Model) -> Mode:
    requests = [case.request for case in cases]
    has_probs = any(case.draft is not None and case.draft.probs is not None for case in cases)  # compared with logits
    return mode_for(requests) if has_probs else drawing_mode(requests, model)


def _any_logprobs(cases: Sequence[Case]) -> bool:
    return any(case.request.params.logprobs is not None for case in cases)


def _is_drawn(request: Request) -> bool:
    """Whether the drawn tokens are its tokens; it may still need logprobs."""
    return not request.shaper.may_adjust and not request.params.speculation.is_lossy


def _launch_rejection(cases: Sequence[Case], launched: Launched, draws: Draws) -> Rejection:
    """Start to verify the independent drafts among the cases, behind their step."""
    begins = accumulate([len(case.tokens) + 1 for case in cases], initial=0)
    kept, indexes = list[KeptDraft](), list[int]()
    buffer: Tensor | None = None
    for i, (case, begin) in enumerate(zip(cases, begins, strict=False)):
        probs = case.draft.probs if case.draft is not None else None
        if isinstance(probs, DeviceProbs) and len(probs):
            lines = launched.lines[begin : begin + len(case.tokens) + 1]
            kept.append(KeptDraft(case.request, len(case.request.tokens), lines, probs.row))
            indexes.append(i)
            buffer = probs.buffer
    if buffer is None:
        return Rejection([], None)
    return Rejection(indexes, launched.rejection(draws, buffer, kept, [cases[i].tokens for i in indexes]))


def _verdicts(
    cases: Sequence[Case], tokens: list[int], exact: list[int], logits: Launched, rejection: Rejection
) -> list[Verdict]:
    """Verify cases against the target's own tokens, or by `rejection`; `sampling/verifier.py` verifies the others."""
    verdicts: list[Verdict | None] = []
    others, lines = list[Case](), list[int]()
    all_exact, rejected = all(exact), rejection.verdicts([case.tokens for case in cases])
    at = 0
    for i, case in enumerate(cases):
        draft = case.draft
        drafted = draft.tokens if draft is not None else ()
        begin, at = at, at + len(drafted) + 1
        is_matched = draft is None or draft.probs is None or matches_own_tokens(case.request.params)
        if is_matched and (all_exact or all(exact[begin:at])) and _is_drawn(case.request):
            own = tokens[begin:at]
            tree = case.tree
            verdicts.append(match_known(drafted, own) if tree is None else match_known_tree(drafted, tree, own))
        elif i in rejected:
            verdicts.append(rejected[i])
        else:
            verdicts.append(None)
            others.append(case)
            lines += range(begin, at)
    result = iter(device_verifier.verify(others, logits.some(lines)) if others else ())
    return [next(result) if verdict is None else verdict for verdict in verdicts]
