"""The library does not speak of the command line: other user interfaces stand on it too."""

from __future__ import annotations

import ast
import re
import typing
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from contract.errors import Remedy
from producer.batch_watch import WritesLost
from producer.cli.main import cli, commands
from producer.remedies import COMMAND_REMEDIES, LIBRARY_REMEDIES, with_remedy

ROOT = Path(__file__).parents[2]


def flags(command: click.Command, context: click.Context) -> Iterator[str]:
    for parameter in command.params:
        yield from (flag for flag in parameter.opts if flag.startswith("--"))
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            assert child is not None
            yield from flags(child, context)


FLAGS = set(flags(cli, click.Context(cli)))
#: worker/tools are command lines of their own; vLLM takes its arguments as a command line.
ALLOWED = {"worker/tools": FLAGS, "worker/engine/vllm": {"--model"}}
NAMES = "|".join(commands())
COMMAND = re.compile(rf"\bproducer ({NAMES})\b|\b({NAMES}) --")


def strings(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


@pytest.mark.parametrize(
    "room",
    [
        "producer/input",
        "producer/submit",
        "producer/collect",
        "producer/run",
        "contract",
        "worker",
    ],
)
def test_no_text_names_a_flag_or_a_command_of_the_command_line(room: str):
    assert (ROOT / room).is_dir()
    assert {"--batch-id", "--partial", "--all", "--errors"} <= FLAGS
    named = []
    for path in sorted((ROOT / room).rglob("*.py")):
        file = path.relative_to(ROOT).as_posix()
        forbidden = FLAGS.difference(
            *(words for folder, words in ALLOWED.items() if file.startswith(folder))
        )
        for line, text in strings(path):
            found = forbidden & set(re.findall(r"--[a-z][a-z-]*", text))
            if found or COMMAND.search(text):
                named.append(f"{file}:{line}: {text[:100]}")
    assert not named, "\n".join(named)


def test_library_and_command_line_word_every_kind_of_remedy():
    assert set(LIBRARY_REMEDIES) == set(COMMAND_REMEDIES) == set(typing.get_args(Remedy))


def test_a_remedy_names_the_facts_of_its_error():
    assert with_remedy(WritesLost("b1", "the lines after 500")) == (
        "Redis has lost its last writes (a failover?): the lines after 500; the same "
        "`producer submit` with --batch-id b1 goes on where it stopped"
    )
