"""The wheel as it is built, installed where there is no checkout: a worker and a producer.

What warmq needs comes from this environment's packages, without its own editable install. With
WARMQ_TEST_WHEEL_PYTHON (`make test-wheel`) it is an environment that pip has filled by itself.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from kit.stacks.installed import built_wheel, environment_with
from kit.stacks.real_stack import ROOT, read_jsonl, text_of

from demo.run import wait_for
from demo.stack import CPU_ENGINE_ARGS, MODEL, RedisServer, Worker, environment_of

pytestmark = pytest.mark.timeout(300)
EXPECTED = json.loads((ROOT / "demo" / "expected.json").read_text())
PACKAGES = ("contract", "gateway", "producer", "worker")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build it."""
    return built_wheel(ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the interpreter of an environment with the wheel in it."""
    if chosen := os.environ.get("WARMQ_TEST_WHEEL_PYTHON"):
        return Path(chosen)
    return environment_with(wheel, tmp_path_factory.mktemp("installed") / "venv")


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    """A folder with nothing of the project in it but the model's own folder."""
    shutil.copytree(MODEL, tmp_path / "empty" / "model")
    return tmp_path / "empty"


def environment(**more: str) -> dict[str, str]:
    """Return this process's environment without settings, and without a way to the checkout."""
    return environment_of({}) | {"PYTHONPATH": ""} | more


def test_the_wheel_holds_the_packages_their_scripts_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = next(name for name in names if name.endswith("/METADATA"))
        entry_points = archive.read(metadata.replace("METADATA", "entry_points.txt")).decode()
    info = metadata.partition("/")[0]
    assert {name.partition("/")[0] for name in names} == {*PACKAGES, info}
    lua = {
        str(file.relative_to(ROOT)) for room in PACKAGES for file in (ROOT / room).rglob("*.lua")
    }
    assert lua and lua == {name for name in names if name.endswith(".lua")}
    tracked = subprocess.run(
        ["git", "ls-files", *PACKAGES],
        cwd=ROOT, text=True, capture_output=True, check=True,
    ).stdout.split()  # fmt: skip
    assert {name for name in names if not name.startswith(info)} == set(tracked)
    assert "producer = producer.cli.main:main" in entry_points
    assert "[warmq.commands]\ngateway = gateway.commands:COMMANDS" in entry_points
    assert "warmq = worker.engine.vllm.pdeath:register" in entry_points
    assert not [name for name in names if "test" in name or name.endswith((".pyc", ".jsonl"))]


def test_the_sdist_builds_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (packed,) = tmp_path.glob("*.tar.gz")
    # tarfile knows no `filter` before Python 3.11.4, and warns without one from 3.12 on.
    subprocess.run(["tar", "-xzf", packed, "-C", tmp_path], check=True)
    source = tmp_path / packed.name.removesuffix(".tar.gz")
    assert {"LICENSE", "CHANGELOG.md", "pyproject.toml"} <= {file.name for file in source.iterdir()}
    assert contents(built_wheel(source, tmp_path / "dist")) == contents(wheel)


def contents(wheel: Path) -> dict[str, bytes]:
    """Return the files of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_nothing_is_imported_from_the_checkout(python: Path, empty: Path) -> None:
    told = subprocess.run(
        [python, "-c", "import contract, gateway, producer, worker; print(worker.__file__)"],
        cwd=empty, env=environment(), text=True, capture_output=True, check=True,
    ).stdout  # fmt: skip
    assert Path(told.strip()).is_relative_to(python.parent.parent)
    assert not Path(told.strip()).is_relative_to(ROOT / "worker")


def test_the_wheels_worker_and_producer_answer_the_demos_file(python: Path, empty: Path) -> None:
    out, errors = empty / "answers.jsonl", empty / "errors.jsonl"
    with RedisServer(empty.parent / "redis") as server:
        worker = Worker(
            server.url, empty.parent / "worker.log", root=empty, env={"PYTHONPATH": ""},
            model=empty / "model", engine_args=CPU_ENGINE_ARGS,
        )  # fmt: skip
        worker.python = python
        with worker:
            submit = subprocess.Popen(
                [
                    python.parent / "producer", "submit", ROOT / "demo" / "questions.jsonl",
                    "--wait", "-o", out, "--errors", errors,
                ],
                cwd=empty, env=environment(WARMQ_REDIS_URL=server.url),
            )  # fmt: skip
            try:
                wait_for(submit, worker)
            finally:
                submit.terminate()
                submit.wait()
            assert submit.returncode == 1  # one line is bad
            assert worker.stop() == 0
    answers = {line["custom_id"]: text_of(line["response"]["body"]) for line in read_jsonl(out)}
    assert answers == EXPECTED
    (error,) = read_jsonl(errors)
    assert error["custom_id"] == "deliberately-bad"
