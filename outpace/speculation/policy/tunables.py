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
    request_grant: float = 5.0
    """The same for a request. With `request_share`, one of 256 tokens may lose 5%, one of 48 tokens 13%."""
    request_share: float = 1.5
    """Times `allowed_loss` (2%): the share of its plain time that a request may lose in steps that help the batch."""
    budget_share: float = 0.3
    """Share of `allowed_loss` that budgets receive. The rest covers expected gains that do not come."""
    most_balance: float = 8.0
    """Plain steps a budget can hold, so that old gains do not pay for current losses."""

    # ---- acceptance: the chance of a draft token
    caution: float = 1.0
    """Standard deviations between the mean and the lower bound. Between 0.6 and 1 the simulator's geometric mean
    differs by 0.2%: budgets bound the loss, this only sets how soon a good proposer is used."""
    model_prior: float = 0.8
    """Chance of a model's draft token before any trial, at temperature 0: measured model pairs have 0.8 to 0.9."""
    prior_weight: float = 6.0
    """Weight of a prior, in trials: about three drafts outweigh it."""
    most_evidence: float = 160.0
    """Upper limit of the weight of past trials, because traffic changes."""
    shift_variance: float = 0.3
    """Initial variance of requests' shifts, in log-odds squared; then learned from finished requests."""
    shift_drift: float = 0.05
    """Share of that variance by which a request's shift may change from one draft to the next."""

    # ---- plans: when a draft is worth its cost
    counted_on: float = 0.7
    """Share of a request's expected remaining tokens that may pay for catching up: it can end at any time."""
    payback_steps: float = 16.0
    """Plain steps over which catching up is charged: half the length of a short request."""
    longest_backoff: int = 16
    """Longest wait between two attempts, in steps. Texts change from prose to copying within about forty tokens."""
    plain_every: int = 128
    """Steps with drafts after which one is plain, to keep the baseline up to date."""
    smoothing: float = 0.15
    """Rate of moving averages: a mean over about the last twelve values."""


TUNABLES = Tunables()
