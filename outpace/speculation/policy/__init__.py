"""Decides which proposer drafts how many tokens for which request: a conservative bandit. Start with `policy.py`."""
