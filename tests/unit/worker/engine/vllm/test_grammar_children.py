"""Children of the compiling process compile many constraints, and refuse none for others."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from worker.engine.vllm import grammar_process
from worker.engine.vllm.grammar_process import Children


class Script:
    """Does in the child what a constraint asks for; answers with the child's pid."""

    def __init__(self) -> None:
        self.kept: list[bytes] = []

    def answer(self, constraint: Callable[[Script], Any]) -> tuple[Any, ...]:
        constraint(self)
        return "valid", os.getpid()


def nothing(_: Script) -> None:
    """Compile easily."""


def grow(script: Script) -> None:
    """Take as many bytes as a child may not have grown by."""
    script.kept.append(bytes(grammar_process.GROWN))


def keep(script: Script) -> None:
    """Take some bytes, and keep them."""
    script.kept.append(bytes(400 << 20))


def wait(_: Script) -> None:
    """Never answer."""
    signal.pause()


def once_more(script: Script) -> None:
    """Need bytes that a child that has grown does not have."""
    script.kept.append(bytes(600 << 20))


def end(_: Script) -> None:
    """End the compiler."""
    os._exit(1)


def spin(_: Script) -> None:
    """Use processor time."""
    with grammar_process._timed():
        while True:
            pass


@pytest.fixture
def children() -> Iterator[Children]:
    made = Children(Script())  # type: ignore[arg-type]
    yield made
    for child in [*made._busy.values(), *made._idle]:
        child.end()


@contextmanager
def pipe() -> Iterator[int]:
    reading, writing = os.pipe()
    yield reading
    os.close(reading)
    os.close(writing)


def answers(children: Children, *constraints: Callable[[Script], Any]) -> list[tuple[Any, ...]]:
    """Have all compiled at a time; return the answers in order."""
    for number, constraint in enumerate(constraints):
        children.give(number, constraint)
    found = []
    with pipe() as incoming:
        while len(found) < len(constraints):
            if answer := children.read(children.next_readable(incoming)):
                found.append(answer)
    assert [answer[0] for answer in sorted(found)] == list(range(len(constraints)))
    return [answer[1:] for answer in sorted(found)]


def test_a_child_compiles_one_constraint_after_the_other(children: Children) -> None:
    pids = {answers(children, nothing)[0] for _ in range(5)}
    assert len(pids) == 1
    both = answers(children, nothing, nothing)
    assert len({*both}) == 2
    assert {*both} > pids


def test_a_child_that_has_grown_gets_no_more(children: Children) -> None:
    ((kind, pid),) = answers(children, grow)
    assert kind == "valid"
    assert answers(children, nothing) != [("valid", pid)]


def test_a_new_child_compiles_what_a_used_one_refuses(
    children: Children, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Far from both limits, because the child of a large process may free some of its memory.
    monkeypatch.setattr(grammar_process, "GROWN", 500 << 20)
    ((_, pid),) = answers(children, keep)
    ((kind, other),) = answers(children, once_more)
    assert kind == "valid"
    assert other != pid


@pytest.mark.parametrize(("constraint", "kind"), [(end, "refused"), (spin, "slow")])
def test_a_constraint_that_ends_a_child_ends_only_its_own(
    children: Children, monkeypatch: pytest.MonkeyPatch, constraint: Any, kind: str
) -> None:
    monkeypatch.setattr(grammar_process, "CPU_S", 0.2)
    answers(children, nothing, nothing)
    found = answers(children, constraint, nothing, nothing)
    assert [each[0] for each in found] == [kind, "valid", "valid"]
    assert answers(children, nothing)[0][0] == "valid"


def test_an_idle_child_that_was_killed_is_replaced(children: Children) -> None:
    ((_, pid),) = answers(children, nothing)
    os.kill(pid, signal.SIGKILL)
    ((kind, other),) = answers(children, nothing)
    assert kind == "valid"
    assert other != pid


def test_an_overdue_constraint_is_given_up(
    children: Children, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_process, "WALL_S", 0.2)
    assert answers(children, wait) == [("stalled",)]
