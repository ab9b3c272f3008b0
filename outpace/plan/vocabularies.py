"""Compares the vocabularies of two models, from their files or from the table.

Drafts are token ids, so an id must mean the same text in both models. Embedding tables may be padded differently, and a
later model of a family may have more tokens after the common ones: neither does harm.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from outpace.errors import ModelError
from outpace.plan.known_models import EXTENDED_TOKENIZERS
from outpace.plan.models import PlannedModel

Verdict = Literal["identical", "extra", "different", "unknown"]
_TOKENS_KEY = "tokenizer.ggml.tokens"


@dataclass(frozen=True, slots=True)
class Compatibility:
    verdict: Verdict
    sentence: str
    overlap: float | None = None  # share of the target's tokens that the draft has, under any id
    first_difference: int | None = None  # the id

    @property
    def is_usable(self) -> bool:
        return self.verdict != "different"


def compare(target: PlannedModel, draft: PlannedModel) -> Compatibility:
    ours, theirs = _read(target), _read(draft)
    if ours and theirs:
        return compare_tokens(ours, theirs)
    if target.tokenizer and draft.tokenizer:
        return _by_name(target, draft)
    sizes = target.shape.vocab_size, draft.shape.vocab_size
    if target.family == draft.family and max(sizes) - min(sizes) < 1024:
        return Compatibility("unknown", "the tokenizers were not compared, since not both models have files here; both "
                             f"are {target.family} models with nearly the same number of tokens")  # fmt: skip
    return Compatibility("unknown", f"the tokenizers were not compared, since not both models have files here; the "
                         f"models have {sizes[0]:,} and {sizes[1]:,} tokens")  # fmt: skip


def _by_name(target: PlannedModel, draft: PlannedModel) -> Compatibility:
    ours, theirs = target.tokenizer, draft.tokenizer
    if ours == theirs:
        return Compatibility("identical", f"both models use the tokenizer {ours}", 1.0)
    if EXTENDED_TOKENIZERS.get(ours or "") == theirs or EXTENDED_TOKENIZERS.get(theirs or "") == ours:
        whose = "target" if EXTENDED_TOKENIZERS.get(ours or "") == theirs else "draft"
        return Compatibility("extra", f"the tokenizers {ours} and {theirs} agree, and the {whose}'s has more tokens")
    return Compatibility("different", f"the tokenizers differ: {ours} and {theirs}")


def compare_tokens(ours: Sequence[bytes], theirs: Sequence[bytes]) -> Compatibility:
    """Tokens by id; an empty one is padding."""
    common = min(len(ours), len(theirs))
    differing = (i for i in range(common) if ours[i] != theirs[i] and ours[i] and theirs[i])
    first = next(differing, None)
    known = set(filter(None, theirs))
    overlap = sum(token in known for token in ours if token) / max(1, sum(map(bool, ours)))
    if first is not None:
        sentence = (
            f"the tokenizers differ: {overlap:.1%} of the target's tokens exist in the draft, and the first difference "
            f"is token {first}, {_shown(ours[first])} in the target and {_shown(theirs[first])} in the draft"
        )
        return Compatibility("different", sentence, overlap, first)
    extra = sum(map(bool, ours)) - sum(map(bool, theirs))
    if not extra:
        return Compatibility("identical", f"the tokenizers are identical ({sum(map(bool, ours)):,} tokens)", 1.0)
    whose = "target" if extra > 0 else "draft"
    place = next(i for i in range(max(len(ours), len(theirs))) if bool(_at(ours, i)) != bool(_at(theirs, i)))
    shown = _shown(_at(ours, place) or _at(theirs, place))
    return Compatibility(
        "extra", f"the tokenizers agree, and the {whose} has {abs(extra)} more tokens, the first {shown} ({place})",
        overlap, place,
    )  # fmt: skip


def _at(tokens: Sequence[bytes], i: int) -> bytes:
    return tokens[i] if i < len(tokens) else b""


def _shown(token: bytes) -> str:
    return repr(token.decode(errors="replace")[:40])


def _read(model: PlannedModel) -> list[bytes]:
    """By id; empty if the model has no vocabulary on this machine."""
    path = model.path
    if path is None:
        return []
    if path.is_dir():
        return _of_folder(path / "tokenizer.json")
    from outpace.models.gguf_header import read_strings

    return [b"" if token.startswith(b"[PAD") else token for token in read_strings(path, _TOKENS_KEY)]


def _of_folder(path: Path) -> list[bytes]:
    from outpace.models.hf_schema import MAX_TOKENIZER_BYTES, read_text

    try:
        values = json.loads(read_text(path, MAX_TOKENIZER_BYTES))
        vocabulary: Any = values["model"]["vocab"]
        pairs = (
            list(vocabulary.items())
            if isinstance(vocabulary, dict)
            else [(t, i) for i, (t, _) in enumerate(vocabulary)]
        )
        pairs += [(added["content"], added["id"]) for added in values.get("added_tokens") or []]
        tokens = [b""] * (1 + max((int(i) for _, i in pairs), default=-1))
        if len(tokens) > 1 << 24:
            raise ValueError("an id is too large")
        for text, i in pairs:
            tokens[int(i)] = str(text).encode()
        return tokens
    except FileNotFoundError:
        return []
    except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise ModelError(f"{path} is damaged ({error!r:.100}); download it again") from error
