"""The password of WARMQ_REDIS_URL for Celery's connections."""

import redis

from contract.redis.connect import credentials_of
from contract.settings import Settings, load


class UrlCredentials(redis.CredentialProvider):
    """Tells Celery's connections the password, so that Celery has none that it could show."""

    def get_credentials(self) -> tuple[str, str] | tuple[str]:
        """Return what WARMQ_REDIS_URL says now."""
        user, password = credentials_of(load(Settings).redis_url.get_secret_value())
        return (user, password) if user else (password,)
