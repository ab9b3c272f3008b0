"""A fake model that says what a test wants it to say, behind a server of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from outpace.models.special_tokens import SpecialToken, SpecialTokens
from tests.fakes import EOS, ByteTokenizer, FakeModel, fake_engine

if TYPE_CHECKING:
    from tests.server_helper import LiveServer

ANSWER_BEGINS = "\nassistant:"


class ScriptedTokenizer(ByteTokenizer):
    """Bytes, and more control tokens, as families have that begin calls with one."""

    def __init__(self, template: str, *controls: str, ending: str = "") -> None:
        more = [SpecialToken(258 + i, text, is_control=True) for i, text in enumerate(controls)]
        self.vocab_size = 258 + len(controls)
        self.chat_template = template + ANSWER_BEGINS + ending
        self.specials = SpecialTokens([*ByteTokenizer.specials.tokens, *more])


class ScriptedModel(FakeModel):
    """Answers a prompt with `answer(prompt)`. Where a grammar forbids the next byte, it ends, or says any other."""

    def __init__(self, answer: Callable[[str], str], tokenizer: ByteTokenizer) -> None:
        super().__init__(tokenizer.vocab_size)
        self._answer = answer
        self._tokenizer = tokenizer

    def logits(self, context: Sequence[int]) -> NDArray[np.float32]:
        begin = _end_of_last(list(context), list(ANSWER_BEGINS.encode()))
        prompt = b"".join(map(self._tokenizer.token_bytes, context[:begin])).decode(errors="replace")
        answer = self._tokenizer.encode(self._answer(prompt), add_special=False)
        place = len(context) - begin
        row = np.zeros(self.vocab_size, np.float32)
        row[EOS] = 30.0
        row[answer[place] if place < len(answer) else EOS] = 60.0
        return row


def _end_of_last(tokens: list[int], wanted: list[int]) -> int:
    for end in range(len(tokens), len(wanted) - 1, -1):
        if tokens[end - len(wanted) : end] == wanted:
            return end
    return 0


@contextmanager
def scripted(
    answer: str | Callable[[str], str],
    *,
    template: str = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
    controls: Sequence[str] = (),
    ending: str = "",
    **options: Any,
) -> Iterator[LiveServer]:
    """A server whose model gives this answer, or the answer of a function to the prompt.

    `ending` is a part of the template after the beginning of the answer, so the answer must begin with its text.
    """
    from tests.server_helper import live  # it loads the server and its clients, which takes a second

    tokenizer = ScriptedTokenizer(template, *controls, ending=ending)
    model = ScriptedModel(answer if callable(answer) else lambda _: answer, tokenizer)
    engine = fake_engine(model, tokenizer=tokenizer, max_context=4096, cache_tokens=16384, speculation="off")
    with live(engine, tokenizer, 4096, **options) as server:
        yield server
        server.check_clean()
