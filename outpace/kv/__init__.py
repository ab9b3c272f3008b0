"""Bookkeeping of the key/value cache: who owns which blocks, what is reserved, what is shared."""
