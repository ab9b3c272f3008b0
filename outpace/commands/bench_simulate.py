"""`outpace bench simulate`: see `outpace.bench.simulate`, which does the work."""

from outpace.bench.simulate import add_arguments, execute

__all__ = ["add_arguments", "execute"]
