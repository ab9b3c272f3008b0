"""Accounting of the KV cache: which sequence owns which blocks, what is reserved, what is shared."""
