"""The unrolled training pass of a head equals drafting token by token, computed by a dull reference."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="torch is not installed; pip install outpace[distill]")

from outpace.training.target import Target
from tests.head_reference import HeadReference, assert_drafts_step_by_step, assert_gradients
from tests.tiny_gguf import FAMILIES
from tests.tiny_training import tiny_head, tiny_target


@pytest.fixture(scope="module", params=FAMILIES)
def target(request, tmp_path_factory) -> Target:
    return tiny_target(tmp_path_factory.mktemp("target"), request.param)


def test_unrolled_training_equals_drafting_step_by_step(target):
    assert_drafts_step_by_step(HeadReference, tiny_head(target)[0], target)


def test_gradients_of_the_unrolled_pass_equal_those_of_the_reference(target):
    assert_gradients(HeadReference, tiny_head(target)[0], target)
