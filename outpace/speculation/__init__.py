"""Guessing what the target will say: one file per way of guessing, and the policy that decides whether to."""
