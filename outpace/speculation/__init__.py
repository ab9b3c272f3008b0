"""Speculative decoding: proposers that draft tokens, measured costs, and the policy that decides when to draft."""
