"""Requests of the Responses API, and their translation to chat requests.

As in `wire`, unknown fields are refused, and fields for features that this server lacks are accepted only with values
that do not use the feature. Nothing is stored: whatever refers to an earlier response is refused.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationInfo

from outpace.models.tool_calls.tools import MAX_TOOLS, NAME_PATTERN
from outpace.server.body import Body
from outpace.server.errors import ApiError
from outpace.server.responses.items import Conversation, InputItem, read_input
from outpace.server.structured import NamedSchema, ResponseFormat, StructuredOutputs
from outpace.server.vllm_fields import TemplateFields
from outpace.server.wire import ChatRequest, CommonFields, PredictedContent

_LOGPROBS = "message.output_text.logprobs"
_MAX_METADATA = 16
_SEND_ALL = "nothing is stored here, so send all items of the conversation in input"
Short = Annotated[str, Field(max_length=64)]


def _unless(remedy: str) -> BeforeValidator:
    """Refuses any use of a field."""

    def refuse(given: object, info: ValidationInfo) -> object:
        if given is not None and given is not False:
            message = f"{info.field_name} is not supported; {remedy}"
            raise ApiError(400, message, param=info.field_name, code="unsupported_parameter")
        return given

    return BeforeValidator(refuse)


def _only_functions(field: str, remedy: str) -> BeforeValidator:
    """Refuses another `type` in this field than "function"."""

    def refuse(given: object) -> object:
        if isinstance(given, str) and given != "function":
            message = f"the type {given[:64]!r} is not supported in {field}; {remedy}"
            raise ApiError(400, message, param=field, code="unsupported_value")
        return given

    return BeforeValidator(refuse)


def _few_entries(given: object) -> object:
    """A mapping describes all mistakes in it, so limit their number first."""
    if isinstance(given, dict) and len(given) > _MAX_METADATA:
        raise ValueError(f"at most {_MAX_METADATA} entries are allowed")
    return given


Metadata = Annotated[
    dict[Short, Annotated[str, Field(max_length=512)]],
    Field(max_length=_MAX_METADATA),
    BeforeValidator(_few_entries),
]
Includable = Literal[
    "message.output_text.logprobs",
    # Details of items that no answer here has
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
]


class FunctionTool(Body):
    type: Annotated[Literal["function"], _only_functions("tools", "offer a function that does it")]
    name: str = Field(pattern=f"^{NAME_PATTERN}$")
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="A JSON schema of an object.")
    strict: bool | None = None

    def for_chat(self) -> dict[str, Any]:
        return {"type": "function", "function": {name: value for name, value in self if name != "type"}}


class FunctionChoice(Body):
    type: Annotated[Literal["function"], _only_functions("tool_choice", "send only the tools that may be called")]
    name: str


class TextFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    # For json_schema only
    name: str | None = Field(None, min_length=1, max_length=256)
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None

    def for_chat(self) -> ResponseFormat:
        if self.type != "json_schema":
            return ResponseFormat(type=self.type)
        for name, value in (("name", self.name), ("schema", self.schema_)):
            if value is None:
                message = f"the request needs text.format.{name} for the type json_schema"
                raise ApiError(400, message, param=f"text.format.{name}", code="missing_required_parameter")
        return ResponseFormat(type="json_schema", json_schema=NamedSchema(**self._of_schema()))

    def repeated(self) -> dict[str, Any]:
        return {"type": self.type} | (self._of_schema() if self.type == "json_schema" else {})

    def _of_schema(self) -> dict[str, Any]:
        fields = {"name": self.name, "description": self.description, "strict": self.strict}
        return fields | {"schema": self.schema_}


class TextOptions(Body):
    format: TextFormat | None = None
    verbosity: Short | None = None


class Reasoning(Body):
    effort: Short | None = Field(None, description="Has an effect where the chat template uses it.")
    # Accepted without effect
    summary: Short | None = None
    generate_summary: Short | None = None


class ResponseStreamOptions(Body):
    include_obfuscation: Literal[False] | None = None


class ResponsesRequest(TemplateFields, CommonFields):
    input: str | Annotated[list[InputItem], Field(fail_fast=True, min_length=1)]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    tools: Annotated[list[FunctionTool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    include: Annotated[list[Includable], Field(fail_fast=True)] | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    reasoning: Reasoning | None = None
    truncation: Literal["auto", "disabled"] | None = Field(
        None, description="auto: only the end of a prompt is used that is too long for the context."
    )
    stream_options: ResponseStreamOptions | None = None
    metadata: Metadata | None = Field(None, description="The answer repeats it.")
    # Not in OpenAI's API; as in chat requests
    prediction: PredictedContent | None = None
    structured_outputs: StructuredOutputs | None = None
    # Accepted without effect
    max_tool_calls: int | None = Field(None, description="Limits tools of OpenAI's own.")
    prompt_cache_retention: str | None = None
    # Accepted only with values that do not use the feature
    background: Annotated[Literal[False] | None, _unless("leave it out, and stream the answer")] = None
    previous_response_id: Annotated[None, _unless(_SEND_ALL)] = None
    conversation: Annotated[None, _unless(_SEND_ALL)] = None
    prompt: Annotated[None, _unless("send the text of the prompt as instructions or input")] = None

    def messages(self) -> Conversation:
        return read_input(self.input, self.instructions)

    def for_chat(self, messages: list[dict[str, Any]]) -> ChatRequest:
        same = {name: getattr(self, name) for part in (CommonFields, TemplateFields) for name in part.model_fields}
        return ChatRequest(
            **same
            | self._for_template()
            | {
                "messages": messages,
                "max_tokens": self.max_output_tokens,
                "tools": None if self.tools is None else [tool.for_chat() for tool in self.tools],
                "tool_choice": self._choice(),
                "parallel_tool_calls": self.parallel_tool_calls,
                "response_format": self.text.format.for_chat() if self.text and self.text.format else None,
                "structured_outputs": self.structured_outputs,
                "logprobs": self._wants_logprobs(),
                "top_logprobs": self.top_logprobs,
                "prediction": self.prediction,
                "truncate_prompt_tokens": self._truncated_to(),
                "stream_options": None if self.stream_options is None else {},
            }
        )

    def _for_template(self) -> dict[str, Any]:
        given = {
            "reasoning_effort": self.reasoning.effort if self.reasoning else None,
            "verbosity": self.text.verbosity if self.text else None,
        }
        return {name: value for name, value in given.items() if value is not None}

    def _choice(self) -> str | dict[str, Any] | None:
        if isinstance(self.tool_choice, FunctionChoice):
            return {"type": "function", "function": {"name": self.tool_choice.name}}
        return self.tool_choice

    def _wants_logprobs(self) -> bool:
        is_included = _LOGPROBS in (self.include or ())
        if self.top_logprobs and not is_included:
            raise ApiError(400, f"top_logprobs needs include: ['{_LOGPROBS}']", param="top_logprobs")
        return is_included

    def _truncated_to(self) -> int | None:
        """As many tokens as fit, unless the request says how many."""
        given = self.truncate_prompt_tokens
        return -1 if given is None and self.truncation == "auto" else given

    def repeated(self) -> dict[str, Any]:
        """The fields that the answer repeats, as they are in effect."""
        choice, form = self.tool_choice, self.text.format if self.text else None
        return {
            "background": False,
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "max_tool_calls": self.max_tool_calls,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "previous_response_id": None,
            "prompt_cache_key": self.prompt_cache_key,
            "reasoning": {"effort": self.reasoning.effort if self.reasoning else None, "summary": None},
            "safety_identifier": self.safety_identifier,
            "store": False,
            "text": {
                "format": {"type": "text"} if form is None else form.repeated(),
                "verbosity": self.text.verbosity if self.text else None,
            },
            "tool_choice": dict(choice) if isinstance(choice, FunctionChoice) else choice or "auto",
            "tools": [dict(tool) for tool in self.tools or ()],
            "top_logprobs": self.top_logprobs or 0,
            "truncation": self.truncation or "disabled",
            "user": self.user,
        }
