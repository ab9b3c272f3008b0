"""Validation describes the first mistake of a request, so its time does not grow with their number."""

from __future__ import annotations

import math

import pytest
from pydantic import BaseModel, ValidationError

from outpace.server.body import MAX_FIELDS
from outpace.server.errors import ApiError
from outpace.server.wire import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

MANY = 5000
CHAT, PLAIN = {"messages": [{"role": "user", "content": "a"}]}, {"prompt": "a"}


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (CompletionRequest, {"prompt": [1.5] * MANY}),
        (CompletionRequest, {"prompt": [{}] * MANY}),
        (CompletionRequest, {"prompt": ["a", *[1] * MANY]}),
        (CompletionRequest, {"prompt": [[1], *["a"] * MANY]}),
        (CompletionRequest, {"prompt": [[""]] * MANY}),
        (CompletionRequest, PLAIN | {"stop": [""] * MANY}),
        (CompletionRequest, PLAIN | {"stop_token_ids": [-1] * MANY}),
        (CompletionRequest, PLAIN | {"logit_bias": {str(i): "" for i in range(MANY)}}),
        (CompletionRequest, PLAIN | {"logit_bias": {str(i): math.nan for i in range(MANY)}}),
        (ChatRequest, {"messages": [1] * MANY}),
        (ChatRequest, {"messages": [{}] * MANY}),
        (ChatRequest, {"messages": [{"role": "user", "content": [1] * MANY}]}),
        (ChatRequest, CHAT | {"modalities": [1] * MANY}),
        (ChatRequest, CHAT | {"tools": [1] * MANY}),
        (ChatRequest, CHAT | {"prediction": {"type": "content", "content": [1] * MANY}}),
        (ChatRequest, CHAT | {"tools": [1] * 128}),
        (ChatRequest, CHAT | {"tool_choice": [1] * MANY}),
        (TokenizeRequest, {"messages": [1] * MANY}),
        (DetokenizeRequest, {"tokens": [""] * MANY}),
    ],
)
def test_a_list_ends_at_its_first_mistake(kind: type[BaseModel], body: dict[str, object]):
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(body)
    assert caught.value.error_count() <= 4  # one for each type that the field may have


def test_an_object_with_very_many_fields_is_refused_before_each_is_looked_at():
    extra = {f"field_{i}": 1 for i in range(MAX_FIELDS)}
    with pytest.raises(ApiError, match=f"{MAX_FIELDS + 1} fields"):
        CompletionRequest.model_validate(PLAIN | extra)
    with pytest.raises(ApiError, match=f"{MAX_FIELDS + 1} fields"):
        ChatRequest.model_validate(CHAT | {"speculation": extra | {"mode": "auto"}})
