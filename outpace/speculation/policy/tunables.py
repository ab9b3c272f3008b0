"""Every number the policy is tuned by, with the reason for its value.

Time is counted in plain steps: what one step of plain decoding of the present batch takes.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tunables:
    # ---- budgets: what finding out may cost
    engine_grant: float = 1.5
    """Plain steps the engine may lose before it has earned anything: a trial or two of a draft that fails."""
    request_grant: float = 2.5
    """The same for a request. With 2% of its time, one of 48 tokens may lose 7%, one of 256 tokens 3%."""
    newcomer_grant: float = 0.4
    """Plain steps that a new request adds to the engine's budget, shared by all that run: its text may be of another
    kind than those before it, and some ten lookups tell."""
    budget_share: float = 0.3
    """Of `allowed_loss` that budgets hand out. The rest is for what was expected and did not come."""
    most_balance: float = 8.0
    """Plain steps a budget can hold: what speculation gained long ago pays for no loss today."""

    # ---- acceptance: what a draft token's chance is
    caution: float = 1.0
    """Standard deviations between the mean and the lower bound. Between 0.6 and 1 the simulator's geometric mean
    differs by 0.2%: budgets bound the loss, this only decides how soon a good draft is believed."""
    model_prior: float = 0.8
    """Chance of a model's draft token before any was tried, at temperature 0: measured pairs have 0.8 to 0.9."""
    prior_weight: float = 6.0
    """Trials that a prior is worth: some three drafts overrule it."""
    most_evidence: float = 160.0
    """Trials remembered of one kind: traffic changes."""
    own_variance: float = 0.3
    """How far requests differ at first, in log-odds squared; learned from requests that end."""
    own_drift: float = 0.05
    """Of that variance, what a request's own rate may move by from one draft to the next."""

    # ---- plans: when a draft is worth its time
    counted_on: float = 0.7
    """Of the tokens a request is expected to have left, those that may pay for catching up: it can end at any time."""
    payback_steps: float = 16.0
    """Plain steps over which catching up is booked: half of what a short request lasts."""
    longest_backoff: int = 16
    """Steps between two tries of what did not pay. Texts turn from prose to copying within some forty tokens."""
    plain_every: int = 128
    """Steps with drafts after which one is plain, so that the baseline is of the present."""
    smoothing: float = 0.15
    """Of moving averages: a mean over the last dozen."""


TUNABLES = Tunables()
