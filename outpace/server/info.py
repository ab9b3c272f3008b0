"""Routes that do not generate: models, tokens, health, version, metrics."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client.exposition import choose_encoder
from pydantic import BaseModel

import outpace
from outpace.models import prompts
from outpace.server.completions import ERRORS, Responses, text_of
from outpace.server.errors import ApiError
from outpace.server.live import LiveStream, about
from outpace.server.state import Check, ServerState, state_of
from outpace.server.tools import checked_tools
from outpace.server.wire import DetokenizeRequest, TokenizeRequest

router = APIRouter()


class ModelCard(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["outpace"] = "outpace"
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class TokenizeReply(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeReply(BaseModel):
    prompt: str


class TokenizerInfo(BaseModel):
    """Null where the model has none."""

    bos_token: str | None
    eos_token: str | None
    chat_template: str | None


class Health(BaseModel):
    status: Literal["ok", "shutting down", "failed"]
    reason: str | None = None


class Version(BaseModel):
    version: str


_DENIED: Responses = {401: ERRORS[401]}
_UNKNOWN: Responses = {404: ERRORS[404]}


@router.get("/v1/models", responses=_DENIED, tags=["about"])
async def models(request: Request) -> ModelList:
    state = state_of(request)
    return ModelList(data=[_card(state, name) for name in state.config.model_names])


@router.get("/v1/models/{name:path}", responses=_DENIED | _UNKNOWN, tags=["about"])
async def model(name: str, request: Request) -> ModelCard:
    state = state_of(request)
    state.check_model(name)
    return _card(state, name)


def _card(state: ServerState, name: str) -> ModelCard:
    return ModelCard(id=name, created=state.created, max_model_len=state.max_context)


_TEXT_ERRORS: Responses = {status: ERRORS[status] for status in (400, 401, 404, 413, 429, 503)}


@router.post("/tokenize", responses=_TEXT_ERRORS, response_model_exclude_none=True, tags=["text"])
async def tokenize(body: TokenizeRequest, request: Request) -> TokenizeReply:
    state = state_of(request)
    state.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "give either prompt or messages, not both", param="prompt")
    with state.engine.reserve(1):
        tokens = await state.offload(request, lambda check: _tokens(state, body, check))
        texts = None
        if body.return_token_strs:
            texts = await state.offload(request, lambda _: [state.texts.text(token) for token in tokens])
    return TokenizeReply(count=len(tokens), max_model_len=state.max_context, tokens=tokens, token_strs=texts)


def _tokens(state: ServerState, body: TokenizeRequest, check: Check) -> list[int]:
    tools = checked_tools(body.tools)
    if body.messages is None:
        assert body.prompt is not None
        return prompts.encode(state.tokenizer, body.prompt, add_special=body.add_special_tokens, check=check)
    rendered = prompts.render(
        state.tokenizer,
        [message.as_dict() for message in body.messages],
        tools=tools,
        syntax=state.call_syntax,
        allow_control_tokens=state.config.allow_control_tokens,
        **body.template_options(state.config.default_template_variables),
    )
    return prompts.encode(state.tokenizer, rendered, check=check)


@router.post("/detokenize", responses=_TEXT_ERRORS, tags=["text"])
async def detokenize(body: DetokenizeRequest, request: Request) -> DetokenizeReply:
    state = state_of(request)
    state.check_model(body.model)
    with state.engine.reserve(1):
        return DetokenizeReply(prompt=await state.offload(request, lambda _: text_of(state, body.tokens)))


@router.get("/tokenizer_info", responses=_DENIED, tags=["text"])
async def tokenizer_info(request: Request) -> TokenizerInfo:
    tokenizer = state_of(request).tokenizer
    return TokenizerInfo(
        bos_token=tokenizer.bos_text or None,
        eos_token=tokenizer.eos_text or None,
        chat_template=tokenizer.chat_template,
    )


@router.get("/health", response_model=Health, responses={503: {"model": Health}}, tags=["about"])
async def health(request: Request) -> Response:
    engine = state_of(request).engine
    if engine.failure is not None:
        return JSONResponse({"status": "failed", "reason": engine.failure}, 503)
    if not engine.is_accepting:
        return JSONResponse({"status": "shutting down", "reason": None}, 503)
    return JSONResponse({"status": "ok", "reason": None})


@router.post("/reset_prefix_cache", include_in_schema=False)
async def reset_prefix_cache(request: Request) -> Health:
    """Clear cached prefixes and the suffix store, for benchmarks between runs. The name is vLLM's."""
    state_of(request).engine.forget()
    return Health(status="ok", reason=None)


@router.get("/version", tags=["about"])
async def version() -> Version:
    return Version(version=outpace.__version__)


@router.get("/metrics", tags=["about"], response_class=Response, responses={200: {"content": {"text/plain": {}}}})
async def metrics(request: Request) -> Response:
    """In Prometheus' text format."""
    encode, content_type = choose_encoder(request.headers.get("accept", ""))
    return Response(encode(state_of(request).registry), media_type=content_type)


@router.get("/v1/outpace/events", include_in_schema=False)  # it does not end, which schemas cannot say
async def events(request: Request) -> Response:
    """Server-sent events: `about` once, then `live` a few times a second."""
    state = state_of(request)
    return LiveStream(state.live, about(state))
