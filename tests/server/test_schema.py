"""Generated requests: schemathesis tries what the OpenAPI schema allows and what it forbids."""

from __future__ import annotations

from collections import Counter
from itertools import product
from typing import Any

import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from tests.fakes import ByteTokenizer, fake_engine
from tests.server_helper import live

CHECKS: list[Any] = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
]


EXAMPLES = 30  # a round
# It takes longer to generate from these schemas, and the second is a part of the first.
FEWER_EXAMPLES = {"/v1/messages": 20, "/v1/messages/count_tokens": 4}
MODES = {GenerationMode.POSITIVE: 200, GenerationMode.NEGATIVE: 400}  # and the answer that a route must have given
ENOUGH, MOST_ROUNDS = 6, 10


def test_no_request_breaks_the_server():
    """Each route that takes a body accepts some of the requests and refuses others, else they try too little of it."""
    engine = fake_engine(max_context=256, cache_tokens=2048, max_sequences=8)
    engine.calibrate()
    # Few tokens per answer, because most allowed values of max_tokens are large.
    with live(engine, ByteTokenizer(), 256, max_output_tokens=8) as server:
        schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
        operations: list[Any] = [result.ok() for result in schema.get_all_operations()]  # type: ignore[union-attr]
        assert len(operations) == 14
        for operation, mode in product(operations, MODES):
            if mode is GenerationMode.NEGATIVE and (operation.method == "get" or "count_tokens" in operation.path):
                continue  # no body that could be invalid, or one whose fields another route has too
            answers, rounds = Counter[int](), 0
            while rounds == 0 or (operation.method == "post" and answers[MODES[mode]] < enough(operation)):
                # Which requests are generated changes with every version of the generator and of our schema.
                assert rounds < MOST_ROUNDS, f"{operation.path} answers {MODES[mode]} too seldom: {answers}"
                answers += try_operation(operation, mode, rounds)
                rounds += 1
        server.check_clean()


def enough(operation: Any) -> int:
    return min(ENOUGH, examples(operation) // 2)


def examples(operation: Any) -> int:
    return FEWER_EXAMPLES.get(operation.path, EXAMPLES)


def make_acceptable(body: dict[str, Any]) -> None:
    """Remove values that the schema allows and the server refuses; they would hide the rest of the request."""
    body.pop("model", None)
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
        if body.get(name) is not None:
            body[name] = int(body[name]) % 8 + (not body.get("echo"))  # in JSON's schemas, 1.0 is an integer
    body.pop("dimensions", None)
    if body.get("stream"):
        body.pop("prompt_logprobs", None)
    else:
        body.pop("stream_options", None)
    for message in body.get("messages") or []:
        message["content"] = str(message.get("content"))[:40]
        for name in set(message) - {"role", "content"}:
            del message[name]
    for names in (("system",), ("tools", "tool_choice")):
        if len(str(body.get(names[0]))) > 100:  # longer than the context
            for name in names:
                body.pop(name, None)
    for name in ("logit_bias", "stop_token_ids", "min_tokens"):
        if body.get(name) and len(str(body)) % 2:
            del body[name]


def try_operation(operation: Any, mode: GenerationMode, number: int) -> Counter[int]:
    """One round of generated requests, the same in every run; returns how often each status was the answer."""
    answers = Counter[int]()

    @seed(number)
    @settings(
        max_examples=examples(operation),
        deadline=None,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def holds(case: Any) -> None:
        if mode is GenerationMode.POSITIVE and isinstance(case.body, dict):
            make_acceptable(case.body)
        answers[case.call_and_validate(timeout=20, checks=CHECKS).status_code] += 1

    holds()
    return answers
