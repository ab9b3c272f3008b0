"""Fields of requests that vLLM adds to OpenAI's API, and what the server makes of them.

`VllmFields` are those of every request that generates, `TemplateFields` those of messages, for the chat template.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field

from outpace.models.chat_template import RESERVED_VARIABLES
from outpace.server.errors import ApiError

# Every completion of a request looks at all of its bad words.
_MAX_WORDS, _MAX_WORD_LENGTH = 256, 128
_MAX_VARIABLES, _MAX_NESTING = 100, 8
BadWord = Annotated[str, Field(min_length=1, max_length=_MAX_WORD_LENGTH)]
BadWordList = Annotated[list[BadWord], Field(fail_fast=True, max_length=_MAX_WORDS)]


class VllmFields(BaseModel):
    skip_special_tokens: bool | None = Field(None, description="False: control tokens appear in the text.")
    include_stop_str_in_output: bool | None = Field(None, description="The text ends with what stopped it.")
    bad_words: BadWordList | None = Field(None, description="Texts that are never produced.")
    priority: int | None = Field(
        None, ge=-(2**31), lt=2**31, description="Of the waiting requests, those with a lower number start first."
    )
    truncate_prompt_tokens: int | None = Field(
        None, ge=-1, description="Keep only the last tokens of the prompt: so many, or with -1 as many as fit."
    )
    truncation_side: Literal["left", "right"] | None = Field(
        None, description="With truncate_prompt_tokens: drop tokens at the beginning (left, the default) or at the end."
    )
    return_token_ids: bool | None = Field(None, description="The reply has the token ids of prompt and answer.")
    prompt_logprobs: int | None = Field(
        None, ge=0, le=20, description="The reply has the log-probabilities of the prompt, with so many alternatives."
    )

    def writing(self) -> dict[str, Any]:
        """The SamplingParams that these fields set; None: not given."""
        names = ("skip_special_tokens", "include_stop_str_in_output", "bad_words")
        return {name: getattr(self, name) for name in names}

    def truncated(self, tokens: Sequence[int], max_context: int, num_wanted: int) -> list[int]:
        """The tokens of the prompt that are used, in a context that must hold `num_wanted` more."""
        limit = self.truncate_prompt_tokens
        if limit is None:
            return list(tokens)
        if limit == 0:
            raise ApiError(400, "truncate_prompt_tokens must be -1, or at least 1", param="truncate_prompt_tokens")
        most = max(1, max_context - num_wanted if limit == -1 else limit)
        return list(tokens[:most] if self.truncation_side == "right" else tokens[-most:])


def _nothing_deep(variables: dict[str, Any]) -> dict[str, Any]:
    """Refuse values nested so deeply that looking at them recursively could fail."""
    if len(variables) > _MAX_VARIABLES:
        raise ValueError(f"at most {_MAX_VARIABLES} variables are allowed")
    level: list[Any] = [variables]
    for _ in range(_MAX_NESTING):
        level = [
            part
            for value in level
            if isinstance(value, dict | list)
            for part in (value.values() if isinstance(value, dict) else value)
        ]
    if level:
        raise ValueError(f"values may be nested {_MAX_NESTING - 1} deep")
    return variables


class TemplateFields(BaseModel):
    add_generation_prompt: bool = Field(True, description="False: the prompt does not begin the assistant's turn.")
    continue_final_message: bool = Field(
        False, description="The prompt ends inside the last message, and the answer continues it."
    )
    chat_template_kwargs: Annotated[dict[str, Any], AfterValidator(_nothing_deep)] | None = Field(
        None, description="Variables for the chat template, such as enable_thinking."
    )
    reasoning_effort: Annotated[str, Field(max_length=64)] | None = Field(
        None, description="Has an effect where the chat template uses it; so has verbosity."
    )
    verbosity: Annotated[str, Field(max_length=64)] | None = None

    def template_options(self, defaults: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments of `prompts.render`. `defaults`: variables of the template that the request need not set."""
        if self.add_generation_prompt and self.continue_final_message:
            message = "continue_final_message needs add_generation_prompt: false; a prompt cannot do both"
            raise ApiError(400, message, param="continue_final_message")
        given = {"reasoning_effort": self.reasoning_effort, "verbosity": self.verbosity}
        variables = {name: value for name, value in given.items() if value is not None}
        variables |= self.chat_template_kwargs or {}
        reserved = sorted(RESERVED_VARIABLES & set(variables))
        if reserved:
            message = f"chat_template_kwargs cannot set {reserved[0]}; leave it out, or send it as a field of its own"
            raise ApiError(400, message, param="chat_template_kwargs")
        return {
            "add_generation_prompt": self.add_generation_prompt,
            "continue_final_message": self.continue_final_message,
            "variables": {**defaults, **variables},
        }
