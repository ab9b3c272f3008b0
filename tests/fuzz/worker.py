"""Tries hostile files, one JSON line per file on stdin, one JSON line per outcome on stdout."""

from __future__ import annotations

import json
import sys
import traceback
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from outpace import LLM, SamplingParams, StructuredOutput
from outpace.errors import OutpaceError, PromptTooLong
from outpace.models.chat_template import render_chat
from outpace.models.generation_config import recommended

LONGEST = 1500  # characters of a sentence that a person can read
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello <|im_end|> 1234 \u4f60\u597d"},
]
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1, "<|im_end|>"]}'}}
CALLED: list[dict[str, Any]] = [
    *MESSAGES,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "2"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "array"}}}}}]


def try_model(path: str, backend: Any) -> None:
    options: dict[str, Any] = {"device": "cpu"} if backend == "torch" else {}
    with LLM(path, backend=backend, speculation="off", threads=1, max_context=256, **options) as llm:
        sampling: dict[str, Any] = dict(recommended(Path(path)).values) | {"max_tokens": 3, "seed": 1}
        params = SamplingParams(**sampling)
        llm.generate("Hello \u4f60", params)
        if llm.tokenizer.chat_template is not None:
            llm.chat(MESSAGES, params)
            with suppress(PromptTooLong):  # the text about tools is long for models so small
                llm.chat(CALLED, params, tools=TOOLS)
        llm.generate("Hello", replace(params, structured=StructuredOutput(json_object=True)))


def try_template(path: str) -> None:
    template = Path(path).read_text(encoding="utf-8")
    render_chat(template, CALLED, bos_token="<s>", eos_token="</s>", tools=TOOLS)


def outcome(case: dict[str, Any]) -> tuple[str, str]:
    try:
        if case["kind"] == "template":
            try_template(case["path"])
        else:
            try_model(case["path"], case["backend"])
    except OutpaceError as error:
        sentence = str(error)
        return ("refused" if sentence.isprintable() and 20 < len(sentence) < LONGEST else "ugly"), sentence
    except BaseException:
        return "traceback", traceback.format_exc()
    return "ran", ""


def main() -> None:
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(outcome(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
