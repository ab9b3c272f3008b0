"""Compares acceptance on the device with the host, given the same noise, and tests the distribution of generations.

Ragged batches are verified at once, and request by request with `verification.verify`; the verdicts are equal. The
arithmetic is bit for bit the same, except for the float64 sums of an inverse transform, whose order may differ.
"""

from __future__ import annotations

import random
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("torch", reason="torch is not installed; the torch backend needs it")

import torch

from outpace.backends.torch.sampling import acceptance as device
from outpace.backends.torch.sampling.acceptance import Drafts, Verdicts, draw_weighted
from outpace.backends.torch.sampling.filters import RowParams, choose, probs
from outpace.backends.torch.sampling.noise import keys, signed, uniforms
from outpace.config import SamplingParams, SpeculationParams
from outpace.core import Draft, Request, Verdict
from outpace.decoding.randomness import Purpose, key, uniform
from outpace.decoding.sampling import Shaper
from outpace.decoding.sampling import choose as host_choose
from outpace.decoding.verification import draw_weighted as host_draw_weighted
from outpace.decoding.verification import matches_own_tokens, verify
from tests.goodness import SMALLEST_P, fits

FloatRows = NDArray[np.float32]


def make_request(params: SamplingParams, seed: int, num_emitted: int) -> Request:
    return Request(
        id=0,
        params=params,
        prompt=[0] * num_emitted,
        seed=seed,
        shaper=Shaper(params, (), frozenset()),
        writer=cast(Any, None),
        max_length=10**6,
    )


FEATURES: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.5},
    {"temperature": 1.8},
    {"top_k": 3},
    {"top_p": 0.9},
    {"min_p": 0.1},
    {"temperature": 0.9, "top_k": 50, "top_p": 0.95, "min_p": 0.01},
]


class Batch:
    """Ragged drafts, drawn on the host like a draft model's, and packed target rows."""

    def __init__(
        self, acceptance: str, num_requests: int, depth: int, vocab: int, *, closeness: float, seeded: bool, seed: int
    ) -> None:
        generator = random.Random(f"{acceptance} {vocab} {closeness} {seeded} {seed}")
        noise = np.random.default_rng([seed, vocab, depth])
        threshold = 0.15 if acceptance == "threshold" else None
        speculation = SpeculationParams(acceptance=cast(Any, acceptance), threshold=threshold)
        self.depth, self.requests, self.drafts, self.target_rows = depth, [], [], []
        self.draft_rows = np.zeros((num_requests, depth, vocab), dtype=np.float32)
        for i in range(num_requests):
            features = FEATURES[i % len(FEATURES)]
            number = generator.getrandbits(64)
            params = SamplingParams(seed=number if seeded else None, speculation=speculation, **features)
            request = make_request(params, number, generator.randrange(1, 5000))
            rows = (noise.normal(size=(depth + 1, vocab)) * noise.choice([0.5, 2.0, 5.0])).astype(np.float32)
            self.draft_rows[i] = rows[:-1] + (noise.normal(size=(depth, vocab)) * closeness).astype(np.float32)
            draft = self._host_draft(request, self.draft_rows[i, : generator.randrange(depth + 1)])
            self.requests.append(request)
            self.drafts.append(draft)
            self.target_rows.append(rows[: len(draft.tokens) + 1])

    @staticmethod
    def _host_draft(request: Request, rows: FloatRows) -> Draft:
        draft = Draft([], "draft", None if matches_own_tokens(request.params) else [])
        anchor = len(request.tokens)
        for offset, row in enumerate(rows):
            probs = request.shaper.probs(row, ())
            if draft.probs is None:
                draft.tokens.append(host_choose(probs, request.seed, anchor + offset))
            else:
                noise = uniform(key(request.seed, Purpose.DRAFT, anchor, offset))
                draft.tokens.append(host_draw_weighted(probs, noise))
                draft.probs = [*draft.probs, probs]
        return draft

    def device_drafts(self) -> Drafts:
        lengths = [len(draft.tokens) for draft in self.drafts]
        first_row = np.cumsum([0, *[length + 1 for length in lengths[:-1]]])
        row_of = first_row[:, None] + np.minimum(np.arange(self.depth + 1), np.array(lengths)[:, None])
        seeds, anchors = [request.seed for request in self.requests], [len(request.tokens) for request in self.requests]
        noise = torch.from_numpy(device.noise_of(seeds, anchors, self.depth))
        return Drafts(
            tokens=torch.tensor([draft.tokens + [0] * (self.depth - len(draft.tokens)) for draft in self.drafts]),
            num_drafted=torch.tensor(lengths),
            row_of=torch.from_numpy(row_of),
            accept_noise=noise[:, : self.depth],
            recover_noise=noise[:, self.depth :],
        )

    def target(self) -> torch.Tensor:
        params = [r.params for r, rows in zip(self.requests, self.target_rows, strict=True) for _ in rows]
        return probs(torch.from_numpy(np.concatenate(self.target_rows)), RowParams.of(params))

    def draft(self) -> torch.Tensor:
        logits = torch.from_numpy(self.draft_rows)
        params = RowParams.of([request.params for request in self.requests])
        return torch.stack([probs(logits[:, i], params) for i in range(self.depth)], dim=1)

    def own_tokens(self, target: torch.Tensor) -> torch.Tensor:
        addresses = [
            (signed(r.seed), len(r.tokens) + i)
            for r, rows in zip(self.requests, self.target_rows, strict=True)
            for i in range(len(rows))
        ]
        seeds, positions = torch.tensor(addresses).unbind(1)
        return choose(target, seeds, positions)

    def assert_agrees(self, verdicts: Verdicts) -> int:
        """Compare with `verify`; returns the number of accepted draft tokens."""
        columns = (verdicts.num_accepted, verdicts.final_token, verdicts.num_lenient)
        for i, (accepted, final, lenient) in enumerate(torch.stack(columns, dim=1).tolist()):
            expected = verify(self.requests[i], self.drafts[i], self.target_rows[i])
            verdict = Verdict([*self.drafts[i].tokens[:accepted], final], expected.num_drafted, accepted, lenient)
            assert verdict == expected, f"request {i}, {self.requests[i].params}"
        return int(verdicts.num_accepted.sum())


def draw_draft(p: torch.Tensor, seed: torch.Tensor, anchor: torch.Tensor, offset: int) -> torch.Tensor:
    """A draft model's next token, `offset` tokens after the anchor, for `reject` or `verify_block`."""
    return draw_weighted(p, uniforms(keys(seed, Purpose.DRAFT, anchor, torch.full_like(anchor, offset))))


def is_sampled(batch: Batch) -> torch.Tensor:
    return torch.tensor([not matches_own_tokens(request.params) for request in batch.requests])


@pytest.mark.parametrize("closeness", [0.0, 0.01, 0.5, 3.0])
@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("vocab", [6, 1000])
def test_sampled_verdicts_equal_the_hosts(rule: str, closeness: float, vocab: int) -> None:
    """Greedy requests share the batch; `match` verifies them, as `verify` does."""
    num_accepted = 0
    for seed in range(4 if vocab < 100 else 1):
        batch = Batch(rule, 160, 4, vocab, closeness=closeness, seeded=False, seed=seed)
        drafts, target = batch.device_drafts(), batch.target()
        judge = device.reject if rule == "rejection" else device.verify_block
        result = judge(drafts, batch.draft(), target)
        matched = device.match(drafts, batch.own_tokens(target))
        num_accepted += batch.assert_agrees(result.where(is_sampled(batch), matched))
    assert num_accepted > 10


@pytest.mark.parametrize("acceptance", ["exact", "typical", "threshold"])
@pytest.mark.parametrize("closeness", [0.01, 0.5])
@pytest.mark.parametrize("vocab", [6, 1000])
def test_matched_and_lenient_verdicts_equal_the_hosts(acceptance: str, closeness: float, vocab: int) -> None:
    batch = Batch(acceptance, 320, 4, vocab, closeness=closeness, seeded=True, seed=1)
    drafts, target = batch.device_drafts(), batch.target()
    lenient = None
    everyone = torch.ones(len(batch.requests), dtype=torch.float64)
    if acceptance == "threshold":
        lenient = device.threshold_leniency(drafts, target, 0.15 * everyone)
    elif acceptance == "typical":
        lenient = device.typical_leniency(drafts, target, 0.09 * everyone, 0.3 * everyone)
    verdicts = device.match(drafts, batch.own_tokens(target), lenient)
    assert batch.assert_agrees(verdicts) > 100
    assert bool((verdicts.num_lenient > 0).any()) or acceptance == "exact" or closeness < 0.1


@pytest.mark.parametrize("vocab", [49_152, 151_936])
def test_verdicts_equal_the_hosts_in_real_vocabularies(vocab: int) -> None:
    for rule in ("rejection", "block"):
        batch = Batch(rule, 8, 2, vocab, closeness=0.3, seeded=False, seed=2)
        judge = device.reject if rule == "rejection" else device.verify_block
        drafts, target = batch.device_drafts(), batch.target()
        result = judge(drafts, batch.draft(), target)
        matched = device.match(drafts, batch.own_tokens(target))
        batch.assert_agrees(result.where(is_sampled(batch), matched))


# --- drawing ----------------------------------------------------------------------------------------------------


def is_on_a_border(weights: FloatRows, noise: float) -> bool:
    """Whether an inverse transform aims so near the border of two tokens that the order of a sum decides."""
    ends = np.cumsum(weights, dtype=np.float64)
    return bool(np.abs(ends - noise * ends[-1]).min() < 1e-12 * ends[-1])


@pytest.mark.parametrize("vocab", [1, 7, 128, 1000, 151_936])
def test_weighted_draws_equal_the_hosts(vocab: int) -> None:
    generator = np.random.default_rng(vocab)
    weights = generator.exponential(size=(40, vocab)) ** 3 * (generator.random((40, vocab)) < 0.6)
    weights[:, generator.integers(vocab)] += 1e-15
    weights = (weights * generator.choice([1e-20, 1.0, 1e6], size=(40, 1))).astype(np.float32)
    for noise in (generator.random(40), np.full(40, 2.0**-53), np.full(40, 1 - 2.0**-53)):
        tokens = draw_weighted(torch.from_numpy(weights), torch.from_numpy(noise)).tolist()
        for row, u, token in zip(weights, noise.tolist(), tokens, strict=True):
            assert row[token] > 0
            assert token == host_draw_weighted(row, u) or is_on_a_border(row, u)


def test_weight_zero_is_never_drawn() -> None:
    weights = torch.zeros(1, 400)
    weights[0, [2, 130, 131, 399]] = torch.tensor([0.25, 1e-30, 0.5, 0.0])
    noise = torch.cat([torch.linspace(0, 1, 1001, dtype=torch.float64), torch.tensor([5e-324, 1 / 3]).double()])
    tokens = draw_weighted(weights.expand(len(noise), -1), noise)
    assert set(tokens.tolist()) == {2, 131}
    assert draw_weighted(weights, torch.tensor([1.0]).double()).tolist() == [131]


@pytest.mark.parametrize("vocab", [6, 1000, 20_001])
def test_a_draft_loop_draws_what_the_host_draws(vocab: int) -> None:
    for seeded in (False, True):
        batch = Batch("exact", 96, 3, vocab, closeness=0.3, seeded=seeded, seed=5)
        seed = torch.tensor([signed(request.seed) for request in batch.requests])
        anchor = torch.tensor([len(request.tokens) for request in batch.requests])
        params = RowParams.of([request.params for request in batch.requests])
        for offset in range(3):
            shaped = probs(torch.from_numpy(batch.draft_rows)[:, offset], params)
            own = choose(shaped, seed, anchor + offset)
            drawn = draw_draft(shaped, seed, anchor, offset)
            tokens = torch.where(is_sampled(batch), drawn, own)
            for i, draft in enumerate(batch.drafts):
                if offset < len(draft.tokens):
                    assert int(tokens[i]) == draft.tokens[offset]


def test_nothing_looks_at_data_on_the_way() -> None:
    """Meta tensors have no data: a branch on a value, or a shape that depends on one, is an error."""
    num_requests, depth, vocab = 4, 3, 20_001
    batch = RowParams.of([SamplingParams(top_p=0.9)] * num_requests, "meta")
    buffer = torch.empty(num_requests, depth, vocab, device="meta")
    words = torch.empty(num_requests, dtype=torch.int64, device="meta")
    steps, tokens = [], []
    for i in range(depth):
        steps.append(probs(buffer[:, i], batch))
        tokens.append(draw_draft(steps[-1], words, words, i))
    row_of = torch.empty(num_requests, depth + 1, dtype=torch.int64, device="meta")
    noise = torch.empty(num_requests, 2 * depth + 1, dtype=torch.float64, device="meta")
    drafts = Drafts(torch.stack(tokens, dim=1), words, row_of, noise[:, :depth], noise[:, depth:])
    rows = torch.arange(num_requests, device="meta").repeat(depth + 1)
    target = probs(torch.empty(num_requests * (depth + 1), vocab, device="meta"), batch.rows(rows))
    own = choose(target, words.repeat(depth + 1), words.repeat(depth + 1))
    lenient = device.typical_leniency(drafts, target, words.double(), words.double())
    matched = device.match(drafts, own, lenient)
    for judge in (device.reject, device.verify_block):
        verdicts = judge(drafts, torch.stack(steps, dim=1), target).where(words > 0, matched)
        assert verdicts.final_token.shape == (num_requests,)


# --- whole generations: the target's distribution --------------------------------------------------------------

VOCAB, LENGTH, DEPTH, NUM_REQUESTS = 5, 4, 3, 6000
SHAPED: dict[str, Any] = {"temperature": 0.9, "top_k": 4, "top_p": 0.9}
# A context is a number: a leading 1, then its tokens as digits. Logits are looked up by it.
_NUM_CONTEXTS = 2 * VOCAB ** (LENGTH + DEPTH)
TARGET = torch.from_numpy(np.random.default_rng(1).normal(size=(_NUM_CONTEXTS, VOCAB)).astype(np.float32)) * 1.5
DRAFT = TARGET + torch.from_numpy(np.random.default_rng(2).normal(size=(_NUM_CONTEXTS, VOCAB)).astype(np.float32))


def generations(rule: str, features: dict[str, Any], *, drawn_at: float = 1.0) -> tuple[list[tuple[int, ...]], float]:
    """Tokens of many requests, in one batch; each request drafts 3, 2 or no tokens, depending on its position."""
    params = RowParams.of([SamplingParams(**features)] * NUM_REQUESTS)
    drawn_with = RowParams.of([SamplingParams(**features | {"temperature": drawn_at})] * NUM_REQUESTS)
    seed = torch.arange(NUM_REQUESTS) * 1_000_003 + 17
    said = torch.zeros(NUM_REQUESTS, LENGTH + DEPTH + 1, dtype=torch.int64)
    length = torch.zeros(NUM_REQUESTS, dtype=torch.int64)
    code = torch.ones(NUM_REQUESTS, dtype=torch.int64)
    num_steps = num_emitted = 0
    while bool((length < LENGTH).any()):
        num_drafted = torch.tensor([3, 2, 3, 0, 0])[length.clamp(max=LENGTH)]
        contexts, tokens, steps = [code], [], []
        buffer = torch.empty(NUM_REQUESTS, DEPTH, VOCAB)
        for i in range(DEPTH):
            buffer[:, i] = DRAFT[contexts[-1] % _NUM_CONTEXTS]
            drawn = probs(buffer[:, i], drawn_with)
            own = choose(drawn, seed, length + i)
            tokens.append(own if rule == "match" else draw_draft(drawn, seed, length, i))
            steps.append(probs(buffer[:, i], params))
            contexts.append(contexts[-1] * VOCAB + tokens[-1])
        rows = torch.stack(contexts, dim=1) % _NUM_CONTEXTS  # rows beyond a draft are ignored
        row_of = torch.arange(rows.numel()).view(rows.shape)
        noise = torch.from_numpy(device.noise_of(seed.tolist(), length.tolist(), DEPTH))
        drafts = Drafts(torch.stack(tokens, dim=1), num_drafted, row_of, noise[:, :DEPTH], noise[:, DEPTH:])
        target = probs(TARGET[rows.flatten()], params.rows(torch.arange(NUM_REQUESTS).repeat_interleave(DEPTH + 1)))
        if rule == "match":
            positions = (length[:, None] + torch.arange(DEPTH + 1)).flatten()
            own = choose(target, seed.repeat_interleave(DEPTH + 1), positions)
            verdicts = device.match(drafts, own)
        else:
            judge = device.reject if rule == "rejection" else device.verify_block
            verdicts = judge(drafts, torch.stack(steps, dim=1), target)
        going = length < LENGTH
        for i in range(DEPTH + 1):
            token = torch.where(i < verdicts.num_accepted, drafts.tokens[:, min(i, DEPTH - 1)], verdicts.final_token)
            says = going & (i <= verdicts.num_accepted)
            said = said.scatter(
                1, length[:, None], torch.where(says, token, said.gather(1, length[:, None])[:, 0])[:, None]
            )
            code, length = torch.where(says, code * VOCAB + token, code), length + says
            num_emitted += int(says.sum())
        num_steps += int(going.sum())
    return [tuple(row) for row in said[:, :LENGTH].tolist()], num_emitted / num_steps


def joint_law(features: dict[str, Any]) -> dict[tuple[int, ...], float]:
    """The joint distribution of plain decoding, from the host's distributions."""
    shaper = Shaper(SamplingParams(**features), (), frozenset())
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(LENGTH):
        longer: dict[tuple[int, ...], float] = {}
        for tokens, probability in law.items():
            code = 1
            for token in tokens:
                code = code * VOCAB + token
            probs = shaper.probs(TARGET[code].numpy(), ())
            longer |= {(*tokens, t): probability * float(probs[t]) for t in np.flatnonzero(probs).tolist()}
        law = longer
    return law


@pytest.mark.parametrize("rule", ["match", "rejection", "block"])
@pytest.mark.parametrize("features", [{}, SHAPED], ids=["plain", "shaped"])
def test_generations_follow_the_targets_joint_law(rule: str, features: dict[str, Any]) -> None:
    outputs, tokens_per_step = generations(rule, features, drawn_at=features.get("temperature", 1.0))
    assert fits(outputs, joint_law(features)) > SMALLEST_P
    assert tokens_per_step > 1.4  # else nothing was accepted and the test is empty


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_the_comparison_catches_a_draft_that_was_drawn_at_another_temperature(rule: str) -> None:
    outputs, _ = generations(rule, {}, drawn_at=0.7)
    assert fits(outputs, joint_law({})) < SMALLEST_P / 100
