"""Environments with a built warmq in them, beside the one that the tests run in.

What warmq needs comes from this environment's packages, without its own editable install.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

#: As pip writes them for a program that another environment's packages bring.
CELERY = """#!{python}
from celery.__main__ import main
if __name__ == "__main__":
    main()
"""


def built_wheel(root: Path, folder: Path) -> Path:
    """Build the wheel of a source tree into a folder; return it."""
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=root, check=True, capture_output=True)
    (built,) = folder.glob("*.whl")
    return built


def environment_with(wheel: Path, venv: Path) -> Path:
    """Make an environment with a wheel in it; return its interpreter."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    python = venv / "bin" / "python"
    packages = Path(sysconfig.get_path("purelib"))
    theirs = venv / packages.relative_to(sys.prefix)
    # A folder that a .pth file names is searched, but its own .pth files, the editable
    # install's among them, are not read.
    (theirs / "locked.pth").write_text(f"{packages}\n")
    if (packages / "libnuma.pth").exists():
        shutil.copy(packages / "libnuma.pth", theirs)
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-qq", "--no-deps"]
    subprocess.run([*pip, "--disable-pip-version-check", str(wheel)], check=True)
    celery = python.parent / "celery"
    celery.write_text(CELERY.format(python=python))
    celery.chmod(0o755)
    return python
