"""Errors in OpenAI's format, {"error": {"message", "type", "param", "code"}}, with the matching HTTP status.

At the paths of Anthropic's API they have its format.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.types import Scope

from outpace.engine.generation import EngineStopped, Overloaded
from outpace.errors import ModelError, OutpaceError, PromptTooLong, UsageError
from outpace.server.messages.errors import error_body, is_messages_path

log = logging.getLogger("outpace.server")

CLIENT_LEFT = 499  # nginx's status for it; only the log shows it
_UNION_MEMBER = re.compile(r"[^\w]|^(str|int|float|bool)$")  # pydantic puts type names between field names


class ErrorBody(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(BaseModel):
    error: ErrorBody


# Fields of OpenAI's and vLLM's requests that this server lacks, and what to do instead.
_UNSUPPORTED = {
    "modalities": "answers are text; leave it out",
    "audio": "answers are text; leave it out",
    "web_search_options": "there is no web search; send what was found as text, or offer a tool for it",
    "use_beam_search": "completions are sampled; set temperature 0 for the likeliest tokens, or n for several answers",
    "length_penalty": "there is no beam search; leave it out",
    "early_stopping": "there is no beam search; leave it out",
    "prompt_embeds": "send the prompt as text or token ids",
    "logprob_token_ids": "logprobs has the likeliest tokens, at most 20",
    "allowed_token_ids": "describe the output with structured_outputs, or use logit_bias",
    "logits_processors": "use logit_bias, bad_words or structured_outputs",
    "thinking_token_budget": "limit the answer with max_tokens, or set enable_thinking in chat_template_kwargs",
    "return_tokens_as_token_ids": "use return_token_ids",
    "echo": "only /v1/completions repeats its prompt; leave it out",
}


class ApiError(OutpaceError):
    """An error with its HTTP status, its headers and the fields of OpenAI's error object."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.type, self.param, self.code = status, type, param, code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        return {"error": {"message": str(self), "type": self.type, "param": self.param, "code": self.code}}


def as_api_error(error: BaseException) -> ApiError:
    """Convert any exception to the error that the client gets."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, Overloaded):
        headers = {"Retry-After": str(math.ceil(error.retry_after))}
        return ApiError(429, str(error), type="rate_limit_error", code="queue_full", headers=headers)
    if isinstance(error, EngineStopped):
        return ApiError(503, str(error), type="service_unavailable_error", code="unavailable")
    if isinstance(error, PromptTooLong):
        return ApiError(400, str(error), param="messages", code="context_length_exceeded")
    if isinstance(error, UsageError | ModelError):  # ModelError: the chat template refused the conversation
        return ApiError(400, str(error))
    if isinstance(error, UnicodeEncodeError):  # JSON escapes can encode lone surrogates; UTF-8 cannot
        return ApiError(
            400, "the request contains text that is not valid Unicode; remove lone surrogates (\\ud800 to \\udfff)"
        )
    if isinstance(error, OutpaceError):
        return ApiError(500, str(error), type="server_error", code="engine_fault")
    return ApiError(500, "the server failed on this request; its log has the details", type="server_error")


def reply(error: BaseException, scope: Scope) -> JSONResponse:
    """The error in the format of the path's clients."""
    api_error = as_api_error(error)
    body = api_error.body()
    if is_messages_path(scope["path"]):
        body = error_body(api_error.status, str(api_error), scope["outpace.request_id"])
    return JSONResponse(body, api_error.status, headers=api_error.headers)


def install(app: FastAPI) -> None:
    """Register handlers, so that every error has the same format."""

    @app.exception_handler(OutpaceError)
    async def known(request: Request, error: OutpaceError) -> JSONResponse:
        return reply(error, request.scope)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        return reply(_from_validation(error), request.scope)

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> JSONResponse:
        return reply(_from_http(request, error), request.scope)


def _from_http(request: Request, error: HTTPException) -> ApiError:
    if error.status_code == HTTPStatus.NOT_FOUND:
        return ApiError(404, f"there is nothing at {request.url.path}; /docs lists the routes")
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        message = f"{request.method} is not allowed at {request.url.path}; see /docs"
        return ApiError(405, message, headers=error.headers)
    return ApiError(error.status_code, str(error.detail), headers=error.headers)


def _from_validation(error: RequestValidationError) -> ApiError:
    """Describe the first problem. The message never repeats the input, which may be a prompt."""
    problems = error.errors()
    first = problems[0]
    # A union reports one problem per member type. Prefer a problem that is not a wrong type: its member's type matched.
    # Among wrong types prefer the innermost: the types around it matched.
    same_field = [each for each in problems if each["loc"][:2] == first["loc"][:2]]
    innermost = max(same_field, key=lambda each: len(each["loc"]))
    first = next((each for each in same_field if not each["type"].endswith("_type")), innermost)
    where = [str(part) for part in first["loc"] if part != "body" and not _UNION_MEMBER.search(str(part))]
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not valid JSON ({first['ctx']['error']}); send one JSON object")
    if not where:
        return ApiError(400, "the body must be one JSON object with the header 'content-type: application/json'")
    name = ".".join(where)
    if first["type"] == "extra_forbidden":
        if name in _UNSUPPORTED:
            message = f"{name} is not supported; {_UNSUPPORTED[name]}"
            return ApiError(400, message, param=name, code="unsupported_parameter")
        return ApiError(400, f"unrecognized request argument: {name}", param=name, code="unknown_parameter")
    if first["type"] == "missing":
        return ApiError(400, f"the request needs {name}", param=name, code="missing_required_parameter")
    problem = first["msg"].removeprefix("Value error, ")
    return ApiError(400, f"{name}: {problem[:1].lower()}{problem[1:]}", param=name, code="invalid_value")
