"""Runs the gateway: uvicorn in this process, and beside it the one that carries batches."""

from __future__ import annotations

import gc
import signal

import uvicorn
from uvicorn.config import LOGGING_CONFIG

from contract.log_lines import set_up
from contract.traces.tracer import tracing
from producer.gateway import audit
from producer.gateway.app import build
from producer.gateway.auth import check_address
from producer.gateway.carrying.process import CarrierProcess
from producer.gateway.connections import most_connections, protocol_for, quiet_about_clients
from producer.gateway.services import Services
from producer.gateway.settings import GatewaySettings

#: Clients keep idle connections for as long as 5 s, uvicorn's default: both would close at once,
#: and a request that is on its way is lost ("Server disconnected").
KEEP_ALIVE_S = 75
#: New objects after which Python's collector looks at the young ones, as in the worker
#: (docs/decisions/0009): at its own 700 it did so every few requests.
YOUNG_OBJECTS = 10_000


def serve(settings: GatewaySettings) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises:
        StoreUnavailable: Redis does not answer at the start.
        KeyMissing: it would be open to the network.
    """
    with tracing(settings.traces, "warmq-gateway"):
        _serve(settings)


def _serve(settings: GatewaySettings) -> None:
    services = Services.open(settings)
    carrier = CarrierProcess()
    # uvicorn ends by the signal that it got, as if it had not taken it: this is what then happens.
    signal.signal(signal.SIGTERM, _exit)
    try:
        check_address(settings.gateway_host, services.keys)
        audit.to_stdout()
        as_json = settings.log_format == "json"
        if as_json:
            set_up("json", "")
        quiet_about_clients()
        if settings.gateway_carries:
            carrier.start()
        app = build(services)
        gc.freeze()  # a full collection would look at all that stays, 90,000 objects
        gc.set_threshold(YOUNG_OBJECTS)
        uvicorn.run(
            app,
            host=settings.gateway_host,
            port=settings.gateway_port,
            loop="uvloop",
            http=protocol_for(most_connections(settings.gateway_connections)),
            ws="none",
            proxy_headers=False,  # who calls is said by its key, not by its address
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=settings.gateway_drain_s,
            access_log=False,
            server_header=False,
            log_config=None if as_json else LOGGING_CONFIG,
            log_level="info",
        )
    finally:
        carrier.stop()
        services.close()


def _exit(*_: object) -> None:
    raise SystemExit(0)
