"""Renders a conversation with the model's chat template, by Hugging Face's conventions.

The template is a program from an untrusted file, so it runs in jinja2's immutable sandbox, with limits on its text and
time (`template_sandbox.py`). There is no default template for models without one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from outpace.errors import ModelError, UsageError
from outpace.models.tool_calls.history import check_tool_fields

if TYPE_CHECKING:
    from jinja2 import Template
    from jinja2.nodes import Node
    from jinja2.parser import Parser

MAX_TEMPLATE = 1 << 17  # characters; long templates have 30,000
# Variables that a caller sets by other means than by `extra`
RESERVED_VARIABLES = frozenset(
    {"messages", "tools", "documents", "bos_token", "eos_token", "add_generation_prompt", "continue_final_message"}
)


def read_template(given: str | os.PathLike[str]) -> str:
    """The template in a file, or the given text if it is a template. Raises UsageError if it cannot be used."""
    text = os.fspath(given)
    if not any(character in text for character in "{}\n"):
        path = Path(text).expanduser()
        if not path.is_file():
            raise UsageError(f"there is no chat template {text!r}; name a file, or give the template itself")
        from outpace.models.hf_schema import MAX_TEMPLATE_BYTES, read_text  # pydantic, which no other template needs

        text = read_text(path, MAX_TEMPLATE_BYTES)
    _compile(text)
    return text


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    /,  # a variable may have these names
    *,
    bos_token: str,
    eos_token: str,
    add_generation_prompt: bool = True,
    **extra: Any,
) -> str:
    """The prompt for `messages`. `extra` are template variables, such as enable_thinking."""
    # Templates test `tools is not none`, so by convention these two are always defined.
    variables: dict[str, Any] = {"tools": None, "documents": None, **extra}
    variables.update(
        messages=check_messages(messages),
        bos_token=bos_token,
        eos_token=eos_token,
        add_generation_prompt=add_generation_prompt,
    )
    from outpace.models.template_limits import TemplateLimitError, limited

    compiled = _compile(template)
    try:
        with limited():
            return compiled.render(variables)
    except TemplateLimitError as error:
        raise ModelError(
            f"the model's chat template was stopped: {error}; send less text, get another copy of the model, or send a "
            "prompt instead of messages"
        ) from error
    except Exception as error:  # any error, such as a division by zero, not only raise_exception
        raise ModelError(f"the model's chat template refused this conversation: {_message_of(error)}") from error


def check_messages(messages: object) -> list[dict[str, Any]]:
    """The messages, each with its content as one text."""
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise UsageError(f"messages must be a list of objects with role and content; got {type(messages).__name__}")
    if not messages:
        raise UsageError("messages is empty; give at least one, such as {'role': 'user', 'content': 'Hello'}")
    return [_check_message(f"messages[{i}]", message) for i, message in enumerate(messages)]


def _check_message(name: str, message: object) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise UsageError(f"{name} must be an object with a role and content; got {type(message).__name__}")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise UsageError(f"{name} needs a role, such as 'user'; got {role!r}")
    fields = check_tool_fields(name, message)
    content = message.get("content")
    return {**fields, "content": "" if content is None and fields.get("tool_calls") else _text(name, content)}


def _text(name: str, content: object) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise UsageError(f"{name} needs content that is a string or a list of text parts; got {content!r}")
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
        if not isinstance(text, str):
            raise UsageError(f"{name} has a part that is not {{'type': 'text', 'text': ...}}; send only text")
        texts.append(text)
    return "".join(texts)


@lru_cache(maxsize=16)
def _compile(template: str) -> Template:
    from jinja2 import TemplateError
    from jinja2.ext import Extension

    from outpace.models.template_limits import TemplateLimitError, limited
    from outpace.models.template_sandbox import BoundedEnvironment

    def raise_exception(message: str) -> NoReturn:
        raise TemplateError(message)

    def strftime_now(form: str) -> str:
        return datetime.now().strftime(form)

    class Generation(Extension):
        """{% generation %} marks the assistant's text for training; here it has no effect."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Parser) -> list[Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    if len(template) > MAX_TEMPLATE:
        raise ModelError(f"the model's chat template has more than {MAX_TEMPLATE:,} characters; get another copy of it")
    environment = BoundedEnvironment(
        filters={"tojson": _to_json},
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", Generation],
    )
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    try:
        with limited():
            return environment.from_string(template)
    except TemplateLimitError as error:
        raise ModelError(f"the model's chat template was stopped: {error}; get another copy of the model") from error
    except Exception as error:  # deep nesting ends in a RecursionError, not a TemplateSyntaxError
        line = getattr(error, "lineno", None)
        where = f" (line {line})" if line else ""
        raise ModelError(f"the model's chat template does not compile: {_message_of(error)}{where}") from error


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: jinja2's own filter escapes <, > and & for HTML, which a model does not expect."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _message_of(error: Exception) -> str:
    return str(error)[:500] or type(error).__name__  # a template may raise any text
