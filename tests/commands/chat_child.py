"""`outpace chat` over a model that answers by a script, in a process of its own: what the tests at a terminal start."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import outpace.backends
import outpace.llm
from outpace.backends import Loaded
from outpace.cli import main
from outpace.config import EngineConfig
from tests.fakes import fake_loaded
from tests.scripted_model import ScriptedModel, ScriptedTokenizer

# Each message begins a line; a line feed after a block would be trimmed.
TEMPLATE: str | None = "{% for m in messages %}{{ '\n' + m.role }}:{{ m.content }}{% endfor %}{{ '' }}"
ENDLESS = "tick tack " * 100


def answer(prompt: str) -> str:
    """The answer to the last message of the prompt; asked for again with every token."""
    message = prompt.removesuffix("\nassistant:").rpartition("\nuser:")[2]
    if message == "long":
        time.sleep(0.002)  # for each token, so that the answer can be stopped
    if message == "all":
        return prompt.replace("\n", "|")
    return {"long": ENDLESS, "echo": "la " * 20, "escape": "a\033[31mb\a"}.get(message, f"you said {message}")


def use_script(patch: Any) -> None:
    """`patch(object, name, value)` is setattr, or pytest's."""

    def load(wanted: EngineConfig, model_path: Path, draft_path: Path | None) -> Loaded:
        config = wanted.resolve(model_context=2048, model_path=str(model_path), draft_path=None)
        tokenizer = ScriptedTokenizer(TEMPLATE or "")
        if TEMPLATE is None:
            tokenizer.chat_template = None
        return Loaded(fake_loaded(ScriptedModel(answer, tokenizer), config, tokenizer=tokenizer), None, config)

    patch(outpace.llm, "resolve_model", lambda name: Path("script.gguf"))
    patch(outpace.backends, "load", load)


if __name__ == "__main__":
    use_script(setattr)
    sys.exit(main(["chat", "--temperature", "0", *sys.argv[1:]]))
