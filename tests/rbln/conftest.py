"""Fixtures of the EMULATED suite, which `make test-rbln` runs in .venv-rbln.

A worker's start is what takes long here, so its tests share it: two of one model, `left` and
`right`, over one queue, and one for each other form with a queue of its own. A test that ends a
worker leaves it so; the next that needs it starts it anew.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest
from kit.engines.emulated_batch import COUNT
from kit.engines.emulated_npu import Emulated, emulated_env
from kit.verdicts.observer import WATCHED

from demo.stack import MODEL, ROOT, RedisServer

ARTEFACTS = {
    "plain": "--max-seq-len 512 --batch-size 4",
    "buckets": "--max-seq-len 512 --batch-size 4 --buckets 4,2,1",
    "flash": "--max-seq-len 2048 --partition-len 1024 --batch-size 2",
    "devices": "--max-seq-len 512 --batch-size 2 --num-devices 2",
}
#: Cards of the workers beside `left` and `right`, which have 0 and 1.
CARDS = {"buckets": "2", "flash": "3", "devices": "4,5"}
#: The compiler's command with several command lines: its imports take longer than compiling.
COMPILE_ALL = (
    "import json, sys; from worker.tools.compile import main; "
    "sys.exit(max(main(words) for words in json.load(sys.stdin)))"
)


def pytest_configure(config: pytest.Config) -> None:
    """Refuse to run where the vendor's packages are missing, or the real rebel is there."""
    try:
        version("vllm-rbln")
    except PackageNotFoundError:
        raise pytest.UsageError("tests/rbln runs in its own environment: make test-rbln") from None


@pytest.fixture(scope="session")
def artefacts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Compile the shipped model in all forms: one by the command itself, the rest beside it."""
    folder = tmp_path_factory.mktemp("compiled")
    words = {
        name: [str(MODEL), "-o", str(folder / name), "--npu", "RBLN-CA25", "--dtype", "float32",
               *options.split()]
        for name, options in ARTEFACTS.items()
    }  # fmt: skip
    commands = (["-m", "worker.compile", *words.pop("plain")], ["-c", COMPILE_ALL])
    compilers = [
        subprocess.Popen(
            [sys.executable, *command], cwd=ROOT, env=os.environ | emulated_env(folder),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for command in commands
    ]  # fmt: skip
    said = [compiler.communicate(json.dumps([*words.values()]))[0] for compiler in compilers]
    assert [compiler.returncode for compiler in compilers] == [0, 0], "\n".join(said)
    return {name: folder / name for name in ARTEFACTS}


@pytest.fixture(scope="session")
def greedy() -> Iterator[Any]:
    """Yield a function: prompts to transformers' own greedy tokens, in a process of its own."""
    with subprocess.Popen(
        [sys.executable, str(ROOT / "tests/rbln/greedy.py"), str(MODEL), str(COUNT)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        known: dict[str, list[list[int]]] = {}

        def ask(given: Sequence[list[int]]) -> list[list[int]]:
            question = json.dumps(given)
            if question not in known:
                assert process.stdin is not None and process.stdout is not None
                process.stdin.write(question + "\n")
                process.stdin.flush()
                known[question] = json.loads(process.stdout.readline())
            return known[question]

        yield ask


@pytest.fixture(scope="session")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RedisServer, Path]]:
    """Yield a Redis whose every write can be read, and the folder of the emulated cards."""
    with RedisServer(tmp_path_factory.mktemp("redis"), *WATCHED) as redis:
        yield redis, tmp_path_factory.mktemp("cards")


@pytest.fixture(scope="session")
def pair(
    machine: tuple[RedisServer, Path],
    artefacts: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[dict[str, Emulated]]:
    """Two workers on the plain artefact with a card each, not started; and a wish in vain."""
    folder = tmp_path_factory.mktemp("pair")
    made = {
        name: Emulated(
            *machine, folder / name, model=artefacts["plain"], rbln_devices=card,
            engine_args="--max-num-seqs 8 --enable-prompt-tokens-details",
            stall_timeout_s=6,
        )
        for card, name in enumerate(("left", "right"))
    }  # fmt: skip
    yield made
    for stack in made.values():
        stack.close()


@pytest.fixture
def left(pair: dict[str, Emulated]) -> Emulated:
    """The first worker, alone with the queue."""
    if (worker := pair["right"].worker) is not None:
        worker.kill()
    pair["left"].ready()
    pair["left"].new_page()
    return pair["left"]


@pytest.fixture
def both(pair: dict[str, Emulated]) -> tuple[Emulated, Emulated]:
    """Both workers, one queue."""
    for stack in pair.values():
        stack.begin_unless_running()
    for stack in pair.values():
        stack.ready()
        stack.new_page()
    return pair["left"], pair["right"]


@pytest.fixture(scope="session")
def forms(
    machine: tuple[RedisServer, Path],
    artefacts: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[dict[str, Emulated]]:
    """The other forms, each with a queue and cards of its own. All but `devices` are starting."""
    folder = tmp_path_factory.mktemp("forms")
    made = {
        name: Emulated(
            *machine, folder / name, model=artefacts[name], rbln_devices=cards,
            served_model_name=name,
        )
        for name, cards in CARDS.items()
    }  # fmt: skip
    for name in ("flash", "buckets"):
        made[name].begin()
    yield made
    for stack in made.values():
        stack.close()
