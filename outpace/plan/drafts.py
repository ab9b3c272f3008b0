"""The ways to draft that the user named: another model, a head, the target's quantised self, a lookup."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from outpace.core import MeasuredAcceptance
from outpace.errors import ModelError, UsageError
from outpace.plan.models import PlannedModel, open_model, place
from outpace.plan.precision import ROUNDED, precision
from outpace.plan.shapes import HeadShape, trained_head

SELF, HEAD, LOOKUPS = "self", "head", ("ngram", "suffix")
DraftKind = Literal["draft", "head", "self", "lookup"]
TRAINED_VOCABULARY = 16384  # tokens that a head of `outpace distill` can draft


@dataclass(frozen=True, slots=True)
class PlannedDraft:
    """A way to draft for a target."""

    kind: DraftKind
    name: str
    model: PlannedModel | None = None  # of kinds `draft` and `self`
    head: HeadShape | None = None
    head_bytes: float = 0.0
    path: Path | None = None
    measured: MeasuredAcceptance | None = None  # brought by a head's file
    exists: bool = True  # False: a head that would have to be trained

    @property
    def weight_bytes(self) -> float:
        """Of its own: a quantised self has its target's embeddings and output head."""
        if self.model is None:
            return self.head_bytes
        return self.model.layer_bytes if self.kind == "self" else self.model.weight_bytes

    @property
    def parameters(self) -> int:
        return self.model.parameters if self.model is not None else self.head.parameters if self.head else 0


def open_draft(reference: str, target: PlannedModel, wanted: str | None = None) -> PlannedDraft:
    """`head`, `self:PRECISION`, `ngram`, `suffix`, or anything that names a model or a head."""
    if reference in LOOKUPS:
        return PlannedDraft("lookup", reference)
    if reference == HEAD:
        head = trained_head(target.shape, TRAINED_VOCABULARY)
        return PlannedDraft("head", "a head", head=head, head_bytes=head.parameters * _head_bytes(target), exists=False)
    if reference == SELF or reference.startswith(f"{SELF}:"):
        return _quantised_self(target, reference.partition(":")[2] if ":" in reference else wanted or "int4")
    if not reference.strip():
        raise UsageError("a draft's name is empty; name a model, a head, self:int4, ngram or suffix, or leave it out")
    path = place(reference)
    if path.exists():
        found = _head_in(path, target)
        if found is not None:
            return found
    model = open_model(reference, wanted)
    return PlannedDraft("draft", model.name, model, path=model.path)


def _quantised_self(target: PlannedModel, rounded: str) -> PlannedDraft:
    if rounded not in ROUNDED:
        names = ", ".join(f"self:{name}" for name in ROUNDED)
        raise UsageError(f"there is no draft 'self:{rounded}'; use one of {names}")
    copy = target.at(precision(ROUNDED[rounded]))
    if copy.layer_bytes >= target.layer_bytes:
        raise UsageError(f"self:{rounded} is no smaller than {target.name} in {target.precision}; name another draft")
    copy = replace(  # it has the target's embeddings and output head
        copy, name=f"{target.name} in {rounded}", embedding_bytes=target.embedding_bytes,
        output_bytes=target.output_bytes,
    )  # fmt: skip
    return PlannedDraft("self", f"self:{rounded}", copy, path=target.path)


def _head_bytes(target: PlannedModel) -> float:
    """Bytes per weight: native heads are in Q8_0, others in the target's float format."""
    return 1.0625 if target.precision.arithmetic == "int8" and target.path is not None else 2.0


def _head_in(path: Path, target: PlannedModel) -> PlannedDraft | None:
    from outpace.models.head_formats import find_head

    if path.is_dir() and not (path / "config.json").is_file() and not (path / "head.gguf").is_file():
        raise ModelError(f"{path} is a folder without a config.json; name a model, a head or its GGUF file")
    found = find_head(path)
    if found is None:
        return None
    return _head_of_gguf(found) if found.is_file() else _head_of_folder(found, target)


def _head_of_gguf(path: Path) -> PlannedDraft:
    import mmap

    import numpy as np

    from outpace.models.gguf_header import read_header
    from outpace.models.head_gguf import describe_head

    header = read_header(path)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        data = np.frombuffer(mapped, np.uint8)[header.data_offset :]
        head = describe_head(path, header, data, lambda *_: True)
        del data
    shape = HeadShape(
        width=head.width, hidden=head.hidden, heads=head.num_heads, kv_heads=head.num_kv_heads, head_dim=head.head_dim,
        draft_vocab_size=head.vocab_size, taps=len(head.taps), target_width=head.width,
    )  # fmt: skip
    measured = None if head.measured is None else MeasuredAcceptance(*head.measured)
    size = float(sum(tensor.info.num_bytes or 0 for tensor in head.tensors))
    return PlannedDraft("head", path.parent.name if path.name == "head.gguf" else path.stem, head=shape,
                        head_bytes=size, path=path, measured=measured)  # fmt: skip


def _head_of_folder(path: Path, target: PlannedModel) -> PlannedDraft:
    from outpace.models.head_formats import read_head

    config = read_head(path, (), target.shape.layers)
    shape = HeadShape(
        width=config.width, hidden=config.hidden, heads=config.num_heads, kv_heads=config.num_kv_heads,
        head_dim=config.head_dim, draft_vocab_size=config.draft_vocab_size, taps=len(config.taps),
        target_width=config.tap_width, has_embedding=config.has_embedding, vocab_size=config.vocab_size,
    )  # fmt: skip
    return PlannedDraft("head", path.name, head=shape, head_bytes=2.0 * shape.parameters, path=path)
