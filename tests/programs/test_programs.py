"""Programs over the fake model, in one batch in this process."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from outpace import LLM, SamplingParams, SpeculationParams
from outpace.errors import OutpaceError, UsageError
from outpace.programs import Interrupted, State, gen, run, select, system, user
from tests.fakes import runner_of
from tests.test_llm import is_clean, use_fakes

PREFIX = "a text that is long enough to be worth sharing "


@pytest.fixture
def llm(monkeypatch) -> Iterator[LLM]:
    use_fakes(monkeypatch)
    with LLM(cache_tokens=4096, max_sequences=8) as made:
        made.engine.calibrate()
        yield made
        assert is_clean(made)


def two_fields(s: State, number: int) -> str:
    s += f"{PREFIX}{number}: "
    s += gen("first", max_tokens=6, ignore_eos=True)
    s += " and "
    s += gen("second", max_tokens=5, ignore_eos=True)
    return str(s["second"])


def test_a_state_grows_as_if_every_generation_had_been_asked_for_alone(llm):
    results = run(two_fields, range(20), on=llm)
    for number, result in enumerate(results):
        text = f"{PREFIX}{number}: "
        for name, num_tokens in (("first", 6), ("second", 5)):
            params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
            said = llm.generate(text, params)[0].outputs[0].text
            assert result.values[name] == said
            text += said + (" and " if name == "first" else "")
        assert result.value == result.values["second"] and result.text == text


def test_the_text_is_prefilled_and_the_next_generation_continues_the_cache(llm):
    [result] = run(two_fields, [1], on=llm)
    first, second = result.state.answer("first"), result.state.answer("second")
    assert (first.num_tokens, second.num_tokens) == (6, 5)
    # The last token of an answer is not in the cache; all before it is.
    assert second.num_cached_tokens == first.num_prompt_tokens + first.num_tokens - 1


def test_a_fork_of_eight_computes_its_prefix_once(llm):
    runner = runner_of(llm.engine)

    def ask(s: State) -> list[str]:
        s += PREFIX * 4
        branches = s.fork(8)
        for number, branch in enumerate(branches):
            branch += f"{number}: "
            branch += gen("said", max_tokens=3, ignore_eos=True, speculation=SpeculationParams(mode="off"))
        branches.join()
        return list(s["said"])

    before = runner.num_computed
    [result] = run(ask, on=llm)
    num_shared = 1 + len(PREFIX * 4)  # with the BOS token
    assert len(result.value) == 8
    # Each branch computes its own three characters and its answer without the last token.
    assert runner.num_computed - before == num_shared + 8 * (3 + 2)
    assert all(isinstance(said, str) for said in result.value)


def test_branches_run_at_the_same_time_and_keep_apart(llm):
    def ask(s: State) -> State:
        s += PREFIX
        s += gen("before", max_tokens=2, ignore_eos=True)
        branches = s.fork(3)
        for number, branch in enumerate(branches):
            branch += f" {number} "
            branch += gen("idea", max_tokens=4, ignore_eos=True)
        branches[1] += gen("more", max_tokens=2, ignore_eos=True)
        joined = branches.join()
        assert [each["before"] for each in joined] == [s["before"]] * 3
        assert s["more"] == [None, branches[1]["more"], None]
        s += branches[2]["idea"]
        return s

    [result] = run(ask, on=llm)
    state = result.value
    assert state.text == PREFIX + state["before"] + state["idea"][2]
    assert max(len(rows) for rows in runner_of(llm.engine).steps) >= 3


def test_select_takes_the_likeliest_choice_and_computes_only_the_choices(llm):
    choices = [" aab", " fed", " b"]

    def judge(s: State) -> str:
        s += PREFIX
        s += select("verdict", choices)
        s += "!"
        return str(s["verdict"])

    runner = runner_of(llm.engine)
    before = runner.num_computed
    [result] = run(judge, on=llm)
    # Every choice needs the logits of the last token before it, which is therefore computed for each.
    shared = len(PREFIX)  # BOS and all but the last character
    assert runner.num_computed - before == shared + sum(1 + len(choice) for choice in choices)
    params = SamplingParams(prompt_logprobs=0, max_tokens=0)
    scores = {}
    for choice in choices:
        scored = llm.generate(PREFIX + choice, params)[0].prompt_logprobs
        scores[choice] = sum(entry.logprob for entry in scored[1 + len(PREFIX) :])
    assert result.state.answer("verdict").scores == pytest.approx(scores)
    assert result.value == max(scores, key=lambda choice: scores[choice]) and result.text == PREFIX + result.value + "!"


def test_the_mean_score_does_not_punish_length(llm):
    def judge(s: State, by: Any) -> dict[str, float]:
        s += PREFIX
        s += select("verdict", ["a", "abcabc"], by=by)
        return s.answer("verdict").scores

    total, mean = (result.value for result in run(judge, ["total", "mean"], on=llm))
    assert mean == {choice: pytest.approx(score / len(choice)) for choice, score in total.items()}


def test_a_generation_has_the_form_that_is_asked_for(llm):
    def ask(s: State) -> tuple[str, str]:
        s += "The year is "
        s += gen("year", regex="(19|20)[0-9]{2}")
        s += " and the answer "
        s += gen("answer", choice=["yes", "no"])
        return s["year"], s["answer"]

    year, answer = run(ask, on=llm)[0].value
    assert year.isdigit() and len(year) == 4 and answer in ("yes", "no")


def test_a_conversation_continues_the_answer_that_the_program_began(llm):
    def ask(s: State) -> State:
        s += system("Be brief.")
        s += user("Why?")
        s += "Because "
        s += gen("why", max_tokens=4, ignore_eos=True)
        s += user("And then?")
        s += gen("then", max_tokens=4, ignore_eos=True)
        return s

    state = run(ask, on=llm)[0].value
    asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    continued = [*asked, {"role": "assistant", "content": "Because " + state["why"]}]
    conversation = [*continued, {"role": "user", "content": "And then?"}]
    assert state["then"] == llm.chat(conversation, params)[0].outputs[0].text
    assert state.messages == [*conversation, {"role": "assistant", "content": state["then"]}]


def test_an_exception_in_one_program_leaves_the_others_alone(llm):
    alone = [result.value for result in run(two_fields, range(8), on=llm)]

    def sometimes(s: State, number: int) -> str:
        if number == 2:
            raise ValueError("no such record")
        if number == 5:
            s += PREFIX * 60  # more than the context holds
            s += gen("first")
        return two_fields(s, number)

    results = run(sometimes, range(8), on=llm)
    assert isinstance(results[2].error, ValueError) and isinstance(results[5].error, OutpaceError)
    with pytest.raises(ValueError, match="no such record"):
        _ = results[2].value
    assert "context holds" in str(results[5].error)
    assert [result.value for i, result in enumerate(results) if i not in (2, 5)] == alone[:2] + alone[3:5] + alone[6:]


def interrupt() -> None:
    """As Ctrl-C does: a signal that also ends a wait of the main thread."""
    main = threading.main_thread().ident
    assert main is not None
    signal.pthread_kill(main, signal.SIGINT)


def test_ctrl_c_returns_what_is_there(llm, monkeypatch):
    runner, ended = runner_of(llm.engine), threading.Semaphore(0)
    forward, pause = runner.forward, [0.0]

    def slowly(plan):
        time.sleep(pause[0])
        return forward(plan)

    monkeypatch.setattr(runner, "forward", slowly)

    def program(s: State, number: int) -> str:
        s += f"{PREFIX}{number} "
        s += gen("first", max_tokens=3, ignore_eos=True)
        _ = s["first"]
        if number == 3:
            for _ in range(3):
                ended.acquire()
            pause[0] = 0.2  # the rest takes far longer than the signal
            s += gen("endless", max_tokens=10_000, ignore_eos=True, speculation=SpeculationParams(mode="off"))
            interrupt()
            return str(s["endless"])
        ended.release()
        return str(s["first"])

    results = run(program, range(4), on=llm, at_once=4)
    monkeypatch.undo()
    assert [result.ok for result in results[:3]] == [True] * 3
    assert isinstance(results[3].error, Interrupted)
    assert results[3].values["first"] and results[3].text.startswith(f"{PREFIX}3 {results[3].values['first']}")
    assert run(two_fields, [0], on=llm)[0].ok  # the engine is as good as before


def test_programs_that_were_not_started_say_so(llm):
    def program(s: State, number: int) -> None:
        interrupt()
        s += "x"
        s += gen(max_tokens=100_000, ignore_eos=True)
        s.wait()

    results = run(program, range(3), on=llm, at_once=1)
    assert [str(result.error) for result in results[1:]] == ["the program was not started"] * 2
    assert not results[0].ok


def test_a_seed_replays_and_every_program_and_branch_has_its_own(llm):
    def ask(s: State, _: int) -> list[str]:
        s += PREFIX
        branches = s.fork(3)
        for branch in branches:
            branch += gen("idea", max_tokens=8, ignore_eos=True)
        branches.join()
        return list(s["idea"])

    params = SamplingParams(temperature=1.5, seed=7)
    once, again = ([result.value for result in run(ask, range(2), on=llm, params=params)] for _ in range(2))
    assert once == again
    assert len({idea for ideas in once for idea in ideas}) == 6


def test_what_was_said_at_a_place_is_a_draft_for_the_next_program(llm):
    """The text before a place differs from program to program, so only the place can tell."""

    def ask(s: State, number: int) -> None:
        s += f"{number * 7919 % 1000:03} " * 12
        s += gen("said", regex="the same words every time", speculation=SpeculationParams(mode="on", method="suffix"))

    [first] = run(ask, [1], on=llm)
    [second] = run(ask, [2], on=llm)
    assert first.values == second.values
    assert second.state.answer("said").num_accepted > first.state.answer("said").num_accepted - 1 > -2
    assert second.state.answer("said").num_accepted >= 20


@pytest.mark.parametrize(
    ("program", "sentence"),
    [
        (lambda s: s.__iadd__(gen("x", max_token=3)), "does not know the option 'max_token'"),
        (lambda s: s.__iadd__(gen("x", max_tokens=-1)), "max_tokens"),
        (lambda s: s.__iadd__(select("x", "yes")), "a list of at least one non-empty text"),
        (lambda s: s.__iadd__(3), "grows by text"),
        (lambda s: s.fork(0), "at least one branch"),
        (lambda s: s.__iadd__("text").__iadd__(user("hello")), "begins with a message"),
    ],
)
def test_a_mistake_is_one_sentence(llm, program, sentence):
    [result] = run(program, on=llm)
    assert isinstance(result.error, UsageError) and sentence in str(result.error)


def test_an_unknown_name_is_an_error_that_lists_the_known_ones(llm):
    def ask(s: State) -> None:
        s += "x"
        s += gen("known", max_tokens=1)
        _ = s["unknown"]

    [result] = run(ask, on=llm)
    assert isinstance(result.error, KeyError) and "'known'" in str(result.error)
