"""The command line: it starts fast, prints text on stdout and the rest on stderr, and errors are one sentence."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import resource
import signal
import subprocess
import sys
import unicodedata
from pathlib import Path
from typing import Any

import pytest

import outpace
from outpace.cli import main
from outpace.core import StepPlan
from tests.fakes import FakeModel, FakeRunner
from tests.test_llm import use_fakes

OUTPACE = [sys.executable, "-m", "outpace"]
CYAN, YELLOW, PLAIN = "\033[36m", "\033[33m", "\033[0m"
# One thread: llama.cpp's threads spin while waiting, which takes minutes instead of seconds on busy cores.
REAL = ["--threads", "1", "--max-context", "512", "--temperature", "0"]
GREEDY = ["--temperature", "0"]  # the same text every time, without an early end


def outpace_run(*arguments: str, stdin: bytes | None = b"", **options: Any) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([*OUTPACE, "run", *arguments], input=stdin, capture_output=True, timeout=120, **options)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Exit status and the one line on stderr; nothing on stdout."""
    try:
        status = main(arguments)
    except SystemExit as exit:
        assert isinstance(exit.code, int)
        status = exit.code
    out, err = capsys.readouterr()
    assert out == ""
    return status, err


@pytest.fixture
def fakes(monkeypatch):
    use_fakes(monkeypatch)


@pytest.fixture
def stdin(monkeypatch):
    def give(text: str) -> None:
        monkeypatch.setattr("sys.stdin", io.StringIO(text))

    return give


# ---- starting


def cpu_seconds(*arguments: str) -> float:
    """User and system time of a child process; the least of three runs, since other processes only add to it."""
    taken = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *arguments], capture_output=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        taken.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(taken)


@pytest.mark.parametrize("arguments", [["-m", "outpace", "--help"], ["-m", "outpace", "run", "--help"]], ids=" ".join)
def test_help_is_there_at_once(arguments):
    assert cpu_seconds(*arguments) < 0.3


def test_import_is_done_at_once():
    assert cpu_seconds("-c", "import outpace") < 0.3


@pytest.mark.parametrize(
    "code",
    [
        "import outpace",
        "import outpace; outpace.SamplingParams, outpace.SpeculationParams, outpace.OutpaceError",
        "from outpace.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass",
        "from outpace.cli import main\ntry: main(['run', '--help'])\nexcept SystemExit: pass",
        "from outpace.cli import main\ntry: main(['chat', '--help'])\nexcept SystemExit: pass",
        "from outpace.cli import main\nassert main(['run', '--temperature', 'nan', 'x']) == 2",
    ],
    ids=["import", "parameters", "help", "run --help", "chat --help", "wrong usage"],
)
def test_neither_numpy_nor_a_model_library_is_loaded_before_it_is_needed(code):
    heavy = "import sys; sys.exit(' '.join({'numpy', 'torch', 'xllamacpp', 'jinja2', 'tqdm'} & set(sys.modules)) or 0)"
    child = subprocess.run([sys.executable, "-c", f"{code}\n{heavy}"], capture_output=True, text=True)
    assert child.returncode == 0, child.stderr


def test_version_is_printed(capsys):
    with pytest.raises(SystemExit) as exit:
        main(["--version"])
    assert exit.value.code == 0
    assert capsys.readouterr().out == f"outpace {outpace.__version__}\n"


def test_help_names_every_flag_of_the_design(capsys):
    with pytest.raises(SystemExit):
        main(["run", "--help"])
    text = capsys.readouterr().out
    for flag in ("model", "draft", "speculation", "method", "depth", "temperature", "top-p", "seed", "json"):
        assert f"--{flag} " in text or f"--{flag}\n" in text
    assert "\033" not in text, "colour in a pipe"


# ---- wrong usage: status 2


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "COMMAND"),
        (["fly"], "'fly'"),
        (["run", "--fast", "hi"], "--fast"),
        (["run", "--temp", "1", "hi"], "--temp hi; did you mean --temperature?"),
        (["run", "--topp", "1", "hi"], "did you mean --top-p?"),
        (["bench", "--concurency=8"], "did you mean --concurrency?"),
        (["run", "hi", "there"], "there"),
        (["run", "--max-tokens", "many", "hi"], "'many'"),
        (["run", "--method", "eagle", "hi"], "'eagle'"),
        (["run", "--speculation", "maybe", "hi"], "'maybe'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_the_command_line_does_not_know_is_named(capsys, arguments, expected):
    status, err = refused(capsys, *arguments)
    assert status == 2
    assert expected in err.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--speculation off --depth 4", "speculation is off but depth is 4; leave out the depth"),
        ("--speculation off --method ngram", "speculation is off but method is 'ngram'"),
        ("--speculation on --depth 0", "speculation is on but depth 0"),
        ("--method draft", "method 'draft' needs a draft model; name one (draft=, --draft)"),
        ("--acceptance threshold", "acceptance 'threshold' needs a threshold between 0 and 1"),
        ("--threshold 0.5", "a threshold was given with acceptance 'exact'"),
        ("--raw --system x", "--system needs the chat template and --raw leaves it out; use one of them"),
        ("--temperature nan", "temperature must be a number between 0 and 100; got nan"),
        ("--temperature -1", "temperature must be a number between 0 and 100; got -1.0"),
        ("--temperature inf", "temperature must be a number between 0 and 100; got inf"),
        ("--top-p 0", "top_p must be above 0"),
        ("--top-p nan", "top_p must be a number between 0 and 1; got nan"),
        ("--top-k -2", "top_k must be a whole number at least -1; got -2"),
        ("--min-p -0.5", "min_p must be a number between 0 and 1; got -0.5"),
        ("--seed -1", "seed must be a whole number between 0 and"),
        ("--max-tokens 0", "max_tokens must be a whole number at least 1; got 0"),
        ("--max-tokens -5", "max_tokens must be a whole number at least 1; got -5"),
        ("--depth 65", "depth must be a whole number between 0 and 64"),
        ("--depth -1", "depth must be a whole number between 0 and 64"),
        ("--threads 0", "threads must be a whole number at least 1; got 0"),
        (
            "--prediction /no/such/file",
            "the prediction /no/such/file cannot be read (No such file or directory)",
        ),
        ("--max-context -8", "max_context must be a whole number at least 1; got -8"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_one_sentence_before_a_model_is_looked_for(capsys, arguments, sentence):
    status, err = refused(capsys, "run", "--model", "/no/such/model.gguf", *arguments.split(), "hi")
    assert status == 2
    assert err.startswith(f"outpace: {sentence}"), err
    assert err.count("\n") == 1


@pytest.mark.parametrize("prompt", ["", "   ", "\n\t"])
def test_an_empty_prompt_is_wrong_usage(capsys, prompt):
    assert refused(capsys, "run", prompt) == (2, "outpace: the prompt is empty; give some text to answer\n")


@pytest.mark.parametrize("arguments", [[], ["-"]])
def test_an_empty_stdin_is_wrong_usage(capsys, stdin, arguments):
    stdin(" \n")
    assert refused(capsys, "run", *arguments) == (2, "outpace: the prompt is empty; give some text to answer\n")


def test_no_prompt_at_a_terminal_is_wrong_usage_with_an_example():
    master, slave = pty.openpty()
    try:
        child = subprocess.run([*OUTPACE, "run"], stdin=slave, capture_output=True, text=True, timeout=30)
    finally:
        os.close(master)
        os.close(slave)
    assert (child.returncode, child.stdout) == (2, "")
    assert child.stderr.startswith("outpace: no prompt was given; write one, as in: outpace run ")


def test_an_empty_stop_string_is_wrong_usage(capsys):
    status, err = refused(capsys, "run", "--stop", "", "hi")
    assert (status, err) == (2, "outpace: a stop string must be a non-empty string; got ''\n")


# ---- failures: status 1


def test_a_missing_model_is_a_sentence(tmp_path):
    child = outpace_run("--model", str(tmp_path / "none.gguf"), "hi")
    assert (child.returncode, child.stdout) == (1, b"")
    assert child.stderr.decode().startswith(f"outpace: there is no file {tmp_path / 'none.gguf'}; ")
    assert child.stderr.count(b"\n") == 1


def test_a_file_that_is_no_gguf_is_a_sentence(tmp_path, capsys):
    junk = tmp_path / "junk.gguf"
    junk.write_bytes(b"not a model at all" * 100)
    status, err = refused(capsys, "run", "--model", str(junk), "hi")
    assert status == 1
    assert err.startswith(f"outpace: {junk} ") and err.count("\n") == 1


def test_a_missing_draft_is_a_sentence(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("outpace.llm.resolve_model", real := _resolving_embedded(tmp_path))
    assert real(None)
    status, err = refused(capsys, "run", "--draft", str(tmp_path / "none.gguf"), "hi")
    assert status == 1
    assert err.startswith(f"outpace: there is no file {tmp_path / 'none.gguf'}; ")


def _resolving_embedded(folder: Path) -> Any:
    from outpace.models.resolve import resolve_model

    return lambda name: folder if name is None else resolve_model(name)


# ---- what is printed, over a fake model


def test_text_goes_to_stdout_and_the_summary_to_stderr(fakes, capsys):
    assert main(["run", "abc", *GREEDY, "--max-tokens", "8"]) == 0
    out, err = capsys.readouterr()
    assert out.endswith("\n") and len(out) > 1
    assert err.startswith("[8 tokens") and err.endswith("]\n") and err.count("\n") == 1


def test_dash_and_nothing_read_the_prompt_from_stdin(fakes, capsys, stdin):
    texts = []
    for arguments in (["user says\n"], ["-"], []):
        stdin("user says\n")
        assert main(["run", *GREEDY, "--json", "--max-tokens", "8", *arguments]) == 0
        found = json.loads(capsys.readouterr().out)
        texts.append((found["text"], found["usage"]))
    assert texts[0] == texts[1] == texts[2]


def test_json_is_the_only_line_on_stdout(fakes, capsys):
    assert main(["run", "abc", *GREEDY, "--json", "--max-tokens", "8", "--speculation", "on", "--depth", "3"]) == 0
    out, err = capsys.readouterr()
    assert out.count("\n") == 1 and err == ""
    found = json.loads(out)
    assert (len(found["token_ids"]), found["finish_reason"]) == (8, "length")
    assert found["config"]["depth"] == 3


def test_a_predicted_file_speeds_the_answer_up_and_does_not_change_it(fakes, capsys, tmp_path):
    def answer(*arguments: str) -> dict[str, Any]:
        assert main(["run", "abc", *GREEDY, "--json", "--max-tokens", "60", *arguments]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    old = tmp_path / "old.txt"
    plain = answer("--speculation", "off")
    old.write_bytes(bytes(token for token in plain["token_ids"] if token < 128))
    found = answer("--prediction", str(old), "--speculation", "on", "--method", "prediction", "--depth", "5")
    assert found["token_ids"] == plain["token_ids"] and found["speculation"]["steps"] < 40
    details = found["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] + details["rejected_prediction_tokens"] == len(old.read_bytes())
    assert details["accepted_prediction_tokens"] > 30


def test_a_prediction_that_is_no_text_is_wrong_usage(capsys, tmp_path):
    (tmp_path / "old.bin").write_bytes(b"\xff\xfe")
    status, err = refused(capsys, "run", "--prediction", str(tmp_path / "old.bin"), "hi")
    assert status == 2 and "is not UTF-8 text; convert it first" in err


def test_raw_leaves_the_chat_template_out_and_system_comes_first(fakes, capsys):
    def num_prompt_tokens(*arguments: str) -> int:
        assert main(["run", "abc", *GREEDY, "--json", "--max-tokens", "1", *arguments]) == 0
        return int(json.loads(capsys.readouterr().out)["usage"]["prompt_tokens"])

    assert num_prompt_tokens("--raw") == 1 + len("abc")
    assert num_prompt_tokens() == 1 + len("user: abc\nassistant:")
    assert num_prompt_tokens("--system", "hm") == 1 + len("system: hm\nuser: abc\nassistant:")


def sampling_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, float]:
    assert main(["run", "abc", "--json", "--max-tokens", "1", *arguments]) == 0
    found: dict[str, float] = json.loads(capsys.readouterr().out)["sampling"]
    return found


def test_run_and_serve_take_the_models_own_sampling_settings(fakes, capsys, monkeypatch, tmp_path, caplog):
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6, "top_k": 20, "max_new_tokens": 5}')
    neutral = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
    assert sampling_of(capsys) == neutral
    model = ["--model", str(tmp_path)]
    assert sampling_of(capsys, *model) == neutral | {"temperature": 0.6, "top_k": 20}
    assert sampling_of(capsys, *model, "--temperature", "0") == neutral | {"temperature": 0.0, "top_k": 20}
    assert sampling_of(capsys, *model, "--generation-config", "vllm") == neutral
    changed = ["--override-generation-config", '{"top_p": 0.5}']
    assert sampling_of(capsys, *model, *changed) == neutral | {"temperature": 0.6, "top_k": 20, "top_p": 0.5}
    assert main(["run", "abc", "--json", *model]) == 0
    assert json.loads(capsys.readouterr().out)["usage"]["completion_tokens"] <= 5

    served: list[Any] = []

    def serve(llm: Any, config: Any) -> int:
        served.append(config)
        return 0

    monkeypatch.setattr("outpace.server.logs.configure", lambda *_: None)  # pytest owns the log of this process
    monkeypatch.setattr("outpace.server.launch.serve", serve)
    with caplog.at_level("INFO", logger="outpace.server"):
        assert main(["serve", *model, *changed]) == 0
    assert served[0].default_sampling == {"temperature": 0.6, "top_k": 20, "top_p": 0.5, "max_tokens": 5}
    assert "sampling defaults: temperature 0.6, top_k 20, max_tokens 5, top_p 0.5 (from generation_conf" in caplog.text


def test_a_wrong_choice_of_sampling_settings_is_found_before_the_model(capsys):
    for command in ("run", "serve"):
        status, err = refused(capsys, command, "--model", "/no/such.gguf", "--override-generation-config", "{")
        assert status == 2 and err.startswith("outpace: --override-generation-config is not JSON")


def test_a_lossy_rule_is_called_lossy(fakes, capsys):
    assert main(["run", "abc", "--acceptance", "typical", "--temperature", "1", "--max-tokens", "4"]) == 0
    assert "LOSSY (typical)" in capsys.readouterr().err
    assert main(["run", "abc", *GREEDY, "--acceptance", "typical", "--json", "--max-tokens", "4"]) == 0
    assert json.loads(capsys.readouterr().out)["speculation"]["lossy"] is True
    assert main(["run", "abc", *GREEDY, "--json", "--max-tokens", "4"]) == 0
    assert json.loads(capsys.readouterr().out)["speculation"]["lossy"] is False


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("terminal", "no_color", "coloured"),
    [(True, None, True), (True, "", True), (True, "1", False), (False, None, False)],
)
def test_accepted_text_is_coloured_on_a_terminal_only(fakes, monkeypatch, terminal, no_color, coloured):
    """By no-color.org, NO_COLOR has an effect if it is set and not empty."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    if no_color is not None:
        monkeypatch.setenv("NO_COLOR", no_color)
    screen = Terminal() if terminal else io.StringIO()
    monkeypatch.setattr("sys.stdout", screen)
    assert main(["run", "abc", *GREEDY, "--speculation", "on", "--draft", "d.gguf", "--max-tokens", "40"]) == 0
    text = screen.getvalue()
    assert (CYAN in text) == coloured
    assert ("\033" in text) == coloured
    assert text.count(CYAN) == text.count(PLAIN)


def test_each_proposer_has_a_colour_of_its_own(fakes, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    seen = {}
    for method, more in (("draft", ["--draft", "d.gguf"]), ("suffix", []), ("ngram", [])):
        monkeypatch.setattr("sys.stdout", screen := Terminal())
        drafting = ["--speculation", "on", "--method", method, *more]
        assert main(["run", "ab ab ab ab", *GREEDY, *drafting, "--max-tokens", "60"]) == 0
        seen[method] = set(re.findall("\033\\[\\d+m", screen.getvalue())) - {PLAIN}
    assert all(len(colours) == 1 for colours in seen.values()), seen
    assert len(set.union(*seen.values())) == 3


class Escapes(FakeModel):
    """Writes a sequence that sets the title of a terminal, between a tab and a line feed."""

    TEXT = b"\ta\033]0;title\x07\r\x7f\xc2\x9b31mb\n"

    def logits(self, context):
        row = super().logits(context).copy()
        row[self.TEXT[len(context) % len(self.TEXT)]] += 90.0
        return row


@pytest.mark.parametrize("terminal", [True, False])
def test_control_characters_of_a_model_do_not_reach_a_terminal(monkeypatch, terminal):
    use_fakes(monkeypatch, Escapes())
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr("sys.stdout", screen := Terminal() if terminal else io.StringIO())
    assert main(["run", "abc", *GREEDY, "--max-tokens", "60"]) == 0
    text = screen.getvalue()
    control = {char for char in text if unicodedata.category(char) == "Cc"}
    if terminal:
        assert control == {"\n", "\t"}
        assert "\ta␛]0;title␇␍␡\ufffd31mb\n" in text
    else:
        assert Escapes.TEXT.decode() in text  # a pipe gets what the model wrote


def test_the_targets_own_text_has_no_colour_on_a_terminal_either(fakes, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr("sys.stdout", screen := Terminal())
    assert main(["run", "abc", *GREEDY, "--speculation", "off", "--max-tokens", "40"]) == 0
    assert "\033" not in screen.getvalue()


def interrupted_at(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    forward, calls = FakeRunner.forward, iter(range(1, 10**6))

    def interrupting(self: FakeRunner, plan: StepPlan) -> Any:
        if next(calls) == at:
            raise KeyboardInterrupt
        return forward(self, plan)

    monkeypatch.setattr(FakeRunner, "forward", interrupting)


def test_ctrl_c_keeps_the_text_and_fails_in_a_sentence(fakes, monkeypatch, capsys):
    assert main(["run", "abc", *GREEDY, "--speculation", "off", "--max-tokens", "30"]) == 0
    whole = capsys.readouterr().out
    interrupted_at(monkeypatch, 10)
    assert main(["run", "abc", *GREEDY, "--speculation", "off", "--max-tokens", "30"]) == 1
    out, err = capsys.readouterr()
    assert len(out) > 1 and whole.startswith(out.rstrip("\n"))
    assert "outpace: interrupted after 9 tokens; the text so far is above\n" in err


def test_ctrl_c_with_json_still_gives_an_object(fakes, monkeypatch, capsys):
    interrupted_at(monkeypatch, 10)
    assert main(["run", "abc", *GREEDY, "--json", "--speculation", "off", "--max-tokens", "30"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["finish_reason"] == "abort" and len(found["token_ids"]) == 9


def test_ctrl_c_between_two_steps_is_an_abort_too(fakes, monkeypatch, capsys):
    class Interrupting(io.StringIO):
        num_flushes = 0

        def flush(self) -> None:
            self.num_flushes += 1
            if self.num_flushes == 4:
                raise KeyboardInterrupt

    from outpace.commands import run

    seen = []
    monkeypatch.setattr(run, "print_summary", lambda output, params: seen.append(output))
    monkeypatch.setattr("sys.stdout", Interrupting())
    assert main(["run", "abc", *GREEDY, "--max-tokens", "30"]) == 1
    assert [output.finish_reason for output in seen] == ["abort"]


def test_ctrl_c_before_the_first_token_is_a_sentence_and_no_traceback(fakes, monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("OUTPACE_CACHE_DIR", str(tmp_path))  # a folder without saved costs
    interrupted_at(monkeypatch, 2)  # while costs are measured
    assert main(["run", "abc"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "\noutpace: interrupted before anything was generated; run it again to start over\n"


# ---- the real model


def check_design_keys(found: dict[str, Any]) -> None:
    top = {"text", "token_ids", "finish_reason", "usage", "timing", "speculation"}
    assert top <= set(found)
    spec = {"proposer", "drafted", "accepted", "steps", "mean_accepted_length", "estimated_speedup"}
    assert spec <= set(found["speculation"])
    assert found["usage"]["completion_tokens"] == len(found["token_ids"])


@pytest.mark.model
def test_the_last_line_of_json_output_has_what_the_design_promises():
    child = outpace_run(*REAL, "--json", "--max-tokens", "12", "--speculation", "on", "-", stdin=b"Name a colour.")
    assert child.returncode == 0, child.stderr
    found = json.loads(child.stdout.splitlines()[-1])
    check_design_keys(found)
    assert found["text"].strip() and found["timing"]["total"] >= found["timing"]["time_to_first_token"] > 0


@pytest.mark.model
def test_the_real_model_writes_text_to_stdout_and_a_summary_to_stderr():
    child = outpace_run(*REAL, "--max-tokens", "6", "--speculation", "off", "What is 2 + 2?")
    assert child.returncode == 0, child.stderr
    assert child.stdout.decode().strip()
    assert child.stderr.decode().startswith("[6 tokens") and child.stderr.count(b"\n") == 1


@pytest.mark.model
def test_a_reader_that_goes_away_is_met_quietly():
    arguments = [*OUTPACE, "run", *REAL, "--speculation", "off", "--max-tokens", "400", "Count from one to a hundred."]
    child = subprocess.Popen(arguments, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdout is not None and child.stderr is not None
    assert child.stdout.read(1)
    child.stdout.close()
    assert child.stderr.read() == b""
    child.wait(timeout=60)  # its status is checked below
    child.stderr.close()


# A program that says on stderr when it has made a few steps: with --json, nothing is printed until the end.
TELLING = [
    sys.executable,
    "-c",
    """
import itertools, sys
from outpace.cli import main
from outpace.engine.engine import Engine

step, number = Engine.step, itertools.count(1)

def told(self):
    made = step(self)
    if next(number) == 8:
        print("generating", file=sys.stderr, flush=True)
    return made

Engine.step = told
sys.exit(main())
""",
]


def interrupt_while_generating(*arguments: str, has_text: bool = True) -> tuple[int, bytes, bytes]:
    """Send SIGINT to a child once it generates."""
    command = [*(OUTPACE if has_text else TELLING), "run", *REAL, "--speculation", "off", "--max-tokens", "400"]
    child = subprocess.Popen(
        [*command, *arguments, "Write a very long story about a fox."],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    assert child.stdout is not None and child.stderr is not None
    received = b""
    if has_text:
        while len(received) < 20:
            received += child.stdout.read(1)
    else:
        while child.stderr.readline() not in (b"generating\n", b""):
            pass
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=60)
    return child.returncode, received + out, err


@pytest.mark.model
def test_sigint_keeps_the_text_and_exits_with_a_sentence():
    status, out, err = interrupt_while_generating()
    assert status == 1
    assert len(out.decode().rstrip("\n")) >= 20
    last = err.decode().splitlines()[-1]
    assert last.startswith("outpace: interrupted after ") and last.endswith("; the text so far is above")
    assert b"Traceback" not in err


@pytest.mark.model
def test_sigint_with_json_gives_an_object_that_says_abort():
    status, out, err = interrupt_while_generating("--json", has_text=False)
    assert status == 1, err
    found = json.loads(out.splitlines()[-1])
    check_design_keys(found)
    assert found["finish_reason"] == "abort"
    assert b"Traceback" not in err


def run_at_a_terminal(*arguments: str, **environment: str) -> str:
    """The command's output with a terminal as stdout and a pipe as stderr."""
    master, slave = pty.openpty()
    environ = {k: v for k, v in os.environ.items() if k != "NO_COLOR"} | environment
    child = subprocess.Popen(
        [*OUTPACE, "run", *arguments], stdin=subprocess.DEVNULL, stdout=slave, stderr=subprocess.PIPE, env=environ
    )
    os.close(slave)
    shown = b""
    try:
        while chunk := os.read(master, 4096):
            shown += chunk
    except OSError:  # Linux raises this when the other end is closed
        pass
    finally:
        os.close(master)
    _, err = child.communicate(timeout=60)
    assert child.returncode == 0, err
    assert b"\033" not in err, "colour in a pipe"
    return shown.decode()


def test_help_is_coloured_on_a_real_terminal():
    assert CYAN in run_at_a_terminal("--help")


@pytest.mark.model
def test_accepted_text_is_coloured_on_a_real_terminal():
    arguments = [
        *REAL,
        "--speculation",
        "on",
        "--method",
        "ngram",
        "--raw",
        "--max-tokens",
        "16",
        "1 2 3 4 1 2 3 4 1 2",
    ]
    assert YELLOW in run_at_a_terminal(*arguments)
    assert "\033" not in run_at_a_terminal(*arguments, NO_COLOR="1")


# ---- regressions


def test_when_the_reader_goes_away_nothing_is_asked_of_a_closed_model(fakes, monkeypatch, tmp_path):
    asked_too_late: list[FakeRunner] = []
    closed: list[FakeRunner] = []
    free = FakeRunner.free

    def watched_free(self: FakeRunner, seq: int) -> None:
        asked_too_late.extend(closed)
        free(self, seq)

    monkeypatch.setattr(FakeRunner, "close", lambda self: closed.append(self))
    monkeypatch.setattr(FakeRunner, "free", watched_free)

    class Leaving(io.TextIOWrapper):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    with open(tmp_path / "out", "wb") as file:
        monkeypatch.setattr("sys.stdout", Leaving(file, encoding="utf-8"))
        assert main(["run", "abc", *GREEDY, "--max-tokens", "30"]) == 1
        monkeypatch.undo()
    assert asked_too_late == []


@pytest.mark.model
def test_a_reader_that_goes_away_makes_the_status_1():
    command = [*OUTPACE, "run", *REAL, "--speculation", "off", "Count from one to a hundred."]
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert child.stdout is not None
    assert child.stdout.read(1)
    child.stdout.close()
    assert child.wait(timeout=60) == 1


def test_help_honours_no_color():
    assert CYAN not in run_at_a_terminal("--help", NO_COLOR="1")


def test_a_closed_stdin_is_wrong_usage_in_a_sentence():
    child = subprocess.run(f"{sys.executable} -m outpace run <&-", shell=True, capture_output=True, text=True)
    assert (child.returncode, child.stderr.count("\n")) == (2, 1)


def test_a_prompt_that_is_not_utf_8_is_wrong_usage_in_a_sentence():
    child = outpace_run(stdin=b"\xff\xfe", env={**os.environ, "PYTHONIOENCODING": "utf-8:strict"})
    assert (child.returncode, child.stderr.count(b"\n")) == (2, 1)


def test_text_that_the_terminal_cannot_encode_is_replaced(monkeypatch):
    class Accents(FakeModel):
        def _opinion(self, state, salt):
            row = super()._opinion(state, salt)
            row["é".encode()[state[0] % 2]] += 50.0
            return row

    use_fakes(monkeypatch, Accents())
    screen = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", screen)
    assert main(["run", "abc", *GREEDY, "--max-tokens", "8"]) == 0


def test_plain_decoding_claims_no_speedup(fakes, capsys):
    assert main(["run", "abc", *GREEDY, "--json", "--method", "none", "--max-tokens", "30"]) == 0
    assert json.loads(capsys.readouterr().out)["speculation"]["estimated_speedup"] in (None, 1.0)


def test_an_interrupted_request_says_how_long_it_took(fakes, monkeypatch, capsys):
    interrupted_at(monkeypatch, 10)
    assert main(["run", "abc", *GREEDY, "--json", "--speculation", "off", "--max-tokens", "30"]) == 1
    assert json.loads(capsys.readouterr().out)["timing"]["total"] is not None
