"""Turns logits into probabilities: temperature, top-k, top-p, min-p, penalties, bias and masks.

Draft and target logits both pass through here, so their distributions can be compared. Order: bias, penalties, masks,
temperature, top-k, top-p, min-p. Everything is float32; greedy is the one-hot limit, computed as an argmax. Acceptance
is in `acceptance.py`.

This is the reference: other implementations (`backends/native/csrc/sampling.cpp`, the torch backend's
`sampling/filters.py` and `kernels/drawing.py`) must give the same tokens. Every decision compares numbers that come
from exact IEEE operations in a fixed order (see `numerics.py`), so the bits agree and ties resolve the same way. Logits
that contain a NaN are the only exception.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from outpace.config import SamplingParams
from outpace.core import TokenLogprob
from outpace.decoding.bad_words import BadWords
from outpace.decoding.matcher import Matcher
from outpace.decoding.numerics import LOG2_E, powers_of_two, total
from outpace.decoding.randomness import Purpose, exponentials, key

FloatRow = NDArray[np.float32]

# Tokens below this fraction of the largest probability are drawn as one group first, and one by one only if the group
# wins. The distribution is the same, but a draw touches a few dozen tokens instead of the whole vocabulary.
HEAD_RATIO = np.float32(1e-3)
_LARGEST = float(np.finfo(np.float32).max)
_TAIL_INDEX = -1  # index of the noise for the group of unlikely tokens


def sharpness(temperature: float) -> np.float32:
    """The factor that turns logits into exponents of two; at most the largest float32, for tiny temperatures."""
    return np.float32(min(LOG2_E / max(temperature, 1e-300), _LARGEST))


class Shaper:
    """Turns one request's logits into the distribution its next token is drawn from.

    `prefix` is always the draft tokens before the row. State that depends on earlier tokens (penalties, min_tokens, bad
    words, the grammar) counts them as emitted, so that a row inside a draft gets exactly what it would get if those
    tokens had been emitted one at a time. With a matcher, tokens that its grammar forbids get probability zero. The
    params' bad words must be token ids.
    """

    def __init__(
        self, params: SamplingParams, prompt: Sequence[int], stop_ids: frozenset[int], matcher: Matcher | None = None
    ) -> None:
        self.params = params
        self.stop_ids = np.fromiter(sorted(stop_ids), dtype=np.int64)
        self._bias_ids = np.fromiter(params.logit_bias.keys(), dtype=np.int64)
        self._bias = np.fromiter(params.logit_bias.values(), dtype=np.float32)
        self.sharpness = sharpness(params.temperature)
        self._bad_words = BadWords([word for word in params.bad_words if not isinstance(word, str)])
        self.matcher = matcher
        self.has_only_mask = not (
            params.logit_bias or params.has_penalties or (params.min_tokens and stop_ids) or params.bad_words
        )
        self.may_adjust = matcher is not None or not self.has_only_mask
        self.num_output = 0
        self._prompt_ids = frozenset(prompt) if params.repetition_penalty != 1.0 else frozenset()
        self._output_counts: Counter[int] = Counter()

    def advance(self, tokens: Sequence[int]) -> None:
        """Record tokens that were emitted."""
        self.num_output += len(tokens)
        if self.may_adjust and self.params.has_penalties:
            self._output_counts.update(tokens)
        if self.matcher is not None:
            self.matcher.advance(tokens)
        if self.params.bad_words:
            self._bad_words.advance(tokens)

    def forbidden(self, prefix: Sequence[int]) -> list[int]:
        """Tokens that would complete a bad word after `prefix`."""
        return self._bad_words.after(prefix) if self.params.bad_words else []

    @property
    def token_counts(self) -> dict[int, int]:
        """Input of the penalties: how often each token was emitted; 0 for tokens that are only in the prompt."""
        return dict.fromkeys(self._prompt_ids, 0) | self._output_counts

    def greedy(self, logits: FloatRow, prefix: Sequence[int]) -> int:
        """The argmax; the lowest id among equals."""
        return int(self.adjusted(logits, prefix).argmax())

    def probs(self, logits: FloatRow, prefix: Sequence[int]) -> FloatRow:
        """The distribution of the next token after `prefix`; sums to one, zero for filtered tokens."""
        params = self.params
        x = self.adjusted(logits, prefix)
        if params.is_greedy:
            one_hot = np.zeros(x.shape, dtype=np.float32)
            one_hot[x.argmax()] = 1.0
            return one_hot
        # Subtract the maximum first: with a tiny temperature, other tokens then become zero instead of overflowing.
        x = x - x.max()
        with np.errstate(over="ignore"):
            x *= self.sharpness
        p = powers_of_two(x)
        if 0 < params.top_k < p.size:
            _keep_top_k(p, params.top_k)
        p /= total(p)
        if params.top_p < 1.0:
            _keep_top_p(p, params.top_p)
        if params.min_p > 0.0:
            p[p < p.max() * np.float32(params.min_p)] = 0.0
        if params.top_p < 1.0 or params.min_p > 0.0:
            p /= total(p)
        return p

    def adjusted(self, logits: FloatRow, prefix: Sequence[int]) -> FloatRow:
        """Apply bias, penalties and masks. Returns `logits` itself, not a copy, if none applies; see `may_adjust`."""
        x = self.unmasked(logits, prefix)
        return x if self.matcher is None else self.matcher.masked(x, prefix)

    def unmasked(self, logits: FloatRow, prefix: Sequence[int]) -> FloatRow:
        """The same without the grammar's mask, which comes last."""
        if self.has_only_mask:
            return logits
        masks_stops = self.num_output + len(prefix) < self.params.min_tokens and self.stop_ids.size > 0
        forbidden = self.forbidden(prefix)
        if not (self._bias_ids.size or masks_stops or self.params.has_penalties or forbidden):
            return logits
        x = logits.copy()
        if self._bias_ids.size:
            x[self._bias_ids] += self._bias
        if self.params.has_penalties:
            self._penalise(x, prefix)
        if masks_stops:
            x[self.stop_ids] = -np.inf
        if forbidden:
            x[forbidden] = -np.inf
        return x

    def _penalise(self, x: FloatRow, prefix: Sequence[int]) -> None:
        params = self.params
        counts = self._output_counts + Counter(prefix) if prefix else self._output_counts
        if params.repetition_penalty != 1.0:
            seen = np.fromiter(self._prompt_ids.union(counts), dtype=np.int64)
            penalty = np.float32(params.repetition_penalty)
            values = x[seen]
            x[seen] = np.where(values > 0, values / penalty, values * penalty)
        if counts and (params.presence_penalty or params.frequency_penalty):
            ids = np.fromiter(counts.keys(), dtype=np.int64)
            times = np.fromiter(counts.values(), dtype=np.float32)
            x[ids] -= np.float32(params.presence_penalty) + np.float32(params.frequency_penalty) * times


def _keep_top_k(p: FloatRow, k: int) -> None:
    """Zero all but the k largest. Among equals at the border the lower ids stay, so that exactly k remain."""
    border = np.partition(p, p.size - k)[p.size - k]
    p[p < border] = 0.0
    tied = np.flatnonzero(p == border)
    surplus = np.count_nonzero(p) - k if border > 0 else 0
    if surplus > 0:
        p[tied[-surplus:]] = 0.0


def _keep_top_p(p: FloatRow, top_p: float) -> None:
    """Zero all but the smallest set of likeliest tokens whose mass reaches top_p; the token that crosses it stays.

    All tokens below (1 - top_p) / size together have less mass than 1 - top_p, so none of them is in the set and only
    the others are sorted.
    """
    candidates = np.flatnonzero(p >= np.float32((1.0 - top_p) / p.size))
    order = candidates[np.argsort(-p[candidates], kind="stable")]
    mass = np.cumsum(p[order], dtype=np.float64)
    num_kept = int(np.searchsorted(mass, top_p, side="left")) + 1
    kept = order[:num_kept]
    values = p[kept]
    p.fill(0.0)
    p[kept] = values


def choose(probs: FloatRow, seed: int, position: int) -> int:
    """The token that (seed, position) picks from a distribution: argmax(log probs + gumbel noise).

    It is computed as argmax(probs / exponential noise), which is the same without two of the three logarithms. It is
    deterministic, so it replays. Likely tokens always get the same noise, so a draft and a target with similar
    distributions pick the same token about as often as possible. The unlikely tail takes part as one candidate with its
    total mass; if it wins, a second draw with separate noise picks a token inside it. By the max-stability of gumbel
    noise this is a draw from `probs`.
    """
    cut = probs.max() * HEAD_RATIO
    head = np.flatnonzero(probs >= cut)
    head_probs = probs[head].astype(np.float64)
    tail_mass = 1.0 - total(head_probs)
    noise = exponentials(key(seed, Purpose.TOKEN, position), np.append(head, _TAIL_INDEX))
    scores = head_probs / noise[:-1]
    best = int(scores.argmax())
    if tail_mass / noise[-1] > scores[best]:
        tail = np.flatnonzero((probs > 0.0) & (probs < cut))
        if tail.size:
            tail_noise = exponentials(key(seed, Purpose.TAIL, position), tail)
            return int(tail[(probs[tail] / tail_noise).argmax()])
    return int(head[best])


def token_logprob(logits: FloatRow, token: int, num_top: int) -> TokenLogprob:
    """Log-probability under the model's distribution, before temperature and filters."""
    largest = logits.max()
    log_total = float(largest) + math.log(float(np.exp(logits - largest).sum(dtype=np.float64)))
    top = [(int(i), float(logits[i]) - log_total) for i in _likeliest(logits, num_top)] if num_top else []
    rank = 1 + int(np.count_nonzero(logits > logits[token]))
    return TokenLogprob(token_id=token, logprob=float(logits[token]) - log_total, top=top, rank=rank)


def _likeliest(logits: FloatRow, count: int) -> NDArray[np.int64]:
    """The `count` likeliest tokens, best first; the lower id among equals.

    Sorting the vocabulary would take longer than many a step. Instead it is cut into parts; the `count` largest maxima
    of parts are `count` tokens, so no token below the smallest of them is needed.
    """
    num_parts = 1024
    whole = logits.size // num_parts * num_parts
    candidates = np.arange(logits.size)
    if count < num_parts and whole:
        maxima = logits[:whole].reshape(-1, num_parts).max(axis=0)
        candidates = np.flatnonzero(logits >= np.partition(maxima, -count)[-count])
    order = np.lexsort((candidates, -logits[candidates]))
    found: NDArray[np.int64] = candidates[order[:count]]
    return found
