"""Tensor parallelism: one model sharded over several processes, each with a GPU of its own (or, for tests, a core).

Rank 0 is the process of the engine. It sends every step to the other ranks, which only run the forward pass.
"""
