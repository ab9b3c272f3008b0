"""What a peer is given and what it gives back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Models:
    """The files every engine runs, and how."""

    target: Path
    draft: Path | None
    threads: int
    depth: int
    max_context: int
    end_ids: frozenset[int]
    backend: str = "auto"  # Outpace's own


@dataclass(frozen=True, slots=True)
class Answer:
    text: str
    num_tokens: int


class Peer(Protocol):
    @property
    def variants(self) -> Sequence[str]:
        """Its ways of decoding, the first of them plain."""
        ...

    def answer(self, variant: str, tokens: Sequence[int], max_tokens: int) -> Answer:
        """A greedy continuation of the prompt, nothing reused from earlier ones."""
        ...

    def close(self) -> None: ...


def open_peer(name: str, models: Models) -> Peer:
    """Loads the engine, which must be installed; raises whatever it raises if it cannot run the file."""
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
