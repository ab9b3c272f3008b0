"""Programs on any server with OpenAI's API: Outpace, vLLM, SGLang, llama.cpp, or a service.

Plain text uses /v1/completions. A conversation uses /v1/chat/completions; where the program has begun the answer, the
request asks the server to continue its last message, as vLLM and Outpace can. Selections are scored by the echoed
log-probabilities of each choice; in a conversation, which has no echo, by constrained decoding.

A server takes requests in the order of their arrival, so a program that goes on would wait behind all that have not
begun, and lose its prefix from the cache meanwhile. A server of Outpace is asked to start such calls first: a program
then keeps its place, as one long generation would.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import fields
from itertools import count, takewhile
from queue import PriorityQueue
from threading import Thread
from typing import Any

import httpx

from outpace.config import SamplingParams
from outpace.errors import OutpaceError
from outpace.programs.parts import Answer, Call, Gen, Select
from outpace.structured import StructuredOutput

_TIMEOUT = httpx.Timeout(600.0, connect=10.0)
_BUSY = (429, 503)
_MOST_ATTEMPTS = 6  # of a request that a busy server refuses
_LONGEST_PAUSE = 30.0  # seconds before the next attempt
_DEFAULTS = SamplingParams()
# Sent always: servers have other defaults. Sent where a program sets it: the rest, by vLLM's names.
_ALWAYS = ("max_tokens", "temperature")
_GOES_ON = -1  # priority of a call that continues a program; others have 0, and a lower number starts first
_STOP = -1  # before all calls, whose numbers begin with 0
_LOCAL = frozenset({"structured", "speculation", "prediction", "n", "pooling", "prompt_logprobs", "visible_tokens"})


class Server:
    """The address of a server, such as "http://127.0.0.1:8000/v1". Without a name, its first model is used."""

    def __init__(self, url: str, *, model: str | None = None, api_key: str | None = None) -> None:
        self.url = url.rstrip("/") if url.rstrip("/").endswith("/v1") else f"{url.rstrip('/')}/v1"
        self.model = model
        self.api_key = api_key


class OnServer:
    """A backend of programs; see `parts.Backend`. At most `at_once` requests are under way."""

    def __init__(self, server: Server, *, at_once: int) -> None:
        headers = {"Authorization": f"Bearer {server.api_key}"} if server.api_key else {}
        limits = httpx.Limits(max_connections=at_once, max_keepalive_connections=at_once)
        self._url = server.url
        self._http = httpx.Client(headers=headers, timeout=_TIMEOUT, limits=limits)
        self._model, self._has_priorities = self._find_model(server.model)
        self._numbers = count()
        # By the program's number, then by arrival; no call: stop.
        self._due: PriorityQueue[tuple[int, int, Call | None]] = PriorityQueue()
        self._cancelled: set[Call] = set()
        # Daemons, unlike the threads of an executor: a server that does not answer must not keep Python from ending.
        self._threads = [Thread(target=self._work, name=f"call-{i}", daemon=True) for i in range(at_once)]
        for thread in self._threads:
            thread.start()

    def submit(self, call: Call) -> None:
        self._due.put((call.priority, next(self._numbers), call))

    def cancel(self, calls: Sequence[Call]) -> None:
        self._cancelled.update(calls)

    def close(self) -> None:
        for _ in self._threads:
            self._due.put((_STOP, next(self._numbers), None))
        self._http.close()

    def _work(self) -> None:
        while (call := self._due.get()[-1]) is not None:
            if call not in self._cancelled:
                self._answer(call)

    def _answer(self, call: Call) -> None:
        try:
            found: Answer | OutpaceError = (
                self._selected(call, call.part) if isinstance(call.part, Select) else self._generated(call)
            )
        except OutpaceError as error:
            found = error
        except Exception as error:  # of this call alone; the thread serves the others
            found = OutpaceError(f"the answer of {self._url} is not in OpenAI's form ({error!r}); check the address")
        call.done(found)

    def _generated(self, call: Call) -> Answer:
        assert isinstance(call.part, Gen)
        body = _sampling(call.params) | _form(call.params.structured) | self._order(call)
        if call.prompt.messages:
            reply = self._post("chat/completions", body | _messages(call))
            text = reply["choices"][0]["message"]["content"] or ""
        else:
            reply = self._post("completions", body | {"prompt": call.prompt.text})
            text = reply["choices"][0]["text"]
        return _counted(Answer(text, reply["choices"][0]["finish_reason"]), reply)

    def _selected(self, call: Call, part: Select) -> Answer:
        if call.prompt.messages:
            longest = max(len(choice.encode()) for choice in part.choices)  # no token is less than a byte
            body = {"temperature": 0.0, "max_tokens": 1 + longest, **_form(StructuredOutput(choice=part.choices)),
                    **self._order(call)}  # fmt: skip
            reply = self._post("chat/completions", body | _messages(call))
            return _counted(Answer(reply["choices"][0]["message"]["content"], "stop"), reply)
        body = {"max_tokens": 0, "echo": True, "logprobs": 0, "temperature": 0.0, **self._order(call)}
        replies = [self._post("completions", body | {"prompt": call.prompt.text + each}) for each in part.choices]
        echoed = [reply["choices"][0]["logprobs"] for reply in replies]
        # Tokens of the text before may differ by choice: scores begin with the first one that differs.
        before = zip(*(_before(each, len(call.prompt.text)) for each in echoed), strict=False)
        first = sum(1 for _ in takewhile(lambda tokens: len(set(tokens)) == 1, before))
        answer = part.chosen([each["token_logprobs"][max(1, first) :] for each in echoed])
        for reply in replies:
            _counted(answer, reply)
        return answer

    def _find_model(self, wanted: str | None) -> tuple[str, bool]:
        """The model's name, and whether the server is known to take priorities: vLLM refuses them by default."""
        try:
            listed = self._ask("GET", "models", None, attempts=_MOST_ATTEMPTS if wanted is None else 1)["data"]
            return wanted or str(listed[0]["id"]), any(each.get("owned_by") == "outpace" for each in listed)
        except (OutpaceError, ValueError, LookupError, TypeError, AttributeError) as error:
            if wanted is not None:
                return wanted, False  # not every service lists its models; if it is not there, the first call says so
            if isinstance(error, OutpaceError):
                raise
            raise OutpaceError(
                f"{self._url} does not list its models in OpenAI's form; check the address, or name a model"
            ) from error

    def _order(self, call: Call) -> dict[str, Any]:
        return {"priority": _GOES_ON} if call.goes_on and self._has_priorities else {}

    def _post(self, path: str, body: Mapping[str, Any]) -> Any:
        return self._ask("POST", path, {"model": self._model, **body})

    def _ask(self, method: str, path: str, body: Mapping[str, Any] | None, *, attempts: int = _MOST_ATTEMPTS) -> Any:
        for attempt in range(1, attempts + 1):
            try:
                response = self._http.request(method, f"{self._url}/{path}", json=body)
            except (httpx.HTTPError, httpx.InvalidURL, RuntimeError) as error:  # RuntimeError: the client was closed
                raise OutpaceError(
                    f"{self._url} did not answer ({error or type(error).__name__}); check the address and the server"
                ) from error
            if response.status_code not in _BUSY or attempt == attempts:
                break
            wanted = response.headers.get("retry-after", "")
            time.sleep(min(_LONGEST_PAUSE, float(wanted) if wanted.isdigit() else 0.5 * 2**attempt))
        if response.is_error:
            raise OutpaceError(f"{self._url} refused with status {response.status_code}: {_reason(response)}")
        return response.json()


def _sampling(params: SamplingParams) -> dict[str, Any]:
    values = {each.name: getattr(params, each.name) for each in fields(params) if each.name not in _LOCAL}
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in values.items()
        if name in _ALWAYS or value != getattr(_DEFAULTS, name)
    }


def _form(structured: StructuredOutput | None) -> dict[str, Any]:
    """OpenAI's field where it has one, else vLLM's."""
    if structured is None:
        return {}
    if structured.json_object:
        return {"response_format": {"type": "json_object"}}
    if structured.json_schema is not None:
        schema = json.loads(str(structured.json_schema))
        return {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}}
    given = {name: getattr(structured, name) for name in ("regex", "choice", "grammar")}
    return {"structured_outputs": {name: value for name, value in given.items() if value is not None}}


def _messages(call: Call) -> dict[str, Any]:
    body: dict[str, Any] = {"messages": call.prompt.as_messages()}
    if call.prompt.text:
        body |= {"add_generation_prompt": False, "continue_final_message": True}
    return body


def _before(echoed: Mapping[str, Any], length: int) -> list[str]:
    """The tokens that begin and end in the first `length` characters."""
    tokens, offsets = echoed["tokens"], echoed["text_offset"]
    ends = [*offsets[1:], length + 1]
    return [token for token, end in zip(tokens, ends, strict=True) if end <= length]


def _counted(answer: Answer, reply: Mapping[str, Any]) -> Answer:
    usage = reply.get("usage") or {}
    answer.num_prompt_tokens += usage.get("prompt_tokens") or 0
    answer.num_cached_tokens += (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    answer.num_tokens += usage.get("completion_tokens") or 0
    return answer


def _reason(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return response.text[:200] or response.reason_phrase
