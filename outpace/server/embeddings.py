"""The route /v1/embeddings. Its prompts go through the engine's queue like those of completions."""

from __future__ import annotations

import base64
from time import time
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BaseModel, Field

from outpace.config import SamplingParams, SpeculationParams
from outpace.engine.generation import Order
from outpace.models import prompts
from outpace.server.body import Body
from outpace.server.completions import ERRORS
from outpace.server.errors import ApiError
from outpace.server.replies import Answer, Heading
from outpace.server.state import Check, ServerState, state_of
from outpace.server.streaming import WholeReply
from outpace.server.wire import MANY, Tokens, given_prompts

router = APIRouter()


class EmbeddingRequest(Body):
    model: str | None = Field(None, description="A name from /v1/models; may be left out.")
    input: str | Tokens | Annotated[list[str], MANY] | Annotated[list[Tokens], MANY]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(None, ge=1, description="Embeddings cannot be shortened: only their own width.")
    user: str | None = None  # without effect

    def check(self, width: int) -> None:
        if self.dimensions is not None and self.dimensions != width:
            message = f"embeddings of this model have {width} dimensions and cannot be shortened; leave out dimensions"
            raise ApiError(400, message, param="dimensions", code="unsupported_parameter")


class Embedding(BaseModel):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str  # a string holds float32 in base64, little-endian


class EmbeddingUsage(BaseModel):
    prompt_tokens: int
    total_tokens: int


class EmbeddingReply(BaseModel):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


class EmbeddingAnswer(Answer):
    is_base64 = False

    def reply(self) -> dict[str, Any]:
        count = self.heading.num_prompt_tokens
        return {
            "object": "list",
            "data": [self._embedding(index) for index in sorted(self.finished)],
            "model": self.heading.model,
            "usage": {"prompt_tokens": count, "total_tokens": count},
        }

    def _embedding(self, index: int) -> dict[str, Any]:
        pooled = self.finished[index].pooled
        assert pooled is not None
        found = pooled.embedding()
        written = base64.b64encode(found.astype("<f4").tobytes()).decode() if self.is_base64 else found.tolist()
        return {"object": "embedding", "index": index, "embedding": written}


@router.post("/v1/embeddings", response_model=EmbeddingReply, responses=ERRORS, tags=["generate"])
async def embeddings(body: EmbeddingRequest, request: Request) -> Response:
    state = state_of(request)
    state.check_model(body.model)
    # Nothing is drafted for a prompt, so costs need not be measured for it.
    plain = SpeculationParams(mode="off")
    params = SamplingParams(pooling=state.config.pooling, max_tokens=0, speculation=plain)
    given = given_prompts(body.input)
    with state.engine.reserve(len(given)):
        encoded = await state.offload(
            request, lambda check: [_encode(state, params, prompt, check) for prompt in given]
        )
    body.check(state.engine.engine.embedding_width)
    heading = Heading(
        id=request.scope["outpace.request_id"],
        created=int(time()),
        model=body.model or state.model_name,
        num_prompt_tokens=sum(map(len, encoded)),
        completions_per_prompt=1,
        with_logprobs=False,
        include_usage=False,
        echoes=[""] * len(encoded),
    )
    answer = EmbeddingAnswer(heading, state.texts)
    answer.is_base64 = body.encoding_format == "base64"
    request.scope["outpace.answer"] = answer
    salt = f"{request.scope.get('outpace.tenant', '')}:"
    generation = state.engine.submit([Order(tokens, params, cache_salt=salt) for tokens in encoded], stream=False)
    return WholeReply(generation, answer, state.config.request_timeout)


def _encode(state: ServerState, params: SamplingParams, prompt: str | list[int], check: Check) -> list[int]:
    check()
    tokens = prompt
    if isinstance(prompt, str):
        tokens = prompts.encode(state.tokenizer, prompt, max_tokens=state.max_context, check=check)
    assert not isinstance(tokens, str)
    state.engine.engine.check(tokens, params)
    return tokens
