"""Requests in Anthropic's format. `translate.py` makes chat requests of them.

As in `outpace/server/wire.py`, unknown fields of a request are refused, those of a content block ignored, and a list
ends at its first mistake.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from outpace.models.tool_calls.tools import MAX_TOOLS
from outpace.server.body import Body
from outpace.server.config import MAX_STOP_STRINGS
from outpace.server.errors import ApiError
from outpace.server.wire import SpeculationFields, StopText

_FAIL_FAST = Field(fail_fast=True)


class Block(BaseModel):
    """A part of a message. A client may send back a block that it received, with all of its fields."""

    model_config = ConfigDict(strict=True)
    type: str


class TextBlock(Block):
    type: Literal["text"]
    text: str


class ToolUseBlock(Block):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ThinkingBlock(Block):
    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(Block):
    type: Literal["redacted_thinking"]


def _only_supported(given: object) -> object:
    """Blocks that a model of text cannot read are refused with a sentence about what to send instead."""
    kind = given.get("type") if isinstance(given, dict) else None
    if isinstance(kind, str) and kind not in _SUPPORTED:
        remedy = "send text, tool_use, tool_result or thinking blocks"
        if kind in ("image", "document"):
            remedy = "send what they say in a text block"
        raise _not_supported("messages", f"content blocks of this type ({kind[:32]!r})", remedy)
    return given


def _not_supported(param: str, what: str, remedy: str) -> ApiError:
    return ApiError(400, f"{what} are not supported; {remedy}", param=param, code="unsupported_parameter")


_SUPPORTED = frozenset({"text", "tool_use", "tool_result", "thinking", "redacted_thinking"})
Text = Annotated[TextBlock, BeforeValidator(_only_supported)]
Texts = str | Annotated[list[Text], _FAIL_FAST]


class ToolResultBlock(Block):
    type: Literal["tool_result"]
    tool_use_id: str
    content: Texts | None = None
    is_error: bool | None = None


AnyBlock = Annotated[
    Annotated[
        TextBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock | RedactedThinkingBlock, Field(discriminator="type")
    ],
    BeforeValidator(_only_supported),
]


class Turn(BaseModel):
    model_config = ConfigDict(strict=True)
    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[AnyBlock], _FAIL_FAST]


def _only_own_tools(given: object) -> object:
    kind = given.get("type") if isinstance(given, dict) else None
    if isinstance(kind, str) and kind != "custom":
        raise _not_supported(
            "tools", "tools that Anthropic defines or runs", "send the tool's name, description and input_schema"
        )
    return given


class OwnTool(Body):
    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None
    type: Literal["custom"] | None = None
    # Accepted without effect
    cache_control: dict[str, Any] | None = None
    input_examples: list[Any] | None = None
    eager_input_streaming: bool | None = None


class ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = Field(None, description="For the type tool: the only one that may be called.")
    disable_parallel_tool_use: bool | None = None


class Thinking(Body):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, ge=1, description="Has no effect: only max_tokens limits an answer.")
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Body):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="Has an effect where the chat template uses reasoning_effort."
    )
    format: OutputFormat | None = None


class PromptFields(Body):
    """The fields that make the prompt."""

    messages: Annotated[list[Turn], Field(fail_fast=True, min_length=1, max_length=100_000)]
    model: str | None = Field(None, description="A name from /v1/models; may be left out.")
    system: Texts | None = None
    tools: (
        Annotated[
            list[Annotated[OwnTool, BeforeValidator(_only_own_tools)]], Field(fail_fast=True, max_length=MAX_TOOLS)
        ]
        | None
    ) = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = Field(None, description="Left out: the model is asked not to think.")
    output_config: OutputConfig | None = None
    # Accepted without effect
    cache_control: dict[str, Any] | None = None
    speed: str | None = None
    user_profile_id: str | None = None
    workspace_id: str | None = None


class CountTokensRequest(PromptFields):
    pass


class MessagesRequest(PromptFields):
    max_tokens: int = Field(ge=1)
    stream: bool | None = None
    stop_sequences: Annotated[list[StopText], Field(fail_fast=True, max_length=MAX_STOP_STRINGS)] | None = None
    temperature: float | None = Field(None, ge=0, le=2, description="Default: the model's, else 1; so for top_p.")
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0)
    # Not in Anthropic's API
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    speculation: SpeculationFields | None = None
    # Accepted without effect
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    inference_geo: str | None = None
    diagnostics: dict[str, Any] | None = None
