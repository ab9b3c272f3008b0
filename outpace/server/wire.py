"""Requests in OpenAI's format, and their translation to SamplingParams.

Unknown fields are refused, as OpenAI does; otherwise a misspelt field would be ignored silently. Fields for OpenAI's
own administration are accepted and have no effect. Fields for features that this server lacks are accepted only with
values that do not use the feature.

Validation runs on the event loop, so its time must not depend on how much of a request is wrong: a list ends at its
first mistake. Describing each of a million took eight seconds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator

from outpace.config import Acceptance, Method, SamplingParams, SpeculationMode, SpeculationParams, Workload
from outpace.models.control_text import ROLES
from outpace.server.body import Body
from outpace.server.config import MAX_STOP_LENGTH, MAX_STOP_STRINGS
from outpace.server.errors import ApiError
from outpace.server.structured import StructuredFields
from outpace.server.tools import ToolChoice, Tools
from outpace.server.vllm_fields import TemplateFields, VllmFields

_FAIL_FAST = Field(fail_fast=True)
MANY = Field(fail_fast=True, min_length=1, max_length=1 << 16)
Tokens = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], _FAIL_FAST]
StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


def _only_numbers(given: object) -> object:
    """Refuse at the first value that is no finite number; unlike a list, a mapping cannot be told to."""
    if isinstance(given, dict):
        for value in given.values():
            if type(value) not in (int, float) or not -math.inf < value < math.inf:
                raise ValueError("every value must be a finite number")
    return given


Biases = Annotated[dict[str, Finite], BeforeValidator(_only_numbers)]


class SpeculationFields(Body):
    """Speculation settings of one request. Missing fields follow the server's settings."""

    mode: SpeculationMode | None = None
    method: Method | None = None
    max_depth: int | None = Field(None, ge=0, le=64)
    workload: Workload | None = None
    acceptance: Acceptance | None = None
    threshold: float | None = Field(None, ge=0, le=1)
    posterior_threshold: float | None = Field(None, ge=0, le=1)
    posterior_alpha: float | None = Field(None, ge=0, le=1)


class StreamOptions(Body):
    include_usage: bool = False
    continuous_usage_stats: bool = Field(False, description="As in vLLM: with include_usage, every chunk has usage.")
    include_drafts: bool = Field(
        False, description="Each chunk has text of one origin and the draft it was in, if any."
    )
    include_obfuscation: Literal[False] | None = None


class CommonFields(VllmFields, Body):
    """What a request that generates may say on every route."""

    model: str | None = Field(None, description="A name from /v1/models; may be left out.")
    stream: bool | None = False
    stop: StopText | Annotated[list[StopText], Field(max_length=MAX_STOP_STRINGS)] | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    temperature: float | None = Field(None, ge=0, le=2, description="Default: the model's, else 1; so for top_p.")
    top_p: float | None = Field(None, gt=0, le=1)
    presence_penalty: float | None = Field(0.0, ge=-2, le=2)
    frequency_penalty: float | None = Field(0.0, ge=-2, le=2)
    logit_bias: Biases | None = None
    # Not in OpenAI's API; as in vLLM
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=0.01, le=10)
    min_tokens: int | None = Field(None, ge=0)
    ignore_eos: bool | None = None
    cache_salt: str | None = Field(None, min_length=1, max_length=256)
    stop_token_ids: Tokens | None = None
    # Not in vLLM's API
    speculation: SpeculationFields | None = None
    # Accepted without effect
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class SamplingFields(CommonFields, StructuredFields):
    stream_options: StreamOptions | None = None
    n: int | None = Field(1, ge=1, le=128)
    max_tokens: int | None = Field(None, ge=1)

    default_tokens: ClassVar[int | None] = None  # without max_tokens; None: the rest of the context

    def wanted_tokens(self) -> int | None:
        return self.max_tokens

    def num_logprobs(self) -> int | None:
        raise NotImplementedError

    def num_prompt_logprobs(self) -> int | None:
        if self.prompt_logprobs is not None and self.stream:
            message = "prompt_logprobs are not sent in a stream, as with vLLM; leave out stream or prompt_logprobs"
            raise ApiError(400, message, param="prompt_logprobs", code="unsupported_parameter")
        return self.prompt_logprobs

    def echoed_logprobs(self) -> int | None:
        """How many alternatives the log-probabilities of a repeated prompt have; None: there are none."""
        return None

    def predicted_text(self) -> str | None:
        return None

    def params(
        self, defaults: SpeculationParams, max_tokens: int, sampling: Mapping[str, Any] | None = None
    ) -> SamplingParams:
        """The SamplingParams. Raises UsageError for fields that contradict each other. `sampling`: for missing ones."""
        given: dict[str, Any] = {
            "n": self.n,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "logit_bias": _bias(self.logit_bias),
            "seed": None if self.seed is None else self.seed % 2**64,
            "stop": self.stop,
            "stop_token_ids": self.stop_token_ids,
            "min_tokens": self.min_tokens,
            "ignore_eos": self.ignore_eos,
            "logprobs": self.num_logprobs(),
            "prompt_logprobs": self.num_prompt_logprobs(),
            "structured": self.structured(),
            **self.writing(),
            "prediction": self.predicted_text(),
        }
        known = dict(sampling or ()) | {name: value for name, value in given.items() if value is not None}
        return SamplingParams(max_tokens=max_tokens, speculation=_speculation(self.speculation, defaults), **known)


class Message(BaseModel):
    """One turn. A client may send back a message it received, including its empty fields."""

    model_config = ConfigDict(extra="allow", strict=True)
    # Checked when the messages are rendered, because --allow-control-tokens permits any role.
    role: str = Field(min_length=1, json_schema_extra={"enum": list(ROLES)})
    content: str | Annotated[list[dict[str, Any]], _FAIL_FAST] | None = None

    @field_validator("role")
    @classmethod
    def _known_by_templates(cls, role: str) -> str:
        return "system" if role == "developer" else role

    def text(self) -> str:
        if isinstance(self.content, list):
            return "".join(str(part.get("text", "")) for part in self.content)
        return self.content or ""

    def as_dict(self) -> dict[str, Any]:
        extra = {name: value for name, value in (self.model_extra or {}).items() if not _is_empty(value)}
        if "function_call" in extra:
            raise ApiError(400, "messages with function_call are not supported; use tool_calls", param="messages")
        if not isinstance(extra.get("name", ""), str):
            raise ApiError(400, "the name of a message must be a string", param="messages", code="invalid_value")
        known = {name: value for name, value in extra.items() if name in ("name", "tool_calls", "tool_call_id")}
        return {"role": self.role, "content": self.content, **known, **_reasoning(extra)}


def _reasoning(extra: Mapping[str, Any]) -> dict[str, Any]:
    """The thinking of an earlier answer, under the name by which templates know it."""
    given = extra.get("reasoning_content") or extra.get("reasoning")
    return {"reasoning_content": given} if isinstance(given, str) else {}


def _is_empty(value: object) -> bool:
    """Whether a field says nothing; LiteLLM puts the empty fields of a message into an object of its own."""
    if isinstance(value, dict):
        return all(part is None for part in value.values())
    return value is None or value == []


def _use_tools(given: object) -> object:
    if given not in ([], "none", "auto"):
        message = "functions and function_call are OpenAI's older fields; use tools and tool_choice"
        raise ApiError(400, message, param="functions", code="unsupported_parameter")
    return given


Messages = Annotated[list[Message], Field(fail_fast=True, min_length=1)]


class ChatRequest(TemplateFields, SamplingFields):
    messages: Messages
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = False
    top_logprobs: int | None = Field(None, ge=0, le=20)
    prediction: PredictedContent | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = Field(None, description="As in vLLM. False: the reply leaves out the thinking.")
    # Accepted only with values that do not use the feature
    functions: Annotated[list[Any], Field(max_length=0), BeforeValidator(_use_tools)] | None = None
    function_call: Annotated[Literal["none", "auto"], BeforeValidator(_use_tools)] | None = None
    modalities: Annotated[list[Literal["text"]], _FAIL_FAST] | None = None

    def wanted_tokens(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    def num_logprobs(self) -> int | None:
        if self.logprobs:
            return self.top_logprobs or 0
        if self.top_logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
        return None

    def predicted_text(self) -> str | None:
        if self.prediction is None:
            return None
        content = self.prediction.content
        return content if isinstance(content, str) else "".join([part.text for part in content])


class TextPart(Body):
    type: Literal["text"]
    text: str


class PredictedContent(Body):
    """OpenAI's predicted output: a text that the answer will resemble, such as a file before an edit."""

    type: Literal["content"]
    content: str | Annotated[list[TextPart], _FAIL_FAST]


class CompletionRequest(SamplingFields):
    prompt: str | Tokens | Annotated[list[str], MANY] | Annotated[list[Tokens], MANY]
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool | None = False
    suffix: Literal[""] | None = Field(None, description="Filling in the middle is not supported.")
    best_of: int | None = Field(None, ge=1)
    max_tokens: int | None = Field(None, ge=0, description="0 scores the prompt only, with echo or prompt_logprobs.")

    default_tokens: ClassVar[int | None] = 16  # OpenAI's default for this endpoint

    def num_logprobs(self) -> int | None:
        return self.logprobs

    def echoed_logprobs(self) -> int | None:
        return self.logprobs if self.echo else None

    def num_prompt_logprobs(self) -> int | None:
        # Without an answer the request only scores its prompt, whatever it shows of that.
        wanted = (super().num_prompt_logprobs(), self.echoed_logprobs(), 0 if self.max_tokens == 0 else None)
        return max((number for number in wanted if number is not None), default=None)

    def prompts(self) -> list[str | list[int]]:
        return given_prompts(self.prompt)

    def check(self) -> None:
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            message = "max_tokens is 0 and nothing of the prompt is asked for; set echo or prompt_logprobs, or raise it"
            raise ApiError(400, message, param="max_tokens", code="invalid_value")
        if self.best_of is not None and self.best_of != (self.n or 1):
            message = "best_of other than n is not supported: every completion is returned"
            raise ApiError(400, f"{message}; leave it out", param="best_of", code="unsupported_parameter")


class TokenizeRequest(TemplateFields, Body):
    """A prompt, or messages to be rendered with the model's chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: Tokens


def given_prompts(given: Any) -> list[str | list[int]]:
    """The prompts of a field that holds one or several, as texts or as token ids."""
    several: list[Any] = [given] if isinstance(given, str) else given
    return [several] if not several or isinstance(several[0], int) else several


def _bias(given: dict[str, float] | None) -> dict[int, float] | None:
    if given is None:
        return None
    try:
        return {int(token): bias for token, bias in given.items()}
    except ValueError:
        message = "logit_bias maps token ids to biases, such as {'42': -100}; a key is not a whole number"
        raise ApiError(400, message, param="logit_bias", code="invalid_value") from None


def _speculation(asked: SpeculationFields | None, defaults: SpeculationParams) -> SpeculationParams:
    """The server's defaults, overridden by the request. Default thresholds apply only to the default's own rule."""
    if asked is None:
        return defaults
    given = {name: value for name, value in asked if value is not None}
    if "acceptance" not in given:
        given["acceptance"] = defaults.acceptance
    if given["acceptance"] == defaults.acceptance == "typical":
        given.setdefault("posterior_threshold", defaults.posterior_threshold)
        given.setdefault("posterior_alpha", defaults.posterior_alpha)
    return SpeculationParams(**given)
