"""A prediction changes how fast a request is, never what it says."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from outpace.config import SamplingParams, SpeculationParams
from outpace.core import Request
from outpace.engine.engine import Engine
from outpace.speculation.proposers.prediction_text import Prediction
from tests.engine.test_engine import check_law, plainly, prompt_of, run
from tests.fakes import EOS, ByteTokenizer, FakeModel, fake_engine

PROMPT = prompt_of(random.Random(3), 12)
FORCED = SpeculationParams(mode="on", method="prediction", max_depth=6)
SETTINGS = [
    SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=11, max_tokens=60, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=3, top_p=0.9, frequency_penalty=0.4, max_tokens=60, ignore_eos=True),
]


def edited(tokens: list[int], rng: random.Random) -> dict[str, list[int]]:
    """Predictions for an output of these tokens."""
    at = rng.randrange(10, 30)
    return {
        "right": tokens,
        "inserted": [*tokens[:at], *b"some more", *tokens[at:]],
        "deleted": tokens[:at] + tokens[at + 9 :],
        "replaced": [*tokens[:at], *b"xyz", *tokens[at + 4 :]],
        "late": tokens[at:],
        "unrelated": [rng.randrange(256) for _ in tokens],
        "empty": [],
        "longer than the context": tokens * 20,
    }


def submit(engine: Engine, params: SamplingParams, predicted: list[int]) -> Request:
    return engine.submit(PROMPT, params, prediction=Prediction(predicted, ByteTokenizer().token_bytes))


@pytest.mark.parametrize("params", SETTINGS, ids=["greedy", "seeded", "filters"])
@pytest.mark.parametrize("speculation", [FORCED, SpeculationParams(mode="auto")], ids=["on", "auto"])
def test_every_prediction_gives_the_tokens_of_plain_decoding(params, speculation):
    model = FakeModel()
    engine = fake_engine(model, max_context=128, cache_tokens=2048, max_sequences=8)
    plain = run(engine, [engine.submit(PROMPT, replace(params, speculation=SpeculationParams(mode="off")))])[0]
    predictions = edited(plain, random.Random(5))
    requests = [submit(engine, replace(params, speculation=speculation), each) for each in predictions.values()]
    assert run(engine, requests) == [plain] * len(requests)
    accepted = {name: r.spec.accepted_prediction_tokens for name, r in zip(predictions, requests, strict=True)}
    for (name, tokens), request in zip(predictions.items(), requests, strict=True):
        assert accepted[name] + request.spec.rejected_prediction_tokens == len(tokens), name
        assert request.predicted is None, "it was freed with its request"
    assert accepted["right"] == accepted["inserted"] == 60
    assert min(accepted["deleted"], accepted["replaced"], accepted["late"]) > 20 > accepted["unrelated"]
    if speculation is FORCED:
        # The first token comes with the prompt; then seven a step.
        assert requests[0].spec.steps == 9 and requests[0].spec.num_accepted == requests[0].spec.num_drafted


def test_drafts_from_a_prediction_keep_the_targets_distribution_without_a_seed():
    model = FakeModel(order=1, sharpness=1.0)
    engine = fake_engine(model, prefix_reuse=False)
    likeliest = bytes(plainly(model, [97, 98], SamplingParams(temperature=0.0, max_tokens=3), 0)).decode()
    params = SamplingParams(temperature=1.0, top_k=3, max_tokens=3, prediction=likeliest, speculation=FORCED)
    requests = check_law(engine, model, params, frozenset({EOS}))
    num_drafted = sum(request.spec.num_drafted for request in requests)
    num_accepted = sum(request.spec.num_accepted for request in requests)
    assert 0 < num_accepted < num_drafted


def test_text_of_the_params_is_read_where_the_caller_has_not_done_it():
    model = FakeModel()
    params = SamplingParams(temperature=0.0, max_tokens=12, prediction="abc", speculation=FORCED)
    request = fake_engine(model).submit(PROMPT, params)
    assert request.predicted is not None and request.predicted.num_tokens == 3


@pytest.mark.parametrize(
    "speculation", [SpeculationParams(mode="off"), SpeculationParams(mode="on", method="ngram")], ids=["off", "ngram"]
)
def test_without_its_proposer_a_prediction_is_ignored(speculation):
    model = FakeModel()
    engine = fake_engine(model)
    wanted = plainly(model, PROMPT, SETTINGS[0], 0)
    predicted = bytes(wanted).decode(errors="replace")
    params = SamplingParams(temperature=0.0, max_tokens=60, prediction=predicted, speculation=speculation)
    assert (engine.read_prediction(params) is None) == (speculation.mode == "off")
    request = engine.submit(PROMPT, params)
    assert run(engine, [request])[0] == wanted[: request.num_output]
    assert request.spec.accepted_prediction_tokens == request.spec.rejected_prediction_tokens == 0


def test_a_request_without_a_prediction_is_never_asked_about_one():
    engine = fake_engine(speculation="auto")
    engine.calibrate()
    plain, predicted = engine.submit(PROMPT, SETTINGS[0]), submit(engine, SETTINGS[0], [97, 98])
    assert engine.policy.lookups(plain) == ("suffix", "ngram")
    assert engine.policy.lookups(predicted) == ("prediction", "suffix", "ngram")


def test_a_preempted_request_keeps_its_place_and_its_counts():
    model = FakeModel()
    engine = fake_engine(model, max_context=100, cache_tokens=120, prefix_reuse=False)
    plain = run(engine, [engine.submit(PROMPT, SETTINGS[0])])[0]
    params = replace(SETTINGS[0], speculation=FORCED)
    requests = [submit(engine, params, plain) for _ in range(4)]
    assert run(engine, requests) == [plain] * 4
    assert sum(request.num_preemptions for request in requests) > 0
    assert {request.spec.accepted_prediction_tokens for request in requests} == {60}


def test_an_aborted_request_frees_its_prediction():
    engine = fake_engine()
    request = submit(engine, replace(SETTINGS[0], speculation=FORCED), [97] * 50)
    for _ in range(3):
        engine.step()
    engine.abort(request)
    assert request.predicted is None and request.spec.rejected_prediction_tokens > 0
