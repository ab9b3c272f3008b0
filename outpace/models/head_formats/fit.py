"""Whether a draft head that somebody brings fits the target."""

from __future__ import annotations

import logging
import re
from pathlib import Path

from outpace.errors import ModelError
from outpace.models.architecture import Architecture
from outpace.models.families import BY_CLASS_NAME
from outpace.models.fingerprint import fingerprint
from outpace.models.head_file import HeadConfig

log = logging.getLogger("outpace.models")


def check_fits(folder: Path, head: HeadConfig, target: Architecture, target_name: str, target_path: Path) -> None:
    """Raise ModelError if the head cannot draft for the target; warn if it was trained for one of another name."""
    made_for = head.target.get("name") or "another model"
    cause = _misfit(head, target, target_path)
    if cause:
        raise ModelError(
            f"the draft head {folder} was made for {made_for!s:.80} and does not fit the model {target_name}: {cause}; "
            "name a head that was trained for this model, or train one: outpace distill"
        )
    name = head.target.get("name")
    if isinstance(name, str) and not _is_named(name, f"{target_name} {target_path.absolute()}"):
        log.warning(
            "the draft head %s was trained for %s and the model is %s: if these differ, fewer drafts are accepted; "
            "answers stay the model's own",
            folder, name, target_name,
        )  # fmt: skip


def _misfit(head: HeadConfig, target: Architecture, target_path: Path) -> str | None:
    """Why the head cannot draft for the target."""
    classes = [str(name) for name in head.target.get("architectures") or ()]
    taps = list(head.taps)
    if classes and target.family not in {family for name in classes for family in _families(name)}:
        return f"it is for a {classes[0]:.80} and the model's family is {target.family}"
    if head.tap_width != target.width:
        return f"it reads hidden states of width {head.tap_width} and the model's have {target.width}"
    if head.vocab_size != target.vocab_size:
        return f"it knows {head.vocab_size} tokens and the model has {target.vocab_size}"
    if not all(1 <= tap <= target.num_layers for tap in taps) or len(set(taps)) != len(taps):
        return f"it reads the model after layers {taps} and the model has {target.num_layers}"
    if not head.has_embedding and head.width != target.width:
        return f"it has no embedding of its own, and its width is {head.width} where the model's is {target.width}"
    return _stale(head, target_path)


def _families(class_name: str) -> tuple[str, ...]:
    """The names under which a target of this class may be known: Mistral's GGUF files say llama."""
    family = BY_CLASS_NAME.get(class_name)
    if family is None:
        return ()
    return family.name, family.gguf_name


def _stale(head: HeadConfig, target_path: Path) -> str | None:
    """Heads that `outpace distill` wrote carry their target's fingerprint."""
    expected = head.target.get("fingerprint")
    if expected is None:
        return None
    found = fingerprint(target_path)
    return None if found == expected else f"its target's fingerprint is {expected!s:.80} and the model's is {found}"


def _is_named(name: str, where: str) -> bool:
    """Whether a model's name on the hub is part of a path or a file's name; case and punctuation do not matter."""
    short, text = (re.sub(r"[\W_]+", "", part.lower()) for part in (name.rstrip("/").rpartition("/")[2], where))
    return bool(short) and short in text
