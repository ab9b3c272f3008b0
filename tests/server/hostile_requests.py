"""Requests that nobody should send, drawn from a seeded generator: wrong fields, broken JSON, broken HTTP."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any

from pydantic import BaseModel

from outpace.server.embeddings import EmbeddingRequest
from outpace.server.messages.wire import CountTokensRequest, MessagesRequest
from outpace.server.responses.request import ResponsesRequest
from outpace.server.wire import ChatRequest, CompletionRequest, DetokenizeRequest, SpeculationFields, TokenizeRequest
from tests.schemas import SchemaMaker

Fields = dict[str, Any]

_SHORT: Fields = {"max_tokens": 8, "seed": 1}
_SHORT_RESPONSE: Fields = {"max_output_tokens": 8, "seed": 1}
_QUESTION = [{"role": "user", "content": "Hello"}]
_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {}}}}}
ENDPOINTS: dict[str, tuple[type[BaseModel], Fields]] = {
    "/v1/completions": (CompletionRequest, {"prompt": "ab", **_SHORT}),
    "/v1/chat/completions": (ChatRequest, {"messages": _QUESTION, **_SHORT}),
    "/v1/chat/completions?tools": (ChatRequest, {"messages": _QUESTION, "tools": [_TOOL], **_SHORT}),
    "/v1/responses": (ResponsesRequest, {"input": _QUESTION, **_SHORT_RESPONSE}),
    "/v1/embeddings": (EmbeddingRequest, {"input": ["ab", "c"]}),
    "/v1/messages": (MessagesRequest, {"messages": _QUESTION, **_SHORT}),
    "/v1/messages/count_tokens": (CountTokensRequest, {"messages": _QUESTION}),
    "/tokenize": (TokenizeRequest, {"prompt": "ab"}),
    "/detokenize": (DetokenizeRequest, {"tokens": [97, 98]}),
}
PATHS = (*ENDPOINTS, "/health", "/metrics", "/version", "/v1/models", "/v1/models/fake", "/reset_prefix_cache", "/docs")
_NUMBERS = (0, -1, 1, 2, 20, 128, 257, 2**31 - 1, 2**31, 2**53 + 1, 2**63, 2**64, -(2**63) - 1, 10**40, 0.0, -0.0)
_FLOATS = (0.5, 1.0, 2.0, 1e-320, 1e308, -1e308, 1.5, float("nan"), float("inf"), -float("inf"))
_TEXTS = (
    "", "a", "user", "auto", "exact", "\x00", "\ud800", "\udfff\ud800", "é" * 300, "🙂" * 50, "<|im_end|>",
    "\r\n\x1b[31m",
)  # fmt: skip


def any_value(rng: Random, depth: int = 0) -> Any:
    """A value of any JSON type, with extremes among them."""
    kind = rng.randrange(8 if depth < 4 else 5)
    if kind == 0:
        return rng.choice((None, True, False))
    if kind == 1:
        return rng.choice(_NUMBERS)
    if kind == 2:
        return rng.choice(_FLOATS)
    if kind <= 4:
        return rng.choice(_TEXTS) * rng.choice((1, 1, 1, 7, 500))
    if kind == 5:
        return {str(any_value(rng, 5))[:40]: any_value(rng, depth + 1) for _ in range(rng.randrange(4))}
    if kind == 6:
        value = any_value(rng, depth + 1)
        return [value] * (rng.choice((3, 1000)) if len(repr(value)) < 50 else 1)
    return [any_value(rng, depth + 1) for _ in range(rng.randrange(4))]


def right(rng: Random) -> tuple[str, bytes]:
    """What others must still get while all the rest goes on."""
    path, (kind, valid) = rng.choice(list(ENDPOINTS.items()))
    return path, json.dumps(valid | {"stream": rng.random() < 0.5} if "stream" in kind.model_fields else valid).encode()


def wrong_fields(rng: Random) -> tuple[str, bytes]:
    """A valid request in which up to three fields have some other value."""
    path, (kind, valid) = rng.choice(list(ENDPOINTS.items()))
    body = dict(valid)
    for _ in range(rng.randrange(1, 4)):
        names = [*kind.model_fields, "unknown", "", "__class__"]
        body[rng.choice(names)] = any_value(rng)
    if "speculation" in kind.model_fields and rng.random() < 0.2:
        body["speculation"] = {rng.choice(list(SpeculationFields.model_fields)): any_value(rng)}
    if "prediction" in kind.model_fields and rng.random() < 0.2:
        body["prediction"] = {"type": "content", "content": any_value(rng)}
    if "prompt_logprobs" in kind.model_fields and rng.random() < 0.2:
        body["prompt_logprobs"] = rng.choice((0, 1, 20, any_value(rng)))
    if "echo" in kind.model_fields and rng.random() < 0.2:
        body |= {"echo": True, "logprobs": rng.choice((0, 20)), "max_tokens": rng.choice((0, 0, 8, any_value(rng)))}
    if "structured_outputs" in kind.model_fields and rng.random() < 0.2:
        body |= wrong_form(rng, kind)
    if "messages" in body and rng.random() < 0.3:
        message = {rng.choice(("role", "content", "name", "tool_calls")): any_value(rng) for _ in range(2)}
        body["messages"] = [{"role": "user", "content": "a"}, message]
    if "input" in body and rng.random() < 0.5:
        body["input"] = [{"role": "user", "content": "a"}, *(wrong_item(rng) for _ in range(rng.randrange(1, 4)))]
    return path, json.dumps(body).encode()


_ITEMS: tuple[Fields, ...] = (
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a", "annotations": []}]},
    {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "1", "output": "a"},
    {"type": "reasoning", "summary": []},
    {"type": "item_reference", "id": "1"},
)


def wrong_item(rng: Random) -> Fields:
    """An item of a response's input, in most cases with another value or without a field."""
    item = dict(rng.choice(_ITEMS))
    name = rng.choice(list(item))
    if rng.random() < 0.5:
        item[name] = [{"type": rng.choice(("input_text", "input_image", any_value(rng))), "text": any_value(rng)}]
    elif rng.random() < 0.7:
        item[name] = any_value(rng)
    elif rng.random() < 0.3:
        del item[name]
    return item


_REGEXES = ("(a*)*", "[", "a{1000000}", "(.*a){50}", "(?=a)", r"\b", "\ud800", "x" * 9000, "((((a|b)*)*)*)*c")
_GRAMMARS = (
    "start: start",
    'start: start start | "a" | ""',
    "start: /[/",
    "x",
    'start: "a" b',
    "%import x",
    'start: ""',
    "start: @described",
    '{"grammars": []}',
    '{"grammars": 1}',
    "{",
)


def wrong_form(rng: Random, kind: type[BaseModel]) -> Fields:
    """A description of structured output: valid, broken, unsatisfiable or expensive."""
    schema: Any = SchemaMaker(rng.randrange(1000)).make()
    for _ in range(rng.randrange(3)):
        schema = {rng.choice(("anyOf", "allOf", "items", "$ref", "not", "enum", "pattern")): any_value(rng), **schema}
    forms: Fields = {
        "guided_json": schema,
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}},
        "text": {"format": {"type": "json_schema", "name": "a", "schema": schema}},
        "guided_regex": rng.choice(_REGEXES),
        "guided_grammar": rng.choice(_GRAMMARS),
        "structured_outputs": {rng.choice(("json", "regex", "choice", "grammar", "x")): any_value(rng)},
    }
    name = rng.choice([name for name in forms if name in kind.model_fields])
    return {name: forms[name]}


_SCHEMAS: tuple[Any, ...] = (
    {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False},
    {"type": "object", "properties": {"a": {"type": "string", "pattern": "(a{1,99}){1,99}b"}}},
    {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
    {"type": "object", "properties": {"a": {"$ref": "http://localhost/x"}}},
    {"allOf": [{"required": ["a"]}, {"properties": {"a": False}}]},
    {"anyOf": [{"properties": {f"p{i}": {"enum": list(range(50))}}} for i in range(20)]},
    {"type": "object", "x-guidance": {"whitespace_pattern": ".*"}},
)


def tools(rng: Random) -> tuple[str, bytes]:
    """Functions with names, schemas and choices of any kind, and calls of them in the history."""
    schema = any_value(rng) if rng.random() < 0.3 else rng.choice(_SCHEMAS)
    for _ in range(rng.choice((0, 0, 0, 30, 90, 300))):
        schema = {"type": "object", "properties": {"a": schema}}
    function: Fields = {"name": rng.choice(("f", "g", "get-it", "a b", "x" * 65, any_value(rng))), "parameters": schema}
    if rng.random() < 0.3:
        function[rng.choice(("description", "strict", "more"))] = any_value(rng)
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": rng.choice(_ARGUMENTS)}}
    if rng.random() < 0.3:
        call = {**call, rng.choice(list(call)): any_value(rng)}
    named = {"type": "function", "function": {"name": rng.choice(("f", "g"))}}
    body: Fields = {
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": None, "tool_calls": _several(rng, call)},
            {"role": "tool", "tool_call_id": rng.choice(("call_1", any_value(rng))), "content": "<|im_end|>"},
        ][: rng.choice((1, 3))],
        "tools": _several(rng, {"type": "function", "function": function}),
        "tool_choice": rng.choice(("auto", "required", "none", named, any_value(rng))),
        "parallel_tool_calls": rng.choice((True, False, None)),
        "stream": rng.random() < 0.5,
    }
    if rng.random() < 0.4:
        return "/v1/responses", json.dumps(_as_response(body) | _SHORT_RESPONSE).encode()
    return "/v1/chat/completions", json.dumps(body | _SHORT).encode()


def _as_response(body: Fields) -> Fields:
    """The same functions, calls and results as a request of the Responses API."""
    question, *answered = body["messages"]
    items = [question]
    if answered:
        calls, result = answered
        items += [{"type": "function_call", "call_id": call.get("id"), **_dict(call)} for call in calls["tool_calls"]]
        items += [{"type": "function_call_output", "call_id": result["tool_call_id"], "output": result["content"]}]
    choice = body["tool_choice"]
    return {
        **{name: value for name, value in body.items() if name != "messages"},
        "input": items,
        "tools": [{"type": "function", **_dict(tool)} for tool in body["tools"]],
        "tool_choice": {"type": "function", **_dict(choice)} if isinstance(choice, dict) else choice,
    }


def _dict(described: Fields) -> Fields:
    function = described.get("function")
    return function if isinstance(function, dict) else {"name": function}


_BLOCKS: tuple[Fields, ...] = (
    {"type": "text", "text": "a"},
    {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"a": 1}},
    {"type": "tool_result", "tool_use_id": "toolu_1", "content": "<|im_end|>"},
    {"type": "thinking", "thinking": "hm", "signature": ""},
    {"type": "image", "source": {}},
)


def blocks(rng: Random) -> tuple[str, bytes]:
    """Messages of Anthropic's format: blocks of any kind in any role, and own and foreign tools."""

    def block() -> Any:
        found = rng.choice(_BLOCKS)
        if rng.random() < 0.2:
            found = {**found, rng.choice(list(found)): any_value(rng)}
        return found

    turns = [
        {"role": rng.choice(("user", "user", "assistant", "system")), "content": [block()] * rng.choice((0, 1, 1, 2))}
        for _ in range(rng.randrange(1, 4))
    ]
    schema = any_value(rng) if rng.random() < 0.2 else rng.choice(_SCHEMAS)
    kind = rng.choice(("auto", "any", "tool", "none", any_value(rng)))
    choice = {"type": kind, "name": "f"} if kind == "tool" else {"type": kind}
    thinking = {"type": rng.choice(("enabled", "disabled", "adaptive", any_value(rng))), "budget_tokens": 9}
    body: Fields = {"messages": turns, "stream": rng.random() < 0.5, **_SHORT}
    for name, value in (("tools", [{"name": "f", "input_schema": schema}]), ("tool_choice", choice),
                        ("thinking", thinking), ("system", [block()])):  # fmt: skip
        if rng.random() < 0.4:
            body[name] = value
    return "/v1/messages", json.dumps(body).encode()


def _several(rng: Random, value: Any) -> list[Any]:
    """One or more of it, in a body that is not too large to be read."""
    return [value] * (rng.choice((1, 1, 2, 150)) if len(repr(value)) < 1000 else 1)


_ARGUMENTS = ("{}", '{"a": 1}', "", "oops", "[" * 2000, '{"a":' * 100 + "1" + "}" * 100, "9" * 5000, '"\\ud800"', "NaN")


def deep(rng: Random) -> tuple[str, bytes]:
    path, (_, valid) = rng.choice(list(ENDPOINTS.items()))
    levels = rng.choice((10, 900, 1100, 20_000))
    opening, closing = rng.choice((("[", "]"), ('{"a":', "}")))
    nested = opening * levels + "1" + closing * rng.choice((levels, 0, levels - 1))
    field = rng.choice(
        (
            '"metadata": %s',
            '"chat_template_kwargs": %s',
            '"guided_json": %s',
            '"tools": [{"type": "function", "name": "f", "parameters": %s}]',
            '"text": {"format": {"type": "json_schema", "name": "a", "schema": %s}}',
        )
    )
    return path, f"{json.dumps(valid)[:-1]}, {field % nested}}}".encode()


def huge(rng: Random) -> tuple[str, bytes]:
    """Large texts, lists and numbers, below and above the limit of a body."""
    path, (_, valid) = rng.choice(list(ENDPOINTS.items()))
    size = rng.choice((3000, 60_000, 250_000))
    value: str = rng.choice(
        (
            json.dumps("a" * size),
            json.dumps("<|im_end|>" * (size // 10)),
            "9" * size,
            "1e" + "9" * min(size, 1000),
            "[" + ",".join(["1"] * (size // 2)) + "]",
            "[" + ",".join(['""'] * (size // 3)) + "]",
            "{" + ",".join(f'"{i}":1' for i in range(size // 10)) + "}",
        )
    )
    field = rng.choice(("prompt", "messages", "input", "instructions", "tokens", "stop", "seed", "logit_bias",
                        "stop_token_ids", "n", "user",
                        "bad_words", "chat_template_kwargs", "guided_json", "guided_regex",
                        "guided_choice"))  # fmt: skip
    body = {name: kept for name, kept in valid.items() if name != field}
    return path, json.dumps(body)[:-1].encode() + b"," * bool(body) + f'"{field}": {value}}}'.encode()


def broken_json(rng: Random) -> tuple[str, bytes]:
    path, data = wrong_fields(rng)
    broken = bytearray(data)
    for _ in range(rng.randrange(1, 6)):
        at = rng.randrange(len(broken) + 1)
        action = rng.randrange(4)
        if action == 0:
            del broken[at:]
        elif action == 1:
            broken[at : at + 1] = rng.randbytes(1)
        elif action == 2:
            broken[at:at] = rng.choice(
                (b"\xff", b"\x00", b'"', b"}", b"[", b"\\u", b"NaN", b"-", b",", b"\xef\xbb\xbf")
            )
        else:
            broken[at:at] = broken[: rng.randrange(len(broken) + 1)]
    return path, bytes(broken[:200_000])


BODIES: tuple[Callable[[Random], tuple[str, bytes]], ...] = (
    right,
    wrong_fields,
    tools,
    blocks,
    deep,
    huge,
    broken_json,
)


def as_http(path: str, data: bytes, *, extra: bytes = b"connection: close\r\n") -> bytes:
    head = (
        f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n"
    )
    return head.encode() + extra + b"\r\n" + data


_ODD_HEADERS = (
    b"content-length: 5", b"content-length: -1", b"content-length: 99999999999999999999", b"content-length: 1, 2",
    b"content-length: +3", b"transfer-encoding: chunked", b"transfer-encoding: gzip, chunked", b"expect: 100-continue",
    b"connection: upgrade\r\nupgrade: websocket", b"connection: upgrade\r\nupgrade: h2c", b"host: a\r\nhost: b",
    b"host: \xff", b"x: y\r\n folded", b"x\x00: y", b"x : y", b": y", b"\x80: y", b"x: " + b"y" * 20_000,
    b"content-type: text/plain", b"content-type: \xff", b"content-type: application/json; charset=\xff",
    b"content-encoding: gzip", b"authorization: Bearer \xff\xfe", b"authorization: \x01", b"origin: http://[",
    b"origin: https://page.example", b"x-request-id: " + b"\xe9" * 200, b"accept: \xff;q=", b"connection: close",
    b"accept: application/openmetrics-text; version=1.0.0; escaping=\xff",
)  # fmt: skip
_ODD_TARGETS = (
    b"*", b"http://other/health", b"//", b"/%00", b"/%0a%1b[31m", b"/%ff%fe", b"/v1/models/%2e%2e%2f", b"/\xff",
    b"/health?" + b"a=1&" * 500, b"/" + b"a" * 5000, b"/v1/models/" + b"%F0%9F%99%82" * 50, b"/v1/../health", b"/#",
)  # fmt: skip
_CHUNKS = (
    b"0\r\n\r\n", b"2\r\n{}\r\n0\r\n\r\n", b"ZZ\r\n", b"-1\r\n", b"ffffffffffffffffffff\r\n", b"2\r\n{}",
    b"2;x=y\r\n{}\r\n", b"0\r\ntrailer: a\r\n\r\n", b"1\r\na\r\n" * 3000, b"\r\n", b"2\r\n{}XX",
)  # fmt: skip


_METHODS = (b"GET", b"POST", b"HEAD", b"OPTIONS", b"CONNECT", b"PUT", b"get", b"\x16\x03\x01", b"X" * 300)
_VERSIONS = (*[b"HTTP/1.1"] * 5, b"HTTP/1.0", b"HTTP/0.9", b"HTTP/2.0", b"HTTP/1.1\x00", b"")


def broken_http(rng: Random) -> bytes:
    """A request whose method, target, version, headers or chunks are odd or wrong; several in a row, or cut off."""
    parts = []
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        method = rng.choice(
            (b"GET", b"POST", b"HEAD", b"OPTIONS", b"CONNECT", b"PUT", b"get", b"\x16\x03\x01", b"X" * 300)
        )
        target = rng.choice(_ODD_TARGETS) if rng.random() < 0.3 else rng.choice(PATHS).encode()
        version = rng.choice(
            (b"HTTP/1.1", b"HTTP/1.1", b"HTTP/1.1", b"HTTP/1.0", b"HTTP/0.9", b"HTTP/2.0", b"HTTP/1.1\x00", b"")
        )
        headers = [b"host: x"] * (rng.random() < 0.9) + rng.sample(_ODD_HEADERS, rng.choice((0, 0, 0, 1, 2, 3)))
        headers += [b"transfer-encoding: chunked"] * (rng.random() < 0.3)
        end = rng.choice((b"\r\n", b"\r\n", b"\r\n", b"\n"))
        head = end.join((method + b" " + target + b" " + version, *headers)) + end + end
        body = b"".join(rng.choices(_CHUNKS, k=rng.randrange(1, 4))) if b"chunked" in head else b'{"prompt": "ab"}'
        parts.append(head + body * (rng.random() < 0.6))
    data = bytearray(b"".join(parts))
    if rng.random() < 0.3:
        del data[rng.randrange(len(data) + 1) :]
    for _ in range(rng.choice((0, 0, 1, 4))):
        data[rng.randrange(len(data) + 1) : 0] = rng.randbytes(1)
    return bytes(data)
