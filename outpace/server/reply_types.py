"""The shapes of replies, for the OpenAPI page and for tests. replies.py writes replies without these classes."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel


class Speculation(BaseModel):
    """What speculation did for this request. `estimated_speedup` is null if nothing was drafted or fewer than
    32 tokens were generated."""

    drafted: int
    accepted: int
    lossy: bool
    estimated_speedup: float | None


class PromptDetails(BaseModel):
    cached_tokens: int


class CompletionDetails(BaseModel):
    """Over all completions: tokens of thinking, and of the tokens of a prediction how many are in the completion (0 if
    it was not used)."""

    reasoning_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails
    speculation: Speculation


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[ChatLogprob]
    refusal: None


class CalledFunction(BaseModel):
    name: str
    arguments: str


class ToolCall(BaseModel):
    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(BaseModel):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning: str | None = None  # left out where there is none; so are the next two
    reasoning_content: str | None = None  # the same, by its older name
    tool_calls: list[ToolCall] | None = None


class ChatChoice(BaseModel):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    token_ids: list[int] | None = None  # with return_token_ids


class PromptLogprob(BaseModel):
    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]  # for each token of the prompt, by token id


class ChatReply(BaseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = None  # with return_token_ids
    prompt_logprobs: PromptLogprobs | None = None  # if asked for


class TextLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float | None]  # null for the first token of a repeated prompt
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(BaseModel):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Literal["stop", "length"]
    token_ids: list[int] | None = None  # with return_token_ids
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None  # if asked for


class TextReply(BaseModel):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage
