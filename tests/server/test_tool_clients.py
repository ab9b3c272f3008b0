"""Tools through clients that others build on the API: LangChain and LiteLLM."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from openai import pydantic_function_tool
from pydantic import BaseModel, Field

from outpace.models.tool_calls import SYNTAXES
from outpace.models.tool_calls.syntax import Call
from tests.scripted_model import scripted
from tests.server_helper import LiveServer

HERMES = SYNTAXES["hermes"]


@tool
def weather(city: str, days: int = 1) -> str:
    """The weather in a city."""
    return f"{city}: rain for {days} days"


@tool
def add(numbers: list[int]) -> int:
    """The sum of numbers."""
    return sum(numbers)


TOOLS = {each.name: each for each in (weather, add)}


class Person(BaseModel):
    """A person."""

    name: str
    age: int = Field(ge=0, le=150)
    languages: list[str] = []


class Strict(BaseModel):
    name: str
    age: int
    languages: list[str]


PERSON: dict[str, Any] = {"name": "Åsa", "age": 41, "languages": ["sv", "en"]}


def act(prompt: str) -> str:
    """The answer of an agent's model: two calls at once, then one with a result in it, then words."""
    if "as JSON" in prompt:
        return json.dumps(PERSON, ensure_ascii=False)
    if "Person" in prompt:
        return HERMES.write([Call("Person", PERSON)])
    if "<tool_response>\n7\n" in prompt:
        return "It rains for seven days."
    if "rain for" in prompt:
        return "Adding.\n" + HERMES.write([Call("add", {"numbers": [3, 4]})])
    return HERMES.write([Call("weather", {"city": "Oslo", "days": 3}), Call("weather", {"city": "Rome", "days": 4})])


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with scripted(act) as server:
        yield server


# ---- LangChain


def langchain(server: LiveServer, **options: Any) -> ChatOpenAI:
    return ChatOpenAI(model="fake", base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60, **options)  # type: ignore[arg-type]


def run_calls(message: AIMessage) -> list[ToolMessage]:
    assert not message.invalid_tool_calls
    return [TOOLS[call["name"]].invoke(call) for call in message.tool_calls]


@pytest.mark.parametrize("streams", [False, True])
def test_an_agent_loop_of_langchain_ends_with_words(server, streams):
    model = langchain(server).bind_tools(list(TOOLS.values()))
    messages: list[Any] = [HumanMessage("How long does it rain in Oslo and Rome together?")]
    num_calls = []
    for _ in range(5):
        if streams:
            chunks = [chunk for chunk in model.stream(messages) if isinstance(chunk, AIMessageChunk)]
            answer: AIMessage = sum(chunks[1:], start=chunks[0])
        else:
            answer = model.invoke(messages)
        messages.append(answer)
        num_calls.append(len(answer.tool_calls))
        if not answer.tool_calls:
            break
        messages += run_calls(answer)
    assert num_calls == [2, 1, 0] and messages[-1].content == "It rains for seven days."
    assert messages[4].content == "Adding."


@pytest.mark.parametrize("strict", [None, True])
def test_structured_output_of_langchain_by_a_call(server, strict):
    model = langchain(server).with_structured_output(Person, method="function_calling", strict=strict)
    assert model.invoke("Who is Åsa?") == Person(**PERSON)


@pytest.mark.parametrize("method", ["json_schema", "json_mode"])
def test_structured_output_of_langchain_by_a_format(server, method):
    model = langchain(server).with_structured_output(Person, method=method)
    assert model.invoke("Who is Åsa, as JSON?") == Person(**PERSON)


# ---- OpenAI's own helpers for pydantic


def test_the_openai_client_parses_calls_into_models(server):
    ask = {"model": "fake", "messages": [{"role": "user", "content": "Who is Åsa?"}]}
    answer = server.client().chat.completions.parse(**ask, tools=[pydantic_function_tool(Strict, name="Person")])
    [call] = answer.choices[0].message.tool_calls
    assert call.function.parsed_arguments == Strict(**PERSON)


# ---- LiteLLM


def schema_of(tool: Any) -> dict[str, Any]:
    found: dict[str, Any] = tool.get_input_schema().model_json_schema()
    return found


FUNCTIONS = [
    {"type": "function", "function": {"name": each.name, "parameters": schema_of(each)}} for each in TOOLS.values()
]


@pytest.fixture
def litellm(monkeypatch) -> Any:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # otherwise it asks the network at its import
    import litellm

    return litellm


@pytest.mark.parametrize("streams", [False, True])
def test_litellm_follows_a_loop_of_calls(server, litellm, streams):
    messages: list[Any] = [{"role": "user", "content": "How long does it rain in Oslo and Rome together?"}]
    ask: dict[str, Any] = {
        "model": "openai/fake",
        "api_base": f"{server.url}/v1",
        "api_key": "none",
        "tools": FUNCTIONS,
    }
    ask["_skip_mcp_handler"] = True  # some releases load their MCP part, an extra, for any tools
    num_calls = []
    for _ in range(5):
        reply = litellm.completion(**ask, messages=messages, stream=streams)
        if streams:
            reply = litellm.stream_chunk_builder(list(reply), messages=messages)
        choice = reply.choices[0]
        messages.append(choice.message.model_dump())
        calls = choice.message.tool_calls or []
        num_calls.append(len(calls))
        if not calls:
            break
        assert choice.finish_reason == "tool_calls"
        for call in calls:
            result = TOOLS[call.function.name].invoke(json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})
    assert num_calls == [2, 1, 0] and messages[-1]["content"] == "It rains for seven days."


def test_litellm_gets_the_format_it_asks_for(server, litellm):
    messages = [{"role": "user", "content": "Who is Åsa, as JSON?"}]
    reply = litellm.completion(
        model="openai/fake", api_base=f"{server.url}/v1", api_key="none", messages=messages, response_format=Person
    )
    assert Person.model_validate_json(reply.choices[0].message.content) == Person(**PERSON)
