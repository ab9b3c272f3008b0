"""Loads prompts from common files: Spec-Bench, MT-Bench, ShareGPT, HumanEval, GSM8K, instructions in Alpaca's and
Self-Instruct's form, and plain JSON lines.

The format is recognised by the fields of a record, not by the file's name. Gzip files need no unpacking. Spec-Bench
and MT-Bench have only the user's turns; the first is used, because later ones need the model's answers.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outpace.bench.workloads import Message, Prompt
from outpace.errors import UsageError

DEFAULT_MAX_TOKENS = 128
_SHAREGPT_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "system": "system"}
_FORMATS = "`prompt` or `messages`, or the fields of Spec-Bench, MT-Bench, ShareGPT, HumanEval, GSM8K or Alpaca"


def load_prompts(path: Path, max_tokens: int = DEFAULT_MAX_TOKENS) -> list[Prompt]:
    """Every usable prompt of the file. A record's own max_tokens, temperature or class is kept."""
    prompts = []
    for number, record in enumerate(_records(path), start=1):
        if not isinstance(record, Mapping):
            raise UsageError(f"{path}, record {number}: expected an object with {_FORMATS}")
        try:
            prompt = _prompt(record, path.name.split(".")[0].lower(), max_tokens)
        except (TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
            raise UsageError(f"{path}, record {number}: expected {_FORMATS}; {error}") from error
        if prompt is not None:
            prompts.append(prompt)
    if not prompts:
        raise UsageError(f"{path} holds no prompt; each record needs {_FORMATS}")
    return prompts


def _records(path: Path) -> list[Any]:
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode("utf-8-sig")
    except OSError as error:
        raise UsageError(f"cannot read the prompts {path}: {error.strerror or error}; check the path") from error
    except (UnicodeDecodeError, zlib.error, EOFError) as error:
        raise UsageError(f"{path} is not UTF-8 text, plain or gzipped; convert it first") from error
    try:
        if text.lstrip().startswith("["):
            return list(json.loads(text))
        # Not splitlines: JSON allows the Unicode line separators inside a string.
        return [json.loads(line) for line in text.split("\n") if line.strip()]
    except json.JSONDecodeError as error:
        raise UsageError(f"{path} is neither JSON lines nor one JSON list: {error}; check the file") from error


def _prompt(record: Mapping[str, Any], file_class: str, max_tokens: int) -> Prompt | None:
    messages, category = _messages(record)
    if not messages:
        return None
    limit = record.get("max_tokens", max_tokens)
    temperature = record.get("temperature")
    if not isinstance(limit, int) or limit < 1:
        raise ValueError(f"max_tokens must be a whole number of at least 1; got {limit!r}")
    if temperature is not None and not (isinstance(temperature, int | float) and 0 <= temperature <= 100):
        raise ValueError(f"temperature must be a number from 0 to 100; got {temperature!r}")
    return Prompt(messages, str(record.get("class") or category or file_class), limit, temperature)


def _messages(record: Mapping[str, Any]) -> tuple[tuple[Message, ...], str | None]:
    """The messages, and the class that the format suggests."""
    if "messages" in record:
        return tuple(_message(each["role"], each["content"]) for each in record["messages"]), None
    if "turns" in record:  # Spec-Bench and MT-Bench
        return (_message("user", record["turns"][0]),), record.get("category")
    if "conversations" in record:
        return _first_exchange(record["conversations"]), "sharegpt"
    if "task_id" in record and "entry_point" in record:
        task = f"Complete this function and return the whole of it.\n\n```python\n{record['prompt'].strip()}\n```"
        return (_message("user", task),), "humaneval"
    if "question" in record:
        return (_message("user", record["question"]),), "gsm8k"
    if "instruction" in record:
        return (_message("user", _instruction(record)),), None
    return (_message("user", record["prompt"]),), None


def _instruction(record: Mapping[str, Any]) -> str:
    """Alpaca's and GPTeacher's `input`, or the first of Self-Instruct's `instances`, follows the instruction."""
    instances = record.get("instances") or [{}]
    given = record.get("input") or instances[0].get("input") or ""
    return "\n\n".join(part for part in (record["instruction"], given) if part)


def _first_exchange(turns: list[Mapping[str, Any]]) -> tuple[Message, ...]:
    """A ShareGPT conversation up to its first question, included; empty if it begins with an answer."""
    messages: list[Message] = []
    for turn in turns:
        role = _SHAREGPT_ROLES.get(turn["from"])
        if role == "assistant" or role is None:
            return ()
        messages.append(_message(role, turn["value"]))
        if role == "user":
            return tuple(messages)
    return ()


def _message(role: Any, content: Any) -> Message:
    if not isinstance(role, str) or not isinstance(content, str) or not content.strip():
        raise ValueError("a message needs a role and a text that is not empty")
    return {"role": role, "content": content}
