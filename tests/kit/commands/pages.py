"""Fences of the pages: what a reader types, where, and what the terminal then prints.

A fence with `sh` is typed into the reader's terminal, with `sh terminal=worker` into another one.
`runs`: its last command goes on. `exit=1`: its last command ends so. `needs=gpu`: only a machine
with such a device runs it. The line `^C` is the key. A fence with `text` is what is printed after
it; `…` stands for anything within a line. Tutorials use these.

Outside of tutorials `run="FILE"` names the test that runs a fence, `program=NAME` the program that
it is a part of (python.md), and `not-run="…"` the reason why no test runs it.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import redis
from kit.commands.terminal import CTRL_C, Terminal

from demo.stack import ROOT, eventually, free_port

TUTORIALS = ROOT / "docs" / "tutorials"
#: All pages.
DOCS = [ROOT / "README.md", ROOT / "README.ko.md", ROOT / "CONTRIBUTING.md",
        *sorted((ROOT / "docs").rglob("*.md"))]  # fmt: skip
#: What a block may need that not every machine has; `network` is for downloads.
DEVICES = ("gpu", "npu", "network")
OPTIONS = {"terminal", "runs", "exit", "needs", "run", "program", "not-run"}
#: What a reader's environment does not have.
NOT_OURS = ("WARMQ_", "VLLM_", "HF_", "MAKE")
COMMAND_S, ENGINE_S = 300.0, 240.0
_FENCE = re.compile(r"^```(\w+)?([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """One fence: its language, its options (`runs` is ""), its text, its line on the page."""

    language: str
    text: str
    line: int
    options: dict[str, str] = field(default_factory=dict)

    @property
    def terminal(self) -> str:
        """The name of the terminal that it is typed or printed in."""
        return self.options.get("terminal", "reader")

    @property
    def commands(self) -> list[str]:
        """The lines to type."""
        return self.text.splitlines()


def blocks(text: str) -> Iterator[Block]:
    """Yield the fences of a page."""
    for found in _FENCE.finditer(text):
        words = (word.partition("=") for word in shlex.split(found[2]))
        options = {name: value for name, _, value in words}
        line = text.count("\n", 0, found.start()) + 1
        yield Block(found[1] or "", found[3], line, options)


def pattern(expected: str) -> re.Pattern[str]:
    """Return what finds the lines of a `text` block, in their order, in a terminal's output."""
    lines = [line for line in expected.splitlines() if line.strip(" …")]
    return re.compile(".*?".join(map(_line_pattern, lines)), re.DOTALL)


def _line_pattern(line: str) -> str:
    parts = (part.split() for part in line.split("…"))
    return r"[^\n]*?".join(r"\s+".join(map(re.escape, words)) for words in parts)


class Reader:
    """Somebody who follows a page in a fresh clone, with nothing set and `make setup` done once.

    Ports of the page are replaced by free ones, because others may use this machine. `env` is
    what the terminals have besides, where a device is emulated.
    """

    def __init__(
        self, folder: Path, venv: Path, ports: tuple[str, ...] = ("6379",),
        env: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self.clone = folder / "warmq"
        self._copy(venv)
        self.ports = {port: str(free_port()) for port in ports}
        self._terminals: dict[str, Terminal] = {}
        kept = {k: v for k, v in os.environ.items() if not k.startswith(NOT_OURS)}
        # What the page leaves out because it is the default; and vLLM's reports of its use.
        url = f"redis://127.0.0.1:{self.ports['6379']}/0"
        self.env = {**kept, "WARMQ_REDIS_URL": url, "DO_NOT_TRACK": "1", **(env or {})}

    def _copy(self, venv: Path) -> None:
        listed = subprocess.run(
            ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout
        for name in filter(None, listed.split("\0")):
            if (source := ROOT / name).is_file():
                target = self.clone / name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, target)
                os.utime(target, (0, 0))  # `make setup` has been done after this
        (self.clone / ".venv").symlink_to(venv)

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        for name, terminal in self._terminals.items():
            if error is not None:
                error.add_note(f"terminal {name!r} said last:\n{terminal.said[-3000:]}")
            terminal.close()
        # A Redis that went into the background, if the page did not come to its end.
        with (
            redis.Redis(port=int(self.ports["6379"])) as client,
            contextlib.suppress(redis.ConnectionError),
        ):
            client.shutdown(nosave=True)

    def terminal(self, name: str) -> Terminal:
        """Return the terminal of that name, opened at its first use in the clone's folder."""
        if name not in self._terminals:
            self._terminals[name] = Terminal(self.clone, self.env)
        return self._terminals[name]

    def follow(self, page: Path, devices: tuple[str, ...] = ()) -> list[str]:
        """Do what the page says; return the commands that were left out, which need devices.

        Raises AssertionError or TimeoutError, naming the page's line.
        """
        left_out: list[str] = []
        for block in blocks(page.read_text()):
            needs = block.options.get("needs")
            if needs is not None and needs not in devices:
                left_out += block.commands if block.language == "sh" else []
            elif block.language in ("sh", "text"):
                try:
                    self._type(block) if block.language == "sh" else self._see(block)
                except (AssertionError, TimeoutError) as error:
                    error.add_note(f"{page.relative_to(ROOT)}, block at line {block.line}")
                    raise
        return left_out

    def _here(self, line: str) -> str:
        for port, free in self.ports.items():
            line = re.sub(rf"\b{port}\b", free, line)
        return line

    def _type(self, block: Block) -> None:
        terminal = self.terminal(block.terminal)
        wanted = int(block.options.get("exit", "0"))
        *first, last = block.commands
        terminal.begin()
        for line in first:
            assert terminal.run(self._here(line), COMMAND_S) in (0, None), line
        if "runs" in block.options:
            terminal.type(self._here(last))
        elif last == CTRL_C:
            status = terminal.run(last, COMMAND_S)
            assert status == wanted if "exit" in block.options else status is not None
        else:
            assert terminal.run(self._here(last), COMMAND_S) == wanted, last

    def _see(self, block: Block) -> None:
        terminal, expected = self.terminal(block.terminal), pattern(self._here(block.text))

        def look() -> bool:
            ended = terminal.status is not None  # before looking: all is printed then
            seen = bool(expected.search(terminal.said))
            assert seen or not ended, f"not printed:\n{block.text}"
            return seen

        eventually(look, ENGINE_S, f"is printed:\n{block.text}", every_s=0.1)
