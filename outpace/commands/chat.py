"""`outpace chat`: a conversation in the terminal. Each turn computes only what the turns before it have not."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from outpace.commands.conversation import Conversation
from outpace.commands.message_reader import MessageReader
from outpace.commands.model_flags import Chosen, add_model_flags, add_sampling_flags, add_speculation_flags
from outpace.commands.screen import AnswerWriter, has_colour, legend, print_dim, print_summary, visible
from outpace.errors import OutpaceError, UsageError, suggestion

if TYPE_CHECKING:
    from outpace.config import SamplingParams
    from outpace.core import Request
    from outpace.engine.driver import Stream
    from outpace.llm import LLM

MAX_TOKENS = 1024  # of an answer; answers in a conversation are longer than those to a single prompt

_DESCRIPTION = """\
Talk with a model. It answers as you type, and every turn costs only its own tokens: what was said before stays in the
cache. Ctrl-C stops an answer, Ctrl-D leaves. A line that ends in a backslash continues on the next one, and pasted
lines are one message. /help lists the commands.

Messages may also come from a pipe, one a line; the answers go to stdout, and everything else to stderr.

examples:
  outpace chat
  outpace chat --model target.gguf --draft draft.gguf --system "Answer in one sentence."
  printf 'My name is Ada.\\nWhat is my name?\\n' | outpace chat --temperature 0
"""
COMMANDS = {
    "/help": "this list",
    "/reset": "forget the conversation; the system message stays",
    "/system": "/system TEXT sets the system message; without a text there is none",
    "/stats": "figures of the conversation",
    "/exit": "leave, as Ctrl-D does",
}
_HOW_TO_LEAVE = "Ctrl-C stops an answer; /exit or Ctrl-D leaves"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = _DESCRIPTION
    add_model_flags(parser)
    add_speculation_flags(parser)
    add_sampling_flags(parser, max_tokens=MAX_TOKENS)


def execute(options: argparse.Namespace) -> int:
    chosen = Chosen.of(options)
    reader = MessageReader(sys.stdin)

    from outpace.llm import LLM

    with LLM(**chosen.engine) as llm:
        if llm.tokenizer.chat_template is None:
            raise UsageError(
                "this model has no chat template, so it cannot hold a conversation; name one with --chat-template, or "
                "use `outpace run --raw`"
            )
        params, _ = chosen.settle(llm, {"max_tokens": MAX_TOKENS})
        if llm.config.speculation != "off":
            llm.engine.calibrate()  # before the first answer, which it would delay
        chat = Chat(llm, params, reader, options.system)
        try:
            chat.talk()
        except KeyboardInterrupt:  # only from a pipe: at a terminal it stops the answer
            print(f"\noutpace: interrupted; {_count(chat.num_answers, 'answer')} before that", file=sys.stderr)
            return 1
    return 0


class Chat:
    """The loop: read a message, carry out a command or stream an answer."""

    def __init__(self, llm: LLM, params: SamplingParams, reader: MessageReader, system: str | None) -> None:
        self._llm, self._params, self._reader = llm, params, reader
        self._conversation = Conversation(llm, params.max_tokens, system)
        self._totals = Totals()

    @property
    def num_answers(self) -> int:
        return self._totals.num_answers

    def talk(self) -> None:
        """Until the input ends or /exit. At a terminal, errors and Ctrl-C end a turn, not the conversation."""
        self._greet()
        while True:
            try:
                message = self._reader.read()
                if message is None:
                    break
                if not self._take(message):
                    return
            except KeyboardInterrupt:
                if not self._reader.is_terminal:
                    raise
                print_dim(f"\n{_HOW_TO_LEAVE}")
            except OutpaceError as error:
                if not self._reader.is_terminal:
                    raise
                print(f"outpace: {error}", file=sys.stderr)
        if self._reader.is_terminal:
            print(file=sys.stderr)  # the shell's prompt begins a line

    def _greet(self) -> None:
        if not self._reader.is_terminal:
            return
        print_dim(f"{visible(self._llm.description)}; /help lists the commands, Ctrl-D leaves")
        config = self._llm.config
        methods = [config.method] if config.speculation == "on" else config.methods
        shown = [method for method in methods if method not in ("none", "prediction", "grammar")]  # not used here
        if has_colour(sys.stdout) and has_colour(sys.stderr) and config.speculation != "off" and shown:
            print(legend(shown), file=sys.stderr)

    def _take(self, message: str) -> bool:
        """Whether the conversation goes on."""
        if message.startswith("/") and not message.startswith("//"):
            return self._obey(*message.split(maxsplit=1))
        self._answer(message.removeprefix("/") if message.startswith("//") else message)
        return True

    def _obey(self, command: str, text: str = "") -> bool:
        if command == "/help":
            print_dim("\n".join(f"{name:9} {meaning}" for name, meaning in COMMANDS.items()))
            print_dim("//TEXT    send a message that begins with a slash")
        elif command == "/reset":
            self._conversation.turns.clear()
            print_dim("the conversation is forgotten")
        elif command == "/system":
            self._conversation.system = text or None
            print_dim("the system message is set" if text else "there is no system message now")
        elif command == "/stats":
            print_dim(str(self._totals))
        elif command != "/exit":
            hint = suggestion(command, COMMANDS) or "/help lists the commands"
            raise UsageError(f"there is no command {command}; {hint} (// begins a message with a slash)")
        return command != "/exit"

    def _answer(self, message: str) -> None:
        tokens, num_dropped = self._conversation.prompt(message)
        if num_dropped:
            turns = "turn was" if num_dropped == 1 else f"{num_dropped} turns were"
            print_dim(f"[the context is full: the oldest {turns} dropped; /reset forgets all of them]")
        stream = self._llm.stream(tokens, self._params)
        self._show(stream)

        from outpace.llm import completion

        request, output = stream.request, completion(stream.request)
        if output.text:
            self._conversation.add(message, output.text)
        print_summary(output, self._params)
        for line in _endings(request, is_empty=not output.text):
            print_dim(f"[{line}]")
        self._totals.add(request)

    def _show(self, stream: Stream) -> None:
        screen = AnswerWriter(sys.stdout)
        try:
            with _ctrl_c_stops(stream) if self._reader.is_terminal else stream:
                for delta in stream:
                    screen.write(delta.segments)
        except KeyboardInterrupt:  # a second one, during a step
            if not self._reader.is_terminal:
                raise
        finally:
            stream.close()
            screen.end()


def _endings(request: Request, *, is_empty: bool) -> Iterator[str]:
    if request.finish_reason == "length" and request.num_output < request.params.max_tokens:
        yield "the answer was cut, because the context is full; /reset forgets the conversation"
    elif request.finish_reason == "length":
        yield f"the answer was cut after {request.num_output} tokens; --max-tokens allows longer ones"
    if is_empty:
        yield "the answer is empty, so the message is not kept"
    elif request.finish_reason == "abort":
        yield "stopped; what was said is kept"


@contextmanager
def _ctrl_c_stops(stream: Stream) -> Iterator[None]:
    """The first Ctrl-C ends the answer after the running step, which keeps the cache; a second one interrupts it."""
    before = signal.getsignal(signal.SIGINT)

    def stop(*_: Any) -> None:
        signal.signal(signal.SIGINT, before)
        stream.stop()

    if before is not signal.default_int_handler:  # the program that started this one ignores it, or has its own
        yield
        return
    signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class Totals:
    """Figures of the whole conversation, for /stats."""

    def __init__(self) -> None:
        self.num_answers = self._num_tokens = self._num_drafted = self._num_accepted = 0
        self._num_prompt = self._num_shared = 0

    def add(self, request: Request) -> None:
        self.num_answers += 1
        self._num_tokens += request.num_output
        self._num_drafted += request.spec.num_drafted
        self._num_accepted += request.spec.num_accepted
        self._num_prompt, self._num_shared = len(request.prompt), request.num_shared

    def __str__(self) -> str:
        return (
            f"{_count(self.num_answers, 'answer')}, {_count(self._num_tokens, 'token')}, "
            f"{self._num_accepted} of {self._num_drafted} draft tokens accepted; "
            f"the latest prompt had {self._num_prompt} tokens, {self._num_shared} of them in the cache"
        )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
