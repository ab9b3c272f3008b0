"""Makes the chat request that means the same as a request in Anthropic's format."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

from outpace.server.errors import ApiError
from outpace.server.messages.wire import (
    Block,
    MessagesRequest,
    OutputConfig,
    OwnTool,
    PromptFields,
    TextBlock,
    Texts,
    Thinking,
    ThinkingBlock,
    ToolChoice,
    ToolResultBlock,
    ToolUseBlock,
    Turn,
)
from outpace.server.wire import ChatRequest

Fields = dict[str, Any]


def chat_request(asked: PromptFields) -> ChatRequest:
    """Without the fields of an answer for a request that only counts tokens."""
    fields: Fields = {
        "model": asked.model,
        "messages": list(_messages(asked)),
        "tools": None if asked.tools is None else [_tool(tool) for tool in asked.tools],
        "chat_template_kwargs": _thinking_variables(asked),
        "include_reasoning": _shows_thinking(asked.thinking),
        **_choice(asked.tool_choice),
        **_output(asked.output_config),
    }
    if asked.messages[-1].role == "assistant":  # its text is the beginning of the answer
        fields |= {"add_generation_prompt": False, "continue_final_message": True}
    return ChatRequest(**fields, **(_sampling(asked) if isinstance(asked, MessagesRequest) else {}))


def _sampling(asked: MessagesRequest) -> Fields:
    names = ("max_tokens", "stream", "temperature", "top_p", "top_k", "seed", "speculation")
    return {name: getattr(asked, name) for name in names} | {"stop": asked.stop_sequences}


def _thinking_variables(asked: PromptFields) -> Fields:
    """Templates name the switch differently. Anthropic's models do not think unless they are asked to."""
    if asked.thinking is not None and asked.thinking.type == "adaptive":
        return {}  # the template's default
    wants = asked.thinking is not None and asked.thinking.type == "enabled"
    return {"enable_thinking": wants, "thinking": wants}


def _shows_thinking(asked: Thinking | None) -> bool:
    """Clients that do not ask for thinking take the first block for the text."""
    return asked is not None and asked.type != "disabled" and asked.display != "omitted"


def _choice(asked: ToolChoice | None) -> Fields:
    if asked is None:
        return {}
    if (asked.name is not None) != (asked.type == "tool"):
        raise _invalid("tool_choice", "tool_choice has a name exactly if its type is tool; correct it")
    if asked.type == "tool":
        choice: Any = {"type": "function", "function": {"name": asked.name}}
    else:
        choice = "required" if asked.type == "any" else asked.type
    return {"tool_choice": choice, "parallel_tool_calls": not asked.disable_parallel_tool_use}


def _output(asked: OutputConfig | None) -> Fields:
    if asked is None:
        return {}
    fields: Fields = {"reasoning_effort": asked.effort}
    if asked.format is not None:
        named = {"name": "output", "schema": asked.format.schema_}
        fields["response_format"] = {"type": "json_schema", "json_schema": named}
    return fields


def _tool(tool: OwnTool) -> Fields:
    function = {"name": tool.name, "description": tool.description, "strict": tool.strict}
    return {"type": "function", "function": function | {"parameters": tool.input_schema}}


def _messages(asked: PromptFields) -> Iterator[Fields]:
    if asked.system:
        yield {"role": "system", "content": _text(asked.system)}
    for role, turns in groupby(asked.messages, lambda turn: turn.role):  # turns of one role are one turn
        blocks = [block for turn in turns for block in _blocks(turn)]
        if role == "assistant":
            yield _assistant(blocks)
        elif role == "user":
            yield from _user(blocks)
        else:
            yield {"role": role, "content": _joined(_only_texts(role, blocks))}
    if asked.messages[-1].role == "assistant" and any(isinstance(block, ToolUseBlock) for block in blocks):
        raise _invalid("messages", "the last message calls tools; send their results after it, as tool_result blocks")


def _blocks(turn: Turn) -> list[Any]:
    return [TextBlock(type="text", text=turn.content)] if isinstance(turn.content, str) else turn.content


def _assistant(blocks: Iterable[Block]) -> Fields:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[Fields] = []
    for block in blocks:
        if isinstance(block, TextBlock):
            texts.append(block.text)
        elif isinstance(block, ToolUseBlock):
            function = {"name": block.name, "arguments": block.input}
            calls.append({"id": block.id, "type": "function", "function": function})
        elif isinstance(block, ToolResultBlock):
            raise _misplaced(block, "assistant")
        elif isinstance(block, ThinkingBlock):
            thoughts.append(block.thinking)
    message: Fields = {"role": "assistant", "content": _joined(texts), "reasoning_content": _joined(thoughts)}
    return message | {"tool_calls": calls}


def _user(blocks: list[Block]) -> Iterator[Fields]:
    """Results of tools are messages of their own; texts between them are the user's."""
    if not blocks:
        yield {"role": "user", "content": ""}
    for is_result, group in groupby(blocks, lambda block: isinstance(block, ToolResultBlock)):
        if is_result:
            yield from (_result(block) for block in group if isinstance(block, ToolResultBlock))
        else:
            yield {"role": "user", "content": _joined(_only_texts("user", group))}


def _result(block: ToolResultBlock) -> Fields:
    text = _text(block.content or "")
    content = f"Error: {text}" if block.is_error else text
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}


def _only_texts(role: str, blocks: Iterable[Block]) -> list[str]:
    texts = []
    for block in blocks:
        if not isinstance(block, TextBlock):
            raise _misplaced(block, role)
        texts.append(block.text)
    return texts


def _text(given: Texts) -> str:
    return given if isinstance(given, str) else _joined([block.text for block in given])


def _joined(texts: Iterable[str]) -> str:
    """Blocks are texts of their own, so their last and first words must not become one."""
    return "\n".join(texts)


def _misplaced(block: Block, role: str) -> ApiError:
    where = "tool_use and thinking belong to the assistant, tool_result to the user"
    return _invalid("messages", f"a message of the role {role} has a {block.type} block; {where}")


def _invalid(param: str, message: str) -> ApiError:
    return ApiError(400, message, param=param, code="invalid_value")
