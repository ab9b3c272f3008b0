"""A run has only tokens that the parser would also give from the places between them."""

from __future__ import annotations

from outpace.decoding.forced_runs import ForcedRuns

NO_STOPS = frozenset[int]()


class ScriptedParser:
    """A parser whose forced tokens after each number of consumed tokens are given."""

    def __init__(self, *forced: list[int]) -> None:
        self._forced = forced
        self.consumed: list[int] = []
        self.num_asked = 0

    def try_consume_tokens(self, tokens: list[int]) -> int:
        self.consumed += tokens
        return len(tokens)

    def rollback(self, num_tokens: int) -> bool:
        del self.consumed[len(self.consumed) - num_tokens :]
        return True

    def compute_ff_tokens(self) -> list[int]:
        self.num_asked += 1
        return self._forced[len(self.consumed)]


def test_a_run_is_tried_once_and_the_parser_returns_to_its_place():
    parser, runs = ScriptedParser([5, 6, 7], [6, 7], [7]), ForcedRuns()
    assert runs.at(parser, b"text", NO_STOPS) == (5, 6, 7)
    assert parser.consumed == [] and parser.num_asked == 3
    assert runs.at(parser, b"text", NO_STOPS) == (5, 6, 7)
    assert parser.num_asked == 4


def test_a_run_ends_where_the_parser_goes_on_with_other_tokens():
    runs = ForcedRuns()
    parser = ScriptedParser([5, 6, 7, 8], [6, 7, 8], [9, 8], [8])
    assert runs.at(parser, b"text", NO_STOPS) == (5, 6)
    assert parser.consumed == []
    assert runs.at(ScriptedParser([5, 6], [4]), b"text", NO_STOPS) == (5,)
    assert runs.at(ScriptedParser([]), b"text", NO_STOPS) == ()


def test_a_run_ends_with_a_stop_token():
    parser, runs = ScriptedParser([5, 6, 7], [6, 7], [7]), ForcedRuns()
    assert runs.at(parser, b"text", frozenset({6})) == (5, 6)
    assert runs.at(parser, b"text", NO_STOPS) == (5, 6, 7), "another request has other stop tokens"
