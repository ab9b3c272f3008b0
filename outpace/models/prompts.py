"""Turns prompts and conversations into tokens, with the model's own template and tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from outpace.backends.base import Tokenizer
from outpace.errors import PromptTooLong, UsageError
from outpace.models.chat_template import check_messages, render_chat
from outpace.models.control_text import check_roles, hide_controls
from outpace.models.text_pieces import WHOLE_CHARS, added_around
from outpace.models.tool_calls import syntax_for
from outpace.models.tool_calls.history import adapt
from outpace.models.tool_calls.syntax import CallSyntax
from outpace.models.tool_calls.tools import Tool

_WITHOUT_TEMPLATE = (
    "this model has no chat template; use generate (or /v1/completions) with a prompt in the format it was trained on"
)


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation as the text the model was trained to continue."""

    text: str
    hidden: str  # the same text, with stand-ins in the control tokens that users wrote
    stand_ins: Mapping[int, str] = field(default_factory=dict)


def render(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Tool] = (),
    syntax: CallSyntax | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    variables: Mapping[str, Any] | None = None,
    allow_control_tokens: bool = False,
) -> ChatPrompt:
    """Render a conversation. Control tokens in its messages and tools are plain text, unless they are allowed.

    `syntax` is how the model writes calls; None: as its template shows. `variables` are for the template, such as
    enable_thinking; control tokens in them are plain text too. With `continue_final_message` the prompt ends where the
    text of the last message does.
    """
    template = tokenizer.chat_template
    if template is None:
        raise UsageError(_WITHOUT_TEMPLATE)
    written, stand_ins, extra = check_messages(messages), dict[int, str](), dict(variables or {})
    described = [tool.as_dict() for tool in tools]
    if not allow_control_tokens:
        check_roles(written)
        # Another message with the variables, for this step only
        hiding = [*written, {"role": "", "variables": extra}] if extra else written
        hidden_all, described, stand_ins = hide_controls(hiding, tokenizer.specials.controls, template, described)
        written = hidden_all[: len(written)]
        extra = hidden_all[-1]["variables"] if extra else {}
    written, unwritten = adapt(written, described, syntax or syntax_for(template), template)
    mark = _end_mark(template, written) if continue_final_message else ""
    if mark:
        written = [*written[:-1], {**written[-1], "content": written[-1]["content"] + mark}]
    hidden = render_chat(
        template,
        written,
        tools=unwritten or None,
        bos_token=tokenizer.bos_text,
        eos_token=tokenizer.eos_text,
        add_generation_prompt=add_generation_prompt,
        **extra,
    )
    if mark:
        hidden, found, _ = hidden.rpartition(mark)
        if not found:
            raise UsageError("the chat template does not show the last message, so it cannot be continued")
    return ChatPrompt(hidden.translate(stand_ins), hidden, stand_ins)


def _end_mark(template: str, messages: Sequence[Mapping[str, Any]]) -> str:
    """A character that is used nowhere, to find the end of the last message in the prompt."""
    used = set(template).union(*(message["content"] for message in messages))
    return next(chr(code) for code in range(0x10FFFD, 0x100000, -1) if chr(code) not in used)


def prepare(tokenizer: Tokenizer) -> None:
    """Look at the whole vocabulary now, which takes tenths of a second, and not at the first prompt."""
    for _ in tokenizer.pieces("a " * WHOLE_CHARS):
        pass
    tokenizer.encode("a", parse_special=False)
    _ = tokenizer.longest_token, tokenizer.specials.controls.beginnings  # computed at their first use


def encode(
    tokenizer: Tokenizer,
    prompt: str | ChatPrompt,
    *,
    add_special: bool = True,
    max_tokens: int | None = None,
    check: Callable[[], None] = lambda: None,
) -> list[int]:
    """The tokens of a prompt. `check` is called between pieces of a long one, and may raise an error to stop.

    A prompt of more than `max_tokens` is refused, before its tokens are computed if its length shows it.
    """
    text = prompt if isinstance(prompt, str) else prompt.text
    if max_tokens is not None:
        _refuse_by_length(tokenizer, text, max_tokens)
    pieces = (
        tokenizer.pieces(text, add_special=add_special) if isinstance(prompt, str) else _chat_pieces(tokenizer, prompt)
    )
    tokens: list[int] = []
    for piece in pieces:
        check()
        if max_tokens is not None and len(tokens) > max_tokens:
            raise _too_long(f"more than {len(tokens)}", max_tokens)
        tokens += piece
    return tokens


def _chat_pieces(tokenizer: Tokenizer, prompt: ChatPrompt) -> Iterator[list[int]]:
    # A template may write the beginning-of-text token itself; do not add a second one.
    has_bos = bool(tokenizer.bos_text) and prompt.hidden.startswith(tokenizer.bos_text)
    controls = tokenizer.specials.controls
    places = controls.places(prompt.hidden) if prompt.stand_ins else []
    if not prompt.stand_ins or places == controls.places(prompt.text):
        yield from tokenizer.pieces(prompt.text, add_special=not has_bos)
        return
    before, after = ([], []) if has_bos else _added_around(tokenizer)
    yield before
    start = 0
    for place in places:
        yield from _plain_pieces(tokenizer, prompt, start, place.start)
        yield [place.token.id]
        start = place.end
    yield from _plain_pieces(tokenizer, prompt, start, len(prompt.hidden))
    yield after


def _plain_pieces(tokenizer: Tokenizer, prompt: ChatPrompt, start: int, end: int) -> Iterator[list[int]]:
    if start < end:
        text = prompt.hidden[start:end].translate(prompt.stand_ins)
        yield from tokenizer.pieces(text, add_special=False, parse_special=False)


def _added_around(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    return added_around(lambda text, add: tokenizer.encode(text, add_special=add, parse_special=False))


def _refuse_by_length(tokenizer: Tokenizer, text: str, max_tokens: int) -> None:
    num_bytes = len(text.encode(errors="replace"))
    if num_bytes <= max_tokens or tokenizer.longest_token is None:
        return
    fewest = num_bytes // tokenizer.longest_token
    if fewest > max_tokens:
        raise _too_long(f"at least {fewest}", max_tokens)


def _too_long(num_tokens: str, max_tokens: int) -> PromptTooLong:
    return PromptTooLong(f"the context holds {max_tokens} tokens; the prompt has {num_tokens}; shorten the prompt")
