"""Answers under many generated schemas validate, in every mode and at every temperature, beside unconstrained requests.

A short part runs on the fake model; all 300 with the embedded model run with `-m slow`.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import jsonschema
import pytest

from outpace import LLM
from outpace.config import SamplingParams, SpeculationParams
from outpace.structured import StructuredOutput
from tests.engine.test_engine import run
from tests.fakes import FakeModel, fake_engine
from tests.schemas import schemas

MODES: list[Any] = ["off", "on", "auto"]


def check(text: str, schema: dict[str, Any]) -> None:
    kind = jsonschema.Draft202012Validator
    kind(schema, format_checker=kind.FORMAT_CHECKER).validate(json.loads(text))


def params_of(schema: dict[str, Any], mode: Any, temperature: float, max_tokens: int, **options: Any) -> SamplingParams:
    return SamplingParams(
        structured=StructuredOutput(json_schema=schema),
        temperature=temperature,
        max_tokens=max_tokens,
        speculation=SpeculationParams(mode=mode),
        **options,
    )


def test_the_generated_schemas_have_every_feature():
    text = "".join(json.dumps(schema) for schema in schemas(300))
    features = ["$ref", "anyOf", "allOf", "enum", "const", "prefixItems", "maxItems", "pattern", "format", "minLength"]
    features += ["multipleOf", "exclusiveMinimum", "required", "null", "\\u00e9"]
    counts = Counter({feature: text.count(feature) for feature in features})
    assert min(counts.values()) > 20, counts


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_finished_answer_validates(mode: Any, temperature: float):
    engine = fake_engine(FakeModel(salt=5, sharpness=1.0), max_context=1024, cache_tokens=8192, max_sequences=8)
    chosen = schemas(24, begin=1000)
    requests = [engine.submit([i + 1, 2, 3], params_of(s, mode, temperature, 900)) for i, s in enumerate(chosen)]
    others = [engine.submit([i + 1, 2, 3], SamplingParams(max_tokens=30, ignore_eos=True)) for i in range(4)]
    run(engine, [*requests, *others])
    assert all(len(other.tokens) == 33 for other in others)
    finished = [(r, s) for r, s in zip(requests, chosen, strict=True) if r.finish_reason == "stop"]
    assert len(finished) >= 20, "the rest was cut by max_tokens"
    for request, schema in finished:
        check(request.writer.text, schema)


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_300_schemas_with_the_embedded_model(mode: Any, temperature: float):
    chosen = schemas(300)
    prompts = [f"Write an example of JSON for this schema: {json.dumps(schema)[:600]}" for schema in chosen]
    params = [params_of(schema, mode, temperature, 300, seed=i) for i, schema in enumerate(chosen)]
    free = [SamplingParams(max_tokens=20, temperature=temperature)] * 20
    with LLM(max_context=1024) as llm:
        outputs = llm.generate([*prompts, *["Once upon a time"] * 20], [*params, *free], progress=False)
    answers = [output.outputs[0] for output in outputs[:300]]
    num_finished = 0
    for answer, schema in zip(answers, chosen, strict=True):
        if answer.finish_reason == "stop":
            check(answer.text, schema)
            num_finished += 1
        else:
            assert answer.finish_reason == "length" and len(answer.token_ids) == 300
    assert num_finished >= 250
