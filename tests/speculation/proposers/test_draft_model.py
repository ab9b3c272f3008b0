"""The draft model: a matching vocabulary, one pass per draft token, and a cache that follows the emitted tokens."""

from __future__ import annotations

from itertools import count
from typing import Any, cast

import numpy as np
import pytest

from outpace.backends.base import Capacity, LoadedModel
from outpace.config import SamplingParams, SpeculationParams
from outpace.core import Draft, Request, Verdict
from outpace.decoding.randomness import Purpose, key, uniform
from outpace.decoding.sampling import Shaper, choose
from outpace.decoding.verification import draw_weighted
from outpace.errors import ModelError
from outpace.models.vocabulary import vocabulary_difference
from outpace.speculation.proposers.base import DraftAsk
from outpace.speculation.proposers.draft_model import DraftModelProposer
from tests.fakes import EOS, ByteTokenizer, FakeModel, FakeRunner

GREEDY = SamplingParams(temperature=0.0)
SEEDED = SamplingParams(temperature=0.9, top_k=20, seed=5)
UNSEEDED = SamplingParams(temperature=0.9, top_k=20)
LOSSY = SamplingParams(temperature=0.9, speculation=SpeculationParams(acceptance="typical"))

_ids = count(1000)


def request(length: int = 3, params: SamplingParams = GREEDY, *, seed: int = 5) -> Request:
    made = next(_ids)
    prompt = [97 + (made + i * i) % 6 for i in range(length)]
    shaper = Shaper(params, prompt, frozenset({EOS}))
    return Request(made, params, prompt, seed, shaper, cast(Any, None), max_length=10_000)


class Drafting:
    """A proposer with a fake draft model, and all objects it uses."""

    def __init__(
        self,
        *,
        vocab_size: int = 258,
        target_vocab_size: int = 258,
        max_sequences: int = 4,
        cache_tokens: int = 400,
        max_step_tokens: int = 64,
        can_rewind: bool = True,
        model: FakeModel | None = None,
    ) -> None:
        capacity = Capacity(max_sequences, cache_tokens, 200, max_step_tokens)
        self.model = model or FakeModel(vocab_size)
        self.runner = FakeRunner(self.model, capacity, can_rewind=can_rewind)
        loaded = LoadedModel(self.runner, ByteTokenizer(), "fake", 0, 0)
        self.proposer = DraftModelProposer(loaded, target_vocab_size)

    def propose(self, *asks: tuple[Request, int]) -> list[Draft]:
        drafts = self.proposer.propose([DraftAsk(who, depth) for who, depth in asks])
        self.proposer._cache.check_integrity()
        return drafts

    def judge(self, who: Request, draft: Draft, num_accepted: int, own: int = 120) -> None:
        """As in the engine: the verdict's tokens are emitted, then the proposer observes the verdict."""
        verdict = Verdict([*draft.tokens[:num_accepted], own], len(draft.tokens), num_accepted)
        who.tokens += verdict.tokens
        who.shaper.advance(verdict.tokens)
        self.proposer.observe(who, verdict)
        self.proposer._cache.check_integrity()

    def held(self, who: Request) -> list[int] | None:
        """The tokens in the draft model's cache for a request; None if it has no sequence."""
        seq = self.proposer._sequences.get(who.id)
        return None if seq is None else self.runner.sequences.get(seq, [])

    def greedily(self, who: Request, depth: int) -> list[int]:
        tokens = list(who.tokens)
        for _ in range(depth):
            tokens.append(int(self.model.logits(tokens)[:258].argmax()))
        return tokens[len(who.tokens) :]


# ---- forward passes


def test_one_forward_per_depth_for_all_requests_together():
    drafting = Drafting()
    asks = [(request(5), 4), (request(9), 4), (request(2), 4)]
    drafting.propose(*asks)
    assert drafting.runner.steps == [[5, 9, 2], [1, 1, 1], [1, 1, 1], [1, 1, 1]]


def test_a_request_that_wants_less_drops_out_of_later_passes():
    drafting = Drafting()
    drafts = drafting.propose((request(5), 1), (request(5), 3), (request(5), 2))
    assert [len(step) for step in drafting.runner.steps] == [3, 2, 1]
    assert [len(draft.tokens) for draft in drafts] == [1, 3, 2]


def test_the_next_draft_feeds_only_what_was_said_since():
    drafting, who = Drafting(), request(20)
    [draft] = drafting.propose((who, 4))
    drafting.judge(who, draft, num_accepted=2)
    drafting.runner.steps.clear()
    drafting.propose((who, 2))
    assert drafting.runner.steps == [[1], [1]], "the target's own token, then one draft token"


def test_the_last_drafted_token_is_fed_only_once_it_was_accepted():
    drafting, who = Drafting(), request(20)
    [draft] = drafting.propose((who, 4))
    drafting.judge(who, draft, num_accepted=4)
    drafting.runner.steps.clear()
    drafting.propose((who, 1))
    assert drafting.runner.steps == [[2]]


def test_a_request_that_was_not_drafted_for_catches_up_in_one_pass():
    drafting, who = Drafting(), request(10)
    [draft] = drafting.propose((who, 2))
    drafting.judge(who, draft, num_accepted=0)
    who.tokens += [98, 99, 100, 101]
    drafting.runner.steps.clear()
    [draft] = drafting.propose((who, 1))
    assert drafting.runner.steps == [[5]]
    assert draft.tokens == drafting.greedily(who, 1)


@pytest.mark.parametrize("lengths", [(100,), (50, 40), (17, 16, 16), (64, 1, 64)])
def test_catching_up_over_more_than_a_step_carries_is_chunked(lengths):
    drafting = Drafting(max_step_tokens=16)
    asks = [(request(length), 2) for length in lengths]
    expected = [drafting.greedily(who, 2) for who, _ in asks]
    assert [draft.tokens for draft in drafting.propose(*asks)] == expected
    assert max(sum(step) for step in drafting.runner.steps) <= 16
    # Required tokens: every prompt and the first drafted token of each; no pass is empty.
    assert drafting.runner.num_computed == sum(lengths) + len(lengths)


# ---- the cache follows the emitted tokens


@pytest.mark.parametrize("num_accepted", [0, 1, 2, 3, 4])
def test_after_a_verdict_the_cache_holds_a_prefix_of_what_was_said(num_accepted):
    drafting, who = Drafting(), request(7)
    [draft] = drafting.propose((who, 4))
    drafting.judge(who, draft, num_accepted)
    held = drafting.held(who)
    assert held == who.tokens[: 7 + min(num_accepted, 3)]
    [again] = drafting.propose((who, 3))
    assert again.tokens == drafting.greedily(who, 3)


def test_many_verdicts_never_leave_a_wrong_token_behind():
    drafting, who = Drafting(), request(4)
    for step in range(12):
        [draft] = drafting.propose((who, 1 + step % 4))
        assert draft.tokens == drafting.greedily(who, 1 + step % 4)
        drafting.judge(who, draft, num_accepted=min(step % 5, len(draft.tokens)), own=97 + step % 6)
        held = drafting.held(who)
        assert held is not None and held == who.tokens[: len(held)]


def test_a_released_request_leaves_nothing_and_may_be_released_twice():
    drafting, who = Drafting(), request()
    drafting.propose((who, 3))
    drafting.proposer.release(who)
    drafting.proposer.release(who)
    drafting.proposer.release(request())
    assert drafting.runner.sequences == {}
    assert drafting.proposer._cache.num_free_tokens == 400


def test_a_verdict_on_an_unknown_request_is_ignored():
    drafting = Drafting()
    drafting.proposer.observe(request(), Verdict([1], 0, 0))
    assert drafting.runner.num_forwards == 0


# ---- catching up and timing


def test_it_knows_what_it_has_to_catch_up_with():
    drafting, who = Drafting(), request(20)
    assert drafting.proposer.num_uncached(who) == 20
    [draft] = drafting.propose((who, 3))
    drafting.judge(who, draft, num_accepted=3)
    assert drafting.proposer.num_uncached(who) == 2, "its last token was not fed, and the target emitted another"
    [draft] = drafting.propose((who, 3))
    drafting.judge(who, draft, num_accepted=0)
    assert drafting.proposer.num_uncached(who) == 1
    drafting.proposer.release(who)
    assert drafting.proposer.num_uncached(who) == len(who.tokens)


def test_catching_up_is_timed_apart_from_passes_that_draft():
    drafting, who, other = Drafting(), request(20), request(7)
    draft, _ = drafting.propose((who, 3), (other, 3))
    timing = drafting.proposer.timing
    assert timing is not None and timing.catch_up_seconds > 0 and timing.num_caught_up == 27
    assert [(rows, tokens) for rows, tokens, *_ in timing.forwards] == [(2, 2)] * 2
    assert timing.num_drawn == 6 and timing.draw_seconds > 0
    drafting.judge(who, draft, num_accepted=1)
    drafting.propose((who, 1))
    later = drafting.proposer.timing
    assert later is not None and later is not timing and later.num_caught_up == 0 and later.catch_up_seconds == 0
    assert len(later.forwards) == 1


def test_time_to_take_a_text_in_is_not_used_before_it_is_weighed():
    drafting, who = Drafting(), request(20)
    drafting.proposer.prepare(who)
    assert drafting.runner.num_forwards == 0


# ---- out of room


def test_out_of_sequences_the_request_idle_longest_is_forgotten():
    drafting = Drafting(max_sequences=2)
    oldest, older, new = request(), request(), request()
    for who in (oldest, older, oldest):  # then the second one is least recently used
        [draft] = drafting.propose((who, 2))
        drafting.judge(who, draft, num_accepted=0)
    [draft] = drafting.propose((new, 2))
    assert len(draft.tokens) == 2
    assert drafting.held(older) is None
    assert drafting.held(oldest) is not None


def test_out_of_tokens_idle_requests_are_forgotten_until_it_fits():
    drafting = Drafting(cache_tokens=50)
    idle = [request(15), request(15), request(15)]
    for who in idle:
        drafting.propose((who, 1))
    new = request(30)
    [draft] = drafting.propose((new, 2))
    assert len(draft.tokens) == 2
    assert [drafting.held(who) is None for who in idle] == [True, True, False]


def test_a_forgotten_request_starts_over_when_asked_again():
    drafting = Drafting(max_sequences=1)
    first, second = request(6), request(6)
    [before] = drafting.propose((first, 2))
    drafting.propose((second, 2))
    drafting.proposer.observe(first, Verdict([1], 2, 0))  # a late verdict finds nothing to rewind
    [after] = drafting.propose((first, 2))
    assert before.tokens == after.tokens == drafting.greedily(first, 2)


@pytest.mark.parametrize("room", [{"max_sequences": 2}, {"cache_tokens": 24}])
def test_those_asked_for_together_never_push_each_other_out(room):
    drafting = Drafting(**room)
    asks = [(request(10), 2) for _ in range(4)]
    drafts = drafting.propose(*asks)
    assert [len(draft.tokens) for draft in drafts] == [2, 2, 0, 0]
    assert [draft.tokens for draft in drafts[:2]] == [drafting.greedily(who, 2) for who, _ in asks[:2]]


@pytest.mark.parametrize(("cache_tokens", "num_drafted"), [(12, 3), (11, 0)])
def test_room_for_all_but_the_last_draft_token_is_enough(cache_tokens, num_drafted):
    """Ten tokens and a draft of three: the third is never fed."""
    [draft] = Drafting(cache_tokens=cache_tokens).propose((request(10), 3))
    assert len(draft.tokens) == num_drafted


def test_a_prompt_that_can_never_fit_gets_an_empty_draft_and_no_error():
    drafting, who = Drafting(cache_tokens=20), request(30)
    [draft] = drafting.propose((who, 2))
    assert draft.tokens == [] and drafting.runner.num_forwards == 0
    drafting.judge(who, draft, num_accepted=0)
    assert drafting.held(who) == []


# ---- drawing


def test_greedy_drafts_are_the_draft_models_own_choice():
    drafting, who = Drafting(), request(8, GREEDY)
    [draft] = drafting.propose((who, 5))
    assert draft.tokens == drafting.greedily(who, 5)
    assert draft.probs is None and draft.proposer == "draft"


@pytest.mark.parametrize(("params", "kept"), [(GREEDY, False), (SEEDED, False), (LOSSY, False), (UNSEEDED, True)])
def test_draft_probs_are_kept_only_where_rejection_sampling_needs_them(params, kept):
    [draft] = Drafting().propose((request(8, params), 3))
    assert (draft.probs is not None) == kept
    if draft.probs is not None:
        assert len(draft.probs) == len(draft.tokens) == 3


def test_draft_probs_are_exactly_the_distribution_each_token_was_drawn_from():
    params = SamplingParams(temperature=0.8, top_p=0.9, presence_penalty=1.5)
    drafting, who = Drafting(), request(8, params, seed=77)
    [draft] = drafting.propose((who, 4))
    assert draft.probs is not None
    shaper = Shaper(params, who.prompt, frozenset({EOS}))
    for i, token in enumerate(draft.tokens):
        probs = shaper.probs(drafting.model.logits(who.tokens + draft.tokens[:i]), draft.tokens[:i])
        np.testing.assert_array_equal(draft.probs[i], probs)
        assert token == draw_weighted(probs, uniform(key(77, Purpose.DRAFT, len(who.tokens), i)))
        assert draft.probs[i][token] > 0


def test_a_seeded_draft_uses_the_noise_the_target_will_use():
    drafting, who = Drafting(), request(8, SEEDED, seed=5)
    [draft] = drafting.propose((who, 4))
    for i, token in enumerate(draft.tokens):
        probs = who.shaper.probs(drafting.model.logits(who.tokens + draft.tokens[:i]), draft.tokens[:i])
        assert token == choose(probs, 5, len(who.tokens) + i)


def test_what_is_drawn_does_not_depend_on_who_else_is_drafted_for():
    who = request(8, UNSEEDED)
    [alone] = Drafting().propose((who, 3))
    together = Drafting().propose((request(20, SEEDED), 5), (who, 3), (request(4, GREEDY), 1))
    assert together[1].tokens == alone.tokens


@pytest.mark.parametrize("params", [GREEDY, SEEDED, UNSEEDED])
def test_a_larger_draft_vocabulary_never_proposes_what_the_target_does_not_have(params):
    class Eager(FakeModel):
        """A draft model that prefers its padding tokens."""

        def _opinion(self, state, salt):
            row = super()._opinion(state, salt)
            row[258:] += 100.0
            return row

    drafting = Drafting(model=Eager(300), target_vocab_size=258)
    [draft] = drafting.propose((request(8, params), 6))
    assert len(draft.tokens) == 6 and max(draft.tokens) < 258
    if draft.probs is not None:
        assert all(probs.shape == (258,) and probs.sum() == pytest.approx(1.0) for probs in draft.probs)


@pytest.mark.parametrize("params", [GREEDY, SEEDED, UNSEEDED])
def test_a_smaller_draft_vocabulary_gives_the_targets_padding_no_chance(params):
    drafting = Drafting(vocab_size=258, target_vocab_size=320)
    [draft] = drafting.propose((request(8, params), 6))
    assert len(draft.tokens) == 6 and max(draft.tokens) < 258
    if draft.probs is not None:
        assert all(probs.shape == (320,) and probs[258:].sum() == 0.0 for probs in draft.probs)


def test_a_token_the_draft_does_not_have_means_an_empty_draft():
    """A padding token of the target can still occur: in a prompt of token ids, or by logit_bias."""
    drafting, who = Drafting(vocab_size=258, target_vocab_size=320), request(8)
    who.tokens.append(300)
    assert drafting.propose((who, 2))[0].tokens == []


def test_a_draft_model_that_cannot_rewind_is_refused_with_a_remedy():
    with pytest.raises(ModelError, match="cannot rewind its cache, which drafting needs; use another draft"):
        Drafting(can_rewind=False)


# ---- the same vocabulary


class Vocabulary(ByteTokenizer):
    def __init__(self, *entries: tuple[bytes, int]) -> None:
        self._entries = list(entries)

    def vocabulary(self) -> list[tuple[bytes, int]]:
        return self._entries


NORMAL, UNUSED = 1 << 2, 1 << 1
BASE = ((b"a", NORMAL), (b"b", NORMAL), ("é".encode(), NORMAL))


def difference(target: Vocabulary, draft: Vocabulary) -> str:
    found = vocabulary_difference(target, draft)
    assert found is not None
    return found


def test_the_same_vocabulary_passes():
    assert vocabulary_difference(Vocabulary(*BASE), Vocabulary(*BASE)) is None


def test_the_first_difference_is_named_on_both_sides():
    other = Vocabulary(BASE[0], (b"x", NORMAL), (b"\xff", NORMAL))
    assert "token 1 is 'b' in the target and 'x' in the draft" in difference(Vocabulary(*BASE), other)


def test_bytes_that_are_no_text_can_still_be_named():
    other = Vocabulary(*BASE[:2], (b"\xff", NORMAL))
    assert "token 2 is 'é' in the target and '\ufffd' in the draft" in difference(Vocabulary(*BASE), other)


def test_unused_padding_may_differ_in_length_on_either_side():
    padded = Vocabulary(*BASE, (b"[PAD3]", UNUSED), (b"[PAD4]", UNUSED | NORMAL))
    assert vocabulary_difference(Vocabulary(*BASE), padded) is None
    assert vocabulary_difference(padded, Vocabulary(*BASE)) is None


@pytest.mark.parametrize("whose", ["target", "draft"])
def test_a_real_token_only_one_of_them_has_is_a_difference(whose):
    longer = Vocabulary(*BASE, (b"[PAD3]", UNUSED), (b"<think>", NORMAL))
    pair = (longer, Vocabulary(*BASE)) if whose == "target" else (Vocabulary(*BASE), longer)
    assert f"token 4, '<think>', exists only in the {whose}" in difference(*pair)


def test_a_different_token_is_named_before_a_different_length():
    other = Vocabulary((b"x", NORMAL))
    assert "token 0 is 'a' in the target and 'x' in the draft" in difference(Vocabulary(*BASE), other)
