"""The models that the user named: a name in the table, a file, a folder, or a name on the hub.

Opening a model reads its config or header, never its weights. From the hub only config.json is fetched, and nothing for
a model of the table.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from outpace.errors import ModelError, UsageError
from outpace.plan.known_models import KNOWN, KnownModel, find_known, similar_names
from outpace.plan.precision import Precision, named_precision, precision
from outpace.plan.shapes import Shape


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
    stored: str  # the precision of its published weights, or of its file
    torch_runs: bool  # whether the torch backend runs the architecture
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
        return replace(self, precision=wanted, **_sizes(self.shape, wanted, self.stored))


def _sizes(shape: Shape, fmt: Precision, stored: str) -> dict[str, Any]:
    """Norms and biases are counted with the layers, at their small size. `stored`: the published format."""
    outer = shape.embedding_parameters * fmt.outer_bytes
    rounded = shape.embedding_parameters * fmt.rounded_head_bytes if fmt.name != stored else 0.0
    small = shape.parameters - shape.layer_parameters - shape.outer_parameters
    return {
        "layer_bytes": _layer_bytes(shape, fmt) + small * 2.0,
        "embedding_bytes": outer,
        "output_bytes": rounded or (0.0 if shape.tied else outer),
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
    path = place(reference)
    if path.is_file():
        return _of_gguf(path, wanted)
    if path.is_dir():
        return _of_folder(path, path.name, wanted)
    known = find_known(reference)
    if known is not None:
        return _of_table(known, reference, wanted)
    from outpace.models import hub

    if hub.is_name(reference) and ":" not in reference and not path.parent.is_dir():
        return _of_folder(_fetched_config(reference), reference, wanted)
    raise ModelError(_unknown(reference))


def place(reference: str) -> Path:
    """The path that a name may stand for. Raises ModelError where the system cannot say whether it exists."""
    path = Path(os.path.expanduser(reference))
    try:
        path.exists()
    except OSError as error:
        raise ModelError(f"cannot look for {reference:.80}: {error.strerror}; check the name") from error
    return path


def _unknown(reference: str) -> str:
    similar = similar_names(reference)
    hint = (
        f"did you mean {', '.join(similar)}?"
        if similar
        else f"known names are, among others, {', '.join(list(KNOWN)[::6])}."
    )
    return (
        f"there is no file or folder {reference}, and no model of that name in the table; {hint} "
        "Any Hugging Face folder, config.json or GGUF file works too"
    )


def _of_table(known: KnownModel, reference: str, wanted: str | None) -> PlannedModel:
    """A name such as owner/Model-AWQ is that of another checkpoint; without the owner, it only says what is wanted."""
    named = named_precision(reference)
    stored = named if named is not None and "/" in reference else known.precision
    fmt = precision(wanted if wanted is not None else named or known.precision)
    return PlannedModel(
        name=known.name,
        shape=known.shape,
        family=known.family,
        precision=fmt,
        parameters=known.shape.parameters,
        nominal=known.nominal * 1e9,
        stored=stored,
        torch_runs=known.shape.latent is None and not known.shape.has_sinks,
        tokenizer=known.tokenizer,
        hub=reference if "/" in reference else known.hub,
        **_sizes(known.shape, fmt, stored),
    )


def _of_folder(path: Path, name: str, wanted: str | None) -> PlannedModel:
    from outpace.models.families import FAMILY_NAMES
    from outpace.plan.configs import read_folder  # pydantic

    shape, family, published = read_folder(path)
    fmt = precision(published if wanted is None else wanted)
    known = find_known(name)
    return PlannedModel(
        name=name,
        shape=shape,
        family=known.family if known is not None and known.shape == shape else family,
        precision=fmt,
        parameters=shape.parameters,
        nominal=_rounded(shape.parameters),
        stored=published,
        torch_runs=family.removesuffix("_text") in FAMILY_NAMES,
        tokenizer=known.tokenizer if known is not None and known.shape == shape else None,
        path=path,
        hub=name if "/" in name else str(path),
        **_sizes(shape, fmt, published),
    )


def _of_gguf(path: Path, wanted: str | None) -> PlannedModel:
    from outpace.models.families import BY_GGUF_NAME
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
        stored=own.name,
        torch_runs=header.architecture in BY_GGUF_NAME,
        tokenizer=known.tokenizer if known is not None and known.shape.vocab_size == shape.vocab_size else None,
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


def _rounded(parameters: int) -> float:
    """To two digits, as a name would say it."""
    return float(f"{parameters:.1e}")
