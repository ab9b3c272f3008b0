"""Thinking through the real clients, over a model that says what the user tells it to say."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import jsonschema
import pytest

from outpace.models.tool_calls import SYNTAXES
from outpace.models.tool_calls.syntax import Call
from tests.scripted_model import scripted
from tests.server_helper import LiveServer

HERMES = SYNTAXES["hermes"]
NOW = Call("clock", {})
CLOCK = {"type": "function", "function": {"name": "clock"}}
THOUGHT, ANSWER = "Let me see:\n\nclouds, <tool_call> and rain.", "It rains. <think> no more"
SAID = f"<think>\n{THOUGHT}\n</think>\n\n{ANSWER}"
NO_THINKING = "{% if enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"  # as Qwen3's
OPENER = "{{ '<think>\\n' }}"  # as DeepSeek-R1's


def last_words(prompt: str) -> str:
    return prompt.rpartition("user: ")[2].removesuffix("\nassistant:")


@pytest.fixture(scope="module")
def before() -> Iterator[LiveServer]:
    """The model may open its thinking."""
    with scripted(last_words, ending=NO_THINKING) as server:
        yield server


@pytest.fixture(scope="module")
def inside() -> Iterator[LiveServer]:
    """The prompt opens it."""
    with scripted(last_words, ending=OPENER, reasoning_parser="deepseek_r1") as server:
        yield server


@pytest.fixture(params=["before", "inside"])
def server(request: pytest.FixtureRequest) -> LiveServer:
    found: LiveServer = request.getfixturevalue(request.param)
    return found


def asked(say: str, **options: Any) -> dict[str, Any]:
    return {"model": "fake", "messages": [{"role": "user", "content": say}], "max_tokens": 500, **options}


def whole(server: LiveServer, say: str = SAID, **options: Any) -> Any:
    return server.client().chat.completions.create(**asked(say, **options))


def streamed(server: LiveServer, say: str = SAID, **options: Any) -> dict[str, str]:
    """The joined texts of the deltas, by field."""
    chunks = server.client().chat.completions.create(**asked(say, stream=True, **options))
    found = {"content": "", "reasoning": "", "reasoning_content": ""}
    for chunk in chunks:
        for name in found:
            found[name] += getattr(chunk.choices[0].delta, name, None) or ""
    return found


# ---- replies


def test_thinking_is_a_field_of_its_own(server):
    reply = whole(server)
    message = reply.choices[0].message
    assert message.reasoning == message.reasoning_content == THOUGHT and message.content == ANSWER
    assert streamed(server) == {"content": ANSWER, "reasoning": THOUGHT, "reasoning_content": THOUGHT}
    assert reply.choices[0].finish_reason == "stop"


def test_tokens_of_thinking_are_counted(before, inside):
    tags = "<think>\n", f"{THOUGHT}\n</think>"
    details = whole(before).usage.completion_tokens_details
    assert details.reasoning_tokens == len("".join(tags))
    assert whole(inside).usage.completion_tokens_details.reasoning_tokens == len(tags[1])
    assert whole(before, "Plain.").usage.completion_tokens_details.reasoning_tokens == 0


def test_an_answer_without_thinking_is_content(before):
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    message = whole(before, "<think>\n\n</think>\n\nYes. <think>x</think>", extra_body=off).choices[0].message
    assert message.content == "Yes. <think>x</think>" and "reasoning" not in message.to_dict()
    message = whole(before, " Plain </think>.").choices[0].message
    assert message.content == " Plain </think>." and "reasoning" not in message.to_dict()


def test_thinking_that_is_cut_off_leaves_no_content(server):
    reply = whole(server, max_tokens=30)
    choice = reply.choices[0]
    assert choice.finish_reason == "length" and choice.message.content is None
    assert THOUGHT.startswith(choice.message.reasoning) and len(choice.message.reasoning) > 15
    assert reply.usage.completion_tokens_details.reasoning_tokens == reply.usage.completion_tokens == 30
    assert streamed(server, max_tokens=30)["content"] == ""


@pytest.mark.parametrize("tools", [[], [CLOCK]])
def test_thinking_may_be_left_out(server, tools):
    hidden: dict[str, Any] = {"extra_body": {"include_reasoning": False}, "tools": tools}
    reply = whole(server, **hidden)
    message = reply.choices[0].message.to_dict()
    assert message["content"] == ANSWER and not {"reasoning", "reasoning_content"} & set(message)
    assert streamed(server, **hidden) == {"content": ANSWER, "reasoning": "", "reasoning_content": ""}
    assert reply.usage.completion_tokens_details.reasoning_tokens > 40


def test_a_stop_string_ends_thinking_too(before):
    choice = whole(before, stop=["clouds"]).choices[0]
    assert choice.message.reasoning == "Let me see:" and choice.message.content is None
    assert choice.finish_reason == "stop"


@pytest.mark.parametrize("tools", [[], [CLOCK]])
def test_logprobs_and_token_ids_cover_the_thinking(before, tools):
    options: dict[str, Any] = {"logprobs": True, "extra_body": {"return_token_ids": True}, "tools": tools}
    choice = whole(before, **options).choices[0]
    for parts in (
        (choice,),
        [chunk.choices[0] for chunk in before.client().chat.completions.create(**asked(SAID, stream=True, **options))],
    ):
        entries = [entry for part in parts if part.logprobs for entry in part.logprobs.content]
        assert b"".join(bytes(entry.bytes) for entry in entries).startswith(SAID.encode())
        ids = [token for part in parts for token in part.model_extra.get("token_ids") or []]
        assert bytes(ids[:-1]) == SAID.encode()


def test_token_ids_of_held_text_are_sent_beside_tools(before):
    options: dict[str, Any] = {"extra_body": {"return_token_ids": True}, "tools": [CLOCK], "stream": True}
    said = HERMES.write([NOW])
    chunks = before.client().chat.completions.create(**asked(said, **options))
    ids = [token for chunk in chunks for token in chunk.choices[0].model_extra.get("token_ids") or []]
    assert bytes(ids[: len(said)]) == said.encode()


def test_every_completion_thinks_for_itself(before):
    choices = whole(before, n=2).choices
    assert [(choice.message.reasoning, choice.message.content) for choice in choices] == [(THOUGHT, ANSWER)] * 2


def test_thinking_of_the_history_reaches_the_template():
    template = "{% for m in messages %}{{ m.role }}: {{ m.reasoning_content }}|{{ m.content }}\n{% endfor %}"
    prompts: list[str] = []

    def answer(prompt: str) -> str:
        prompts.append(prompt)
        return "ok"

    with scripted(answer, template=template) as server:
        for name in ("reasoning", "reasoning_content"):
            turns: list[Any] = [{"role": "assistant", "content": "b", name: "hm"}, {"role": "user", "content": "c"}]
            whole(server, messages=turns)
            assert prompts[-1].endswith("assistant: hm|b\nuser: |c\nassistant:")
        turns = [{"role": "assistant", "content": [{"type": "thinking", "thinking": "so", "signature": ""}]}]
        messages_client(server).messages.create(
            model="fake", max_tokens=5, messages=[*turns, {"role": "user", "content": "c"}]
        )
    assert prompts[-1].endswith("assistant: so|\nuser: |c\nassistant:")


def test_the_parser_may_be_turned_off():
    with scripted(last_words, ending=NO_THINKING, reasoning_parser="none") as server:
        assert whole(server).choices[0].message.content == SAID


def test_r1_thinks_although_nothing_opens_it():
    with scripted(last_words, reasoning_parser="deepseek_r1") as server:
        message = whole(server, "hm\n</think>\nYes.").choices[0].message
    assert (message.reasoning, message.content) == ("hm", "Yes.")


def test_a_begun_answer_is_continued_in_its_thinking(before):
    turns = [{"role": "user", "content": " <think>\nhm\n</think>Yes."}]
    for begun, reasoning, content in (("<think>\nh", "m", "Yes."), ("<think>\nhm\n</think>Y", None, "es.")):
        options = {"continue_final_message": True, "add_generation_prompt": False}
        message = whole(
            before, messages=[*turns, {"role": "assistant", "content": begun}], extra_body=options
        ).choices[0].message  # fmt: skip
        assert (message.model_extra.get("reasoning"), message.content) == (reasoning, content)


# ---- constraints begin after the thinking


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "clock"}}])
def test_calls_follow_the_thinking(server, choice):
    say = f"<think>\n{THOUGHT}\n</think>\n\n{HERMES.write([NOW])}"
    found = whole(server, say, tools=[CLOCK], tool_choice=choice, parallel_tool_calls=False).choices[0]
    assert found.message.reasoning == THOUGHT and not found.message.content
    assert [call.function.name for call in found.message.tool_calls] == ["clock"]
    assert found.finish_reason == "tool_calls"
    assert streamed(server, say, tools=[CLOCK], tool_choice=choice) == {
        "content": "", "reasoning": THOUGHT, "reasoning_content": THOUGHT
    }  # fmt: skip


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_required_call_is_made_after_thinking_about_a_refusal(server, temperature):
    say = "<think>\nno\n</think>\n\nI will not."
    found = whole(server, say, tools=[CLOCK], tool_choice="required", temperature=temperature, seed=1).choices[0]
    assert found.message.reasoning == "no" and found.message.tool_calls[0].function.name == "clock"


SCHEMA = {
    "type": "object",
    "properties": {"sky": {"enum": ["clear", "cloudy"]}},
    "required": ["sky"],
    "additionalProperties": False,
}
FORMS: list[dict[str, Any]] = [
    {"response_format": {"type": "json_schema", "json_schema": {"name": "sky", "schema": SCHEMA}}},
    {"extra_body": {"guided_regex": '\\{"sky": "(clear|cloudy)"\\}'}},
    {"extra_body": {"guided_choice": ['{"sky": "clear"}', '{"sky": "cloudy"}']}},
    {"extra_body": {"guided_grammar": 'start: "{" "\\"sky\\": " SKY "}"\nSKY: "\\"clear\\"" | "\\"cloudy\\""'}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "sky", "schema": SCHEMA}}, "tools": [CLOCK]},
]


@pytest.mark.parametrize("form", FORMS)
def test_structured_output_follows_the_thinking(server, form):
    for say in ('{"sky": "cloudy"}', "It is clear."):
        message = whole(server, f"<think>\n{THOUGHT}\n</think>\n\n{say}", **form).choices[0].message
        assert message.reasoning == THOUGHT
        if not message.tool_calls:
            jsonschema.validate(json.loads(message.content), SCHEMA)
        if say.startswith("{"):
            assert message.content == say


def test_structured_output_needs_no_thinking(before):
    message = whole(before, '{"sky": "cloudy"}', **FORMS[0]).choices[0].message
    assert message.content == '{"sky": "cloudy"}' and "reasoning" not in message.to_dict()


def test_a_wrong_description_is_still_refused(server):
    body = asked("x") | {
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}
    }
    assert server.post("/v1/chat/completions", body)[0] == 400


@pytest.mark.parametrize("ending", ["", "[THINK]"])
def test_tags_that_are_control_tokens(ending):
    said = f"[THINK]hm[/THINK]{HERMES.write([NOW])}"
    with scripted(said, controls=("[THINK]", "[/THINK]"), ending=ending) as server:
        message = whole(server, tools=[CLOCK], tool_choice="required", parallel_tool_calls=False).choices[0].message
        assert message.reasoning == "hm" and message.tool_calls[0].function.name == "clock"
        message = whole(server).choices[0].message
        assert message.reasoning == "hm" and message.content == HERMES.write([NOW])


# ---- Anthropic's API


def messages_client(server: LiveServer) -> Any:
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=60)


OWN_CLOCK: Any = {"name": "clock", "input_schema": {"type": "object"}}


def test_thinking_is_a_block_before_the_text(server):
    ask: Any = asked(SAID, thinking={"type": "adaptive"})
    message = messages_client(server).messages.create(**ask)
    with messages_client(server).messages.stream(**ask) as stream:
        thoughts = [event.thinking for event in stream if event.type == "thinking"]
        final = stream.get_final_message()
    assert "".join(thoughts) == THOUGHT
    for each in (message, final):
        thinking, text = each.content
        assert (thinking.type, thinking.thinking, text.type, text.text) == ("thinking", THOUGHT, "text", ANSWER)
    assert message.usage.output_tokens_details.thinking_tokens > len(THOUGHT)


def test_calls_are_blocks_after_thinking(server):
    ask: Any = asked(
        f"<think>\nhm\n</think>\n\n{HERMES.write([NOW])}", tools=[OWN_CLOCK], thinking={"type": "adaptive"}
    )
    for choice in ("auto", "any"):
        message = messages_client(server).messages.create(**ask, tool_choice={"type": choice})
        assert [block.type for block in message.content][:2] == ["thinking", "tool_use"]
        assert message.stop_reason == "tool_use"


def test_thinking_that_nobody_asked_for_is_not_shown(inside):
    for thinking in ({"type": "disabled"}, {"type": "enabled", "budget_tokens": 2000, "display": "omitted"}):
        message: Any = messages_client(inside).messages.create(**asked(SAID, thinking=thinking))
        assert [(block.type, block.text) for block in message.content] == [("text", ANSWER)]
    message = messages_client(inside).messages.create(**asked(SAID))
    assert message.content[0].text == ANSWER and message.usage.output_tokens_details.thinking_tokens > len(THOUGHT)
