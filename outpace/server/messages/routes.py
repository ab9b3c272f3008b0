"""The routes of Anthropic's Messages API."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

from outpace.models import prompts
from outpace.server.completions import ERRORS, STREAM, Responses, answer_chat, chat_prompt
from outpace.server.messages.answer import MessagesAnswer
from outpace.server.messages.errors import MessagesErrorReply
from outpace.server.messages.reply_types import MessageReply, TokenCount
from outpace.server.messages.translate import chat_request
from outpace.server.messages.wire import CountTokensRequest, MessagesRequest
from outpace.server.state import Check, ServerState, state_of
from outpace.server.tools import use_of
from outpace.server.wire import ChatRequest

router = APIRouter()
_ERRORS: Responses = {status: {**about, "model": MessagesErrorReply} for status, about in ERRORS.items()}
_COUNT_ERRORS: Responses = {status: _ERRORS[status] for status in (400, 401, 404, 413, 429, 503)}


@router.post("/v1/messages", response_model=MessageReply, responses=_ERRORS | STREAM, tags=["generate"])
async def messages(body: MessagesRequest, request: Request) -> Response:
    return await answer_chat(chat_request(body), request, MessagesAnswer, "msg_")


@router.post("/v1/messages/count_tokens", responses=_COUNT_ERRORS, tags=["text"])
async def count_tokens(body: CountTokensRequest, request: Request) -> TokenCount:
    state = state_of(request)
    state.check_model(body.model)
    chat = chat_request(body)
    with state.engine.reserve(1):
        return TokenCount(input_tokens=await state.offload(request, lambda check: _count(state, chat, check)))


def _count(state: ServerState, chat: ChatRequest, check: Check) -> int:
    use = use_of(chat.tools, chat.tool_choice, chat.parallel_tool_calls, state.call_syntax)
    prompt = chat_prompt(state, chat, [message.as_dict() for message in chat.messages], use)
    return len(prompts.encode(state.tokenizer, prompt, check=check))
