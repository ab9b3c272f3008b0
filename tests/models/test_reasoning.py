"""The tags around thinking: which a model uses, where an answer begins, and what a reader makes of any pieces."""

from __future__ import annotations

import pytest

from outpace.errors import UsageError
from outpace.models.reasoning import PARSERS, reasoning_for
from outpace.models.reasoning.reader import ReasoningReader
from outpace.models.reasoning.syntax import Beginning
from outpace.models.reasoning.use import Reasoning
from tests.scripted_model import ScriptedTokenizer

QWEN3 = PARSERS["qwen3"]


@pytest.mark.parametrize(
    ("template", "controls", "found"),
    [
        ("{% if '</think>' in content %}", (), "qwen3"),
        ("{{ messages }}", ("<think>", "</think>"), "qwen3"),
        ("{{ messages }}", ("<think>",), None),
        ("{{ messages }}", ("[THINK]", "[/THINK]"), "mistral"),
        ("<seed:think></seed:think>", (), "seed_oss"),
        ("{{ messages }}", (), None),
    ],
)
def test_auto_takes_the_tags_of_the_template_or_the_vocabulary(template, controls, found):
    syntax = reasoning_for(ScriptedTokenizer(template, *controls))
    assert (syntax and syntax.name) == found


def test_a_parser_may_be_named():
    tokenizer = ScriptedTokenizer("</think>")
    for name, syntax in PARSERS.items():
        assert reasoning_for(tokenizer, name) is syntax
    assert reasoning_for(tokenizer, "none") is None
    with pytest.raises(UsageError, match="no reasoning parser 'qwen9'; use auto, none, qwen3"):
        reasoning_for(tokenizer, "qwen9")


@pytest.mark.parametrize(
    ("prompt", "beginning", "of_r1"),
    [
        ("assistant: <think>\n", "inside", "inside"),
        ("assistant: <think>\n\n</think>\n\n", "after", "after"),
        ("what is <think>? assistant:", "before", "inside"),
    ],
)
def test_where_an_answer_begins(prompt, beginning, of_r1):
    assert QWEN3.beginning(prompt) == beginning
    assert PARSERS["deepseek_r1"].beginning(prompt) == of_r1


@pytest.mark.parametrize(
    ("text", "beginning"),
    [("", "before"), ("Well", "after"), ("<think>Well", "inside"), ("<think>a</think>b", "after")],
)
def test_where_an_answer_begins_that_continues_a_text(text, beginning):
    assert QWEN3.continued(text) == beginning


CASES: list[tuple[Beginning, str, str, str]] = [
    ("before", "<think>\nA b.\n\nC </thin d\n</think>\n\nYes </think>.", "A b.\n\nC </thin d", "Yes </think>."),
    ("before", "\n<think>x</think>y", "x", "y"),
    ("before", "<think></think> y", "", "y"),
    ("before", "<think>\n\n</think>\n\ny \n", "", "y \n"),
    ("before", " <thin air <think>x</think>", "", " <thin air <think>x</think>"),
    ("before", "<think>cut </th", "cut </th", ""),
    ("before", "<thi", "", "<thi"),
    ("before", "", "", ""),
    ("before", "Plain.", "", "Plain."),
    ("inside", "x y\n</think>\nz", "x y", "z"),
    ("inside", "<think>\nx</think>z", "x", "z"),
    ("inside", " never closed ", "never closed", ""),
    ("inside", "<thi", "<thi", ""),
    ("after", "<think>x</think> z", "", "<think>x</think> z"),
]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 100])
@pytest.mark.parametrize(("beginning", "answer", "reasoning", "content"), CASES)
def test_thinking_is_separated_from_pieces_of_any_size(beginning, answer, reasoning, content, size):
    reader = ReasoningReader(QWEN3, beginning)
    found = [
        reader.read(answer[at : at + size], is_last=at + size >= len(answer))
        for at in range(0, max(1, len(answer)), size)
    ]
    assert "".join(thought.reasoning for thought in found) == reasoning
    assert "".join(thought.content for thought in found) == content


@pytest.mark.parametrize("size", [1, 4, 100])
@pytest.mark.parametrize(
    ("beginning", "answer", "thinking"),
    [
        ("before", "<think>ab</think>c", "<think>ab</think>"),
        ("before", "\n<think>ab", "\n<think>ab"),
        ("before", "abc <think>x</think>", ""),
        ("before", "<thi", ""),
        ("inside", "ab</think>c", "ab</think>"),
        ("inside", "ab" * 20 + "</think>c", "ab" * 20 + "</think>"),
        ("after", "ab</think>c", ""),
    ],
)
def test_tokens_of_thinking_are_counted_with_their_tags(beginning, answer, thinking, size):
    data = answer.encode()
    tokens = [data[at : at + size] for at in range(0, len(data), size)]
    assert Reasoning(QWEN3, beginning).num_tokens(tokens) == -(-len(thinking) // size)
