"""scripts/setup says for which device an environment is, and makes it anew for another."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from demo.stack import ROOT

#: Passes for an interpreter, and ends where an environment would be made.
PYTHON = "#!/bin/sh\ncase $1 in -c) echo 3.11 ;; --version) echo Python 3.11 ;; *) exit 7 ;; esac\n"


def executable(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A folder of programs, found before all others."""
    (tmp_path / "bin").mkdir()
    executable(tmp_path / "bin" / "python", PYTHON)
    executable(tmp_path / "bin" / "nvidia-smi", "#!/bin/sh\nexit 9\n")
    return tmp_path / "bin"


def said(tools: Path, device: str | None = None) -> str:
    """Run set-up as far as to the making of the environment; return what it said."""
    env = {
        "PATH": f"{tools}:{os.environ['PATH']}",
        "PYTHON": str(tools / "python"),
        "VENV": str(tools.parent / "venv"),
        "DEV": str(tools.parent / "dev"),
    }
    done = subprocess.run(
        [str(ROOT / "scripts" / "setup")],
        env=env | ({"DEVICE": device} if device else {}),
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode
    return done.stderr


def made_for(tools: Path, device: str | None) -> Path:
    """Lay out an environment as set-up leaves it, or did before devices; return a file in it."""
    python = tools.parent / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    executable(python, "#!/bin/sh\nexit 9\n")
    if device:
        (tools.parent / "venv" / ".device").write_text(device + "\n")
    else:
        (tools.parent / "venv/lib/python3.11/site-packages/torch").mkdir(parents=True)
    return python


def test_a_machine_without_a_driver_gets_the_cpu(tools: Path) -> None:
    assert "setup: device cpu: this machine has neither" in said(tools)


def test_a_machine_with_nvidias_driver_gets_cuda(tools: Path) -> None:
    executable(tools / "nvidia-smi", "#!/bin/sh\nexit 0\n")
    assert "setup: device cuda: this machine has an NVIDIA driver" in said(tools)


@pytest.mark.parametrize(("file", "device"), [("nvidiactl", "cuda"), ("rbln0", "rbln")])
def test_a_drivers_file_is_enough(tools: Path, file: str, device: str) -> None:
    (tools.parent / "dev").mkdir()
    (tools.parent / "dev" / file).touch()
    assert f"setup: device {device}: this machine has" in said(tools)


def test_a_machine_with_rebellions_tools_gets_rbln(tools: Path) -> None:
    executable(tools / "rbln-smi", "#!/bin/sh\nexit 0\n")
    assert "setup: device rbln: this machine has Rebellions' driver" in said(tools)


def test_the_device_that_is_named_wins(tools: Path) -> None:
    assert "setup: device cuda, as DEVICE says; this machine has neither" in said(tools, "cuda")


def test_an_unknown_device_is_refused_with_the_known_ones(tools: Path) -> None:
    assert said(tools, "gpu") == "setup: DEVICE=gpu: there are cpu, cuda and rbln\n"


@pytest.mark.parametrize("before", ["cpu", None])
def test_an_environment_for_another_device_is_made_anew(tools: Path, before: str | None) -> None:
    left = made_for(tools, before)
    assert "venv was made for cpu: it is made anew" in said(tools, "cuda")
    assert not left.exists()


def test_an_environment_keeps_its_device_where_none_is_named(tools: Path) -> None:
    left = made_for(tools, "cuda")
    assert "venv was made for it; this machine has neither" in said(tools)
    assert left.exists()


def test_an_environment_without_an_engine_is_for_whatever_the_machine_has(tools: Path) -> None:
    made_for(tools, "cpu")
    (tools.parent / "venv" / ".device").unlink()
    assert "made anew" not in said(tools, "cuda")


def test_nothing_is_removed_where_no_python_is_found(tools: Path) -> None:
    left = made_for(tools, "cpu")
    executable(tools / "python", "#!/bin/sh\nexit 1\n")
    assert "Python" in said(tools, "cuda")
    assert left.exists()
