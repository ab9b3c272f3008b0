"""Errors in the shape OpenAI's clients know, {"error": {"message", "type", "param", "code"}}, with the right status."""

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

from outpace.engine.generation import EngineStopped, Overloaded
from outpace.errors import ModelError, OutpaceError, UsageError

log = logging.getLogger("outpace.server")

_UNION_MEMBER = re.compile(r"[^\w]|^(str|int|float|bool)$")  # pydantic's names for types, among those of fields


class ErrorBody(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(BaseModel):
    error: ErrorBody


class ApiError(OutpaceError):
    """A refusal with everything the wire wants to know."""

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
    """Whatever was raised, as what the client may hear of it."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, Overloaded):
        headers = {"Retry-After": str(math.ceil(error.retry_after))}
        return ApiError(429, str(error), type="rate_limit_error", code="queue_full", headers=headers)
    if isinstance(error, EngineStopped):
        return ApiError(503, str(error), type="service_unavailable_error", code="unavailable")
    if isinstance(error, UsageError | ModelError):  # a chat template that refuses a conversation is a ModelError
        return ApiError(400, str(error))
    if isinstance(error, UnicodeEncodeError):  # JSON can spell what no text may contain
        return ApiError(
            400, "the request holds text that is not valid Unicode; remove lone surrogates (\\ud800 to \\udfff)"
        )
    if isinstance(error, OutpaceError):
        return ApiError(500, str(error), type="server_error", code="engine_fault")
    return ApiError(500, "the server failed on this request; its log has the details", type="server_error")


def reply(error: BaseException) -> JSONResponse:
    told = as_api_error(error)
    return JSONResponse(told.body(), told.status, headers=told.headers)


def install(app: FastAPI) -> None:
    """Give every way of failing the same shape."""

    @app.exception_handler(OutpaceError)
    async def known(_: Request, error: OutpaceError) -> JSONResponse:
        return reply(error)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        return reply(_from_validation(error))

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> JSONResponse:
        if error.status_code == HTTPStatus.NOT_FOUND:
            return reply(ApiError(404, f"there is nothing at {request.url.path}; /docs lists what there is"))
        if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
            message = f"{request.method} is not possible at {request.url.path}"
            return reply(ApiError(405, message, headers=error.headers))
        return reply(ApiError(error.status_code, str(error.detail), headers=error.headers))


def _from_validation(error: RequestValidationError) -> ApiError:
    """One sentence about the first thing wrong. It never repeats what was sent: that may be a prompt."""
    problems = error.errors()
    first = problems[0]
    # Where several types are possible each complains; the one whose type was meant says what else is wrong.
    about_it = [each for each in problems if each["loc"][:2] == first["loc"][:2]]
    first = next((each for each in about_it if not each["type"].endswith("_type")), first)
    where = [str(part) for part in first["loc"] if part != "body" and not _UNION_MEMBER.search(str(part))]
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not valid JSON ({first['ctx']['error']}); send one JSON object")
    if not where:
        return ApiError(400, "the body must be one JSON object with the header 'content-type: application/json'")
    name = ".".join(where)
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"unrecognized request argument: {name}", param=name, code="unknown_parameter")
    if first["type"] == "missing":
        return ApiError(400, f"the request needs {name}", param=name, code="missing_required_parameter")
    problem = first["msg"].removeprefix("Value error, ")
    return ApiError(400, f"{name}: {problem[:1].lower()}{problem[1:]}", param=name, code="invalid_value")
