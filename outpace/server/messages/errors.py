"""Errors in Anthropic's format, {"type": "error", "error": {"type", "message"}, "request_id"}."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

_PATH = "/v1/messages"
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class MessagesErrorBody(BaseModel):
    type: str
    message: str


class MessagesErrorReply(BaseModel):
    type: Literal["error"]
    error: MessagesErrorBody
    request_id: str


def is_messages_path(path: str) -> bool:
    """Whether clients of Anthropic's API use this path, also below a proxy's own or where there is no route."""
    return _PATH in path


def error_body(status: int, message: str, request_id: str) -> dict[str, Any]:
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}
