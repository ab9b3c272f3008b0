"""What the user named: a model or a draft, as a name in the table, a file, a folder, or a name on the hub.

Opening a model reads its config or header, never its weights. From the hub only config.json is fetched, and nothing for
a model of the table.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from outpace.core import MeasuredAcceptance
from outpace.errors import ModelError, UsageError
from outpace.models import hub
from outpace.plan.known_models import KNOWN, KnownModel, find_known, similar_names
from outpace.plan.precision import Precision, precision
from outpace.plan.shapes import HeadShape, Shape, trained_head

SELF, HEAD, LOOKUPS = "self", "head", ("ngram", "suffix")
DraftKind = Literal["draft", "head", "self", "lookup"]
TRAINED_VOCABULARY = 16384  # tokens that a head of `outpace distill` can draft


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """A model's shape and its bytes in one precision."""

    name: str
    shape: Shape
    family: str
    precision: Precision
    layer_bytes: float
    embedding_bytes: float
    output_bytes: float  # 0: the embeddings serve as output head
    parameters: int
    nominal: float  # parameters as people round them
    tokenizer: str | None = None  # of the table
    path: Path | None = None  # of a file or folder on this machine
    hub: str = ""  # what to call it in a command line

    @property
    def weight_bytes(self) -> float:
        return self.layer_bytes + self.embedding_bytes + self.output_bytes

    def nominal_bytes(self) -> float:
        """As articles count: a round number of parameters at the format's plain size."""
        return self.nominal * self.precision.nominal_bytes

    def bytes_read(self, tokens: int) -> float:
        """By a step: all layers, but of experts those that are used; one output head; single rows of embeddings."""
        share = self.shape.layer_parameters_read(tokens) / self.shape.layer_parameters
        return self.layer_bytes * share + (self.output_bytes or self.embedding_bytes)

    def at(self, wanted: Precision) -> PlannedModel:
        """The same model with weights in another format."""
        return replace(self, precision=wanted, **_sizes(self.shape, wanted))


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
        return self.model.weight_bytes if self.model is not None else self.head_bytes

    @property
    def parameters(self) -> int:
        return self.model.parameters if self.model is not None else self.head.parameters if self.head else 0


def _sizes(shape: Shape, fmt: Precision) -> dict[str, Any]:
    """Norms and biases are counted with the layers, at their small size."""
    outer = shape.embedding_parameters * fmt.outer_bytes
    small = shape.parameters - shape.layer_parameters - shape.outer_parameters
    return {
        "layer_bytes": _layer_bytes(shape, fmt) + small * 2.0,
        "embedding_bytes": outer,
        "output_bytes": 0.0 if shape.tied else outer,
    }


def _layer_bytes(shape: Shape, fmt: Precision) -> float:
    """MXFP4 checkpoints hold only experts in four bits, and the rest in bfloat16."""
    if fmt.name != "mxfp4" or shape.experts is None:
        return shape.layer_parameters * fmt.bytes_per_weight
    in_experts = shape.expert_layers * shape.experts.count * shape.expert_parameters
    return in_experts * fmt.bytes_per_weight + (shape.layer_parameters - in_experts) * 2.0


def open_model(reference: str, wanted: str | None = None) -> PlannedModel:
    """`wanted`: the precision of the weights; without one, the file's own, the published one, or bf16."""
    if not reference.strip():
        raise UsageError("the model's name is empty; name a model such as llama-3.1-70b, a GGUF file or a folder")
    path = Path(os.path.expanduser(reference))
    if path.is_file():
        return _of_gguf(path, wanted)
    if path.is_dir():
        return _of_folder(path, path.name, wanted)
    known = find_known(reference)
    if known is not None:
        return _of_table(known, reference, wanted)
    if hub.is_name(reference) and ":" not in reference and not path.parent.is_dir():
        return _of_folder(_fetched_config(reference), reference, wanted)
    raise ModelError(_unknown(reference))


def _unknown(reference: str) -> str:
    similar = similar_names(reference)
    hint = (
        f"did you mean {', '.join(similar)}?"
        if similar
        else f"known names are, among others, {', '.join(list(KNOWN)[::6])}"
    )
    return (
        f"there is no file or folder {reference}, and no model of that name in the table; {hint} "
        "Any Hugging Face folder, config.json or GGUF file works too"
    )


def _of_table(known: KnownModel, reference: str, wanted: str | None) -> PlannedModel:
    fmt = precision(wanted or known.precision)
    return PlannedModel(
        name=known.name,
        shape=known.shape,
        family=known.family,
        precision=fmt,
        parameters=known.shape.parameters,
        nominal=known.nominal * 1e9,
        tokenizer=known.tokenizer,
        hub=reference if "/" in reference else known.hub,
        **_sizes(known.shape, fmt),
    )


def _of_folder(path: Path, name: str, wanted: str | None) -> PlannedModel:
    from outpace.plan.configs import read_folder  # pydantic

    shape, family, published = read_folder(path)
    fmt = precision(wanted or published)
    known = find_known(name)
    return PlannedModel(
        name=name,
        shape=shape,
        family=known.family if known is not None and known.shape == shape else family,
        precision=fmt,
        parameters=shape.parameters,
        nominal=_rounded(shape.parameters),
        tokenizer=known.tokenizer if known is not None and known.shape == shape else None,
        path=path,
        hub=name if "/" in name else str(path),
        **_sizes(shape, fmt),
    )


def _of_gguf(path: Path, wanted: str | None) -> PlannedModel:
    from outpace.models.gguf_header import read_header
    from outpace.plan.gguf_shapes import gguf_bytes, num_gguf_parameters, shape_of_gguf

    if path.name == "config.json":
        return _of_folder(path.parent, path.parent.name, wanted)
    header = read_header(path)
    shape = shape_of_gguf(header, path)
    layers, embedding, output = gguf_bytes(header, path)
    known = find_known(path.name)
    parameters = num_gguf_parameters(header)
    bits = 8 * (layers + embedding + output) / parameters
    own = Precision(f"GGUF of {bits:.2f} bits a weight", bits / 8, bits / 8, bits / 8, "int8")
    model = PlannedModel(
        name=str(header.metadata.get("general.name") or path.stem)[:80],
        shape=shape,
        family=known.family if known is not None else header.architecture,
        precision=own,
        layer_bytes=layers,
        embedding_bytes=embedding,
        output_bytes=output,
        parameters=parameters,
        nominal=_rounded(parameters),
        path=path,
        hub=str(path),
    )
    return model if wanted is None else model.at(precision(wanted))


def _fetched_config(reference: str) -> Path:
    """The folder with the config.json of a model on the hub; its weights are not downloaded."""
    name, _, revision = reference.partition("@")
    try:
        from huggingface_hub import hf_hub_download, try_to_load_from_cache

        kept = try_to_load_from_cache(name, "config.json", revision=revision or None)
        if isinstance(kept, str):
            return Path(kept).parent
        _check_reachable()
        return Path(hf_hub_download(name, "config.json", revision=revision or None)).parent
    except ImportError as error:
        raise ModelError(f"{_unknown(reference)}; to read configs from the hub, pip install huggingface-hub") from error
    except Exception as error:  # the hub's client raises errors of several libraries
        reason = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"{_unknown(reference)}; its config.json could not be fetched from the hub ({reason})"
        ) from error


def _check_reachable() -> None:
    """Without a connection the hub's client would try again for half a minute."""
    import socket
    from urllib.parse import urlsplit

    from huggingface_hub import constants

    host = urlsplit(constants.ENDPOINT).hostname or ""
    try:
        socket.getaddrinfo(host, 443)
    except OSError as error:
        raise ConnectionError("the hub cannot be reached") from error


def open_draft(reference: str, target: PlannedModel, wanted: str | None = None) -> PlannedDraft:
    """`head`, `self:PRECISION`, `ngram`, `suffix`, or anything that names a model or a head."""
    if reference in LOOKUPS:
        return PlannedDraft("lookup", reference)
    if reference == HEAD:
        head = trained_head(target.shape, TRAINED_VOCABULARY)
        return PlannedDraft("head", "a head", head=head, head_bytes=head.parameters * _head_bytes(target), exists=False)
    if reference == SELF or reference.startswith(f"{SELF}:"):
        asked = precision(reference.partition(":")[2] or wanted or "int4")
        fmt = precision("int4_g32") if asked.name == "int4" else asked
        copy = replace(target.at(fmt), name=f"{target.name} in {asked}")
        return PlannedDraft("self", f"self:{asked}", copy, path=target.path)
    path = Path(os.path.expanduser(reference))
    if path.exists():
        found = _head_in(path, target)
        if found is not None:
            return found
    model = open_model(reference, wanted)
    return PlannedDraft("draft", model.name, model, path=model.path)


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


def _rounded(parameters: int) -> float:
    """To two digits, as a name would say it."""
    return float(f"{parameters:.1e}")
