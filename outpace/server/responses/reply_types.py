"""The shape of a response, for the OpenAPI page and for tests. answer.py writes it without these classes."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from outpace.server.reply_types import ChatLogprob, CompletionDetails, PromptDetails, Speculation

ItemStatus = Literal["completed", "incomplete"]


class InputDetails(PromptDetails):
    cache_write_tokens: int


class ResponsesUsage(BaseModel):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: CompletionDetails
    total_tokens: int
    speculation: Speculation


class ReasoningText(BaseModel):
    type: Literal["reasoning_text"]
    text: str


class OutputReasoning(BaseModel):
    type: Literal["reasoning"]
    id: str
    status: ItemStatus
    summary: list[Any]
    content: list[ReasoningText]


class OutputText(BaseModel):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[ChatLogprob]


class OutputMessage(BaseModel):
    type: Literal["message"]
    id: str
    status: ItemStatus
    role: Literal["assistant"]
    content: list[OutputText]


class OutputCall(BaseModel):
    type: Literal["function_call"]
    id: str
    call_id: str
    name: str
    arguments: str
    status: ItemStatus


class IncompleteDetails(BaseModel):
    reason: Literal["max_output_tokens"]


class ResponsesReply(BaseModel):
    id: str
    object: Literal["response"]
    created_at: int
    status: ItemStatus
    error: None
    incomplete_details: IncompleteDetails | None
    model: str
    output: list[OutputReasoning | OutputMessage | OutputCall]
    usage: ResponsesUsage
    prompt_token_ids: list[int] | None = None  # with return_token_ids
    token_ids: list[int] | None = None
    # As the request has them
    background: Literal[False]
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: None
    prompt_cache_key: str | None
    reasoning: dict[str, Any]
    safety_identifier: str | None
    store: Literal[False]
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    user: str | None
