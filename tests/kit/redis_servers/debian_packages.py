"""Servers out of Debian's packages, unpacked into the environment, without root, once.

The suite is the machine's own or another that the same mirror has: each brings its own release
of a server. A server of a newer suite brings that suite's libraries too, the C library with them.
"""

from __future__ import annotations

import fcntl
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

CACHE = Path(sys.prefix) / "debian-servers"
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
TIMEOUT_S = 120


class NotUnpacked(AssertionError):
    """The packages cannot be had here."""


@dataclass(frozen=True, slots=True)
class Packaged:
    """A server program, `redis-server` or `valkey-server`, and the suite that has its package.

    No suite means that of the machine.
    """

    name: str
    suite: str = ""

    def program(self) -> str:
        """Return the program, unpacked now if it was not before; raises NotUnpacked."""
        folder = CACHE / "-".join(filter(None, (self.name, self.suite)))
        folder.mkdir(parents=True, exist_ok=True)
        start = folder / self.name
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not start.exists():
                try:
                    self._unpack(folder, start)
                except (OSError, subprocess.SubprocessError, LookupError) as error:
                    told = getattr(error, "stderr", None) or error
                    raise NotUnpacked(
                        f"The tests run Debian's {self.name}{self.suite and f' of {self.suite}'}, "
                        "unpacked with `apt-get download` and `dpkg -x`. That failed here (package "
                        "lists and a mirror are needed, of Debian itself where a suite is named; "
                        f"`apt-get update` may help): {told}"
                    ) from error
        return str(start)

    def _unpack(self, folder: Path, start: Path) -> None:
        root, new = folder / "root", folder / "new"
        shutil.rmtree(root, ignore_errors=True)
        apt = _Apt(folder, self.suite)
        packages = (self.name, self.name.replace("-server", "-tools"))
        apt.unpack(root, packages)
        _write_start(new, root, self.name)
        if subprocess.run([new, "--version"], capture_output=True, check=False).returncode:
            apt.unpack(root, apt.libraries(packages))
            _write_start(new, root, self.name)
            _run(new, "--version")
        new.replace(start)


def unpacked(folder: Path, suite: str, package: str) -> Path:
    """Unpack one package of a suite; return the root that its files are in."""
    folder.mkdir(parents=True, exist_ok=True)
    root = folder / "root"
    _Apt(folder, suite).unpack(root, (package,))
    return root


class _Apt:
    """Debian's own client, with package lists of its own where a suite is named."""

    def __init__(self, folder: Path, suite: str) -> None:
        self._folder = folder
        self._options: list[str] = []
        if suite:
            self._options = _options_for(folder, suite)
            _run("apt-get", *self._options, "update")

    def unpack(self, root: Path, packages: tuple[str, ...]) -> None:
        """Download the packages and unpack them into `root`."""
        into = self._folder / "deb"
        shutil.rmtree(into, ignore_errors=True)
        into.mkdir()
        _run("apt-get", *self._options, "download", *packages, cwd=into)
        for package in into.glob("*.deb"):
            _run("dpkg", "-x", package, root)

    def libraries(self, packages: tuple[str, ...]) -> tuple[str, ...]:
        """Return the libraries that the packages need, and those that these need."""
        found: set[str] = set()
        more = set(packages)
        while more:
            text = _run("apt-cache", *self._options, "depends", "--important", *sorted(more))
            named = re.findall(r"^ *\|?(?:Pre)?Depends: ((?:lib|lua|zlib)\S+)$", text, re.MULTILINE)
            more = set(named) - found
            found |= more
        return tuple(sorted(found))


def _options_for(folder: Path, suite: str) -> list[str]:
    """Return what points apt at one suite of the mirror that the machine is configured with."""
    sites = _run("apt-get", "indextargets", "--format", "$(SITE)", "Origin: Debian").split()
    if not sites:
        raise LookupError("no mirror of Debian is among the machine's package sources")
    lists, cache, sources = (folder / name for name in ("lists", "cache", "sources"))
    (lists / "partial").mkdir(parents=True, exist_ok=True)
    (cache / "archives" / "partial").mkdir(parents=True, exist_ok=True)
    sources.write_text(f"deb [signed-by={KEYRING}] {sites[0]} {suite} main\n")
    settings = {
        "Dir::Etc::SourceList": sources,
        "Dir::Etc::SourceParts": "/dev/null",
        "Dir::State::Lists": lists,
        "Dir::Cache": cache,
        "APT::Sandbox::User": "root",  # the user it changes to could not write here
    }
    return [word for name, value in settings.items() for word in ("-o", f"{name}={value}")]


def _write_start(path: Path, root: Path, name: str) -> None:
    """Write the script that starts the unpacked server with the unpacked libraries."""
    libraries = ":".join(sorted({str(library.parent) for library in root.rglob("*.so*")}))
    server = root / "usr" / "bin" / name
    # A C library works only with the loader that came with it.
    loader = next(iter(sorted(root.rglob("ld-linux-*.so.*"))), None)
    begin = (
        f"exec {loader} --library-path {libraries}"
        if loader
        else f"LD_LIBRARY_PATH={libraries} exec"
    )
    path.write_text(f'#!/bin/sh\n{begin} {server} "$@"\n')
    path.chmod(0o755)


def _run(*command: str | Path, cwd: Path | None = None) -> str:
    return subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=TIMEOUT_S, check=True
    ).stdout
