"""What a user can choose about a head and its training. Loads no torch, so that wrong flags are reported at once."""

from __future__ import annotations

from dataclasses import dataclass

from outpace.errors import UsageError

_MULTIPLE = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillSettings:
    minutes: float = 15.0
    call_minutes: float | None = None
    answer_minutes: float | None = None  # None: a quarter of `minutes`
    num_own_prompts: int = 0
    document_share: float = 0.2
    max_answer: int = 256
    draft_vocab_size: int = 16384
    hidden: int | None = None  # None: the target's
    num_steps: int = 4
    learning_rate: float = 1.5e-3
    batch_tokens: int | None = None  # None: by device
    seed: int = 0
    compile: bool = True

    def __post_init__(self) -> None:
        for name in ("minutes", "call_minutes", "answer_minutes", "draft_vocab_size", "hidden", "num_steps",
                     "learning_rate", "batch_tokens", "max_answer"):  # fmt: skip
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise UsageError(f"{name.replace('_', ' ')} must be above 0; got {value:g}")
        if not 0 <= self.document_share < 1:
            raise UsageError(f"the share of documents must be at least 0 and below 1; got {self.document_share:g}")
        for name in ("hidden", "batch_tokens"):  # quantised by blocks; padded to multiples
            value = getattr(self, name)
            if value is not None and value % _MULTIPLE:
                raise UsageError(f"{name.replace('_', ' ')} must be a multiple of {_MULTIPLE}; got {value}")
