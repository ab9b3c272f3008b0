"""The two line formats of OpenAI's batches: requests in the input file, results in the output file.

A result's `id` names the input line that it answers: a hash of the line's bytes and of how many equal lines came before
it. So a resumed batch knows what is done without a file of its own, and an answer to a line that was changed since is
noticed.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from outpace.errors import UsageError

ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
_SEEDED = ROUTES[:2]  # the routes whose requests may have a seed
_ID_PREFIX = "batch_req_"


class BadLine(UsageError):
    """A line that is not a request. Its result says why."""

    def __init__(self, code: str, message: str, custom_id: str | None = None) -> None:
        super().__init__(message)
        self.code, self.custom_id = code, custom_id


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the input, not yet parsed."""

    number: int  # from 1, as editors count
    id: str
    content: bytes


@dataclass(frozen=True, slots=True)
class BatchRequest:
    custom_id: str
    url: str
    body: dict[str, Any]


def read_lines(path: Path) -> Iterator[Line]:
    """Every line of the input that is not blank."""
    seen: Counter[bytes] = Counter()
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            content = raw.strip()
            if content:
                digest = sha256(content).digest()
                yield line_of(number, content, seen[digest])
                seen[digest] += 1


def line_of(number: int, content: bytes, num_equal: int = 0) -> Line:
    """`num_equal`: equal lines before this one."""
    digest = sha256(content).digest()
    return Line(number, _ID_PREFIX + sha256(digest + num_equal.to_bytes(8, "little")).hexdigest()[:24], content)


def parse(line: Line) -> BatchRequest:
    """Raises BadLine if this is not a request that a batch can hold."""
    try:
        given = json.loads(line.content)
    except (ValueError, RecursionError) as error:
        raise BadLine("invalid_json_line", f"line {line.number} is not valid JSON ({error})") from None
    if not isinstance(given, dict):
        raise BadLine("invalid_json_line", f"line {line.number} is not a JSON object")
    custom_id = given.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        raise BadLine("missing_required_parameter", f"line {line.number} needs custom_id, a string that names it")

    def refuse(code: str, problem: str) -> BadLine:
        return BadLine(code, f"line {line.number}: {problem}", custom_id)

    unknown = sorted(set(given) - {"custom_id", "method", "url", "body"})
    if unknown:
        raise refuse("unknown_parameter", f"unrecognized field {unknown[0]!r}; parameters belong into body")
    if given.get("method", "POST") != "POST":
        raise refuse("invalid_method", 'method must be "POST"')
    if given.get("url") not in ROUTES:
        raise refuse("invalid_url", f"url must be one of {', '.join(ROUTES)}")
    body = given.get("body")
    if not isinstance(body, dict):
        raise refuse("missing_required_parameter", "body must be the JSON object that the route takes")
    if body.get("stream"):
        raise refuse("unsupported_parameter", "an answer in a file cannot be streamed; leave out stream")
    return BatchRequest(custom_id, given["url"], body)


def seeded(request: BatchRequest, line: Line, seed: int) -> BatchRequest:
    """The request with a seed of its own, if it has none and its route takes one.

    It depends on the line alone, so that a resumed batch gives the answers that an uninterrupted one gives.
    """
    if request.url not in _SEEDED or request.body.get("seed") is not None:
        return request
    own = int.from_bytes(sha256(f"{seed}:{line.id}".encode()).digest()[:8], "little")
    return BatchRequest(request.custom_id, request.url, {**request.body, "seed": own})


def answered(line: Line, custom_id: str, status: int, request_id: str, body: Any) -> dict[str, Any]:
    """The result of a line that a route has answered, with success or with an error."""
    response = {"status_code": status, "request_id": request_id, "body": body}
    return {"id": line.id, "custom_id": custom_id, "response": response, "error": None}


def refused(line: Line, problem: BadLine) -> dict[str, Any]:
    """The result of a line that no route has seen."""
    error = {"code": problem.code, "message": str(problem)}
    return {"id": line.id, "custom_id": problem.custom_id, "response": None, "error": error}


def is_failure(result: dict[str, Any]) -> bool:
    response = result["response"]
    return response is None or response["status_code"] != 200


def failure_message(result: dict[str, Any]) -> str:
    response = result["response"]
    message: str = result["error"]["message"] if response is None else response["body"]["error"]["message"]
    return message


def check_result(content: bytes) -> dict[str, Any] | None:
    """A line of an output file, or None if no batch of ours wrote it."""
    try:
        result = json.loads(content)
    except (ValueError, RecursionError):
        return None
    if not isinstance(result, dict) or not str(result.get("id", "")).startswith(_ID_PREFIX):
        return None
    return result if {"custom_id", "response", "error"} <= set(result) else None
