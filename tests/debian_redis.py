"""The distribution's redis-server, for what the bundled 6.2 cannot do: TLS.

Its packages are unpacked into the environment, without root, once. Where that is
impossible the tests that need it fail and say so; they are not skipped.
"""

from __future__ import annotations

import datetime as dt
import fcntl
import ipaddress
import re
import shutil
import subprocess
import sys
from functools import cached_property
from pathlib import Path

import redis
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from demo.stack import RedisServer

CACHE = Path(sys.prefix) / "debian-redis"
PACKAGES = ("redis-server", "redis-tools")


class NoDebianRedis(AssertionError):
    """The distribution's redis-server cannot be had here."""


def debian_redis() -> str:
    """Return the program; it starts the unpacked server with the unpacked libraries."""
    CACHE.mkdir(exist_ok=True)
    program = CACHE / "redis-server"
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not program.exists():
            try:
                _unpack(program)
            except (OSError, subprocess.CalledProcessError, LookupError) as error:
                told = getattr(error, "stderr", None) or error
                raise NoDebianRedis(
                    "TLS is tested against the distribution's redis-server, unpacked with "
                    "`apt-get download` and `dpkg -x`. That failed here (Debian or Ubuntu with "
                    f"package lists and a mirror is needed; `apt-get update` may help): {told}"
                ) from error
    return str(program)


def _unpack(program: Path) -> None:
    root = CACHE / "root"
    shutil.rmtree(root, ignore_errors=True)
    shutil.rmtree(CACHE / "deb", ignore_errors=True)
    (CACHE / "deb").mkdir()
    _fetch(root, *PACKAGES)
    server = root / "usr/bin/redis-server"
    if _missing(server, root):
        _fetch(root, *_libraries())
    if missing := _missing(server, root):
        raise LookupError(f"its libraries are not all there: {', '.join(missing)}")
    new = program.with_suffix(".new")
    new.write_text(f'#!/bin/sh\nLD_LIBRARY_PATH={_paths(root)} exec {server} "$@"\n')
    new.chmod(0o755)
    new.replace(program)


def _fetch(root: Path, *packages: str) -> None:
    folder = CACHE / "deb"
    _run("apt-get", "download", *packages, cwd=folder)
    for package in folder.glob("*.deb"):
        _run("dpkg", "-x", package, root)


def _libraries() -> list[str]:
    """Return the libraries that the packages name, the C library aside."""
    text = _run("apt-cache", "depends", *PACKAGES)
    names = re.findall(r"^ *\|?Depends: ((?:lib|lua)\S+)$", text, re.MULTILINE)
    return sorted(set(names) - {"libc6"})


def _paths(root: Path) -> str:
    return ":".join(sorted({str(library.parent) for library in root.rglob("*.so*")}))


def _missing(server: Path, root: Path) -> list[str]:
    text = _run("ldd", server, env={"LD_LIBRARY_PATH": _paths(root), "PATH": "/usr/bin:/bin"})
    return re.findall(r"(\S+) => not found", text)


def _run(*command: str | Path, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    return subprocess.run(
        command, cwd=cwd, env=env, capture_output=True, text=True, timeout=120, check=True
    ).stdout


class Authority:
    """A certificate authority of this test's own, and one server certificate for 127.0.0.1."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.ca, self.cert, self.key = (folder / f"{n}.pem" for n in ("ca", "server", "key"))
        ca_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
        issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"test CA {folder.name}")])
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
        address = x509.SubjectAlternativeName(
            [x509.IPAddress(ipaddress.ip_address("127.0.0.1")), x509.DNSName("localhost")]
        )
        usage = x509.KeyUsage(True, False, False, False, False, True, True, False, False)
        root = _certificate(issuer, issuer, ca_key).add_extension(usage, True)
        root = root.add_extension(x509.BasicConstraints(True, None), True)
        leaf = _certificate(subject, issuer, key).add_extension(address, False)
        pem = serialization.Encoding.PEM
        self.ca.write_bytes(root.sign(ca_key, hashes.SHA256()).public_bytes(pem))
        self.cert.write_bytes(leaf.sign(ca_key, hashes.SHA256()).public_bytes(pem))
        self.key.write_bytes(
            key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        )


def _certificate(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey
) -> x509.CertificateBuilder:
    now = dt.datetime.now(dt.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(hours=1))
        .not_valid_after(now + dt.timedelta(days=1))
    )


class TlsRedis(RedisServer):
    """A redis-server that speaks nothing but TLS."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.authority = Authority(folder / "tls")
        super().__init__(folder, *options, binary=debian_redis())
        self._options = (
            *options, "--appendonly", "yes", "--port", "0", "--tls-port", str(self.port),
            "--tls-cert-file", str(self.authority.cert), "--tls-key-file", str(self.authority.key),
            "--tls-ca-cert-file", str(self.authority.ca), "--tls-auth-clients", "no",
        )  # fmt: skip

    @cached_property
    def secure_url(self) -> str:
        """The URL that trusts the test's authority only."""
        return f"rediss://127.0.0.1:{self.port}/0?ssl_ca_certs={self.authority.ca}"

    def client(self) -> redis.Redis:
        """Return a new client."""
        return redis.Redis.from_url(self.secure_url, socket_timeout=10)
