"""Bad words: which token may not come next, and which token sequences a word stands for."""

from __future__ import annotations

import random

import pytest

from outpace.config import MAX_BAD_WORDS, SamplingParams
from outpace.decoding.bad_words import BadWords, as_token_ids
from tests.fakes import EOS, ByteTokenizer, fake_engine


def test_the_last_token_is_forbidden_where_all_before_it_were_emitted():
    words = BadWords([[7], [1, 2, 3], [2, 3], [2, 4], [5, 2, 3]])
    assert words.after([]) == [7]
    assert words.after([2]) == [7, 3, 4]
    assert words.after([1, 2]) == [7, 3, 4]
    words.advance([9, 1])
    assert words.after([]) == [7]
    words.advance([2])
    assert words.after([]) == [7, 3, 4]
    assert words.after([9]) == [7]


@pytest.mark.parametrize("seed", range(20))
def test_it_is_the_plain_definition_whatever_part_was_emitted(seed):
    rng = random.Random(seed)
    words = [[rng.randrange(3) for _ in range(rng.randrange(1, 5))] for _ in range(4)]
    text = [rng.randrange(3) for _ in range(12)]
    for num_emitted in range(len(text) + 1):
        subject = BadWords(words)
        for token in text[:num_emitted]:
            subject.advance([token])
        wanted = {w[-1] for w in words if len(w) == 1 or (len(w) <= 12 and text[1 - len(w) :] == w[:-1])}
        assert set(subject.after(text[num_emitted:])) == wanted


def test_a_word_is_forbidden_as_it_is_and_after_a_space_and_never_as_a_control_token():
    assert as_token_ids(["ab", " ab", [5, 6]], ByteTokenizer()) == ((97, 98), (32, 97, 98), (5, 6))
    [plain, spaced] = as_token_ids(["</s>"], ByteTokenizer())
    assert plain == tuple(b"</s>") and spaced == tuple(b" </s>") and EOS not in plain


def test_as_many_words_as_are_allowed_are_as_many_sequences_as_are_allowed():
    words = [f"{number:03}" for number in range(MAX_BAD_WORDS)]
    request = fake_engine().submit([97], SamplingParams(bad_words=words))
    assert len(request.params.bad_words) == 2 * MAX_BAD_WORDS


@pytest.mark.parametrize("speculation", [{"speculation": "off"}, {"speculation": "on", "method": "draft", "depth": 4}])
def test_an_output_never_has_a_bad_word(speculation):
    words = ["a", "bc", "cde", "ff"]
    engine = fake_engine(**speculation)
    texts = []
    for seed in range(6):
        request = engine.submit([97, 98], SamplingParams(bad_words=words, seed=seed, max_tokens=80, ignore_eos=True))
        while engine.has_requests:
            engine.step()
        texts.append(bytes(token for token in request.tokens[2:] if token < 256))
    assert not any(word.encode() in text for word in words for text in texts)
    free = engine.submit([97, 98], SamplingParams(seed=0, max_tokens=80, ignore_eos=True))
    while engine.has_requests:
        engine.step()
    assert any(word.encode() in bytes(t for t in free.tokens if t < 256) for word in words), "the test shows little"
