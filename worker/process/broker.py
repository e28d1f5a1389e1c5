"""WARMQ_REDIS_URL in Celery's own terms, for the control commands' connection.

Celery and kombu spell TLS, Sentinel and Unix sockets differently from redis-py. And
what they are given they show: `inspect stats` would print the password of a Sentinel
URL. So Celery gets the address only, and asks worker.process.broker for the password.
"""

from typing import Any
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

import redis

from contract.redis.connect import SentinelUrl, credentials_of
from contract.settings import Settings, load

_PROVIDER = "worker.process.broker.UrlCredentials"


def celery_settings(url: str) -> dict[str, Any]:
    """Return broker, result backend and their options."""
    if url.startswith("sentinel://"):
        return _sentinel(SentinelUrl.parse(url))
    parts = urlsplit(url)
    query = dict(parse_qsl(parts.query))
    provider = {"credential_provider": _PROVIDER} if any(credentials_of(url)) else {}
    if parts.scheme == "unix":
        place = {"virtual_host": query.get("db", "0")}
        address = f"redis+socket://{parts.path}?{urlencode(place | provider)}"
        return {"broker_url": address, "result_backend": address}
    db = query.get("db") or parts.path.strip("/") or "0"
    host = parts.netloc.rpartition("@")[2]
    address = f"redis://{host}/{db}" + (f"?{urlencode(provider)}" if provider else "")
    settings: dict[str, Any] = {"broker_url": address, "result_backend": address}
    if parts.scheme == "rediss":
        tls = {"ssl_cert_reqs": "required"}
        tls |= {name: value for name, value in query.items() if name.startswith("ssl_")}
        settings |= {"broker_use_ssl": _typed(tls), "redis_backend_use_ssl": _typed(tls)}
    return settings


def _typed(tls: dict[str, str]) -> dict[str, Any]:
    """Return TLS options as redis-py's connections take them; its own URL parser does that too."""
    hostname = tls.get("ssl_check_hostname")
    if hostname is None:
        return dict(tls)
    return tls | {"ssl_check_hostname": hostname.lower() not in ("0", "f", "false", "n", "no", "")}


def _sentinel(url: SentinelUrl) -> dict[str, Any]:
    provider = f"?{urlencode({'credential_provider': _PROVIDER})}" if url.password else ""
    hosts = [f"{host}:{port}/{url.db}" for host, port in url.addresses]
    # Celery's Sentinel backend knows no credential provider; it masks its URL wherever it shows it.
    login = f"{quote(url.user, '')}:{quote(url.password, '')}@" if url.password else ""
    return {
        "broker_url": ";".join(f"sentinel://{host}{provider}" for host in hosts),
        "result_backend": ";".join(f"sentinel://{login}{host}" for host in hosts),
        "broker_transport_options": {"master_name": url.master},
        "result_backend_transport_options": {"master_name": url.master},
    }


class UrlCredentials(redis.CredentialProvider):
    """Tells Celery's connections the password, so that Celery has none that it could show."""

    def get_credentials(self) -> tuple[str, str] | tuple[str]:
        """Return what WARMQ_REDIS_URL says now."""
        user, password = credentials_of(load(Settings).redis_url.get_secret_value())
        return (user, password) if user else (password,)
