"""`outpace chat`: turns, commands and a full context in this process; keys, colours and Ctrl-C at a real terminal."""

from __future__ import annotations

import io
import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path

import pytest

from outpace.cli import main
from outpace.commands import message_reader
from outpace.commands.message_reader import MessageReader
from outpace.core import Request
from outpace.engine.engine import Engine
from tests.commands.chat_child import ENDLESS, use_script
from tests.fakes import FakeRunner

GREEN, DIM, ESCAPE = "\033[32m", "\033[2m", re.compile("\033\\[[0-9;?]*[a-zA-Z]")
PROMPT = "> "


# ---- in this process, from a pipe


@pytest.fixture
def chat(monkeypatch, capsys):
    """Holds a conversation and returns its status, its answers and what stderr got."""

    def hold(*lines: str, arguments: str = "--speculation off") -> tuple[int, list[str], str]:
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        status = main(["chat", "--temperature", "0", *arguments.split()])
        out, err = capsys.readouterr()
        return status, out.splitlines(), err

    use_script(monkeypatch.setattr)
    return hold


@pytest.fixture
def requests(monkeypatch) -> list[Request]:
    """All requests that are submitted."""
    seen: list[Request] = []
    submit = Engine.submit

    def watched(self, *arguments, **options):
        seen.append(submit(self, *arguments, **options))
        return seen[-1]

    monkeypatch.setattr(Engine, "submit", watched)
    return seen


def test_a_pipe_gets_one_answer_a_line_and_no_colours(chat):
    status, answers, err = chat("hi", "", "there")
    assert (status, answers) == (0, ["you said hi", "you said there"])
    assert len(re.findall(r"^\[\d+ tokens, [\d.]+ a second; no drafts: plain decoding\]$", err, re.M)) == 2
    assert "\033" not in err and PROMPT not in err


def test_the_model_sees_the_whole_conversation_and_the_system_message(chat):
    _, answers, _ = chat("hi", "all", arguments="--speculation off --system be-brief")
    assert answers[1] == "|system:be-brief|user:hi|assistant:you said hi|user:all|assistant:"


@pytest.mark.parametrize("speculation", ["--speculation off", "--speculation on --method suffix"])
def test_the_tokens_of_earlier_turns_are_taken_from_the_cache(chat, requests, speculation):
    chat("a first message", "a second message", "a third message", arguments=speculation)
    first, second, third = requests
    # The model's end-of-text token is no part of the next prompt.
    assert [second.num_shared, third.num_shared] == [len(each.tokens) - 1 for each in (first, second)]


def test_commands_change_the_conversation(chat):
    status, answers, err = chat("hi", "/system new", "all", "/reset", "all", "/system", "all", "/exit", "never")
    assert status == 0
    assert answers[1].startswith("|system:new|user:hi|assistant:you said hi|user:all")
    assert answers[2] == "|system:new|user:all|assistant:"
    assert answers[3] == f"|user:all|assistant:{answers[2]}|user:all|assistant:", "/system without a text removes it"
    assert "the conversation is forgotten" in err
    assert "never" not in "".join(answers)


def test_stats_say_what_the_cache_saved(chat, requests):
    _, _, err = chat("a first message", "a second message", "/stats", "/help")
    assert f"2 answers, {sum(each.num_output for each in requests)} tokens" in err
    prompt = requests[1]
    assert f"the latest prompt had {len(prompt.prompt)} tokens, {prompt.num_shared} of them in the cache" in err
    assert "/system TEXT" in err and "/stats" in err


def test_an_unknown_command_is_a_sentence_and_two_slashes_send_it(chat):
    status, answers, err = chat("//help me", "/rset")
    assert (status, answers) == (2, ["you said /help me"])
    assert err.endswith("outpace: there is no command /rset; did you mean /reset? (// begins a message with a slash)\n")


def test_a_backslash_continues_a_message(chat):
    _, answers, _ = chat("one\\", "two\\", "three")
    assert answers == ["you said one", "two", "three"]


def test_a_full_context_drops_the_oldest_turns_with_a_sentence(chat, requests):
    status, answers, err = chat(
        *(f"message {i} {'x' * 40}" for i in range(5)), "all", arguments="--speculation off --max-context 512"
    )
    assert status == 0
    assert "[the context is full: the oldest" in err and "dropped; /reset forgets all of them]" in err
    assert (
        "message 0" not in answers[-1] and "message 4" in answers[-1] and answers[-1].endswith("|user:all|assistant:")
    )
    assert all(len(each.prompt) <= 512 * 3 // 4 for each in requests), "too little is left for the answer"
    after_drops = [later for before, later in pairwise(requests) if later.num_shared < len(before.tokens) - 1]
    assert len(after_drops) == err.count("the context is full") > 0
    assert all(len(each.prompt) <= 256 for each in after_drops), "half of the context is not free"


def test_a_message_that_never_fits_is_a_sentence_and_keeps_the_turns(chat):
    status, answers, err = chat("hi", "x" * 300, arguments="--speculation off --max-context 256")
    assert (status, answers) == (2, ["you said hi"])
    assert "leave no room for an answer in the context of 256 tokens; shorten them or raise --max-model-len" in err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--max-tokens 10", "the answer was cut after 10 tokens; --max-tokens allows longer ones"),
        ("--max-context 256", "the answer was cut, because the context is full; /reset forgets the conversation"),
    ],
)
def test_a_cut_answer_says_why(chat, arguments, says):
    assert f"[{says}]" in chat("long", arguments=f"--speculation off {arguments}")[2]


def test_ctrl_c_ends_a_conversation_from_a_pipe_with_a_sentence(chat, monkeypatch):
    forward = FakeRunner.forward

    def interrupting(self, plan):
        if self.num_forwards == 30:
            raise KeyboardInterrupt
        return forward(self, plan)

    monkeypatch.setattr(FakeRunner, "forward", interrupting)
    status, answers, err = chat("hi", "long", "never")
    assert status == 1 and answers[0] == "you said hi" and answers[1].startswith("tick") and len(answers) == 2
    assert err.endswith("\noutpace: interrupted; 1 answer before that\n")


def test_lines_pasted_without_readline_are_one_message(monkeypatch):
    monkeypatch.setattr(message_reader, "_enable_line_editing", lambda: False)
    master, slave = pty.openpty()
    with open(slave) as stdin:
        reader = MessageReader(stdin)
        os.write(master, b"one\ntwo\n")
        assert reader.read() == "one\ntwo"
        os.write(master, b"three\n")
        assert reader.read() == "three"
    os.close(master)


@pytest.mark.model
def test_the_real_model_takes_earlier_turns_from_the_cache():
    """Its tokenizer gives the answer that it wrote the same tokens again."""
    command = [sys.executable, "-m", "outpace", "chat", "--threads", "1", "--temperature", "0", "--max-tokens", "24"]
    said = b"My name is Ada.\n/stats\nWhat is my name?\n/stats\n"
    child = subprocess.run(command, input=said, capture_output=True, timeout=120, check=True)
    found = re.findall(rb"(\d+) tokens, .* prompt had (\d+) tokens, (\d+) of them in the cache", child.stderr)
    (num_output, num_prompt, _), (_, _, num_shared) = [tuple(map(int, each)) for each in found]
    assert num_shared == num_prompt + num_output - 1


def test_a_model_without_a_chat_template_is_refused(chat, monkeypatch):
    monkeypatch.setattr("tests.commands.chat_child.TEMPLATE", None)
    status, _, err = chat("hi")
    assert status == 2 and "has no chat template, so it cannot hold a conversation; name one with --chat-temp" in err


def test_chat_takes_the_flags_of_run(capsys):
    flags = {}
    for command in ("run", "chat"):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        flags[command] = set(re.findall(r"--[a-z-]+", capsys.readouterr().out.partition("options:")[2]))
    own = {"--prediction", "--raw", "--json", "--trace", "--verbose"}
    structured = {"--json-schema", "--regex", "--choice", "--grammar"}
    assert flags["run"] - flags["chat"] == own | structured and flags["chat"] <= flags["run"]


# ---- at a real terminal


class Terminal:
    """A child process whose stdin, stdout and stderr are one pseudo-terminal."""

    def __init__(self, master: int, child: subprocess.Popen[bytes]) -> None:
        self._master, self.child, self.shown = master, child, ""

    def wait_for(self, text: str, *, seconds: float = 10.0) -> str:
        """Read until the text is shown; returns everything up to it and forgets that."""
        end = time.monotonic() + seconds
        while text not in self.shown:
            readable = select.select([self._master], [], [], max(0.0, end - time.monotonic()))[0]
            assert readable, f"{text!r} did not come; there is {self.shown!r}"
            self.shown += self._read()
        found, _, self.shown = self.shown.partition(text)
        return found + text

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def press_ctrl_c_until(self, text: str) -> None:
        """Again and again: readline notices it only while it waits, which begins just after the prompt is shown."""
        for _ in range(20):
            self.type("\x03")
            with suppress(AssertionError):
                self.wait_for(text, seconds=0.5)
                return
        raise AssertionError(f"{text!r} did not come; there is {self.shown!r}")

    def rest(self) -> str:
        with suppress(OSError):  # Linux raises it when the other end is closed
            while piece := self._read():
                self.shown += piece
        return self.shown

    def _read(self) -> str:
        return os.read(self._master, 65536).decode()


@contextmanager
def at_a_terminal(tmp_path: Path, *arguments: str, **environment: str) -> Iterator[Terminal]:
    master, slave = pty.openpty()
    environ = {k: v for k, v in os.environ.items() if k != "NO_COLOR"}
    environ |= {"TERM": "xterm", "OUTPACE_CACHE_DIR": str(tmp_path), **environment}
    command = [sys.executable, "-m", "tests.commands.chat_child", *arguments]
    child = subprocess.Popen(
        command, stdin=slave, stdout=slave, stderr=slave, env=environ, start_new_session=True, preexec_fn=_own_terminal
    )
    os.close(slave)
    try:
        yield Terminal(master, child)
        assert child.wait(timeout=10) == 0
    finally:
        child.kill()
        child.wait()
        os.close(master)


def _own_terminal() -> None:
    """Make stdin the controlling terminal, so that Ctrl-C is a signal."""
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def test_ctrl_c_stops_the_answer_and_the_conversation_goes_on(tmp_path):
    with at_a_terminal(tmp_path, "--speculation", "off") as terminal:
        terminal.wait_for(PROMPT)
        terminal.press_ctrl_c_until("Ctrl-C stops an answer; /exit or Ctrl-D leaves")
        terminal.wait_for(PROMPT)
        terminal.type("a first message\n")
        terminal.wait_for("plain decoding]")
        terminal.wait_for(PROMPT)
        terminal.type("long\n")
        terminal.wait_for("tick tack tick")  # it streams: the answer takes seconds
        terminal.type("\x03")
        stopped = terminal.wait_for("stopped; what was said is kept")
        num_tokens = int(re.findall(r"\[(\d+) tokens", stopped)[0])
        assert 0 < num_tokens < len(ENDLESS)
        terminal.wait_for(PROMPT)
        terminal.type("all\n")
        heard = terminal.wait_for("|user:all|assistant:")
        assert "user:long|assistant:tick tack" in heard, "what was said before the interrupt is lost"
        terminal.wait_for(PROMPT)
        terminal.type("/stats\n")
        num_shared = int(re.findall(r"(\d+) of them", terminal.wait_for("in the cache"))[0])
        assert num_shared > len("user:a first message"), "the interrupt emptied the cache"
        terminal.wait_for(PROMPT)
        terminal.type("\x04")
        assert "Traceback" not in terminal.rest()


def test_colours_name_the_proposer_and_control_characters_are_signs(tmp_path):
    with at_a_terminal(tmp_path, "--speculation", "on", "--method", "suffix") as terminal:
        greeting = terminal.wait_for(PROMPT)
        assert f"by proposer:\033[0m {GREEN}suffix" in greeting
        terminal.type("echo\n")
        answer = terminal.wait_for("]\033[0m")
        assert f"{GREEN}" in answer and "la la" in ESCAPE.sub("", answer)
        assert re.search(re.escape(DIM) + r"\[\d+ tokens.* tokens a step", answer)
        terminal.wait_for(PROMPT)
        terminal.type("escape\n")
        assert "a␛[31mb␇\r\n" in ESCAPE.sub("", terminal.wait_for("]\033[0m"))
        terminal.wait_for(PROMPT)
        terminal.type("/exit\n")
        assert "by proposer" not in terminal.rest(), "the legend is shown once"


def test_no_color_is_obeyed_and_pasted_lines_are_one_message(tmp_path):
    with at_a_terminal(tmp_path, "--speculation", "on", "--method", "suffix", NO_COLOR="1") as terminal:
        terminal.wait_for(PROMPT)
        terminal.type("\033[200~two\nlines\033[201~\n")  # as a terminal sends pasted text
        shown = terminal.wait_for("tokens a step")
        assert "you said two\r\nlines\r\n" in shown
        answer = shown.rpartition("\033[?2004l")[2]  # after the last sequence of the line editor
        assert answer.startswith("\ryou said") and "\033" not in answer
        terminal.wait_for(PROMPT)
        terminal.type("\x04")
        terminal.rest()
