"""The built-in prompts: enough of each class, complete, and short enough for a small model and context."""

from __future__ import annotations

import pytest

from outpace.bench.workloads import BUILT_IN, built_in, evenly
from outpace.errors import UsageError


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_workload_has_dozens_of_different_prompts(name):
    prompts = built_in(name)
    assert len(prompts) >= 24
    assert len({prompt.messages[-1]["content"] for prompt in prompts}) == len(prompts)
    for prompt in prompts:
        assert prompt.category == name
        assert 64 <= prompt.max_tokens <= 256
        assert prompt.messages[0]["role"] == prompt.messages[-1]["role"] == "user"
        assert all(message["content"] and "%%" not in message["content"] for message in prompt.messages)
        assert sum(len(message["content"]) for message in prompt.messages) < 2000


def test_conversations_alternate_between_user_and_assistant():
    roles = [[message["role"] for message in prompt.messages] for prompt in built_in("chat")]
    assert ["user", "assistant", "user"] in roles
    assert all(role == ("user", "assistant")[i % 2] for each in roles for i, role in enumerate(each))


def test_code_to_edit_stands_whole_in_the_prompt():
    for prompt in built_in("code_edit"):
        assert prompt.messages[0]["content"].count("```") == 2


def test_a_few_prompts_are_spread_over_the_whole():
    assert evenly(range(10), 5) == [0, 2, 4, 6, 8]
    assert evenly([1, 2], 5) == [1, 2]
    assert len(built_in("story", 3)) == 3


def test_an_unknown_workload_is_named_with_the_known_ones():
    with pytest.raises(UsageError, match=r"no built-in workload 'poetry'; choose from code_edit, code"):
        built_in("poetry")
