"""The route of the Responses API."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial

from fastapi import APIRouter, Request
from fastapi.responses import Response

from outpace.errors import OutpaceError
from outpace.server.completions import ERRORS, STREAM, answer_chat
from outpace.server.errors import ApiError, as_api_error
from outpace.server.responses.answer import ResponsesAnswer
from outpace.server.responses.reply_types import ResponsesReply
from outpace.server.responses.request import ResponsesRequest

router = APIRouter()
# Fields of chat requests, and their names here
_NAMES = {"messages": "input", "max_tokens": "max_output_tokens", "response_format": "text.format"}


@router.post("/v1/responses", response_model=ResponsesReply, responses=ERRORS | STREAM, tags=["generate"])
async def responses(body: ResponsesRequest, request: Request) -> Response:
    conversation = body.messages()
    if not conversation.messages:
        raise ApiError(400, "input has no message; send at least one", param="input", code="invalid_value")
    chat = body.for_chat(conversation.messages)
    try:
        return await answer_chat(chat, request, partial(ResponsesAnswer, body.repeated()), "resp_")
    except OutpaceError as error:
        raise _renamed(as_api_error(error), conversation.origins) from error


def _renamed(error: ApiError, origins: Sequence[str]) -> ApiError:
    """The error of a chat request in the words of this API."""
    message = re.sub(r"\bmessages\[(\d+)\]", lambda place: origins[int(place[1])], str(error))
    message = re.sub(r"\b(max_tokens|response_format)\b", lambda name: _NAMES[name[0]], message)
    param = None if error.param is None else _NAMES.get(error.param, error.param)
    return ApiError(error.status, message, type=error.type, param=param, code=error.code, headers=error.headers)
