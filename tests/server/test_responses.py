"""The Responses API through the real OpenAI client, and LangChain's, over a model that says what each test wants."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from outpace.config import SamplingParams
from outpace.core import StepPlan, TokenLogprob
from outpace.engine.generation import Piece
from outpace.models.reasoning import PARSERS
from outpace.models.reasoning.use import Reasoning
from outpace.models.tool_calls import SYNTAXES
from outpace.models.tool_calls.reader import CallReader, Found
from outpace.models.tool_calls.syntax import Call
from outpace.server.completions import Encoded
from outpace.server.replies import Heading
from outpace.server.responses.answer import ResponsesAnswer
from outpace.server.responses.output import Output
from outpace.server.scored import TokenTexts
from tests.fakes import ByteTokenizer, fake_engine, runner_of
from tests.scripted_model import scripted
from tests.server_helper import LiveServer, live

HERMES = SYNTAXES["hermes"]
WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "weather",
    "description": "The weather in a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
QUESTION: dict[str, Any] = {"role": "user", "content": "How is the weather in Oslo and Rome?"}
OSLO, ROME = Call("weather", {"city": "Oslo"}), Call("weather", {"city": "Rome", "days": 2})
LOGPROBS = "message.output_text.logprobs"
EVENT: Any = TypeAdapter(ResponseStreamEvent)


class Person(BaseModel):
    name: str
    age: int


ASA = Person(name="Åsa", age=41)


def act(prompt: str) -> str:
    """Calls of two functions for a question about the weather, words for their results, and for all else."""
    if "as JSON" in prompt:
        return json.dumps(ASA.model_dump(), ensure_ascii=False)
    if "<tool_response>" in prompt:
        return "Rain here and there."
    if '"weather"' in prompt:
        return "Let me look.\n" + HERMES.write([OSLO, ROME])
    if '"Person"' in prompt:
        return HERMES.write([Call("Person", ASA.model_dump())])
    return "Good day. 🌞"


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with scripted(act) as server:
        yield server


@pytest.fixture(scope="module")
def plain() -> Iterator[LiveServer]:
    """A model without a script, whose answers depend on every sampling parameter."""
    engine = fake_engine(max_context=256, cache_tokens=2048)
    engine.calibrate()
    with live(engine, ByteTokenizer(), 256) as server:
        yield server
        server.check_clean()


def whole(server: LiveServer, **fields: Any) -> Any:
    response = server.client().responses.create(**({"model": "fake", "input": "Hello"} | fields))
    Response.model_validate(response.to_dict())  # the client itself checks no types
    return response


def events_of(server: LiveServer, **fields: Any) -> list[Any]:
    stream = server.client().responses.create(**({"model": "fake", "input": "Hello"} | fields), stream=True)
    events = list(stream)
    for event in events:
        EVENT.validate_python(event.to_dict())
    assert [event.sequence_number for event in events] == list(range(len(events)))
    return events


def streamed(server: LiveServer, **fields: Any) -> Any:
    return events_of(server, **fields)[-1].response


def facts(response: Any) -> dict[str, Any]:
    """All of a response that does not differ between two with the same text."""
    found: dict[str, Any] = response.to_dict() | {"id": None, "created_at": None}
    found["output"] = [{name: item[name] for name in item if name not in ("id", "call_id")} for item in found["output"]]
    found["usage"] = {name: found["usage"][name] for name in ("input_tokens", "output_tokens", "total_tokens")}
    return found


def calls_of(response: Any) -> list[Call]:
    calls = [item for item in response.output if item.type == "function_call"]
    assert len({call.call_id for call in calls} | {call.id for call in calls}) == 2 * len(calls)
    return [Call(call.name, json.loads(call.arguments)) for call in calls]


# ---- text


def test_a_text_is_answered_and_the_request_repeated(server):
    response = whole(server, instructions="Be kind.", metadata={"topic": "weather"}, max_output_tokens=50, store=True)
    assert response.output_text == "Good day. 🌞" and response.status == "completed"
    [message] = response.output
    assert message.role == "assistant" and message.status == "completed" and message.id.startswith("msg_")
    assert response.id.startswith("resp_") and response.model == "fake" and response.error is None
    assert response.instructions == "Be kind." and response.metadata == {"topic": "weather"}
    assert response.max_output_tokens == 50 and response.temperature == response.top_p == 1.0
    assert response.store is False and response.incomplete_details is None  # nothing is stored
    prompt = "system: Be kind.\nuser: Hello\nassistant:"
    assert response.usage.input_tokens == server.post("/tokenize", {"prompt": prompt})[1]["count"]
    assert response.usage.output_tokens == len(response.output_text.encode()) + 1  # the end token
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    assert response.usage.speculation["drafted"] == response.usage.input_tokens_details.cached_tokens == 0


def test_a_stream_has_every_event_in_its_place(server):
    events = events_of(server)
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert [event.type for event in events if event not in deltas] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    created, added, part, done, finished = (events[i] for i in (0, 2, 3, -4, -2))
    assert created.response.status == "in_progress" and created.response.output == [] and not created.response.usage
    assert added.item.status == "in_progress" and added.item.content == [] and part.part.text == ""
    assert {event.item_id for event in [part, *deltas, done]} == {added.item.id}
    assert "".join(event.delta for event in deltas) == done.text == "Good day. 🌞"
    assert finished.item == events[-1].response.output[0] and finished.item.content[0].text == done.text
    assert facts(events[-1].response) == facts(whole(server))


def test_the_names_of_events_are_on_lines_of_their_own(server):
    _, text, headers = server.post("/v1/responses", {"input": "Hello", "stream": True})
    assert headers["content-type"].startswith("text/event-stream") and "[DONE]" not in text
    for block in text.strip().split("\n\n"):
        name, data = block.split("\n")
        assert name == f"event: {json.loads(data.removeprefix('data: '))['type']}"


def test_the_stream_helper_of_the_client_follows(server):
    with server.client().responses.stream(model="fake", input="Hello") as stream:
        snapshots = [event.snapshot for event in stream if event.type == "response.output_text.delta"]
        response = stream.get_final_response()
    assert snapshots[-1] == response.output_text == "Good day. 🌞"


@pytest.mark.parametrize("ask", [whole, streamed])
def test_an_answer_that_reaches_the_limit_is_incomplete(server, ask):
    response = ask(server, max_output_tokens=4)
    assert response.status == "incomplete" and response.incomplete_details.reason == "max_output_tokens"
    assert response.output_text == "Good" and response.output[0].status == "incomplete"
    if ask is streamed:
        assert events_of(server, max_output_tokens=4)[-1].type == "response.incomplete"


@pytest.mark.parametrize("ask", [whole, streamed])
def test_an_empty_answer_is_an_empty_message(ask):
    with scripted("") as server:
        response = ask(server)
    assert response.output_text == "" and response.output[0].content[0].text == "" and response.status == "completed"


def test_a_fault_in_mid_stream_ends_it_as_failed():
    engine = fake_engine(max_context=512, cache_tokens=4096)
    engine.calibrate()
    runner, breaks = runner_of(engine), threading.Event()
    forward = runner.forward

    def broken(plan: StepPlan) -> Any:
        time.sleep(0.01)
        if breaks.is_set():
            raise RuntimeError("broken on purpose")
        return forward(plan)

    runner.forward = broken  # type: ignore[method-assign]
    with live(engine, ByteTokenizer(), 512) as server:
        ask: dict[str, Any] = {"model": "fake", "input": "a", "max_output_tokens": 300, "stream": True}
        events = []
        for event in server.client().responses.create(**ask, extra_body={"ignore_eos": True}):
            events.append(event)
            if event.type == "response.output_text.delta":
                breaks.set()
        breaks.clear()
        server.check_clean()
    assert [event.type for event in events[-2:]] == ["response.output_item.done", "response.failed"]
    failed = EVENT.validate_python(events[-1].to_dict()).response
    assert failed.status == "failed" and failed.output[0].status == "incomplete" and failed.usage is None
    assert failed.error.code == "server_error" and "the engine failed on this request" in failed.error.message


# ---- the same answers as chats


EXTRAS: list[dict[str, Any]] = [
    {"seed": 7},
    {"seed": 7, "top_k": 2, "logit_bias": {"97": 5}, "presence_penalty": 1.5},
    {"seed": 7, "stop": ["a", "e", "i"], "include_stop_str_in_output": True},
    {"seed": 3, "repetition_penalty": 1.4, "min_p": 0.1, "bad_words": ["q"]},
    {"seed": 3, "speculation": {"mode": "on", "method": "ngram"}, "return_token_ids": True},
    {"seed": 3, "structured_outputs": {"regex": "[a-f]{9}"}},
    {"seed": 3, "truncate_prompt_tokens": 9},
    {
        "seed": 3,
        "prediction": {"type": "content", "content": "Hello, hello, hello"},
        "speculation": {"mode": "on", "method": "prediction"},
    },
]


@pytest.mark.parametrize("extra", EXTRAS)
def test_other_fields_mean_what_they_mean_in_a_chat(plain, extra):
    body = {"temperature": 0.9, "top_p": 0.95, **extra}
    chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 24, **body}
    _, wanted, _ = plain.post("/v1/chat/completions", chat)
    status, reply, _ = plain.post("/v1/responses", {"input": "hello", "max_output_tokens": 24, **body})
    assert status == 200, reply
    assert reply["output"][0]["content"][0]["text"] == wanted["choices"][0]["message"]["content"]
    assert reply["temperature"] == 0.9 and reply["top_p"] == 0.95
    assert reply["usage"]["output_tokens"] == wanted["usage"]["completion_tokens"]
    details = wanted["usage"]["completion_tokens_details"]
    assert reply["usage"]["output_tokens_details"] == details | {"reasoning_tokens": 0}
    assert reply.get("prompt_token_ids") == wanted.get("prompt_token_ids")
    assert reply.get("token_ids") == wanted["choices"][0].get("token_ids")


def test_truncation_auto_uses_the_end_of_a_long_prompt(plain):
    with pytest.raises(openai.BadRequestError) as refused:
        whole(plain, input="x" * 300, max_output_tokens=10)
    assert refused.value.code == "context_length_exceeded" and refused.value.param == "input"
    response = whole(plain, input="x" * 300, max_output_tokens=10, truncation="auto")
    assert response.usage.input_tokens == 246 and response.truncation == "auto"


def test_effort_and_verbosity_reach_the_template():
    template = "{{ reasoning_effort }}, {{ verbosity }}{% for m in messages %}{{ m.content }}\n{% endfor %}"
    with scripted(lambda prompt: "Heard." if "low, high" in prompt else "Not heard.", template=template) as server:
        assert whole(server, reasoning={"effort": "low"}, text={"verbosity": "high"}).output_text == "Heard."
        assert whole(server).output_text == "Not heard."


@pytest.mark.parametrize("ask", [whole, streamed])
def test_logprobs_spell_the_text(server, ask):
    response = ask(server, include=[LOGPROBS], top_logprobs=2)
    entries = response.output[0].content[0].logprobs
    assert b"".join(bytes(entry.bytes) for entry in entries[:-1]).decode() == response.output_text
    assert all(len(entry.top_logprobs) == 2 for entry in entries) and len(entries) == response.usage.output_tokens


def test_deltas_carry_the_logprobs_of_their_text(server):
    events = events_of(server, input=[QUESTION], tools=[WEATHER], include=[LOGPROBS])
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    tokens = [entry.token for event in deltas for entry in event.logprobs]
    assert "".join(tokens) == "Let me look."  # the tokens of calls are in no message
    for response in (events[-1].response, whole(server, input=[QUESTION], tools=[WEATHER], include=[LOGPROBS])):
        assert [entry.token for entry in response.output[0].content[0].logprobs] == tokens


# ---- tools


@pytest.mark.parametrize("ask", [whole, streamed])
def test_an_agent_loop_ends_with_words(server, ask):
    """The items of the answer go back as the client has them, with the results."""
    items: list[Any] = [QUESTION]
    first = ask(server, input=items, tools=[WEATHER])
    assert calls_of(first) == [OSLO, ROME] and first.output_text == "Let me look."
    assert [item.type for item in first.output] == ["message", "function_call", "function_call"]
    items += first.output
    items += [
        {"type": "function_call_output", "call_id": item.call_id, "output": f"rain in {item.arguments}"}
        for item in first.output
        if item.type == "function_call"
    ]
    assert ask(server, input=items, tools=[WEATHER]).output_text == "Rain here and there."


def test_a_stream_of_calls_has_every_event_in_its_place(server):
    events = events_of(server, input=[QUESTION], tools=[WEATHER])
    of_calls = [event for event in events if getattr(event, "output_index", 0) > 0]
    added, done = "response.output_item.added", "response.output_item.done"
    delta, complete = "response.function_call_arguments.delta", "response.function_call_arguments.done"
    kinds = [event.type for event in of_calls if event.type != delta]
    assert kinds == [added, complete, done] * 2
    for index, call in ((1, OSLO), (2, ROME)):
        first, *deltas, whole_arguments, last = (event for event in of_calls if event.output_index == index)
        assert first.item.name == "weather" and first.item.arguments == "" and first.item.status == "in_progress"
        assert {event.item_id for event in [*deltas, whole_arguments]} == {first.item.id}
        assert "".join(event.delta for event in deltas) == whole_arguments.arguments == last.item.arguments
        assert json.loads(last.item.arguments) == call.arguments and last.item.status == "completed"
        assert whole_arguments.name == "weather"
    assert facts(events[-1].response) == facts(whole(server, input=[QUESTION], tools=[WEATHER]))


@pytest.mark.parametrize("ask", [whole, streamed])
def test_a_call_that_is_cut_off_is_incomplete(server, ask):
    cut = len("Let me look.\n" + HERMES.write([OSLO])) + 50
    response = ask(server, input=[QUESTION], tools=[WEATHER], max_output_tokens=cut)
    assert response.status == "incomplete"
    assert [item.status for item in response.output] == ["completed", "completed", "incomplete"]
    assert '{"city": "Rome"'.startswith(response.output[2].arguments)


@pytest.mark.parametrize("size", [1, 2, 7])
@pytest.mark.parametrize(
    "answer",
    [act('"weather"'), HERMES.write([OSLO]), HERMES.write([OSLO]) + '\n<tool_call>{"n', "It <tool_call", "", " a b"],
)
def test_the_items_do_not_depend_on_how_an_answer_comes_in_pieces(answer, size):
    def read(num: int) -> tuple[list[Any], list[Any]]:
        reader, output, events = CallReader(HERMES, ["weather"]), Output(), []
        for start in range(0, len(answer), num):
            text = answer[start : start + num]
            entries = [{"token": each, "bytes": list(each.encode())} for each in text]
            events += [json.loads(json.dumps(event)) for event in output.add(reader.feed(text), entries)]
        events += [json.loads(json.dumps(event)) for event in output.add(reader.finish(), [])]
        events += [json.loads(json.dumps(event)) for event in output.finish("completed")]
        return output.items, events

    items, events = read(size)
    unnamed = [[{**item, "id": None, "call_id": None} for item in found] for found in (items, read(len(answer) + 1)[0])]
    assert unnamed[0] == unnamed[1]
    for i, item in enumerate(items):
        text = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        deltas = [event for event in events if event["output_index"] == i and "delta" in event]
        assert "".join(event["delta"] for event in deltas) == text
        assert len(deltas) > 1 or i or not text or size > 1
        if item["type"] == "message":
            entries = item["content"][0]["logprobs"]
            assert [entry for event in deltas for entry in event["logprobs"]] == entries
            # Only an answer that is cut at the beginning of a second call has a message after a call.
            assert "".join(entry["token"] for entry in entries) == ("" if i else text)


def test_a_named_function_is_called_and_no_other(server):
    clock = {"type": "function", "name": "clock"}
    response = whole(
        server, input=[QUESTION], tools=[WEATHER, clock], tool_choice={"type": "function", "name": "clock"}
    )
    assert calls_of(response) == [Call("clock", {})] and len(response.output) == 1
    assert response.tool_choice.name == "clock" and [each.name for each in response.tools] == ["weather", "clock"]
    one = whole(server, input=[QUESTION], tools=[WEATHER], tool_choice="required", parallel_tool_calls=False)
    assert len(calls_of(one)) == 1 and not one.parallel_tool_calls and one.tool_choice == "required"
    assert whole(server, input=[QUESTION], tools=[WEATHER], tool_choice="none").output_text == "Good day. 🌞"


def test_the_client_parses_calls_into_models(server):
    tools = [openai.pydantic_function_tool(Person)]
    response = server.client().responses.parse(model="fake", input="Who is Åsa?", tools=tools)
    assert response.output[0].parsed_arguments == ASA


# ---- thinking


THOUGHT = "Let me see:\n\n<tool_call> and 🌧."
TAGGED = f"<think>\n{THOUGHT}\n</think>\n\n"
LINES = "{% for m in messages %}{{ m.role }}: {{ m.reasoning_content }}|{{ m.content }}\n{% endfor %}"


def think(prompt: str) -> str:
    if "say nothing" in prompt:
        return TAGGED
    if "no thinking" in prompt:
        return "<think>\n\n</think>\n\nYes."
    return TAGGED + act(prompt)


@pytest.fixture(scope="module")
def before() -> Iterator[LiveServer]:
    """The model opens its thinking."""
    with scripted(think, reasoning_parser="qwen3") as server:
        yield server


@pytest.fixture(scope="module")
def inside() -> Iterator[LiveServer]:
    """The prompt opens it."""
    with scripted(think, ending="{{ '<think>\\n' }}", reasoning_parser="deepseek_r1") as server:
        yield server


@pytest.fixture(params=["before", "inside"])
def thinker(request: pytest.FixtureRequest) -> LiveServer:
    found: LiveServer = request.getfixturevalue(request.param)
    return found


@pytest.mark.parametrize("ask", [whole, streamed])
def test_thinking_is_an_item_before_the_message(thinker, ask):
    response = ask(thinker)
    reasoning, message = response.output
    assert reasoning.type == "reasoning" and reasoning.id.startswith("rs_") and reasoning.status == "completed"
    assert reasoning.summary == [] and [part.to_dict() for part in reasoning.content] == [
        {"type": "reasoning_text", "text": THOUGHT}
    ]
    assert message.content[0].text == response.output_text == "Good day. 🌞" and message.status == "completed"


def test_a_stream_of_thinking_has_every_event_in_its_place(thinker):
    events = events_of(thinker)
    deltas = [event for event in events if event.type == "response.reasoning_text.delta"]
    of_item = [event for event in events if getattr(event, "output_index", None) == 0]
    assert [event.type for event in of_item if event not in deltas] == [
        "response.output_item.added",
        "response.content_part.added",
        "response.reasoning_text.done",
        "response.content_part.done",
        "response.output_item.done",
    ]
    added, part, *_, done, part_done, finished = of_item
    assert added.item.status == "in_progress" and added.item.content == [] and part.part.text == ""
    assert {event.item_id for event in [part, *deltas, done, part_done]} == {added.item.id}
    assert "".join(event.delta for event in deltas) == done.text == part_done.part.text == THOUGHT
    assert finished.item == events[-1].response.output[0]
    following = events[events.index(finished) + 1]  # the message begins after the thinking has ended
    assert following.type == "response.output_item.added" and following.output_index == 1
    assert facts(events[-1].response) == facts(whole(thinker))


def test_the_stream_helper_of_the_client_follows_thinking(before):
    with before.client().responses.stream(model="fake", input="Åsa as JSON", text_format=Person) as stream:
        thoughts = [event.delta for event in stream if event.type == "response.reasoning_text.delta"]
        assert stream.get_final_response().output_parsed == ASA
    assert "".join(thoughts) == THOUGHT


@pytest.mark.parametrize("ask", [whole, streamed])
def test_tokens_of_thinking_are_counted(before, inside, ask):
    tags = "<think>\n", f"{THOUGHT}\n</think>"
    assert ask(before).usage.output_tokens_details.reasoning_tokens == len("".join(tags).encode())
    assert ask(inside).usage.output_tokens_details.reasoning_tokens == len(tags[1].encode())


@pytest.mark.parametrize("ask", [whole, streamed])
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_calls_are_items_after_thinking(thinker, ask, choice):
    response = ask(thinker, input=[QUESTION], tools=[WEATHER], tool_choice=choice, temperature=0)
    kinds = [item.type for item in response.output if item.type != "message"]  # required: without words
    assert kinds[:2] == ["reasoning", "function_call"] and response.output[0].content[0].text == THOUGHT
    assert response.output_text == ("Let me look." if choice == "auto" else "")
    if choice == "auto":
        assert calls_of(response) == [OSLO, ROME]


@pytest.mark.parametrize("ask", [whole, streamed])
def test_thinking_that_is_cut_off_is_the_only_item_and_incomplete(thinker, ask):
    response = ask(thinker, max_output_tokens=20, tools=[WEATHER], input=[QUESTION])
    assert response.status == "incomplete" and response.incomplete_details.reason == "max_output_tokens"
    [reasoning] = response.output
    assert reasoning.type == "reasoning" and reasoning.status == "incomplete" and response.output_text == ""
    assert THOUGHT.startswith(reasoning.content[0].text) and len(reasoning.content[0].text) > 5
    assert response.usage.output_tokens_details.reasoning_tokens == response.usage.output_tokens == 20


@pytest.mark.parametrize("ask", [whole, streamed])
def test_only_what_is_there_becomes_an_item(before, ask):
    assert [item.type for item in ask(before, input="say nothing").output] == ["reasoning"]
    [message] = ask(before, input="no thinking").output
    assert message.content[0].text == "Yes."


@pytest.mark.parametrize("ask", [whole, streamed])
def test_logprobs_are_those_of_the_message_without_its_thinking(thinker, ask):
    response = ask(thinker, include=[LOGPROBS])
    entries = response.output[1].content[0].logprobs
    assert b"".join(bytes(entry.bytes) for entry in entries[:-1]).decode() == "Good day. 🌞"
    response = ask(thinker, include=[LOGPROBS], input=[QUESTION], tools=[WEATHER])
    assert "".join(entry.token for entry in response.output[1].content[0].logprobs) == "Let me look."


@pytest.mark.parametrize("size", [1, 2, 7])
@pytest.mark.parametrize(
    ("said", "thinking", "text"),
    [
        ("<think>\na b\n</think>\n\nYes <b>.", "a b", "Yes <b>."),
        (" <thing", "", " <thing"),
        ("<think></think> x", "", "x"),
        ("<think>a </thi", "a </thi", ""),
    ],
)
def test_thinking_does_not_depend_on_how_an_answer_comes_in_pieces(said, thinking, text, size):
    encoded = Encoded([1], SamplingParams(), reasoning=Reasoning(PARSERS["qwen3"], "before"))
    heading = Heading("resp_1", 0, "fake", 1, 1, with_logprobs=True, include_usage=False, echoes=[""])
    answer, events = ResponsesAnswer({}, encoded, heading, TokenTexts(ByteTokenizer())), []
    for start in range(0, len(said), size):
        ids = list(said[start : start + size].encode())
        scores = [TokenLogprob(each, -1.0, [], 1) for each in ids]
        is_last = start + size >= len(said)
        piece = Piece(0, bytes(ids).decode(), ids, scores, finish_reason="stop" if is_last else None)
        events += [json.loads(block.split("data: ")[1]) for block in answer.events(piece).decode().split("\n\n")[:-1]]
    deltas = {"reasoning_text": "", "output_text": "", "logprobs": ""}
    for event in events:
        if event["type"].endswith("text.delta"):
            deltas[event["type"].split(".")[1]] += event["delta"]
            deltas["logprobs"] += "".join(entry["token"] for entry in event.get("logprobs", ()))
    assert deltas == {"reasoning_text": thinking, "output_text": text, "logprobs": text}
    kinds = ["reasoning"] * bool(thinking) + ["message"] * bool(text)
    assert [item["type"] for item in events[-1]["response"]["output"]] == kinds


def test_a_token_of_thinking_and_text_counts_for_the_text():
    output = Output()
    tokens = ["hm", "</think", ">\n\nYes", ",", " it", " is"]
    entries = [{"token": token, "bytes": list(token.encode())} for token in tokens]
    list(output.add(Found("Yes,"), entries[:4], len("hm</think>\n\n")))
    list(output.add(Found(" it"), entries[4:]))
    assert [entry["token"] for entry in output.items[0]["content"][0]["logprobs"]] == tokens[2:5]


def test_a_fault_in_thinking_ends_its_item():
    events = [*(output := Output()).add_thinking("hm"), *output.close("incomplete")]
    assert events[-1]["type"] == "response.output_item.done" and events[-1]["item"]["status"] == "incomplete"


@pytest.mark.parametrize("ask", [whole, streamed])
def test_thinking_that_is_sent_back_reaches_the_template(ask):
    prompts: list[str] = []

    def answer(prompt: str) -> str:
        prompts.append(prompt)
        return "<think>hm</think>Yes."

    with scripted(answer, template=LINES, reasoning_parser="qwen3") as server:
        first = ask(server)
        ask(server, input=[{"role": "user", "content": "a"}, *first.output, {"role": "user", "content": "b"}])
    assert prompts[-1].endswith("user: |a\nassistant: hm|Yes.\nuser: |b\nassistant:")


# ---- structured output


def test_the_client_parses_text_into_models(server):
    ask: dict[str, Any] = {"model": "fake", "input": "Åsa as JSON", "text_format": Person}
    response = server.client().responses.parse(**ask)
    assert response.output_parsed == ASA and response.text.format.name == "Person"
    with server.client().responses.stream(**ask) as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_parsed == ASA


def test_a_format_binds_a_model_that_says_something_else(server):
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    form = {"type": "json_schema", "name": "number", "schema": schema}
    assert json.loads(whole(server, text={"format": form}, temperature=0).output_text)["n"] in (1, 2)
    response = whole(server, text={"format": {"type": "json_object"}}, temperature=0, max_output_tokens=30)
    assert response.output_text.lstrip()[0] == "{" and response.text.format.type == "json_object"


# ---- LangChain


@tool
def weather(city: str, days: int = 1) -> str:
    """The weather in a city."""
    return f"{city}: rain for {days} days"


def answer_of(model: Any, messages: list[Any], *, streams: bool) -> AIMessage:
    if not streams:
        answer: AIMessage = model.invoke(messages)
        return answer
    chunks = [chunk for chunk in model.stream(messages) if isinstance(chunk, AIMessageChunk)]
    return sum(chunks[1:], start=chunks[0])


@pytest.mark.parametrize("streams", [False, True])
def test_an_agent_loop_of_langchain_ends_with_words(server, streams):
    options: dict[str, Any] = {"base_url": f"{server.url}/v1", "api_key": "none", "use_responses_api": True}
    model = ChatOpenAI(model="fake", max_retries=0, timeout=60, **options).bind_tools([weather])
    messages: list[Any] = [HumanMessage(QUESTION["content"])]
    for num_calls in (2, 0):
        answer = answer_of(model, messages, streams=streams)
        assert len(answer.tool_calls) == num_calls and not answer.invalid_tool_calls
        messages += [answer, *(weather.invoke(call) for call in answer.tool_calls)]
    assert messages[-1].text == "Rain here and there." and messages[1].text == "Let me look."


@pytest.mark.parametrize("version", ["v0", "responses/v1"])
@pytest.mark.parametrize("streams", [False, True])
def test_langchain_may_send_thinking_back(before, streams, version):
    options: dict[str, Any] = {"base_url": f"{before.url}/v1", "api_key": "none", "output_version": version}
    model = ChatOpenAI(model="fake", max_retries=0, timeout=60, use_responses_api=True, **options)
    question = HumanMessage("Hello")
    answer = answer_of(model, [question], streams=streams)
    assert answer.text == "Good day. 🌞" and "think>" not in str(answer.content)
    assert model.invoke([question, answer, question]).text == "Good day. 🌞"
