"""A tokenizer whose tokens are words, for tests of predictions that a reader can follow."""

from __future__ import annotations

import re

from outpace.core import Request
from outpace.speculation.proposers.prediction import Follower
from outpace.speculation.proposers.prediction_text import Prediction
from tests.requests_helper import make_request

_WORD = re.compile(r"\s*\w+|\s*[^\w\s]|\s+")


class Words:
    """Numbers words as they come. A word has the space before it, as in most vocabularies."""

    def __init__(self) -> None:
        self._words: dict[str, int] = {}

    def encode(self, text: str) -> list[int]:
        return [self._words.setdefault(word, len(self._words)) for word in _WORD.findall(text)]

    def decode(self, tokens: list[int]) -> str:
        return b"".join(map(self.token_bytes, tokens)).decode()

    def token_bytes(self, token: int) -> bytes:
        return list(self._words)[token].encode()

    def predicted(self, text: str) -> Request:
        """A request, still without output, for which this text is predicted."""
        request = make_request([0])
        request.predicted = Follower(Prediction(self.encode(text), self.token_bytes))
        return request
