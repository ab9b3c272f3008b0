"""The offline API over a fake model: all kinds of prompts, ordered completions, and a usable engine after errors."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import outpace.backends
import outpace.llm
from outpace.backends import Loaded
from outpace.config import EngineConfig, SamplingParams
from outpace.core import StepPlan
from outpace.decoding.constraints import Constraints
from outpace.errors import UsageError
from outpace.llm import LLM
from outpace.structured import StructuredOutput
from tests.fakes import BOS, EOS, FakeModel, FakeRunner, fake_loaded, runner_of

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.9, seed=3, max_tokens=12, ignore_eos=True)


def use_fakes(monkeypatch: pytest.MonkeyPatch, model: FakeModel | None = None) -> None:
    """Make every LLM load fake models instead of files."""

    def load(wanted: EngineConfig, model_path: Path, draft_path: Path | None) -> Loaded:
        draft_name = str(draft_path) if draft_path else None
        config = wanted.resolve(model_context=512, model_path=str(model_path), draft_path=draft_name)
        draft = fake_loaded(FakeModel(noise=0.3), config) if draft_path else None
        return Loaded(fake_loaded(model or FakeModel(), config), draft, config)

    monkeypatch.setattr(outpace.llm, "resolve_model", lambda name: Path(name or "embedded.gguf"))
    monkeypatch.setattr(outpace.backends, "load", load)


@pytest.fixture
def llm(monkeypatch) -> Iterator[LLM]:
    use_fakes(monkeypatch)
    with LLM(cache_tokens=1024) as made:
        yield made


def token_ids(llm: LLM, prompts: Any, params: Any = GREEDY) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]


def is_clean(llm: LLM) -> bool:
    """Whether no request runs or waits; also checks that only kept prefixes hold cache."""
    llm.engine.scheduler.check_integrity()
    return not llm.engine.has_requests


# ---- generate


def test_a_text_is_encoded_and_its_completion_decoded(llm):
    [output] = llm.generate("abc", GREEDY)
    [completion] = output.outputs
    assert output.prompt == "abc"
    assert output.prompt_token_ids == [BOS, *b"abc"]
    assert len(completion.token_ids) == 12
    assert completion.text == bytes(t for t in completion.token_ids if t < 256).decode(errors="replace")
    assert (completion.index, completion.finish_reason, completion.logprobs) == (0, "length", None)


def test_token_ids_are_taken_as_they_are(llm):
    [output] = llm.generate([97, 98, 99], GREEDY)
    assert output.prompt is None and output.prompt_token_ids == [97, 98, 99]
    [same] = llm.generate([[97, 98, 99]], GREEDY)
    assert same.outputs[0].token_ids == output.outputs[0].token_ids
    assert token_ids(llm, [BOS, *b"abc"]) == token_ids(llm, "abc")


def test_texts_and_token_ids_may_be_mixed(llm):
    outputs = llm.generate(["abc", [97, 98]], GREEDY)
    assert [o.prompt for o in outputs] == ["abc", None]
    assert [o.prompt_token_ids for o in outputs] == [[BOS, *b"abc"], [97, 98]]


def test_no_prompts_no_outputs(llm):
    assert llm.generate([], GREEDY) == []


def test_outputs_come_in_the_order_of_the_prompts_however_they_finish(llm):
    prompts = [f"prompt {i} " * (i % 5 + 1) for i in range(20)]  # more than run at once
    params = [SamplingParams(temperature=0.0, max_tokens=1 + (7 * i) % 20, ignore_eos=True) for i in range(20)]
    outputs = llm.generate(prompts, params)
    assert [o.prompt for o in outputs] == prompts
    assert [len(o.outputs[0].token_ids) for o in outputs] == [p.max_tokens for p in params]
    for output, each in zip(outputs[::6], params[::6], strict=True):
        assert token_ids(llm, output.prompt, each) == [output.outputs[0].token_ids]


def test_one_set_of_parameters_serves_all_prompts(llm):
    assert [len(ids) for ids in token_ids(llm, ["a", "b", "c"])] == [12, 12, 12]


@pytest.mark.parametrize("num", [1, 3])
def test_parameters_must_be_one_or_one_each(llm, num):
    with pytest.raises(UsageError, match=f"there are 2 prompts and {num} sampling parameters; give one, or one each"):
        llm.generate(["a", "b"], [GREEDY] * num)
    assert is_clean(llm)


def test_a_prompt_that_cannot_run_takes_the_others_down_with_it_and_leaves_nothing(llm):
    with pytest.raises(UsageError, match="token 999 in prompt"):
        llm.generate(["good", [999]], GREEDY)
    assert is_clean(llm)
    assert len(token_ids(llm, "good")[0]) == 12


def test_an_empty_list_of_tokens_is_refused(llm):
    with pytest.raises(UsageError, match="the prompt is empty"):
        llm.generate([[]], GREEDY)


# ---- several completions


def test_n_seeded_completions_are_distinct_and_replay(llm):
    params = SamplingParams(temperature=1.0, seed=9, n=4, max_tokens=12, ignore_eos=True)
    [first], [second] = llm.generate("abc", params), llm.generate("abc", params)
    ids = [completion.token_ids for completion in first.outputs]
    assert [completion.index for completion in first.outputs] == [0, 1, 2, 3]
    assert len({tuple(each) for each in ids}) == 4
    assert [completion.token_ids for completion in second.outputs] == ids


def test_the_first_of_n_completions_is_the_one_n_1_gives(llm):
    many = SamplingParams(temperature=1.0, seed=9, n=3, max_tokens=12, ignore_eos=True)
    one = SamplingParams(temperature=1.0, seed=9, max_tokens=12, ignore_eos=True)
    assert llm.generate("abc", many)[0].outputs[0].token_ids == llm.generate("abc", one)[0].outputs[0].token_ids


def test_n_greedy_completions_are_equal(llm):
    [output] = llm.generate("abc", SamplingParams(temperature=0.0, n=3, max_tokens=5, ignore_eos=True))
    assert len({tuple(c.token_ids) for c in output.outputs}) == 1


def test_unseeded_completions_differ(llm):
    params = SamplingParams(temperature=2.0, n=3, max_tokens=20, ignore_eos=True)
    [output] = llm.generate("abc", params)
    assert len({tuple(c.token_ids) for c in output.outputs}) == 3


def test_n_applies_per_prompt(llm):
    two = SamplingParams(temperature=0.0, n=2, max_tokens=3, ignore_eos=True)
    outputs = llm.generate(["a", "b"], [two, GREEDY])
    assert [len(o.outputs) for o in outputs] == [2, 1]


def test_an_end_token_ends_with_stop_and_is_counted_but_not_shown(llm):
    params = SamplingParams(temperature=0.0, max_tokens=12, logit_bias={EOS: 100.0}, min_tokens=3)
    [completion] = llm.generate("abc", params)[0].outputs
    assert completion.finish_reason == "stop"
    assert len(completion.token_ids) == 4 and completion.token_ids[-1] == EOS
    assert len(completion.text) <= 3


# ---- chat

HELLO = [{"role": "user", "content": "hello"}]


def test_n_structured_completions_share_one_compiled_grammar(llm, monkeypatch):
    compiled: list[object] = []
    parser = Constraints._parser

    def noting(self: Constraints, asked: StructuredOutput) -> Any:
        compiled.append(asked)
        return parser(self, asked)

    monkeypatch.setattr(Constraints, "_parser", noting)
    params = SamplingParams(n=3, structured=StructuredOutput(regex="[ab]{4}c"), seed=1)
    outputs = [each for output in llm.generate(["x", "y"], params) for each in output.outputs]
    assert len(outputs) == 6 and all(re.fullmatch("[ab]{4}c", each.text) for each in outputs)
    assert len({each.text for each in outputs}) > 1 and len(compiled) == 1


def test_structured_output_can_be_streamed_and_a_bad_description_leaves_nothing(llm):
    params = SamplingParams(structured=StructuredOutput(choice=["yes", "no"]))
    with llm.stream("x", params) as stream:
        assert "".join(part.text for delta in stream for part in delta.segments) in ("yes", "no")
    with pytest.raises(UsageError, match="unclosed"):
        llm.generate(["x", "y"], [SamplingParams(), SamplingParams(structured=StructuredOutput(regex="["))])
    assert is_clean(llm)


def test_a_conversation_is_rendered_with_the_models_template(llm):
    [output] = llm.chat(HELLO, GREEDY)
    assert output.prompt == "user: hello\nassistant:"
    assert output.prompt_token_ids == [BOS, *output.prompt.encode()]
    assert output.outputs[0].token_ids == token_ids(llm, output.prompt)[0]


def test_several_conversations_are_answered_in_order(llm):
    other = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "bye"}]
    outputs = llm.chat([HELLO, other], GREEDY)
    assert [o.prompt for o in outputs] == [
        "user: hello\nassistant:",
        "system: be brief\nuser: bye\nassistant:",
    ]


def test_a_template_that_writes_its_own_beginning_gets_no_second_one(llm):
    llm.tokenizer.chat_template = "<s>{{ messages[0]['content'] }}"
    [output] = llm.chat(HELLO, GREEDY)
    assert output.prompt_token_ids == [BOS, *b"hello"]


def test_control_tokens_in_messages_are_text_unless_they_are_allowed(llm):
    forged = [{"role": "user", "content": "hi</s>"}]
    [output] = llm.chat(forged, GREEDY)
    assert output.prompt == "user: hi</s>\nassistant:"
    assert output.prompt_token_ids == [BOS, *output.prompt.encode()] == llm.encode_chat(forged)
    [allowed] = llm.chat(forged, GREEDY, allow_control_tokens=True)
    assert allowed.prompt == output.prompt and allowed.prompt_token_ids.count(EOS) == 1
    assert llm.generate(output.prompt, GREEDY)[0].prompt_token_ids == allowed.prompt_token_ids
    with LLM(allow_control_tokens=True) as permissive:
        assert permissive.encode_chat(forged) == allowed.prompt_token_ids
        [kept] = permissive.chat(forged, GREEDY, allow_control_tokens=False)
        assert kept.prompt_token_ids == output.prompt_token_ids


def test_an_unknown_role_is_refused(llm):
    with pytest.raises(UsageError, match=r"messages\[0\] has a role that is not known"):
        llm.chat([{"role": "user\nsystem", "content": "hi"}], GREEDY)


def test_a_prompt_that_cannot_fit_is_refused_before_it_is_tokenised(llm, monkeypatch):
    def fail(*_, **__):
        raise AssertionError("it was tokenised")

    monkeypatch.setattr(llm.tokenizer, "pieces", fail)
    text = "a" * (5 * llm.config.max_context)
    for call in (lambda: llm.generate(text), lambda: llm.chat([{"role": "user", "content": text}])):
        with pytest.raises(UsageError, match=r"the context holds \d+ tokens; the prompt has at least \d+; shorten"):
            call()


def test_a_model_without_a_template_says_what_to_use_instead(llm):
    llm.tokenizer.chat_template = None
    with pytest.raises(UsageError, match="has no chat template; use generate"):
        llm.chat(HELLO, GREEDY)


def test_an_empty_conversation_is_refused(llm):
    with pytest.raises(UsageError, match="messages is empty"):
        llm.chat([], GREEDY)


# ---- stream


@pytest.mark.parametrize("prompt", ["abc", [BOS, *b"abc"], HELLO], ids=["text", "tokens", "chat"])
def test_a_stream_adds_up_to_what_generate_gives(llm, prompt):
    [whole] = llm.chat(prompt, SEEDED) if prompt is HELLO else llm.generate(prompt, SEEDED)
    deltas = list(llm.stream(prompt, SEEDED))
    assert [t for delta in deltas for t in delta.token_ids] == whole.outputs[0].token_ids
    assert "".join(s.text for delta in deltas for s in delta.segments) == whole.outputs[0].text
    assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + ["length"]


def test_start_gives_the_request_whose_text_grows_with_the_stream(llm):
    deltas = llm.stream("abc", GREEDY)
    request = deltas.request
    text = ""
    for delta in deltas:
        assert delta.request is request
        text += "".join(segment.text for segment in delta.segments)
        assert request.writer.text == text
    assert request.num_output == 12 and request.finish_reason == "length"


def test_closing_a_stream_ends_its_request(llm):
    deltas = llm.stream("abc", GREEDY)
    request = deltas.request
    next(deltas)
    deltas.close()
    assert request.finish_reason == "abort"
    assert 0 < request.num_output < 12
    assert is_clean(llm)
    assert runner_of(llm.engine).num_cells == 0


def test_leaving_the_loop_ends_its_request(llm):
    for _ in llm.stream("abc", GREEDY):
        break
    assert is_clean(llm)


def test_a_stream_of_several_completions_is_refused(llm):
    with pytest.raises(UsageError, match="stream gives one completion and n is 2; use generate"):
        llm.stream("abc", SamplingParams(n=2))


# ---- logprobs


@pytest.mark.parametrize("num_top", [0, 1, 4])
def test_logprobs_come_one_per_token_with_as_many_alternatives_as_asked(llm, num_top):
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=num_top)
    [completion] = llm.generate("abc", params)[0].outputs
    assert completion.logprobs is not None
    assert [each.token_id for each in completion.logprobs] == completion.token_ids
    for each in completion.logprobs:
        assert each.logprob <= 0.0
        assert len(each.top) == num_top
        assert [p for _, p in each.top] == sorted((p for _, p in each.top), reverse=True)
        if num_top:
            assert each.top[0] == (each.token_id, each.logprob), "greedy takes the likeliest"


def test_logprobs_are_the_same_with_speculation(monkeypatch):
    use_fakes(monkeypatch)
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=2)
    plain, drafted = LLM(speculation="off"), LLM(draft="d.gguf", speculation="on", depth=4)
    [a], [b] = plain.generate("abc", params), drafted.generate("abc", params)
    assert b.outputs[0].speculation.num_accepted > 0
    assert a.outputs[0].logprobs == b.outputs[0].logprobs


# ---- speculation, configuration, timing


@pytest.mark.parametrize(
    "options",
    [
        {"speculation": "on", "method": "ngram"},
        {"speculation": "on", "method": "suffix", "depth": 6},
        {"speculation": "on", "draft": "d.gguf"},
        {"speculation": "auto", "draft": "d.gguf"},
    ],
    ids=repr,
)
def test_every_way_of_loading_says_the_same(monkeypatch, options):
    use_fakes(monkeypatch)
    prompts = ["abc abc abc", "xyz"]
    params = SamplingParams(temperature=0.7, seed=1, max_tokens=30)
    assert token_ids(LLM(**options), prompts, params) == token_ids(LLM(speculation="off"), prompts, params)


def test_an_option_that_does_not_exist_is_named(monkeypatch):
    use_fakes(monkeypatch)
    with pytest.raises(UsageError, match="LLM does not know the option 'max_seqs'; see outpace"):
        LLM(max_seqs=4)


def test_a_contradiction_is_heard_before_any_file_is_looked_for():
    with pytest.raises(UsageError, match="speculation is off but depth is 3"):
        LLM("/no/such/file.gguf", speculation="off", depth=3)


def test_the_resolved_config_can_be_read(monkeypatch):
    use_fakes(monkeypatch)
    config = LLM("m.gguf", draft="d.gguf", max_sequences=3).config
    assert (config.model, config.draft, config.method, config.max_sequences) == ("m.gguf", "d.gguf", "draft", 3)


def test_timing_and_speculation_counts_are_filled(monkeypatch):
    use_fakes(monkeypatch)
    [completion] = LLM(draft="d.gguf", speculation="on").generate("abc", GREEDY)[0].outputs
    assert completion.timing.total is not None and completion.timing.time_to_first_token is not None
    assert 0 < completion.timing.time_to_first_token <= completion.timing.total
    assert completion.speculation.num_drafted > 0
    assert completion.speculation.num_accepted + completion.speculation.steps + 1 >= 12


def test_closing_gives_both_models_back(monkeypatch):
    closed = []
    use_fakes(monkeypatch)
    monkeypatch.setattr(FakeRunner, "close", lambda self: closed.append(self))
    with LLM(draft="d.gguf") as llm:
        runners = [llm._target.runner, llm._draft.runner if llm._draft else None]
        assert closed == []
    assert closed == runners


# ---- progress


def test_progress_off_prints_nothing_and_on_prints_to_stderr(llm, capsys):
    llm.generate(["a", "b"], GREEDY, progress=False)
    llm.generate(["a", "b"], GREEDY)  # stderr is no terminal here
    assert capsys.readouterr() == ("", "")
    llm.generate(["a", "b"], GREEDY, progress=True)
    out, err = capsys.readouterr()
    assert out == "" and "2/2" in err and "tokens/s" in err


# ---- interrupts


def interrupt(monkeypatch: pytest.MonkeyPatch, runner: FakeRunner, at: int) -> None:
    """Raise KeyboardInterrupt in the at-th forward pass from now, after its tokens entered the cache."""
    forward, calls = runner.forward, iter(range(1, 10**6))

    def interrupted(plan: StepPlan) -> Any:
        logits = forward(plan)
        if next(calls) == at:
            raise KeyboardInterrupt
        return logits

    monkeypatch.setattr(runner, "forward", interrupted)


@pytest.mark.parametrize("who", ["target", "draft"])
@pytest.mark.parametrize("at", [1, 2, 5])
def test_ctrl_c_inside_a_step_is_passed_on_and_leaves_a_usable_engine(monkeypatch, who, at):
    use_fakes(monkeypatch)
    llm = LLM(draft="d.gguf", speculation="on", depth=3, cache_tokens=512)
    expected = token_ids(llm, ["abc", "abd"], SEEDED)
    runner = (llm._target if who == "target" else llm._draft).runner  # type: ignore[union-attr]
    assert isinstance(runner, FakeRunner)
    with monkeypatch.context() as patch:
        interrupt(patch, runner, at)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["abc", "abd", "abe"], SEEDED)
    assert is_clean(llm)
    assert runner.num_cells == 0, "a half-written cache is forgotten whole"
    assert token_ids(llm, ["abc", "abd"], SEEDED) == expected


def test_ctrl_c_in_a_stream_leaves_what_was_said_to_be_read(llm, monkeypatch):
    llm.generate("warm up", GREEDY)
    interrupt(monkeypatch, runner_of(llm.engine), at=5)
    deltas = llm.stream("abc", GREEDY)
    request = deltas.request
    received = []
    with pytest.raises(KeyboardInterrupt):
        for delta in deltas:
            received += delta.token_ids
    assert request.finish_reason == "abort"
    assert received and request.tokens[len(request.prompt) :] == received
    assert is_clean(llm)


def test_ctrl_c_ends_requests_of_others_too_since_their_caches_are_half_written(llm, monkeypatch):
    expected = token_ids(llm, "abc")
    deltas = llm.stream("another", GREEDY)
    other = deltas.request
    next(deltas)
    with monkeypatch.context() as patch:
        interrupt(patch, runner_of(llm.engine), at=2)
        with pytest.raises(KeyboardInterrupt):
            llm.generate("abc", GREEDY)
    assert other.finish_reason == "abort"
    assert is_clean(llm) and runner_of(llm.engine).num_cells == 0
    assert token_ids(llm, "abc") == expected


# ---- regressions


def steps_at_most(monkeypatch: pytest.MonkeyPatch, llm: LLM, limit: int) -> None:
    """Fail after `limit` steps instead of looping forever."""
    step, calls = llm.engine.step, iter(range(limit))

    def counted() -> Any:
        assert next(calls, None) is not None, "the engine is stepped forever with nothing to do"
        return step()

    monkeypatch.setattr(llm.engine, "step", counted)


def test_a_stream_survives_another_generation_in_between(llm, monkeypatch):
    expected = token_ids(llm, "abc")[0]
    steps_at_most(monkeypatch, llm, 200)
    deltas = llm.stream("abc", GREEDY)
    received = list(next(deltas).token_ids)
    llm.generate("something else", SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True))
    received += [token for delta in deltas for token in delta.token_ids]
    assert received == expected


def test_a_stream_ends_when_an_interrupt_elsewhere_reset_the_engine(llm, monkeypatch):
    deltas = llm.stream("abc", GREEDY)
    next(deltas)
    with monkeypatch.context() as patch:
        interrupt(patch, runner_of(llm.engine), at=2)
        with pytest.raises(KeyboardInterrupt):
            llm.generate("something else", GREEDY)
    steps_at_most(monkeypatch, llm, 200)
    received = [token for delta in deltas for token in delta.token_ids]
    assert deltas.request.finish_reason == "abort"
    assert len(received) < GREEDY.max_tokens, "only what was emitted before the interrupt"


def test_closing_a_stream_that_was_never_read_ends_its_request(llm):
    deltas = llm.stream("abc", GREEDY)
    deltas.close()
    assert not llm.engine.has_requests


def test_ctrl_c_during_the_first_measurement_leaves_a_usable_engine(llm, monkeypatch):
    with monkeypatch.context() as patch:
        interrupt(patch, runner_of(llm.engine), at=3)
        with pytest.raises(KeyboardInterrupt):
            llm.generate("abc", GREEDY)
    assert len(token_ids(llm, "abc")[0]) == 12


def test_token_ids_may_be_a_numpy_array(llm):
    import numpy as np

    assert token_ids(llm, np.array([97, 98, 99])) == token_ids(llm, [97, 98, 99])


@pytest.mark.parametrize(
    "prompts", [b"bytes", [b"bytes"], [[1.5]], [1.5], [True], [[True]], None, 5, [None], [5, "a"], {"a": 1}]
)
def test_what_is_no_prompt_is_refused_in_a_sentence(llm, prompts):
    with pytest.raises(UsageError, match=r"a prompt is a text or a list of token ids|token ids are whole numbers"):
        llm.generate(prompts, GREEDY)
    assert is_clean(llm)
