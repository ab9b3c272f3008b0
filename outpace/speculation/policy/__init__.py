"""Which proposer drafts how many tokens for whom: a conservative bandit. `policy.py` reads top down."""
