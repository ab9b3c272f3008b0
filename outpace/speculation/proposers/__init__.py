"""Proposers of draft tokens, one per file."""
