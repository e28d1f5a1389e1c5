"""Texts of others are printed without control characters; the joiners of emoji are none."""

from __future__ import annotations

import io
import sys

import pytest

from producer.cli.show import printable

FAMILY = "\U0001f468\u200d\U0001f469"


@pytest.mark.parametrize(("encoding", "joiner"), [("utf-8", "\u200d"), ("latin-1", r"\u200d")])
def test_joiners_stay_if_the_terminal_has_them(
    monkeypatch: pytest.MonkeyPatch, encoding: str, joiner: str
) -> None:
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding=encoding))
    assert printable(FAMILY) == FAMILY.replace("\u200d", joiner)
    for control in ("\x1b[2J", "a\tb", "\u202e", "\U000e0041"):
        shown = printable(f"{control}{FAMILY}")
        assert shown == repr(control)[1:-1] + FAMILY.replace("\u200d", joiner)
