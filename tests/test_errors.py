"""Messages are one line, whatever names they hold."""

from __future__ import annotations

import pytest

from outpace.errors import BackendError, ModelError, UsageError


@pytest.mark.parametrize("kind", [BackendError, ModelError, UsageError])
def test_line_breaks_and_terminal_escapes_become_spaces(kind):
    assert str(kind("there is no file a\nb\x1b[31m\u2028\u4f60\u597d; check it")) == (
        "there is no file a b [31m \u4f60\u597d; check it"
    )


def test_the_cause_and_the_remedy_of_a_long_message_are_kept():
    message = str(ModelError(f"there is no file {'x' * 100_000}; check the path"))
    assert message.startswith("there is no file xxx") and message.endswith("xxx; check the path")
    assert len(message) < 1300
