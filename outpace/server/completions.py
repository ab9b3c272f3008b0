"""The routes of chats and plain completions. They turn a request into orders for the engine; `streaming` writes the
answer. Routes of other APIs that translate their requests to chats use `answer_chat`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from time import time
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from outpace.config import SamplingParams
from outpace.decoding.bad_words import as_token_ids
from outpace.decoding.constraints import Constraint
from outpace.decoding.randomness import child_seed
from outpace.engine.generation import Order
from outpace.errors import UsageError
from outpace.models import prompts
from outpace.models.reasoning.syntax import ReasoningSyntax
from outpace.models.reasoning.use import Reasoning
from outpace.models.tool_calls.use import ToolUse
from outpace.server.errors import ApiError, ErrorReply
from outpace.server.reasoning_replies import ReasoningAnswer, ReasoningToolAnswer
from outpace.server.replies import Answer, ChatAnswer, Heading, TextAnswer
from outpace.server.reply_types import ChatReply, TextReply
from outpace.server.scored import TokenTexts
from outpace.server.state import Check, ServerState, state_of
from outpace.server.streaming import EventStream, WholeReply
from outpace.server.tool_replies import ToolAnswer
from outpace.server.tools import use_of
from outpace.server.wire import ChatRequest, CompletionRequest, SamplingFields, StreamOptions

if TYPE_CHECKING:
    from outpace.speculation.proposers.prediction_text import Prediction

log = logging.getLogger("outpace.server")
Responses = dict[int | str, dict[str, Any]]
ERRORS: Responses = {
    400: {"model": ErrorReply, "description": "The request is invalid."},
    401: {"model": ErrorReply, "description": "The API key is missing or wrong."},
    404: {"model": ErrorReply, "description": "The model is not served here."},
    413: {"model": ErrorReply, "description": "The body is too large."},
    429: {"model": ErrorReply, "description": "The queue is full; Retry-After says when to send again."},
    500: {"model": ErrorReply, "description": "The engine failed on this request."},
    503: {"model": ErrorReply, "description": "The server is shutting down, or its engine has stopped."},
    504: {"model": ErrorReply, "description": "The answer took too long."},
}
MAX_PROMPT_LOGPROBS = 1 << 19  # in one reply: up to 40 MB, and a second of a worker thread to write it
STREAM: Responses = {200: {"content": {"text/event-stream": {}}}}
router = APIRouter()


@dataclass(slots=True)
class Encoded:
    """An encoded prompt with its parameters and its prediction, and its text if the reply repeats it."""

    tokens: list[int]
    params: SamplingParams
    constraint: Constraint | None = None
    prediction: Prediction | None = None
    echo: str = ""
    tools: ToolUse | None = None
    reasoning: Reasoning | None = None  # how the answer thinks; None: the model does not


@router.post("/v1/chat/completions", response_model=ChatReply, responses=ERRORS | STREAM, tags=["generate"])
async def chat_completions(body: ChatRequest, request: Request) -> Response:
    return await answer_chat(body, request, _chat_answer, "chatcmpl-")


def _chat_answer(encoded: Encoded, heading: Heading, texts: TokenTexts) -> Answer:
    use, reasoning = encoded.tools, encoded.reasoning
    if reasoning is None:
        return ChatAnswer(heading, texts) if use is None else ToolAnswer(heading, texts, use)
    if use is None:
        return ReasoningAnswer(heading, texts, reasoning=reasoning)
    return ReasoningToolAnswer(heading, texts, reasoning=reasoning, use=use)


async def answer_chat(
    body: ChatRequest, request: Request, kind: Callable[[Encoded, Heading, TokenTexts], Answer], prefix: str
) -> Response:
    """Generate what a chat request asks for. `kind` writes the answer in some API's format; its id begins with
    `prefix`."""
    state = state_of(request)
    state.check_model(body.model)
    with state.engine.reserve(body.n or 1):
        messages = [message.as_dict() for message in body.messages]
        is_long = bool(body.tools) or body.structured_field is not None  # compiling must not block the event loop
        encoded = await state.offload(
            request,
            lambda check: _spell_bad_words(state, [_encode_chat(state, body, messages, check)]),
            is_long=is_long,
        )
    return _answer(state, body, request, encoded, partial(kind, encoded[0]), prefix)


@router.post("/v1/completions", response_model=TextReply, responses=ERRORS | STREAM, tags=["generate"])
async def completions(body: CompletionRequest, request: Request) -> Response:
    state = state_of(request)
    state.check_model(body.model)
    body.check()
    given = body.prompts()
    with state.engine.reserve(len(given) * (body.n or 1)):  # before anything is made of them
        encoded = await state.offload(
            request,
            lambda check: _spell_bad_words(state, [_encode_prompt(state, body, prompt, check) for prompt in given]),
            is_long=body.structured_field is not None,
        )
    return _answer(state, body, request, encoded, TextAnswer, "cmpl-")


def _encode_chat(state: ServerState, body: ChatRequest, messages: Sequence[dict[str, Any]], check: Check) -> Encoded:
    use = use_of(body.tools, body.tool_choice, body.parallel_tool_calls, state.call_syntax)
    prompt = chat_prompt(state, body, messages, use)
    if state.config.log_prompts:
        log.info("prompt: %r", prompt.text)
    tokens = prompts.encode(state.tokenizer, prompt, max_tokens=_most_tokens(state, body), check=check)
    encoded = _fit_to_context(state, body, tokens)
    encoded.prediction = state.engine.engine.read_prediction(encoded.params, check)
    if use is not None:
        _constrain_to_calls(state, encoded, use)
    if state.reasoning_syntax is not None:
        _allow_thinking(state, body, encoded, prompt, state.reasoning_syntax)
    return encoded


def _allow_thinking(
    state: ServerState, body: ChatRequest, encoded: Encoded, prompt: prompts.ChatPrompt, syntax: ReasoningSyntax
) -> None:
    beginning = syntax.beginning(prompt.hidden)
    if body.continue_final_message:
        beginning = syntax.continued(body.messages[-1].text())
    encoded.reasoning = Reasoning(syntax, beginning, is_shown=body.include_reasoning is not False)
    encoded.params = encoded.reasoning.allow(encoded.params, state.tokenizer)
    encoded.constraint = _compile(state, body, encoded.params)


def chat_prompt(
    state: ServerState, body: ChatRequest, messages: Sequence[dict[str, Any]], use: ToolUse | None
) -> prompts.ChatPrompt:
    return prompts.render(
        state.tokenizer,
        messages,
        tools=() if use is None else use.tools,
        syntax=state.call_syntax,
        allow_control_tokens=state.config.allow_control_tokens,
        **body.template_options(state.config.default_template_variables),
    )


def _most_tokens(state: ServerState, body: SamplingFields) -> int | None:
    """A longer prompt is refused, unless its beginning is dropped."""
    return state.max_context if body.truncate_prompt_tokens is None else None


def _constrain_to_calls(state: ServerState, encoded: Encoded, use: ToolUse) -> None:
    try:
        encoded.params = use.constrain(encoded.params, state.tokenizer)
        encoded.constraint = state.engine.engine.constraint_of(encoded.params)
    except UsageError as error:
        message = (
            str(error).replace("this grammar", "the parameters of the tools").replace("structured output", "tools")
        )
        raise ApiError(400, message, param="tools", code="invalid_value") from None
    encoded.tools = use


def _encode_prompt(state: ServerState, body: CompletionRequest, prompt: str | list[int], check: Check) -> Encoded:
    if state.config.log_prompts:
        log.info("prompt: %r", prompt)
    check()
    if isinstance(prompt, str):
        tokens = prompts.encode(state.tokenizer, prompt, max_tokens=_most_tokens(state, body), check=check)
    else:
        tokens = prompt
    encoded = _fit_to_context(state, body, tokens)
    if body.echo:
        is_cut = len(encoded.tokens) < len(tokens)
        encoded.echo = text_of(state, encoded.tokens) if is_cut or not isinstance(prompt, str) else prompt
    return encoded


def _fit_to_context(state: ServerState, body: SamplingFields, tokens: list[int]) -> Encoded:
    """Settle max_tokens, check that prompt and completion fit into the context, and build the parameters."""
    wanted = body.wanted_tokens()
    least = 1 if wanted is None else wanted
    tokens = body.truncated(tokens, state.max_context, least)
    room = state.max_context - len(tokens)
    limit = state.config.max_output_tokens
    if wanted is not None and limit is not None and wanted > limit:
        raise ApiError(400, f"{wanted} tokens were requested; this server allows at most {limit}", param="max_tokens")
    if room < least:
        message = (
            f"the context holds {state.max_context} tokens; the prompt has {len(tokens)} and "
            f"{'at least 1' if wanted is None else wanted} were requested; shorten the prompt or request fewer"
        )
        raise ApiError(400, message, param="messages", code="context_length_exceeded")
    defaults = dict(state.config.default_sampling)
    recommended = int(defaults.pop("max_tokens", room))
    max_tokens = min(room, limit or room, body.default_tokens or recommended) if wanted is None else wanted
    params = body.params(state.config.default_speculation, max_tokens, defaults)
    state.engine.engine.check(tokens, params)
    return Encoded(tokens, params, _compile(state, body, params))


def _compile(state: ServerState, body: SamplingFields, params: SamplingParams) -> Constraint | None:
    try:
        return state.engine.engine.constraint_of(params)
    except UsageError as problem:
        raise ApiError(400, str(problem), param=body.structured_field, code="invalid_value") from None


def _spell_bad_words(state: ServerState, encoded: list[Encoded]) -> list[Encoded]:
    """Tokenise the bad words once for all prompts, and here, where it does not delay a step."""
    words = encoded[0].params.bad_words
    if words:
        ids = as_token_ids(words, state.tokenizer)
        for each in encoded:
            each.params = replace(each.params, bad_words=ids)
    return encoded


def _answer(
    state: ServerState,
    body: SamplingFields,
    request: Request,
    encoded: Sequence[Encoded],
    kind: Callable[[Heading, TokenTexts], Answer],
    prefix: str,
) -> Response:
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options is only allowed when stream is true", param="stream_options")
    num_each = encoded[0].params.n
    _check_scores([each.tokens for each in encoded], encoded[0].params)
    # Clients with different keys, or with salts of their own, share no caches.
    salt = f"{request.scope.get('outpace.tenant', '')}:{body.cache_salt or ''}"
    priority = body.priority or 0 if state.config.scheduling_policy == "priority" else 0
    options = body.stream_options or StreamOptions.model_validate({})
    orders = [
        Order(
            each.tokens,
            each.params,
            _seed_of(each.params, index),
            salt,
            priority,
            each.prediction,
            each.constraint,
            options.include_drafts,
        )
        for each in encoded
        for index in range(num_each)
    ]
    heading = Heading(
        id=prefix + request.scope["outpace.request_id"],
        created=int(time()),
        model=body.model or state.model_name,
        num_prompt_tokens=sum(len(each.tokens) for each in encoded),
        completions_per_prompt=num_each,
        with_logprobs=encoded[0].params.logprobs is not None,
        include_usage=state.config.always_include_usage or options.include_usage,
        continuous_usage=options.continuous_usage_stats,
        include_drafts=options.include_drafts,
        prompt_token_ids=[each.tokens for each in encoded] if body.return_token_ids else None,
        echoes=[each.echo for each in encoded for _ in range(num_each)],
        prompts=[each.tokens for each in encoded],
        prompt_logprobs=body.prompt_logprobs,
        echoed_logprobs=body.echoed_logprobs(),
    )
    answer = kind(heading, state.texts)
    request.scope["outpace.answer"] = answer
    generation = state.engine.submit(orders, stream=bool(body.stream))
    response = EventStream if body.stream else WholeReply
    return response(generation, answer, state.config.request_timeout)


def _check_scores(prompts: Sequence[Sequence[int]], params: SamplingParams) -> None:
    """Refuse more log-probabilities of prompts than one reply should hold. Each completion has its own."""
    if params.prompt_logprobs is None:
        return
    wanted = params.n * (1 + params.prompt_logprobs) * sum(map(len, prompts))
    if wanted > MAX_PROMPT_LOGPROBS:
        message = (
            f"the reply would have {wanted} log-probabilities of prompts; at most {MAX_PROMPT_LOGPROBS} fit; "
            "send fewer prompts at once, or ask for fewer alternatives"
        )
        raise ApiError(400, message, param="prompt", code="invalid_value")


def _seed_of(params: SamplingParams, index: int) -> int | None:
    return None if params.seed is None else child_seed(params.seed, index)


def text_of(state: ServerState, tokens: Sequence[int]) -> str:
    """The text of these tokens. Raises if a token is not in the vocabulary."""
    size = state.tokenizer.vocab_size
    for token in tokens:
        if token >= size:
            raise ApiError(400, f"token {token} is not in the vocabulary of {size} tokens", param="tokens")
    return b"".join(map(state.tokenizer.token_bytes, tokens)).decode(errors="replace")
