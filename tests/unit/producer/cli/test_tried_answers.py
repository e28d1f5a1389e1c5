"""How `producer try` shows an answer."""

from __future__ import annotations

import pytest

from producer.cli.commands.try_ import _shown


@pytest.mark.parametrize(
    ("answer", "shown"),
    [
        ("", "(no text)"), ("\n" * 30, "(only blanks: 30 characters)"),
        (" \t\n", "(only blanks: 3 characters)"), ("\n\ngood\n", "good"), (" a\n\nb", " a\n\nb"),
    ],
)  # fmt: skip
def test_an_answer_of_blanks_is_named_and_blank_lines_around_one_are_left_out(
    answer: str, shown: str
) -> None:
    assert _shown(answer) == shown
