"""Compares the vocabularies of two models, from their files or from the table.

Where every id means the same text in both models, drafts are token ids. Embedding tables may be padded differently:
that does no harm. Otherwise the engine bridges the two tokenizers (`bridge.py`), and what counts is how many tokens
they have in common.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from outpace.errors import ModelError
from outpace.models.byte_level import token_text
from outpace.plan.known_models import EXTENDED_TOKENIZERS
from outpace.plan.models import PlannedModel

Verdict = Literal["identical", "extra", "different", "unknown"]
_TOKENS_KEY = "tokenizer.ggml.tokens"
_SPACE = "\u0120".encode()  # as byte-level vocabularies spell it
_BYTE_PIECE = re.compile(rb"<0x([0-9A-F]{2})>")


@dataclass(frozen=True, slots=True)
class Compatibility:
    verdict: Verdict
    sentence: str
    overlap: float | None = None  # share of the target's tokens that the draft has, under any id
    first_difference: int | None = None  # the id
    shared: float | None = None  # share of the draft's tokens that the target has, under any id

    @property
    def needs_bridge(self) -> bool:
        """Whether the engine takes the draft for a model of another vocabulary, as `vocabulary_difference` has it."""
        return self.verdict in ("different", "extra")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    tokens: list[bytes]  # by id, as the file spells them; an empty one is padding
    is_byte_level: bool  # spelled with one visible character for each byte

    def texts(self) -> set[bytes]:
        """What the tokens stand for, in whatever way the file spells it."""
        if self.is_byte_level:
            return {token_text(token.decode(errors="replace")) or token for token in self.tokens if token}
        return {_piece_text(token) for token in self.tokens if token}

    def spellings(self) -> set[bytes]:
        return set(filter(None, self.tokens))


def _piece_text(token: bytes) -> bytes:
    """Of a vocabulary in the manner of SentencePiece."""
    byte = _BYTE_PIECE.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace("\u2581".encode(), b" ")


def compare(target: PlannedModel, draft: PlannedModel) -> Compatibility:
    ours, theirs = _read(target), _read(draft)
    if ours is not None and theirs is not None:
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


def compare_tokens(ours: Vocabulary, theirs: Vocabulary) -> Compatibility:
    """By id, as spelled; what is shared under other ids by what the tokens stand for."""
    common = min(len(ours.tokens), len(theirs.tokens))
    pairs = zip(ours.tokens[:common], theirs.tokens[:common], strict=True)
    first = next((i for i, (a, b) in enumerate(pairs) if a != b and a and b), None)
    if first is not None:
        is_alike = ours.is_byte_level == theirs.is_byte_level  # then the spelling, which takes less time, says the same
        mine, other = (each.spellings() if is_alike else each.texts() for each in (ours, theirs))
        num_shared = len(mine & other)
        overlap, shared = num_shared / max(1, len(mine)), num_shared / max(1, len(other))
        sentence = (
            f"the tokenizers differ: {overlap:.1%} of the target's tokens exist in the draft and {shared:.1%} of the "
            f"draft's in the target, and the first difference is token {first}, {_shown(ours.tokens[first])} in the "
            f"target and {_shown(theirs.tokens[first])} in the draft"
        )
        return Compatibility("different", sentence, overlap, first, shared)
    num_ours, num_theirs = sum(map(bool, ours.tokens)), sum(map(bool, theirs.tokens))
    extra = num_ours - num_theirs
    if not extra:
        return Compatibility("identical", f"the tokenizers are identical ({num_ours:,} tokens)", 1.0, shared=1.0)
    whose = "target" if extra > 0 else "draft"
    longest = max(len(ours.tokens), len(theirs.tokens))
    place = next(i for i in range(longest) if bool(_at(ours.tokens, i)) != bool(_at(theirs.tokens, i)))
    shown = _shown(_at(ours.tokens, place) or _at(theirs.tokens, place))
    num_both = sum(bool(a and b) for a, b in zip(ours.tokens, theirs.tokens, strict=False))
    return Compatibility(
        "extra", f"the tokenizers agree, and the {whose} has {abs(extra)} more tokens, the first {shown} ({place})",
        num_both / num_ours, place, num_both / num_theirs,
    )  # fmt: skip


def _at(tokens: Sequence[bytes], i: int) -> bytes:
    return tokens[i] if i < len(tokens) else b""


def _shown(token: bytes) -> str:
    return repr(token.decode(errors="replace")[:40])


def _read(model: PlannedModel) -> Vocabulary | None:
    """None if the model has no vocabulary on this machine."""
    path = model.path
    if path is None:
        return None
    if path.is_dir():
        return _of_folder(path / "tokenizer.json")
    from outpace.models.gguf_header import read_strings

    tokens = [b"" if token.startswith(b"[PAD") else token for token in read_strings(path, _TOKENS_KEY)]
    is_byte_level = sum(token.startswith(_SPACE) for token in tokens) > len(tokens) / 100
    return Vocabulary(tokens, is_byte_level) if tokens else None


def _of_folder(path: Path) -> Vocabulary | None:
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
        return Vocabulary(tokens, '"ByteLevel"' in json.dumps(values.get("decoder")))
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise ModelError(f"{path} is damaged ({error!r:.100}); download it again") from error
