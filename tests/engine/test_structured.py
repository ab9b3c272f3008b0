"""Structured output through the engine over a fake model: valid, equal with and without drafts, and never stuck."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest

from outpace.config import SamplingParams, SpeculationParams
from outpace.core import Request
from outpace.decoding.sampling import Shaper, choose
from outpace.engine.engine import Engine
from outpace.errors import UsageError
from outpace.structured import StructuredOutput
from tests.decoding.test_matcher import failing_matcher
from tests.engine.test_engine import METHODS, run
from tests.fakes import EOS, FakeModel, fake_engine

PROMPT = [1, 2, 3, 4]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-f]{1,6}$"},
        "ages": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 20}, "maxItems": 3},
    },
    "required": ["name", "ages"],
    "additionalProperties": False,
}
STRUCTURED = StructuredOutput(json_schema=SCHEMA)


def params_of(structured: StructuredOutput = STRUCTURED, *, max_tokens: int = 100, **options: Any) -> SamplingParams:
    return SamplingParams(structured=structured, max_tokens=max_tokens, **options)


def text_of(request: Request) -> str:
    return request.writer.text


def plainly(engine: Engine, model: FakeModel, params: SamplingParams, seed: int) -> list[int]:
    """The reference: the target alone, with a new matcher for every token."""
    constraint = engine.constraint_of(params)
    assert constraint is not None
    emitted: list[int] = []
    while len(emitted) < params.max_tokens:
        shaper = Shaper(params, PROMPT, frozenset({EOS}), constraint.matcher(frozenset({EOS})))
        shaper.advance(emitted)
        logits = model.logits([*PROMPT, *emitted])
        position = len(PROMPT) + len(emitted)
        emitted.append(
            shaper.greedy(logits, ()) if params.is_greedy else choose(shaper.probs(logits, ()), seed, position)
        )
        shaper.advance(emitted[-1:])
        assert shaper.matcher is not None
        if emitted[-1] == EOS or shaper.matcher.ending(()) is not None:
            break
    return emitted


@pytest.mark.parametrize("method", [*METHODS, "grammar"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_seeded_request_emits_the_same_tokens_with_any_drafts(method: Any, temperature: float):
    on = SpeculationParams(mode="on", method=method, max_depth=5) if method != "none" else None
    for seed in range(8):
        model = FakeModel(salt=seed)
        engine = fake_engine(model)
        params = params_of(temperature=temperature, seed=seed, speculation=on or SpeculationParams(mode="off"))
        request = engine.submit(PROMPT, params)
        assert run(engine, [request]) == [plainly(engine, model, params, seed)]
        assert request.finish_reason in ("stop", "length")
        if request.finish_reason == "stop":
            jsonschema.validate(json.loads(text_of(request)), SCHEMA)


@pytest.mark.parametrize("acceptance", ["exact", "rejection", "typical", "threshold"])
@pytest.mark.parametrize("mode", ["off", "on", "auto"])
def test_every_finished_answer_is_valid_in_a_batch_with_others(mode: Any, acceptance: Any):
    engine = fake_engine(FakeModel(salt=3), max_sequences=4)
    threshold = 0.01 if acceptance == "threshold" else None
    speculation = SpeculationParams(mode=mode, acceptance=acceptance, threshold=threshold)
    requests = [engine.submit(PROMPT, params_of(temperature=1.0, speculation=speculation)) for _ in range(12)]
    free = [engine.submit(PROMPT, SamplingParams(max_tokens=40, ignore_eos=True)) for _ in range(4)]
    regexes = [engine.submit(PROMPT, params_of(StructuredOutput(regex="[a-f]{3,9}!"))) for _ in range(4)]
    run(engine, [*requests, *free, *regexes])
    finished = [request for request in requests if request.finish_reason == "stop"]
    assert finished
    for request in finished:
        jsonschema.validate(json.loads(text_of(request)), SCHEMA)
    assert all(re.fullmatch("[a-f]{3,9}!", text_of(request)) for request in regexes)
    assert {len(request.tokens) - len(PROMPT) for request in free} == {40}


def test_an_answer_cut_by_max_tokens_says_length_and_a_complete_one_stop():
    engine = fake_engine()
    whole, cut = (engine.submit(PROMPT, params_of(StructuredOutput(choice=["hello"]), max_tokens=n)) for n in (5, 4))
    run(engine, [whole, cut])
    assert (text_of(whole), whole.finish_reason) == ("hello", "stop")
    assert (text_of(cut), cut.finish_reason) == ("hell", "length")


def test_the_grammar_decides_where_the_output_ends():
    engine = fake_engine()
    params = params_of(StructuredOutput(choice=["yes"]), ignore_eos=True, min_tokens=50)
    request = engine.submit(PROMPT, params)
    run(engine, [request])
    assert (text_of(request), request.finish_reason) == ("yes", "stop")


def test_bias_and_penalties_cannot_allow_a_forbidden_token():
    engine = fake_engine()
    biased = params_of(StructuredOutput(choice=["yes", "no"]), logit_bias={ord("x"): 100.0, ord("n"): 50.0})
    request = engine.submit(PROMPT, biased)
    run(engine, [request])
    assert text_of(request) == "no"


def test_a_stop_string_ends_structured_output():
    engine = fake_engine()
    request = engine.submit(PROMPT, params_of(StructuredOutput(choice=["one, two"]), stop=[","]))
    run(engine, [request])
    assert (text_of(request), request.finish_reason) == ("one", "stop")


def test_a_parser_that_fails_ends_its_request_and_no_other():
    engine = fake_engine()
    at_once, later, other = (
        engine.submit(PROMPT, params_of(StructuredOutput(regex="[ab]{8}"), temperature=1.0, seed=5)) for _ in range(3)
    )
    at_once.matcher = at_once.shaper.matcher = failing_matcher("[ab]{8}", b"")
    run_first = fake_engine()
    twin = run_first.submit(PROMPT, params_of(StructuredOutput(regex="[ab]{8}"), temperature=1.0, seed=5))
    run(run_first, [twin])
    later.matcher = later.shaper.matcher = failing_matcher("[ab]{8}", text_of(twin)[:3].encode())
    run(engine, [at_once, later, other])
    assert [request.finish_reason for request in (at_once, later, other)] == ["length", "length", "stop"]
    assert [text_of(request) for request in (at_once, later, other)] == ["", text_of(twin)[:3], text_of(twin)]


def test_what_cannot_be_compiled_is_refused_before_it_is_queued():
    engine = fake_engine()
    with pytest.raises(UsageError, match="unclosed"):
        engine.submit(PROMPT, params_of(StructuredOutput(regex="[")))
    assert not engine.has_requests
