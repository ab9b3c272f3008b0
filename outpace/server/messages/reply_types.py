"""The shapes of replies, for the OpenAPI page and for tests. answer.py writes replies without these classes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from outpace.server.reply_types import Speculation


class TextReplyBlock(BaseModel):
    type: Literal["text"]
    text: str
    citations: None


class ThinkingReplyBlock(BaseModel):
    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseReplyBlock(BaseModel):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


ReplyBlock = Annotated[TextReplyBlock | ThinkingReplyBlock | ToolUseReplyBlock, Field(discriminator="type")]


class OutputDetails(BaseModel):
    thinking_tokens: int


class MessageUsage(BaseModel):
    """The prompt has `input_tokens` and `cache_read_input_tokens` together."""

    input_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int
    output_tokens: int
    output_tokens_details: OutputDetails
    speculation: Speculation


class MessageReply(BaseModel):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ReplyBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(BaseModel):
    input_tokens: int
