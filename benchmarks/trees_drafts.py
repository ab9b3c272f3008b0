"""What a head would draft from every position of a known answer: the true tokens' ranks, and trees grown by a beam.

In plain torch, whole texts at once. A node of a draft looks at the entries of the text up to the one that its draft
began with, at its ancestors and at itself. It is computed from its parent's state and its own token, as in a chain.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from outpace.backends.torch.kernels.reference import rms_norm
from outpace.backends.torch.model.head_loader import open_head
from outpace.backends.torch.model.head_weights import named_head_tensors
from outpace.training.batches import BatchShape, Texts, make_batch
from outpace.training.head import Chains, Head, Parameters
from outpace.training.target import Target

NEVER = np.iinfo(np.int32).max  # the rank of a token that is not drafted
_UNIT = 32  # lengths of batches are multiples of it
_CPU = torch.device("cpu")

Ranks = NDArray[np.int32]


def load_head(path: Path, target_path: Path, target: Target) -> tuple[Head, Tensor]:
    """A head in float32, and the target's tokens that it can draft."""
    checkpoint = open_head(path, target_path, target.config, target.name)
    weights = checkpoint.load(torch.float32, _CPU)
    parameters: Parameters = {}
    for name, part in named_head_tensors(weights, checkpoint.config).items():
        assert isinstance(part, Tensor), "nothing is rounded in float32"
        parameters[name] = part
    return Head(checkpoint.config, target, parameters), weights.ids


@dataclass(frozen=True, slots=True)
class Level:
    """Nodes at one depth, `width` for each entry."""

    state: Tensor  # [entries, width, model's width]
    keys: Tensor  # [entries, width, depth, kv heads, head size]: of the ancestors and the node itself
    values: Tensor
    log_probs: Tensor  # [entries, width, draft vocabulary]: of the token after each node


class Drafts:
    """Drafts from all entries of one text that end inside its answer."""

    def __init__(self, head: Head, kept: Tensor, text: Texts) -> None:
        assert len(text) == 1, "one text at a time"
        length = -(-int(text.lengths[0]) // _UNIT) * _UNIT
        shape = BatchShape(num_tokens=length, chunk=1, num_steps=1)
        batch = make_batch(text, length, [0], shape, _CPU)
        self._head, self._kept = head, kept
        self._chains: Chains = head.begin(head.target.features(batch, head.config.taps), batch)
        self.entries = batch.entries
        # From the second token after an entry on; -1 where the answer has ended or the head does not know the token.
        place = torch.full((head.target.config.vocab_size,), -1).scatter(0, kept, torch.arange(len(kept)))
        known = torch.full((2 * length,), -1)
        known[: int(text.lengths[0])] = torch.from_numpy(text.tokens.astype(np.int64))
        self._known = known.clamp(min=0)
        self._places = torch.where(known >= 0, place[self._known], -1)

    def truth(self, depth: int) -> Tensor:
        """The place in the draft vocabulary of each entry's true token at a depth, from 0; -1: there is none."""
        return self._places[self.entries + 2 + depth]

    @torch.no_grad()
    def root(self) -> Level:
        """What a head computes first: the token that the target emitted last, and with it the rows of all entries."""
        batch = self._chains.batch
        q, keys, values = self._enter(self._chains.h, batch.shifted(1), batch.positions())
        group = q.shape[1] // keys.shape[1]
        self._text_keys, self._text_values = (x.repeat_interleave(group, 1).transpose(0, 1) for x in (keys, values))
        none = keys.new_zeros((len(self.entries), 1, 0, *keys.shape[1:]))
        return self._leave(self._chains.h[self.entries][:, None], q[self.entries][:, None], none, none)

    @torch.no_grad()
    def grow(self, above: Level, parents: Tensor, tokens: Tensor) -> Level:
        """Feed the nodes [entries, width] with these parents, given by their place in the level above, and tokens."""
        num, width = parents.shape
        rows = torch.arange(num)[:, None]
        state = above.state[rows, parents]
        depth = above.keys.shape[2] + 1
        positions = (self.entries + depth)[:, None].expand(-1, width).reshape(-1)
        made = self._enter(state.flatten(0, 1), tokens.reshape(-1), positions)
        q, key, value = (x.view(num, width, *x.shape[1:]) for x in made)
        keys = torch.cat([above.keys[rows, parents], key[:, :, None]], dim=2)
        values = torch.cat([above.values[rows, parents], value[:, :, None]], dim=2)
        return self._leave(state, q, keys, values)

    def true_ranks(self, depth: int) -> Ranks:
        """[entries, depth]: how many tokens the head finds likelier than the true one, after the true ones before."""
        found = np.full((len(self.entries), depth), NEVER, np.int32)
        level, alive = self.root(), torch.ones(len(self.entries), dtype=torch.bool)
        only = torch.zeros((len(self.entries), 1), dtype=torch.int64)
        for i in range(depth):
            truth, log_probs = self.truth(i), level.log_probs[:, 0]
            alive = alive & (truth >= 0)
            own = log_probs.gather(1, truth.clamp(min=0)[:, None])
            found[alive, i] = (log_probs > own).sum(1)[alive].numpy()
            if i + 1 < depth:
                level = self.grow(level, only, self._known[self.entries + 2 + i][:, None])
        return found

    def tree_ranks(self, width: int, depth: int) -> Ranks:
        """[entries, depth, depth]: at [:, i, j], how many nodes of the first j + 1 levels go before the true node of
        level i, by joint probability. Every level expands its `width` likeliest nodes, each to as many children."""
        num = len(self.entries)
        found = np.full((num, depth, depth), NEVER, np.int32)
        level = self.root()
        joint, is_true = torch.zeros(num, 1), torch.ones(num, 1, dtype=torch.bool)
        joints, own = list[Tensor](), list[Tensor]()
        for i in range(depth):
            log_probs, places = level.log_probs.topk(width)
            total = (joint[:, :, None] + log_probs).flatten(1)
            hit = (is_true[:, :, None] & (places == self.truth(i)[:, None, None])).flatten(1)
            joints.append(total)
            own.append(torch.where(hit, total, -torch.inf).amax(1))
            if i + 1 < depth:
                joint, best = total.topk(width)
                is_true = hit.gather(1, best)
                level = self.grow(level, best // width, self._kept[places.flatten(1).gather(1, best)])
        for i, mine in enumerate(own):
            # A child may be as likely as its parent, which goes first.
            before = [(joints[j] >= mine[:, None] if j < i else joints[j] > mine[:, None]).sum(1) for j in range(depth)]
            counts = torch.stack(before, 1).cumsum(1)[:, i:]
            found[:, i, i:] = torch.where(mine[:, None] > -torch.inf, counts, NEVER).numpy()
        return found

    def _enter(self, h: Tensor, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        head, c, working = self._head, self._head.config, self._chains.working
        e = functional.embedding(tokens, head.target.weights.embedding)
        rope = head.target.rope(positions, 2 * self._chains.batch.length)
        norms = (working[f"layers.0.{name}.weight"] for name in ("hidden_norm", "input_layernorm"))
        return head.enter(h, e, *norms, self._chains.layer.qkv, rope, c.num_heads, c.num_kv_heads, c.epsilon)

    def _leave(self, h: Tensor, q: Tensor, keys: Tensor, values: Tensor) -> Level:
        """h [entries, width, model's width], q [entries, width, heads, head size]."""
        c, layer, num, width = self._head.config, self._chains.layer, *q.shape[:2]
        mixed = self._attend(q, keys, values).reshape(num * width, -1)
        state = self._head.finish(
            h.flatten(0, 1), mixed, layer.out, layer.norm, layer.gate_up, layer.down, c.epsilon
        )  # fmt: skip
        logits = rms_norm(state, self._chains.working["norm.weight"], c.epsilon) @ self._chains.output.T
        log_probs = logits.log_softmax(-1).view(num, width, -1)
        return Level(state.view(num, width, -1), keys, values, log_probs)

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Over the text up to each draft's entry, and over the ancestors and the node itself."""
        num, width, heads, dim = q.shape
        group = heads // keys.shape[3]
        rows = (q / dim**0.5).permute(2, 0, 1, 3).reshape(heads, num * width, dim)
        scores = (rows @ self._text_keys.transpose(1, 2)).view(heads, num, width, -1)
        hidden = torch.arange(scores.shape[-1]) > self.entries[:, None]
        scores = scores.masked_fill(hidden[None, :, None], -torch.inf)
        own_keys, own_values = (x.repeat_interleave(group, 3) for x in (keys, values))
        own = torch.einsum("nwhd,nwlhd->hnwl", q / dim**0.5, own_keys)
        probs = torch.cat([scores, own], -1).softmax(-1)
        num_text = scores.shape[-1]
        text = probs[..., :num_text].reshape(heads, num * width, -1) @ self._text_values
        mixed = text.view(heads, num, width, dim).permute(1, 2, 0, 3)
        return mixed + torch.einsum("hnwl,nwlhd->nwhd", probs[..., num_text:], own_values)
