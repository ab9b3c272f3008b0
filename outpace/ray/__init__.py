"""Outpace on a Ray cluster: replicas behind Ray Serve, batches by Ray Data. Needs `pip install outpace[ray]`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outpace.ray.application import application
    from outpace.ray.predictor import Predictor

__all__ = ["Predictor", "application"]


def __getattr__(name: str) -> Any:
    if name == "Predictor":
        from outpace.ray.predictor import Predictor

        return Predictor
    if name == "application":
        from outpace.ray.application import application

        return application
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
