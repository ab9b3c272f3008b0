"""A draft model with another tokenizer: it reads the target's text, and changes nothing in what is said."""

from __future__ import annotations

import numpy as np
import pytest

from outpace.backends.base import Capacity, LoadedModel
from outpace.config import SamplingParams, SpeculationParams
from outpace.core import Request
from outpace.engine.engine import Engine
from outpace.speculation.proposers.base import DraftAsk, NoDraft
from outpace.speculation.proposers.other_vocabulary import OtherVocabularyProposer, SharedTokens
from outpace.speculation.proposers.text_bridge import TextBridge, segments
from tests.fakes import BOS, EOS, ByteTokenizer, FakeModel, FakeRunner, fake_config, fake_loaded
from tests.fuzz import bridge as fuzz
from tests.piece_tokenizer import PIECES, PieceTokenizer
from tests.requests_helper import make_request

PIECE_VOCAB = 258 + len(PIECES)


class Watched(OtherVocabularyProposer):
    """After every draft, the draft model's cache must begin with what a fresh bridge makes of the text."""

    def propose(self, asks):
        drafts = super().propose(asks)
        self._cache.check_integrity()
        for ask in asks:
            if len(self._tokens(ask.request)) > self._runner.capacity.max_context:
                continue
            fresh = self.bridge.start()
            self.bridge.read(fresh, ask.request.tokens)
            assert isinstance(self._runner, FakeRunner)
            held = self._runner.sequences[self._sequences[ask.request.id]]
            assert held == self._fed[ask.request.id] and held[: len(fresh.tokens)] == fresh.tokens
        return drafts


def engine_of(target_pieces: bool, *, sharpness: float = 3.0) -> Engine:
    """A target and a draft model, of which one has more tokens than the other."""
    config = fake_config(draft="fake", max_context=256, cache_tokens=2048)
    big, small = FakeModel(PIECE_VOCAB, sharpness=sharpness), FakeModel(258, noise=0.2, sharpness=sharpness)
    target = fake_loaded(big if target_pieces else small, config, tokenizer=_tokenizer(target_pieces))
    draft = fake_loaded(small if target_pieces else big, config, tokenizer=_tokenizer(not target_pieces))
    proposer = Watched(draft, target.tokenizer, target.runner.vocab_size)
    return Engine(target, {"none": NoDraft(), "draft": proposer}, config)


def _tokenizer(has_pieces: bool) -> ByteTokenizer:
    return PieceTokenizer() if has_pieces else ByteTokenizer()


def answers(engine: Engine, params: SamplingParams) -> list[Request]:
    prompts = ['{"name": "abc", "age": 12} and', "true or false? é", "red green blue"]
    requests = [engine.submit(engine._tokenizer.encode(text), params) for text in prompts]
    while engine.has_requests:
        engine.step()
    engine.scheduler.check_integrity()
    return requests


@pytest.mark.parametrize("target_pieces", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("mode", ["on", "auto"])
def test_answers_equal_plain_decoding(target_pieces, temperature, mode):
    said = {}
    for name in (mode, "off"):
        params = SamplingParams(
            temperature=temperature, seed=3, max_tokens=40, ignore_eos=True, speculation=SpeculationParams(mode=name)
        )
        requests = answers(engine_of(target_pieces), params)
        said[name] = [request.tokens for request in requests]
        if name == "on":
            assert sum(request.spec.num_drafted for request in requests) > 50
    assert said[mode] == said["off"]


def test_unseeded_requests_get_the_distribution_that_tokens_were_drawn_from():
    engine = engine_of(True)
    proposer = engine._proposers["draft"]
    assert isinstance(proposer, Watched) and proposer.shared.share == 1.0
    requests = answers(engine, SamplingParams(max_tokens=30, ignore_eos=True, speculation=SpeculationParams(mode="on")))
    assert sum(request.spec.num_accepted for request in requests) > 0


def test_a_restricted_distribution_is_the_drafts_own_renormalised():
    target, draft = PieceTokenizer(), ByteTokenizer()
    for ours, theirs in ((target, draft), (draft, target)):
        shared = SharedTokens(ours, theirs)
        logits = np.random.default_rng(0).normal(size=theirs.vocab_size).astype(np.float32)
        row = shared.restricted(logits, ours.vocab_size + 3)
        assert row.shape == (ours.vocab_size + 3,)
        whole = np.exp(logits - logits.max())
        for our_id, their_id in shared.to_draft.items():
            meaning = [each.token_bytes(token) for each, token in ((ours, our_id), (theirs, their_id))]
            assert meaning[0] == meaning[1]
            expected = whole[their_id] / whole[list(shared.to_draft.values())].sum()
            assert np.exp(row[our_id]) / np.exp(row).sum() == pytest.approx(expected, rel=1e-4)
        assert np.isneginf(row).sum() == row.size - len(shared.to_draft)


def test_the_end_of_an_answer_is_drafted_where_both_models_know_it():
    class Ends(FakeModel):
        def logits(self, context):
            row = np.zeros(self.vocab_size, np.float32)
            row[ord("x") if len(context) < 4 else EOS] = 9.0
            return row

    runner = FakeRunner(Ends(258), Capacity(4, 400, 200, 64))
    proposer = OtherVocabularyProposer(
        LoadedModel(runner, ByteTokenizer(), "fake", 0, 0), PieceTokenizer(), PIECE_VOCAB
    )

    request = make_request([BOS, 258, ord("x")])
    request.params = SamplingParams(temperature=0.0)
    [draft] = proposer.propose([DraftAsk(request, 6)])
    assert draft.tokens[-1] == EOS and draft.probs is None


def test_a_text_that_is_too_long_in_the_drafts_tokens_is_not_drafted():
    """80 tokens of the target are 400 of the draft model, whose cache holds 256 of a request."""
    engine = engine_of(True)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, speculation=SpeculationParams(mode="on"))
    request = engine.submit([258 + PIECES.index(b"green")] * 80, params)
    while engine.has_requests:
        engine.step()
    assert request.num_output == 8 and request.spec.num_drafted == 0


def test_a_segment_ends_where_the_text_before_it_says_so():
    text = b"One two, three four\nfive 6 seven. Eight" + "字".encode() * 200
    pieces = segments(text)
    assert b"".join(pieces) == text and max(map(len, pieces)) <= 256
    for piece in pieces:
        piece.decode()  # no character is cut
    for end in range(1, len(text)):
        assert segments(text[:end])[:-1] == pieces[: len(segments(text[:end])) - 1]


def test_texts_in_twenty_scripts_leave_caches_equal_to_fresh_ones():
    for pair in ((PieceTokenizer(), ByteTokenizer()), (ByteTokenizer(), PieceTokenizer())):
        assert fuzz.run(*pair, seed=5, count=40) == 20


def test_the_fuzz_finds_a_bridge_that_depends_on_how_the_text_grew(monkeypatch):
    """It closes all that is there after each reading, wherever that ends."""
    read = TextBridge.read

    def hasty(self, bridged, tokens):
        read(self, bridged, tokens)
        self._close(bridged, len(bridged.tail))

    monkeypatch.setattr(TextBridge, "read", hasty)
    with pytest.raises(AssertionError, match="other tokens than a fresh one"):
        fuzz.run(ByteTokenizer(), PieceTokenizer(), seed=5, count=100)


def test_the_fuzz_finds_a_bridge_that_loses_bytes(monkeypatch):
    monkeypatch.setattr(TextBridge, "target_tokens", lambda self, text: self._to_target(text.strip()))
    with pytest.raises(AssertionError, match="says something else"):
        fuzz.run(ByteTokenizer(), PieceTokenizer(), seed=5, count=100)
