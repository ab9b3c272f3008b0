"""The kinds of heads by name, with what distinguishes them before training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from outpace.models.head_file import HeadConfig, Kind
from outpace.training.heads import Eagle3Head, Head, Parameters
from outpace.training.onepass import OnePassHead
from outpace.training.target import Target


@dataclass(frozen=True, slots=True)
class HeadKind:
    make: Callable[..., Head]  # of a config, a target and parameters
    start_values: Callable[[HeadConfig, Target, Tensor], Parameters]
    num_layers: int
    num_steps: int  # drafted tokens per entry in training
    markov_rank: int = 0


KINDS: dict[Kind, HeadKind] = {
    "eagle3": HeadKind(Eagle3Head, Eagle3Head.start_values, num_layers=1, num_steps=4),
    "onepass": HeadKind(OnePassHead, OnePassHead.start_values, num_layers=2, num_steps=7, markov_rank=64),
}
