"""Programs against a live server give what they give in the process; other servers' faults are sentences."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from time import sleep
from typing import Any

import pytest

from outpace import LLM
from outpace.errors import OutpaceError
from outpace.programs import Server, State, gen, run, select, user
from outpace.programs.on_server import OnServer
from tests.fake_openai_server import FakeServer
from tests.fakes import ByteTokenizer, FakeRunner, fake_engine
from tests.server_helper import LiveServer, live
from tests.test_llm import use_fakes

PREFIX = "a text that is long enough to be worth sharing "


@pytest.fixture
def server() -> Iterator[LiveServer]:
    engine = fake_engine(max_context=256, cache_tokens=4096)
    engine.calibrate()
    with live(engine, ByteTokenizer(), 256, model_names=("fake",)) as made:
        yield made
        made.check_clean()


@pytest.fixture
def llm(monkeypatch) -> Iterator[LLM]:
    use_fakes(monkeypatch)
    with LLM(max_context=256, cache_tokens=4096) as made:
        yield made


def everything(s: State, number: int) -> State:
    s += f"{PREFIX}{number} "
    s += gen("word", max_tokens=5, ignore_eos=True)
    s += gen("digits", regex="[0-9]{3}", max_tokens=8)
    s += select("verdict", [" good", " bad", " none"])
    branches = s.fork(2)
    for branch in branches:
        branch += gen("idea", max_tokens=4, ignore_eos=True)
    branches.join()
    return s


def test_the_same_programs_give_the_same_values(server, llm):
    here = run(everything, range(6), on=llm)
    there = run(everything, range(6), on=server.url)
    assert [result.value.text for result in there] == [result.value.text for result in here]
    assert [result.values for result in there] == [result.values for result in here]
    scores = [[result.state.answer("verdict").scores for result in results] for results in (here, there)]
    assert scores[1] == [pytest.approx(each, abs=1e-4) for each in scores[0]]


def test_a_conversation_is_continued_and_selected(server):
    def ask(s: State) -> State:
        s += user("Why?")
        s += "Because "
        s += gen("why", max_tokens=4, ignore_eos=True)
        s += user("Really?")
        s += select("really", ["yes", "no"])
        return s

    state = run(ask, on=f"{server.url}/v1")[0].value
    assert len(state["why"]) >= 1 and state["really"] in ("yes", "no")
    assert [each["role"] for each in state.messages] == ["user", "assistant", "user", "assistant"]


def test_an_error_of_the_server_ends_one_program(server):
    def ask(s: State, text: str) -> str:
        s += text
        s += gen("said", max_tokens=3, ignore_eos=True)
        return str(s["said"])

    good, bad = run(ask, [PREFIX, PREFIX * 20], on=Server(server.url, model="fake"))
    assert good.ok and isinstance(bad.error, OutpaceError) and "status 400" in str(bad.error)


def test_a_server_that_is_not_there_is_one_sentence():
    with pytest.raises(OutpaceError, match="did not answer"):
        run(everything, [1], on="http://127.0.0.1:9")


def test_an_answer_of_another_form_is_one_sentence():
    with FakeServer() as other:
        [result] = run(everything, [1], on=other.url)
    assert isinstance(result.error, OutpaceError) and "status 404" in str(result.error)


def long_program(s: State, number: int) -> State:
    s += f"{number} {PREFIX * 2}"
    for name in ("a", "b", "c"):
        s += gen(name, max_tokens=4, ignore_eos=True)
        s += " and "
    return s


def num_computed(states: list[State]) -> int:
    answers = [state.answer(name) for state in states for name in ("a", "b", "c")]
    return sum(each.num_prompt_tokens - each.num_cached_tokens for each in answers)


def test_a_program_that_goes_on_keeps_its_place(monkeypatch):
    """Two run at a time and the cache has room for few: behind all the others, it would find its prefix gone. A step
    takes longer than the way to the client and back, as with a real model."""
    computed, forward = {}, FakeRunner.forward

    def slow(self, plan):
        sleep(0.01)
        return forward(self, plan)

    monkeypatch.setattr(FakeRunner, "forward", slow)
    for name in ("kept", "lost"):
        engine = fake_engine(max_context=256, cache_tokens=1024, max_sequences=2, speculation="off")
        if name == "lost":
            monkeypatch.setattr(OnServer, "_order", lambda self, call: {})
        with live(engine, ByteTokenizer(), 256, model_names=("fake",)) as server:
            computed[name] = num_computed([each.value for each in run(long_program, range(12), on=server.url)])
            server.check_clean()
    prefix = 12 * len(f"0 {PREFIX * 2}")
    assert computed["kept"] < 2 * prefix < 2.5 * prefix < computed["lost"]


@pytest.mark.parametrize("owner", ["outpace", "vllm"])
def test_only_a_server_that_takes_priorities_gets_one(owner):
    """vLLM refuses a request with a priority unless it was started for them."""
    with CompletionServer(owner) as server:
        for on in (server.url, Server(server.url, model="m")):
            [result] = run(long_program, [1], on=on)
            assert result.ok
    sent = [body.get("priority") for body in server.bodies]
    assert sent == ([None, -1, -1] * 2 if owner == "outpace" else [None] * 6)


def test_a_named_model_needs_no_list_of_models():
    with CompletionServer(None) as server:
        assert run(long_program, [1], on=Server(server.url, model="m"))[0].ok
        with pytest.raises(OutpaceError, match="does not list its models in OpenAI's form"):
            run(long_program, [1], on=server.url)


class CompletionServer:
    """Answers every completion with "x"; without an owner, its list of models is something else."""

    def __init__(self, owner: str | None) -> None:
        self.bodies: list[dict[str, Any]] = []
        listed = "{}" if owner is None else json.dumps({"data": [{"id": "m", "owned_by": owner}]})
        bodies = self.bodies

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: object) -> None:
                pass

            def do_GET(self) -> None:
                self._reply(listed)

            def do_POST(self) -> None:
                bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self._reply(json.dumps({"choices": [{"text": "x", "finish_reason": "length"}]}))

            def _reply(self, text: str) -> None:
                self.send_response(200)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text.encode())

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"

    def __enter__(self) -> CompletionServer:
        Thread(target=self._http.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()
