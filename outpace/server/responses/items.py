"""The items of a request's `input`, and their translation to the messages of a chat.

An item has a `type`; only a message may leave it out. Fields of items that are not needed are ignored, because clients
send back the items that they received.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from outpace.server.errors import ApiError

_REMEDIES = {
    "item_reference": "nothing is stored here, so send the item itself",
    "input_image": "send text",
    "input_file": "send its text",
    "input_audio": "send text",
}


class _Loose(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)


class TextPart(_Loose):
    type: Literal["input_text", "output_text", "text"]
    text: str


class RefusalPart(_Loose):
    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


def _tag_of_part(given: object) -> str | None:
    """Which class a part has. Tags have a space, so that error messages leave them out of the names of fields."""
    kind = _field(given, "type")
    if kind is None:
        return None
    if kind not in ("input_text", "output_text", "text", "refusal"):
        raise _unsupported("content parts", kind, "send parts of the type input_text")
    return "refusal part" if kind == "refusal" else "text part"


Part = Annotated[
    Annotated[TextPart, Tag("text part")] | Annotated[RefusalPart, Tag("refusal part")],
    Discriminator(
        _tag_of_part,
        custom_error_type="invalid_part",
        custom_error_message="a part must be an object such as {'type': 'input_text', 'text': ...}",
    ),
]
Content = str | Annotated[list[Part], Field(fail_fast=True)]


class MessageItem(_Loose):
    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: Content


class FunctionCallItem(_Loose):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class FunctionCallOutputItem(_Loose):
    type: Literal["function_call_output"]
    call_id: str
    output: Content


class ReasoningPart(_Loose):
    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(_Loose):
    """Thinking of an earlier answer. Without content, as from other servers, it is ignored."""

    type: Literal["reasoning"]
    content: Annotated[list[ReasoningPart], Field(fail_fast=True)] | None = None


def _tag_of_item(given: object) -> str | None:
    if not isinstance(given, dict | BaseModel):
        return None
    kind = _field(given, "type")
    if kind not in (None, "message", "function_call", "function_call_output", "reasoning"):
        raise _unsupported("input items", kind, "send messages, function_call and function_call_output")
    return f"{kind or 'message'} item"


InputItem = Annotated[
    Annotated[MessageItem, Tag("message item")]
    | Annotated[FunctionCallItem, Tag("function_call item")]
    | Annotated[FunctionCallOutputItem, Tag("function_call_output item")]
    | Annotated[ReasoningItem, Tag("reasoning item")],
    Discriminator(
        _tag_of_item,
        custom_error_type="invalid_item",
        custom_error_message="an item must be an object such as {'role': 'user', 'content': ...}",
    ),
]


def _field(given: object, name: str) -> object:
    return given.get(name) if isinstance(given, dict) else getattr(given, name, None)


def _unsupported(what: str, kind: object, remedy: str) -> ApiError:
    shown, remedy = ("this", remedy) if not isinstance(kind, str) else (repr(kind[:64]), _REMEDIES.get(kind, remedy))
    message = f"{what} of the type {shown} are not supported; {remedy}"
    return ApiError(400, message, param="input", code="unsupported_value")


@dataclass(slots=True)
class Conversation:
    """The messages of a chat, and for each what it was made of, to name it in errors."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    origins: list[str] = field(default_factory=list)
    thinking: str = ""  # what the assistant thought before its next message

    def add(self, origin: str, message: dict[str, Any]) -> None:
        self.messages.append(message)
        self.origins.append(origin)


def read_input(given: str | Sequence[InputItem], instructions: str | None) -> Conversation:
    """Instructions become a system message; a call belongs to the message of the assistant before it, thinking to the
    one after it."""
    found = Conversation()
    if instructions is not None:
        found.add("instructions", {"role": "system", "content": instructions})
    if isinstance(given, str):
        found.add("input", {"role": "user", "content": given})
        return found
    for i, item in enumerate(given):
        _add_item(found, f"input[{i}]", item)
    return found


def _add_item(found: Conversation, origin: str, item: InputItem) -> None:
    if isinstance(item, ReasoningItem):
        found.thinking += "".join([part.text for part in item.content or ()])
        return
    _add_message_or_call(found, origin, item)
    thinking, found.thinking = found.thinking, ""
    last = found.messages[-1]
    if thinking and last["role"] == "assistant":
        last["reasoning_content"] = last.get("reasoning_content", "") + thinking


def _add_message_or_call(
    found: Conversation, origin: str, item: MessageItem | FunctionCallItem | FunctionCallOutputItem
) -> None:
    last: dict[str, Any] = found.messages[-1] if found.messages else {"role": None}
    match item:
        case MessageItem():
            role, text = "system" if item.role == "developer" else item.role, _text_of(item.content)
            if role == last["role"] == "system":
                last["content"] += f"\n\n{text}"  # most templates take one system message only
            else:
                found.add(origin, {"role": role, "content": text})
        case FunctionCallItem():
            if last["role"] != "assistant":
                last = {"role": "assistant", "content": None}
                found.add(origin, last)
            function = {"name": item.name, "arguments": item.arguments}
            call = {"id": item.call_id, "type": "function", "function": function}
            last.setdefault("tool_calls", []).append(call)
        case FunctionCallOutputItem():
            result = {"role": "tool", "tool_call_id": item.call_id, "content": _text_of(item.output)}
            found.add(origin, result)


def _text_of(content: Content) -> str:
    return content if isinstance(content, str) else "".join([part.text for part in content])
