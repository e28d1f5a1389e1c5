"""The programs of docs/how-to/python.md as they stand: only the address differs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from kit.commands.pages import blocks
from kit.commands.support import producer_env
from kit.stacks.celery_side import simulated

from demo.stack import ROOT


def programs(name: str) -> list[str]:
    """Return the page's parts of a program."""
    page = (ROOT / "docs/how-to/python.md").read_text()
    return [block.text for block in blocks(page) if block.options.get("program") == name]


def printed(program: str, redis_url: str, folder: Path) -> list[str]:
    """Run a program beside a worker; return what it prints."""
    env = producer_env(redis_url)
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
    with simulated(redis_url, folder / "worker.log"):
        done = subprocess.run(
            [sys.executable, "-c", program.replace("redis://127.0.0.1:6379/0", redis_url)],
            cwd=folder, env=env, capture_output=True, text=True, timeout=90, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.timeout(120)
def test_the_celery_programs_print_answers(redis_url: str, tmp_path: Path) -> None:
    found = printed("\n".join(programs("celery")), redis_url, tmp_path)
    assert [line.rpartition("?")[0] for line in found[1:6]] == [
        f"What is {n} plus 2" for n in range(5)
    ]
    assert found[6] == "chat.completion SUCCESS"
    assert found[7].startswith("RequestRejected invalid_request ")
    assert found[8:] == []


@pytest.mark.timeout(120)
def test_the_clients_programs_print_answers(redis_url: str, tmp_path: Path) -> None:
    lines = printed("\n".join(programs("client")), redis_url, tmp_path)
    assert sorted(line.partition(" ")[0] for line in lines[:5]) == [f"q{n}" for n in range(5)]
    assert lines[5] == "completed 5 of 5"
    assert lines[6] == "1000"
    assert sorted(lines[7:]) == ["1 True", "2 True"]


@pytest.mark.timeout(120)
def test_the_clients_programs_have_the_types_that_a_strict_checker_wants(
    tmp_path: Path,
) -> None:
    names = ["client", *LIBRARIES]
    files = [tmp_path / f"program{number}.py" for number in range(len(names))]
    for name, file in zip(names, files, strict=True):
        file.write_text("\n".join(programs(name)))
    command = ("mypy", "--strict", "--ignore-missing-imports", "--follow-imports=silent")
    done = subprocess.run(
        [sys.executable, "-m", *command, "--cache-dir", tmp_path / "cache", *files],
        cwd=ROOT, capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout


LIBRARIES = ["pandas", "polars", "datasets"]


@pytest.mark.parametrize("library", LIBRARIES)
def test_each_example_with_a_library_has_about_ten_lines(library: str) -> None:
    (program,) = programs(library)
    assert len(program.strip().splitlines()) <= 14
    compile(program, library, "exec")


@pytest.mark.timeout(120)
@pytest.mark.parametrize("library", LIBRARIES)
def test_the_example_with_a_library_joins_answers_to_its_rows(
    redis_url: str, tmp_path: Path, library: str
) -> None:
    (program,) = programs(library)
    text = " ".join(printed(program, redis_url, tmp_path))
    assert "Good soup." in text
    assert "answer" in text
    assert not {"None", "NaN", "null"} & set(re.findall(r"\w+", text))
