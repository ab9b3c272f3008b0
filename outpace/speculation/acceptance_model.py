"""How likely the next draft token is to be accepted, given that those before it were.

Everything is kept in log-odds. Of each proposer, recent traffic gives the general part, by temperature: what its own
confidence is worth (its share of right guesses where it claims 60%, 90%, ...), and its rate before any confidence is
known. Each request adds one number of its own, learned from its own drafts, drifting with time and drawn back to the
general part where it has not been seen lately. Both are learned by the same rule, one step of Newton's method on the
likelihood of each trial: few observations move them little or much according to how sure they were.

A trial is a draft token whose fate became known. Tokens after a refused one were never tried, and a draft accepted
whole says nothing about the token that would have come next: only what was tried is counted.

Plain arithmetic on a few numbers at a time: between two steps that stream a model's weights through the processor's
caches, every call into an array library costs more than what it computes here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from math import exp, log, sqrt

from outpace.speculation.differences import Own, Spread

TEMPERATURES = (0.0, 0.5, 0.9)  # up to and including; hotter is a class of its own
_NUM_POSITIONS = 4  # the rate without confidence: of the first, second, third, and of all further tokens
_LOW, _HIGH, _NUM_KNOTS = -3.0, 5.0, 9  # log-odds of confidence
_WIDTH = (_HIGH - _LOW) / (_NUM_KNOTS - 1)
_FINE = 1024  # steps in which confidence is read
_ALIKE = 8  # steps of log-odds, in each one, within which requests are forecast alike

# What is believed before any traffic, in log-odds, by temperature. A draft model is right four times in five on greedy
# text and a little less as text gets freer: it draws at the same temperature and with the same noise, or is judged by
# its distribution, so that the two agree about as often as their distributions do (benchmarks.policy_cells: tokens of
# Qwen's draft:3 are right in 0.85, 0.83 and 0.81 of all cases at 0, 0.7 and 1). A confidence is taken for less than it
# says, because proposers flatter themselves; that of guesses from text for less still, which know no temperature.
_RATE_PRIOR = (1.4, 1.3, 1.2, 1.0)
_TRUST_PRIOR = 0.8
_CONFIDENCE_SHIFT = (0.0, -0.3, -0.7, -1.0)

_GENERAL_CERTAINTY = 1.5  # of the prior, in units of information; a trial brings at most a quarter
_LEAST_SHARE = 0.05  # of what set a request apart, for those that come after it
_ENOUGH_TRIALS = 6  # to believe what is not only assumed
_CAUTION = 0.6  # standard deviations that a rate may be lower than it is believed to be
_MOST_COUNTED_ON = 0.75
_MOST_CERTAINTY = 40.0  # traffic changes: older trials are forgotten once there are many
_LEAST, _MOST = 0.005, 0.995  # probabilities nobody can claim to know better


def temperature_class(temperature: float) -> int:
    return sum(temperature > bound for bound in TEMPERATURES)


@dataclass(slots=True)
class Prospects:
    """What is known of one request: how it differs from others, by proposer."""

    temperature: int  # class
    shift: float = 0.0  # what was known of it beforehand, in log-odds
    step: int = 0  # that it has come to
    rates: dict[str, Own] = field(default_factory=dict)  # where no confidence is known,
    trusts: dict[str, Own] = field(default_factory=dict)  # and where it is


class AcceptanceModel:
    def __init__(self, methods: Sequence[str], *, models: Collection[str] = ()) -> None:
        """`models`: those of the methods that are models, and draw at the temperature of the request."""
        self._methods = {method: _Method(is_model=method in models) for method in methods}
        self._forecasts: dict[tuple[str, int, int, int, float], list[float]] = {}  # until rates are learned again

    def given_confidence(self, method: str, prospects: Prospects, confidence: Sequence[float]) -> list[float]:
        """P(accepted | those before were) for each token of a draft whose proposer said how sure it is."""
        knots = self._methods[method].knots[prospects.temperature]
        own = self._trust(method, prospects).mean
        return [_chance(knots, sure, own) for sure in confidence]

    def survival(self, method: str, prospects: Prospects, confidence: Sequence[float], least: float) -> list[float]:
        """The chance that each token is reached and accepted, as far as that exceeds `least`."""
        knots = self._methods[method].knots[prospects.temperature]
        own, product, out = self._trust(method, prospects).mean, 1.0, list[float]()
        for sure in confidence:  # `_chance` once more, in line: this is most of what weighing guesses costs
            left, share = _PLACES[int(sure * _FINE)]
            low = knots[left]
            chance = 1.0 / (1.0 + exp(-(low + (knots[left + 1] - low) * share + own)))
            product *= chance if chance < _MOST else _MOST
            if product < least:
                break
            out.append(product)
        return out

    def forecast_survival(self, method: str, prospects: Prospects, depth: int, least: float) -> list[float]:
        """The same before anything was drafted. Requests known alike share one list: not to be changed."""
        own = round(self._rate(method, prospects).mean * _ALIKE)
        key = (method, prospects.temperature, own, depth, least)
        known = self._forecasts.get(key)
        if known is None:
            rates = self._methods[method].rates[prospects.temperature]
            product, known = 1.0, []
            for position in range(depth):
                product *= _probability(rates[min(position, _NUM_POSITIONS - 1)] + own / _ALIKE)
                if product < least:
                    break
                known.append(product)
            self._forecasts[key] = known
        return known

    def forecast(self, method: str, prospects: Prospects, depth: int) -> list[float]:
        """P(accepted | those before were) before anything was drafted."""
        rates = self._methods[method].rates[prospects.temperature]
        own = self._rate(method, prospects).mean
        known = [_probability(rate + own) for rate in rates[:depth]]
        return known + known[-1:] * (depth - len(known))

    def _rate(self, method: str, prospects: Prospects) -> Own:
        return self._own(prospects, prospects.rates, method, self._methods[method].rate_spreads)

    def _trust(self, method: str, prospects: Prospects) -> Own:
        return self._own(prospects, prospects.trusts, method, self._methods[method].trust_spreads)

    @staticmethod
    def _own(prospects: Prospects, owns: dict[str, Own], method: str, spreads: Sequence[Spread]) -> Own:
        own = owns.get(method)
        if own is None:
            spread = spreads[prospects.temperature]
            own = owns[method] = Own(spread, prospects.shift, spread.variance, prospects.step)
        own.at(prospects.step)
        return own

    def is_known(self, method: str) -> bool:
        """Whether traffic has said anything about a proposer yet."""
        return self.evidence(method) >= 1.0

    def evidence(self, method: str) -> float:
        """How much it has said, in units of what is enough to believe it at all."""
        return self._methods[method].num_trials / _ENOUGH_TRIALS

    def certainty(self, methods: Iterable[str]) -> float:
        """The share of what is expected of these proposers that can be counted on: the more trials, the more."""
        trials = min((self._methods[method].num_trials for method in methods), default=0)
        return min(_MOST_COUNTED_ON, 1.0 - 2.0 / sqrt(trials)) if trials >= _ENOUGH_TRIALS else 0.0

    def cautious_share(self, method: str, temperature: int, depth: int) -> float:
        """Of the tokens a draft is forecast to have accepted, what is left were its rates as low as they may be."""
        state = self._methods[method]
        rates, known = state.rates[temperature], state.rate_certainty[temperature]
        believed = cautious = 0.0
        likely = unlikely = 1.0
        for position in range(depth):
            i = min(position, _NUM_POSITIONS - 1)
            likely *= _probability(rates[i])
            unlikely *= _probability(rates[i] - _CAUTION / sqrt(known[i]))
            believed += likely
            cautious += unlikely
        return cautious / believed if believed else 0.0

    def observe(
        self,
        method: str,
        prospects: Prospects,
        confidence: Sequence[float],
        num_hits: int,
        num_tried: int,
        num_drafted: int | None = None,
    ) -> None:
        """Of a draft, `num_tried` tokens met their fate and the first `num_hits` of them were accepted.

        `confidence` is of each token, or empty where the proposer was not asked for it.
        """
        if not num_tried:
            return
        if confidence:
            self.observe_guess(method, prospects, confidence, num_hits, num_tried)
        else:
            self._methods[method].num_trials += num_tried
        self._learn_rate(method, prospects, 0, [float(i < num_hits) for i in range(num_tried)], num_drafted)

    def observe_guess(
        self, method: str, prospects: Prospects, confidence: Sequence[float], num_hits: int, num_tried: int
    ) -> None:
        """Learn what confidence is worth, and nothing else: a guess is never forecast, it is there to be looked at."""
        state, own = self._methods[method], self._trust(method, prospects)
        state.num_trials += num_tried
        knots, certainty = state.knots[prospects.temperature], state.knot_certainty[prospects.temperature]
        surprise = information = 0.0
        # What each is believed to be worth before any of them is learned from.
        chances = [_chance(knots, sure, own.mean) for sure in confidence[:num_tried]]
        for i, chance in enumerate(chances):
            missed, informs = (i < num_hits) - chance, chance * (1.0 - chance)
            left, share = _PLACES[int(confidence[i] * _FINE)]
            _newton(knots, certainty, left, 1.0 - share, missed, informs)
            _newton(knots, certainty, left + 1, share, missed, informs)
            surprise += missed
            information += informs
        own.learn(surprise, information)

    def observe_unsaid(self, method: str, prospects: Prospects, confidence: float, position: int) -> None:
        """A draft stopped before a token because of this confidence: what that is worth stands in for its fate."""
        self._methods[method].num_trials += 1
        [worth] = self.given_confidence(method, prospects, [confidence])
        self._learn_rate(method, prospects, position, [worth])

    def _learn_rate(
        self, method: str, prospects: Prospects, start: int, fates: Sequence[float], num_drafted: int | None = None
    ) -> None:
        self._forecasts.clear()
        state = self._methods[method]
        chances = self.forecast(method, prospects, start + len(fates))[start:]
        surprise = information = moved = 0.0
        for i, (chance, fate) in enumerate(zip(chances, fates, strict=True)):
            moved = state.learn_rate(prospects.temperature, start + i, fate - chance, chance * (1 - chance))
            surprise += fate - chance
            information += chance * (1 - chance)
        if start + len(fates) == num_drafted:
            state.carry_on(prospects.temperature, start + len(fates) - 1, moved)
        self._rate(method, prospects).learn(surprise, information)

    def end(self, prospects: Prospects) -> None:
        """A request is over: what set it apart is, in part, what was not known of all. The first ones say most."""
        for owns, is_rate in ((prospects.rates, True), (prospects.trusts, False)):
            for method, own in owns.items():
                self._methods[method].follow(prospects.temperature, own.mean, is_rate=is_rate)
                own.spread.fade()
        self._forecasts.clear()

    def general_rate(self, method: str, temperature: float) -> float:
        """For people: how often the first draft token is accepted in recent traffic."""
        return _probability(self._methods[method].rates[temperature_class(temperature)][0])


class _Method:
    """The general part of one proposer: by temperature class, its rates by position and its confidence's worth."""

    def __init__(self, *, is_model: bool) -> None:
        shifts = [0.0 if is_model else shift for shift in _CONFIDENCE_SHIFT]
        self._num_ended = {is_rate: [0] * len(_RATE_PRIOR) for is_rate in (False, True)}  # requests
        self.num_trials = 0  # of tokens that were drafted or guessed
        self.rate_spreads = [Spread() for _ in _RATE_PRIOR]  # by temperature class
        self.trust_spreads = [Spread() for _ in _CONFIDENCE_SHIFT]
        self.rates = [[prior] * _NUM_POSITIONS for prior in _RATE_PRIOR]
        self.knots = [[_TRUST_PRIOR * (_LOW + i * _WIDTH) + shift for i in range(_NUM_KNOTS)] for shift in shifts]
        self.rate_certainty = [[_GENERAL_CERTAINTY] * _NUM_POSITIONS for _ in _RATE_PRIOR]
        self.knot_certainty = [[_GENERAL_CERTAINTY] * _NUM_KNOTS for _ in _CONFIDENCE_SHIFT]

    def follow(self, temperature: int, distance: float, *, is_rate: bool) -> None:
        ended = self._num_ended[is_rate]
        ended[temperature] += 1
        values = (self.rates if is_rate else self.knots)[temperature]
        share = max(_LEAST_SHARE, 1.0 / (1.0 + ended[temperature]))
        values[:] = [value + share * distance for value in values]

    def learn_rate(self, temperature: int, position: int, surprise: float, information: float) -> float:
        """Returns by how much the rate has moved."""
        rates, position = self.rates[temperature], min(position, _NUM_POSITIONS - 1)
        before = rates[position]
        _newton(rates, self.rate_certainty[temperature], position, 1.0, surprise, information)
        return rates[position] - before

    def carry_on(self, temperature: int, position: int, moved: float) -> None:
        """Positions behind the last of a draft are like it, as far as nothing is known of their own.

        Else drafts of one token would say nothing of deeper ones, and nobody would try any.
        """
        rates, certainty = self.rates[temperature], self.rate_certainty[temperature]
        for later in range(position + 1, _NUM_POSITIONS):
            rates[later] += moved * _GENERAL_CERTAINTY / certainty[later]


def _newton(
    values: list[float], certainty: list[float], i: int, weight: float, surprise: float, information: float
) -> None:
    sure = certainty[i] + weight * weight * information
    if sure > _MOST_CERTAINTY:
        sure = _MOST_CERTAINTY
    certainty[i] = sure
    values[i] += weight * surprise / sure


def _knot(odds: float) -> tuple[int, float]:
    place = (odds - _LOW) / _WIDTH
    left = min(int(place), _NUM_KNOTS - 2)
    return left, place - left


def _log_odds(probability: float) -> float:
    inside = min(max(probability, 1e-4), 1.0 - 1e-4)
    return min(max(log(inside / (1.0 - inside)), _LOW), _HIGH)


def _probability(odds: float) -> float:
    return min(max(1.0 / (1.0 + exp(-odds)), _LEAST), _MOST)


# Where a confidence lies between the knots, looked up instead of computed: a logarithm for every token adds up.
_PLACES = [_knot(_log_odds(i / _FINE)) for i in range(_FINE + 1)]


def _chance(knots: Sequence[float], sure: float, own: float) -> float:
    """What a confidence is worth: straight lines between the knots, and the request's own distance from them."""
    left, share = _PLACES[int(sure * _FINE)]
    low = knots[left]
    chance = 1.0 / (1.0 + exp(-(low + (knots[left + 1] - low) * share + own)))
    return _LEAST if chance < _LEAST else _MOST if chance > _MOST else chance
