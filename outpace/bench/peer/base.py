"""The interface of a peer engine: what it gets and what it returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Models:
    """The model files and options that every engine gets."""

    target: Path
    draft: Path | None
    threads: int
    depth: int
    max_context: int
    end_ids: frozenset[int]
    backend: str = "auto"  # used by Outpace only


@dataclass(frozen=True, slots=True)
class Answer:
    text: str
    num_tokens: int


class Peer(Protocol):
    @property
    def variants(self) -> Sequence[str]:
        """Its decoding variants; the first is plain decoding."""
        ...

    def answer(self, variant: str, tokens: Sequence[int], max_tokens: int) -> Answer:
        """Continue the prompt greedily, without any cache from earlier prompts."""
        ...

    def close(self) -> None: ...


def open_peer(name: str, models: Models) -> Peer:
    """Load the engine, which must be installed. If it cannot run the file, its own exception is raised."""
    if name == "outpace":
        from outpace.bench.peer.ours import OutpacePeer

        return OutpacePeer(models)
    if name == "llama.cpp":
        from outpace.bench.peer.llamacpp import LlamaCppPeer

        return LlamaCppPeer(models)
    if name == "transformers":
        from outpace.bench.peer.transformers import TransformersPeer

        return TransformersPeer(models)
    if name == "openvino":
        from outpace.bench.peer.openvino import OpenVinoPeer

        return OpenVinoPeer(models)
    from outpace.bench.peer.vllm import VllmPeer

    return VllmPeer(models)
