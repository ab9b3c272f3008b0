"""A draft model with another tokenizer than the target's.

Both models read the same text (see `text_bridge.py`). There are two ways to draft (Timor et al. 2025):

- As text, for greedy requests and where the vocabularies have little in common: what the draft model says is tokenised
  by the target's tokenizer and offered as a one-hot draft. Verification is exact whatever is offered.
- As tokens, for sampled requests: the draft model's distribution is restricted to the tokens that both vocabularies
  have, and tokens are drawn from exactly that, in the target's ids: with the target's noise where tokens are compared
  with the target's own, else independently, with the distribution kept for rejection sampling.

The policy sees a draft model like any other, with its costs and what it has to catch up on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from outpace.backends.base import LoadedModel, Tokenizer, Verifier
from outpace.core import Draft, Request, Verdict
from outpace.kv.prefix import common_prefix_length
from outpace.speculation.proposers.base import DraftAsk
from outpace.speculation.proposers.draft_model import Drafting, DraftModelProposer, FloatRow
from outpace.speculation.proposers.text_bridge import ENOUGH_SHARED, Bridged, TextBridge


class SharedTokens:
    """The tokens that stand for the same text in both vocabularies, or for the same control token."""

    def __init__(self, target: Tokenizer, draft: Tokenizer) -> None:
        ours = _by_meaning(target)
        pairs = [(ours[meaning], token) for meaning, token in _by_meaning(draft).items() if meaning in ours]
        self.target_ids: NDArray[np.int64] = np.array([ours for ours, _ in pairs], np.int64)
        self.draft_ids: NDArray[np.int64] = np.array([theirs for _, theirs in pairs], np.int64)
        self.to_draft = dict(pairs)
        self.share = len(pairs) / max(1, draft.vocab_size)

    def restricted(self, logits: FloatRow, vocab_size: int) -> FloatRow:
        """The draft model's logits of the shared tokens, at their places in the target's vocabulary. The softmax of
        these is the draft model's distribution, restricted and renormalised."""
        row = np.full(vocab_size, -np.inf, np.float32)
        row[self.target_ids] = logits[self.draft_ids]
        return row


def _by_meaning(tokenizer: Tokenizer) -> dict[tuple[bool, bytes], int]:
    controls = {token.id: token.text.encode(errors="surrogateescape") for token in tokenizer.specials.controls.tokens}
    found: dict[tuple[bool, bytes], int] = {(True, text): token for token, text in controls.items() if text}
    for token in range(tokenizer.vocab_size):
        text = tokenizer.token_bytes(token)
        if text and token not in controls:
            found.setdefault((False, text), token)
    return found


@dataclass(slots=True)
class _Text:
    """What the draft model has said as text, and how sure it was of each of its tokens."""

    text: bytes = b""
    ends: list[int] = field(default_factory=list)  # of its tokens in the text
    sure: list[float] = field(default_factory=list)
    control: int | None = None  # a control token of the target after the text


class OtherVocabularyProposer(DraftModelProposer):
    def __init__(
        self, model: LoadedModel, target: Tokenizer, target_vocab_size: int, verifier: Verifier | None = None
    ) -> None:
        super().__init__(model, target_vocab_size, verifier)
        self._draws_on_device = False  # a device draws in the draft model's vocabulary
        self.bridge = TextBridge(target, model.tokenizer)
        self.shared = SharedTokens(target, model.tokenizer)
        self._bridged: dict[int, Bridged] = {}  # by request
        self._fed: dict[int, list[int]] = {}  # what a sequence's cache holds
        self._texts: dict[int, _Text] = {}  # of the drafts being made, by request

    def propose(self, asks: Sequence[DraftAsk]) -> list[Draft]:
        self._texts = {}
        drafts = super().propose(asks)
        assert self.timing is not None
        begin = perf_counter()
        for ask, draft in zip(asks, drafts, strict=True):
            said = self._texts.get(ask.request.id)
            if said is not None:
                self._retokenise(said, draft, ask.depth)
        self.timing.draw_seconds += perf_counter() - begin
        return drafts

    def observe(self, request: Request, verdict: Verdict) -> None:
        pass  # the cache is compared with the text when the next draft is made

    def release(self, request: Request) -> None:
        super().release(request)
        self._bridged.pop(request.id, None)

    def num_uncached(self, request: Request) -> int:
        tokens = self._tokens(request)
        return max(1, len(tokens) - common_prefix_length(self._fed.get(request.id, []), tokens))

    def _tokens(self, request: Request) -> list[int]:
        bridged = self._bridged.get(request.id)
        if bridged is None:
            bridged = self._bridged[request.id] = self.bridge.start()
        self.bridge.read(bridged, request.tokens)
        return bridged.tokens

    def _uncached(self, request: Request, seq: int) -> list[int]:
        assert self.timing is not None
        begin = perf_counter()
        tokens, fed = self._tokens(request), self._fed.setdefault(request.id, [])
        self.timing.draw_seconds += perf_counter() - begin  # the bridge is part of what a draft token costs the host
        # The logits of the last token are needed, so it is computed again even if it is there.
        num_kept = min(common_prefix_length(fed, tokens), len(tokens) - 1)
        self._cache.rewind(seq, num_kept)
        del fed[num_kept:]
        return tokens[num_kept:]

    def _forget(self, request_id: int) -> None:
        self._fed.pop(request_id, None)

    def _drafts_text(self, request: Request) -> bool:
        return request.params.is_greedy or self.shared.share < ENOUGH_SHARED

    def _fit(self, row: FloatRow) -> FloatRow:
        return row  # `_draw` fits it, if it draws in the target's vocabulary

    def _fed_now(self, drafting: Drafting, tokens: list[int]) -> None:
        self._fed[drafting.request.id] += tokens

    def _draw(self, drafting: Drafting, logits: FloatRow) -> int | None:
        request = drafting.request
        if not self._drafts_text(request):
            token = super()._draw(drafting, self.shared.restricted(logits, self._vocab_size))
            assert token is not None
            return self.shared.to_draft[token]
        said = self._texts.setdefault(request.id, _Text())
        token = int(logits.argmax())
        text = self.bridge.draft_bytes(token)
        if text is None:
            said.control = self.bridge.target_control(token)
            return None
        said.text += text
        said.ends.append(len(said.text))
        drafting.draft.tokens.append(token)  # its length tells how deep the draft is; replaced at the end
        return token

    def _retokenise(self, said: _Text, draft: Draft, depth: int) -> None:
        """The text in the target's tokens. A token is as sure as all of the draft model's tokens it is made of."""
        tokens, confidence = self.bridge.target_tokens(said.text), draft.confidence
        sure: list[float] = []
        at = 0
        for token in tokens:
            begin, at = at, at + len(self.bridge.target_bytes(token))
            product = 1.0
            for i, end in enumerate(said.ends[: len(confidence)]):
                if end > begin and (said.ends[i - 1] if i else 0) < at:
                    product *= confidence[i]
            sure.append(product)
        if said.control is not None:
            tokens.append(said.control)
            sure.append(confidence[len(said.ends)] if len(said.ends) < len(confidence) else 1.0)
        elif len(confidence) > len(said.ends):
            sure.append(confidence[-1])  # of the token before which it stopped
        draft.tokens = tokens[:depth]
        draft.confidence = sure[: len(draft.tokens) + 1] if confidence else []
