"""Programs against a live server give what they give in the process; other servers' faults are sentences."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from outpace import LLM
from outpace.errors import OutpaceError
from outpace.programs import Server, State, gen, run, select, user
from tests.fake_openai_server import FakeServer
from tests.fakes import ByteTokenizer, fake_engine
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
