"""Runs the gateway: uvicorn in this process."""

from __future__ import annotations

import uvicorn

from producer.gateway.app import build
from producer.gateway.services import Services
from producer.gateway.settings import GatewaySettings

#: Clients keep idle connections for as long as 5 s, uvicorn's default: both would close at once,
#: and a request that is on its way is lost ("Server disconnected").
KEEP_ALIVE_S = 75
#: Streams that are open when the gateway ends have so long.
GRACE_S = 10


def serve(settings: GatewaySettings) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises:
        StoreUnavailable: Redis does not answer at the start.
    """
    services = Services.open(settings)
    try:
        uvicorn.run(
            build(services),
            host=settings.gateway_host,
            port=settings.gateway_port,
            loop="uvloop",
            http="httptools",
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=GRACE_S,
            limit_concurrency=settings.gateway_connections,
            access_log=False,
            server_header=False,
            log_level="info",
        )
    finally:
        services.close()
