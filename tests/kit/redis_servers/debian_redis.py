"""The distribution's redis-server, for what the bundled 6.2 cannot do: TLS.

Where its packages cannot be had the tests that need it fail and say so; they are not skipped.
"""

from __future__ import annotations

import datetime as dt
import ipaddress
from functools import cached_property
from pathlib import Path

import redis
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from kit.redis_servers.debian_packages import Packaged

from demo.stack import RedisServer, chosen_redis


def debian_redis() -> str:
    """Return the program of the machine's own release; it starts with unpacked libraries."""
    return Packaged("redis-server").program()


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
        # Python 3.13 and newer refuse certificates without them (VERIFY_X509_STRICT).
        named = x509.SubjectKeyIdentifier.from_public_key(ca_key.public_key())
        by = x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(named)
        root, leaf = root.add_extension(named, False), leaf.add_extension(by, False)
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
        super().__init__(folder, *options, binary=chosen_redis() or debian_redis())
        self.options = (
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
