"""The best plan for a step: which draft tokens to take of which request, given what they cost and how likely they are.

Guesses are there already and cost nothing more; a draft model is priced in `drafting.py`. A plan that would slow down a
request that gains nothing by it, beyond what that one may lose, is made fairer or smaller in `fairness.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outpace.config import MAX_DEPTH
from outpace.core import Draft
from outpace.speculation.acceptance_model import AcceptanceModel
from outpace.speculation.base import DraftAsk
from outpace.speculation.costs import Costs
from outpace.speculation.drafting import DraftWeigher, Stop
from outpace.speculation.fairness import make_fair
from outpace.speculation.reading import Prospect
from outpace.speculation.seats import NEURAL, Choice, Step
from outpace.speculation.sweep import Plan, Table, survival

_MARGIN = 1.01  # a gain smaller than this is within what measured costs can be wrong by
_MODEL_AGAIN = 4  # steps after which a draft model that did not pay is weighed again
_LEAST_SURVIVAL = 0.05  # a token less likely than this to be reached and right pays nowhere,
_MOST_WEIGHED = 1024  # tokens of guesses looked at in a step: the more requests, the fewer of each
_LEAST_EACH = 4
_LEAST_WORTH = 0.4  # nor one that brings less than this part of what a token costs on average
_FIRST_STAKE = 1.0  # plain steps that a batch may lose to proposers of which nothing is known
_GUESS_STAKE = 0.35  # and to guesses, whatever is known; as much again for each token on end that was as guessed


@dataclass(slots=True)
class Weighed:
    """A plan, and for each of its rows the step's row and the guess it would take."""

    plan: Plan
    rows: list[int]
    guesses: list[Draft | None]


@dataclass(slots=True)
class _Weighing:
    """A step being weighed: its costs, and for each row that can have a draft, its guess and the chances of that."""

    step: Step
    table: Table
    headroom: float
    rows: list[int]
    guesses: list[Draft | None]
    chances: list[list[float]]


class Weigher:
    def __init__(self, costs: Costs, acceptance: AcceptanceModel, drafting: DraftWeigher, max_step_tokens: int) -> None:
        self._costs = costs
        self._acceptance = acceptance
        self._drafting = drafting
        self._max_step_tokens = max_step_tokens
        self._model_again = 0  # the step in which a draft model is weighed again

    def best_plan(
        self,
        step: Step,
        choices: Sequence[Choice],
        headroom: float,
        *,
        guessable: Sequence[int],
        with_model: bool = True,
    ) -> Weighed | None:
        """The draft tokens worth taking, of guesses for the rows `guessable`; None where nothing beats plain decoding.

        Were none of them accepted, the step would lose no more than `headroom` seconds; once something is known of
        those who propose them, were only those accepted that can be counted on.
        """
        step.reason = "nothing beats plain decoding"
        slot = min(step.slot_seconds, step.first_slot_seconds)
        least = max(_LEAST_SURVIVAL, _LEAST_WORTH * slot * step.rows / step.plain_seconds)
        guessed = self._best_guesses(step, guessable, least)
        looks = with_model and step.number >= self._model_again
        prospects = self._drafting.prospects(step, least) if looks else []
        if prospects:
            self._model_again = step.number + _MODEL_AGAIN  # unless it is taken
        if not guessed and not prospects:
            if not any(draft.tokens for drafts in step.guesses.values() for draft in drafts):
                step.reason = "no guess"
            return None
        rows = sorted({*guessed, *(prospect.row for prospect in prospects)}) if prospects else list(guessed)
        guesses = [guessed[i][0] if i in guessed else None for i in rows]
        chances = [guessed[i][1] if i in guessed else [] for i in rows]
        most = sum(map(len, chances)) + sum(len(prospect.survival) for prospect in prospects)
        weighing = _Weighing(step, self._table(step, choices, most), headroom, rows, guesses, chances)
        best = self._shaped(weighing, Plan(weighing.table, chances)) if guessed else None
        if prospects:
            drafted = self._drafted(weighing, prospects)
            if drafted is not None:
                self._model_again = 0
                if best is None or drafted.speed > best.speed:
                    best = drafted
        return Weighed(best, rows, guesses) if best is not None else None

    def _drafted(self, weighing: _Weighing, prospects: list[Prospect]) -> Plan | None:
        """The best plan with the draft model that hurts nobody: with all texts, those that may be staked on what is
        known, or only those it has read; as deep as promises most, or less deep, because what its passes take is taken
        from all."""
        step, table = weighing.step, weighing.table
        read = [prospect for prospect in prospects if step.seats[prospect.row].has_read]
        staked = [prospect for prospect in prospects if prospect.is_staked]
        groups = [prospects]
        for smaller in (staked, read):
            if 0 < len(smaller) < len(groups[-1]):
                groups.append(smaller)
        for group in groups:
            deepest = MAX_DEPTH
            while deepest:
                plan = self._drafting.best(step, table, weighing.rows, weighing.chances, group, deepest)
                if plan is None:
                    break
                deepest = plan.num_passes // 2
                shaped = self._shaped(weighing, plan)
                if shaped is not None:
                    in_debt = not weighing.headroom
                    if self._drafting.reading.is_made_good(step, table, shaped, weighing.rows, group, in_debt=in_debt):
                        return shaped
                    break
        return None

    def _shaped(self, weighing: _Weighing, plan: Plan) -> Plan | None:
        """A plan made so small that it stakes no more than may be lost, and fair; None where that leaves no gain."""
        step, table = weighing.step, weighing.table
        # Plain steps may be faster than the costs of their parts say, where the host's part is done meanwhile.
        plain_speed = max(table.plain_speed, step.rows / (step.plain_seconds + step.guess_seconds))
        least_speed = plain_speed * _MARGIN
        if not plan.count or plan.speed < least_speed:
            return None
        stake = weighing.headroom
        certainty = self._acceptance.certainty(_proposers(plan, weighing.guesses))
        if certainty:
            token_seconds = step.plain_seconds / step.rows - self._costs.judge_seconds
            stake += certainty * sum(plan.gains) * token_seconds
        elif step.rows > 1:  # guesses can be compared with what is said without anybody waiting for it
            stake = min(stake, _FIRST_STAKE * step.plain_seconds)
        if plan.drafted is None:
            stake = min(stake, self._guess_stake(weighing, plan))
        longest = table.total(0, table.expected) + stake
        if plan.seconds > longest:
            plan.within(longest)
            if not plan.count and not certainty:
                step.reason = "too much to stake before any guess was compared with what is said"
        if step.rows > 1 and plan.count:
            make_fair(step, plan, weighing.rows, longest)
            if not plan.count:
                step.is_vetoed = True
        return plan if plan.count and plan.speed >= least_speed else None

    @staticmethod
    def _guess_stake(weighing: _Weighing, plan: Plan) -> float:
        """Seconds that guesses may cost, were none of them right: little at first, then the more they have been right.

        How sure a guesser is of itself says little where copying is about to begin or has just ended: a deep draft that
        fails there costs more than a shallow one that is right brings. Where deep ones cost little, they are made.
        """
        step = weighing.step
        right = sum([step.seats[i].num_right for i, depth in zip(weighing.rows, plan.depths, strict=True) if depth])
        return _GUESS_STAKE * (1.0 + right / step.rows) * step.plain_seconds

    def take(self, step: Step, choices: list[Choice], best: Weighed) -> None:
        """Put a plan into choices."""
        plan, drafted = best.plan, best.plan.drafted
        token_seconds = self._drafting.token_seconds(step, plan) if drafted is not None else 0.0
        least, to_go_on = plan.speed * plan.slot_seconds, plan.speed * (plan.slot_seconds + token_seconds)
        for row, (i, guess) in enumerate(zip(best.rows, best.guesses, strict=True)):
            depth, expected = plan.depths[row], 1.0 + plan.gains[row]
            if not depth:
                continue
            if drafted is not None and drafted[row]:
                stop = Stop(self._acceptance, step.seats[i], least, to_go_on)
                choices[i] = Choice(NEURAL, depth, ask=DraftAsk(step.requests[i], depth, stop), expected=expected)
            elif guess is not None:
                choices[i] = Choice(guess.proposer, depth, draft=guess, expected=expected)

    def _best_guesses(self, step: Step, rows: Sequence[int], least: float) -> dict[int, tuple[Draft, list[float]]]:
        """Of each of these rows, the guess that promises most, and the chance of each of its tokens to survive."""
        found: dict[int, tuple[Draft, list[float]]] = {}
        if not step.guesses:
            return found
        most_each = max(_LEAST_EACH, _MOST_WEIGHED // step.rows)
        for i in rows:
            most = 0.0
            for draft in step.guesses.get(step.requests[i].id, ()):
                if draft.tokens:
                    chances = self._acceptance.survival(
                        draft.proposer, step.seats[i].prospects, draft.confidence[:most_each], least
                    )
                    promised = sum(chances)
                    if promised > most:
                        most, found[i] = promised, (draft, chances)
        return found

    def _table(self, step: Step, choices: Sequence[Choice], most_drafted: int) -> Table:
        """What steps of every size cost, given what happens in any case."""
        fixed = sum([choice.depth for choice in choices])
        least = step.rows + step.num_prefill + fixed
        most = least + min(max(0, self._max_step_tokens - least), most_drafted)
        return Table(
            seconds=self._costs.target.by_tokens(step.rows, least, most, step.context),
            expected=step.rows + (self._expected_of_fixed(step, choices) if fixed else 0.0),
            token_seconds=self._costs.judge_seconds,
            before=self._costs.schedule_seconds + step.guess_seconds,
        )

    def _expected_of_fixed(self, step: Step, choices: Sequence[Choice]) -> float:
        total = 0.0
        for seat, choice in zip(step.seats, choices, strict=True):
            if choice.depth:
                gain = sum(survival(self._acceptance.forecast(choice.method, seat.prospects, choice.depth)))
                choice.expected = 1.0 + gain
                total += gain
        return total


def _proposers(plan: Plan, guesses: Sequence[Draft | None]) -> set[str]:
    """Of what a plan would take."""
    drafted = plan.drafted or [False] * len(guesses)
    found = {NEURAL} if any(drafted) else set()
    for guess, depth, is_drafted in zip(guesses, plan.depths, drafted, strict=True):
        if guess is not None and depth and not is_drafted:
            found.add(guess.proposer)
    return found
