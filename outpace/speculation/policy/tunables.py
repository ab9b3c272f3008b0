"""The numbers that tune the policy, each with the reason for its value.

The unit of time is the plain step: the time of one plain decoding step of the current batch.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tunables:
    # ---- budgets: what exploration may cost
    engine_grant: float = 1.5
    """Plain steps the engine may lose at the start: enough for one or two drafts that fail."""
    request_grant: float = 2.5
    """The same for a request: with `allowed_loss`, one of 256 tokens may lose 3%, one of 48 tokens 7%."""
    engine_share: float = 0.2
    """Times `allowed_loss` (2%): the share of plain time that the engine may lose. The rest covers expected gains that
    do not come. A request may lose all of `allowed_loss`."""
    most_balance: float = 8.0
    """Plain steps a budget can hold, so that old gains do not pay for current losses."""
    payback_steps: float = 32.0
    """Steps in which a draft is to repay a debt: a request that is always expected to gain 0.2 of a step, and
    never does, may owe 6 steps. Fewer let one unlucky request keep a whole batch from drafts that pay."""

    # ---- acceptance: the chance of a draft token
    caution: float = 1.0
    """Standard deviations between the mean and the lower bound. Between 0.6 and 1 the simulator's geometric mean
    differs by 0.2%: budgets bound the loss, this only sets how soon a good proposer is used."""
    model_prior: float = 0.8
    """Chance of a model's draft token before any trial: measured model pairs have 0.8 to 0.9."""
    prior_trials: float = 6.0
    """Weight of a prior, in trials: about three drafts outweigh it."""
    measured_trials: float = 32.0
    """Weight of what was measured on other prompts, which may differ from these."""
    most_trials: float = 160.0
    """Upper limit of the weight of past trials, because traffic changes."""
    spread: float = 0.45
    """Variance of the differences between requests, in log-odds squared, at the start; then learned."""

    # ---- plans: when a draft is worth its cost
    counted_on: float = 0.7
    """Share of a request's expected remaining tokens that may pay for catching up: it can end at any time."""
    longest_wait: int = 32
    """Longest wait between two attempts, in steps. Texts change from prose to copying within about forty tokens; on a
    CPU an attempt for eight requests takes an eighth of a plain step."""
    deciding_share: float = 0.5
    """Times `allowed_loss`: the share of the time that deciding about a model's plan may take."""
    plain_every: int = 128
    """Steps with drafts after which one is plain, to keep the baseline up to date: it costs 1% of a gain of 1.6."""
    smoothing: float = 0.05
    """Rate of moving averages: a mean over about the last forty values."""


TUNABLES = Tunables()
