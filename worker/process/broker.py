"""Translates WARMQ_REDIS_URL into Celery's settings, for the connection of control commands.

URLs with TLS, Sentinel or a Unix socket have another form in Celery and kombu than in redis-py.
Both also show their settings: `inspect stats` would print the password of a Sentinel URL. So Celery
gets a URL without the password, and asks UrlCredentials for it.
"""

from typing import Any
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

import redis

from contract.redis.connect import SentinelUrl, credentials_of
from contract.settings import Settings, load

_PROVIDER = "worker.process.broker.UrlCredentials"


def celery_settings(url: str) -> dict[str, Any]:
    """Return Celery's settings of its broker and result backend for a URL."""
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
        tls: dict[str, Any] = {"ssl_cert_reqs": "required"}
        tls |= {name: value for name, value in query.items() if name.startswith("ssl_")}
        # The same values are false as in redis-py's URL parser.
        if (hostname := tls.get("ssl_check_hostname")) is not None:
            false_words = ("0", "f", "false", "n", "no", "")
            tls["ssl_check_hostname"] = hostname.lower() not in false_words
        settings |= {"broker_use_ssl": tls, "redis_backend_use_ssl": dict(tls)}
    return settings


def _sentinel(url: SentinelUrl) -> dict[str, Any]:
    provider = f"?{urlencode({'credential_provider': _PROVIDER})}" if url.password else ""
    hosts = [f"{host}:{port}/{url.db}" for host, port in url.addresses]
    # Celery's Sentinel backend takes no credential provider, but masks the password in its URL.
    login = f"{quote(url.user, '')}:{quote(url.password, '')}@" if url.password else ""
    return {
        "broker_url": ";".join(f"sentinel://{host}{provider}" for host in hosts),
        "result_backend": ";".join(f"sentinel://{login}{host}" for host in hosts),
        "broker_transport_options": {"master_name": url.master},
        "result_backend_transport_options": {"master_name": url.master},
    }


class UrlCredentials(redis.CredentialProvider):
    """Gives Celery's connections the password, so that no setting of Celery has it."""

    def get_credentials(self) -> tuple[str, str] | tuple[str]:
        """Return the user, if any, and the password of WARMQ_REDIS_URL."""
        user, password = credentials_of(load(Settings).redis_url.get_secret_value())
        return (user, password) if user else (password,)
