"""Environments of other projects' packages, made by the benchmark itself and never locked.

Each lies in `.venv-bench/<name>` and is made anew when its list changes: tests/bench/requirements/
<name>.txt, exact versions, complete (nothing is resolved). `over_base` puts it over the project's
own environment, so that what it brings comes first and vLLM is the same one.
"""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
from pathlib import Path

from demo.stack import ROOT

LISTS = Path(__file__).resolve().parents[1] / "requirements"
ENVIRONMENTS = ROOT / ".venv-bench"


class CannotRun(Exception):
    """What is to be compared cannot run here; the message says why."""


def environment(name: str, *, over_base: bool) -> Path:
    """Return the interpreter of an environment with the packages of requirements/<name>.txt.

    Raises CannotRun with pip's last words where they cannot be installed.
    """
    wanted = (LISTS / f"{name}.txt").read_text()
    folder = ENVIRONMENTS / name
    stamp, python = folder / "installed.txt", folder / "bin" / "python"
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    print(f"installing {name} into {folder.relative_to(ROOT)}", flush=True)
    try:
        _run(sys.executable, "-m", "venv", "--clear", "--without-pip", folder)
        if over_base:
            site = folder / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
            base = sysconfig.get_path("purelib")
            # addsitedir, not the bare path: the base's own .pth files count too.
            (site / "zz-base.pth").write_text(f"import site; site.addsitedir({base!r})\n")
        _run(
            sys.executable, "-m", "pip", "--python", python, "install", "-qq", "--no-deps",
            "--disable-pip-version-check", "-r", LISTS / f"{name}.txt",
        )  # fmt: skip
    except subprocess.SubprocessError as error:
        reason = told(str(getattr(error, "stderr", None) or error))
        raise CannotRun(f"{name} cannot be installed: {reason}") from error
    stamp.write_text(wanted)
    return python


def version(name: str) -> str:
    """Return the first line of a list: the package that is compared, with its version."""
    return (LISTS / f"{name}.txt").read_text().splitlines()[0]


def told(text: str) -> str:
    """Return the first error that a program's output names, else its end; without our folder."""
    errors = re.findall(r"^.*?(\w+(?:Error|Exception): .*)$", text, re.MULTILINE)
    return (errors[0] if errors else text.strip()[-300:]).replace(str(ROOT), "...")


def _run(*command: str | Path) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
