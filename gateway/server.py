"""Runs the gateway: uvicorn in this process, and beside it the one that carries batches."""

from __future__ import annotations

import errno
import gc
import signal
import socket
from typing import Any

import uvicorn
from uvicorn.config import LOGGING_CONFIG

from contract.errors import WarmqError
from contract.log_lines import set_up
from contract.traces import tracing
from gateway.app import build
from gateway.auth import check_address
from gateway.batches.runner.process import RunnerProcess
from gateway.files.files import check_same_store
from gateway.http import audit
from gateway.http.connections import protocol_for, raise_descriptor_limit, silence_client_errors
from gateway.http.services import Services
from gateway.settings import GatewaySettings

#: Clients keep idle connections for as long as 5 s, uvicorn's default: both would close at once,
#: and a request that is on its way is lost ("Server disconnected").
KEEP_ALIVE_S = 75
#: New objects after which Python's collector looks at the young ones, as in the worker
#: (docs/decisions/0009): at its own 700 it did so every few requests.
YOUNG_OBJECTS = 10_000


class AddressTaken(WarmqError):
    """The gateway cannot listen on its address."""

    code = "address_not_free"


def check_free(host: str, port: int) -> None:
    """Raise AddressTaken if nobody can listen on an address now: before anything is started."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        told = error.strerror or str(error)
        raise AddressTaken(
            f"host {host} is no address to listen on: {told}; name one by --host"
        ) from None
    for family, kind, protocol, _, address in found:
        try:
            _probe(socket.socket(family, kind, protocol), address)
        except OSError as error:
            # A name may have an address of IPv6 where there is none, beside one that can be had.
            if len(found) == 1 or error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                raise AddressTaken(_why_not(host, port, error)) from None


def _probe(probe: socket.socket, address: Any) -> None:
    with probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if probe.family == socket.AF_INET6:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        probe.bind(address)
        probe.listen(1)  # of two that are bound, only one may listen


def _why_not(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} of {host} is in use; name another by --port, or end what listens there"
    if error.errno == errno.EACCES:
        return f"port {port} needs rights that this user has not; name one above 1023 by --port"
    return f"nobody can listen on {host}, port {port}: {error.strerror}; name another by --host"


def serve(settings: GatewaySettings) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises:
        StoreUnavailable: Redis does not answer at the start.
        FileStoreFailed: files cannot be kept, or are kept elsewhere than those of other gateways.
        KeyMissing: it would be open to the network.
        AddressTaken: somebody listens there.
    """
    check_free(settings.gateway_host, settings.gateway_port)
    with tracing(settings.traces, "warmq-gateway"):
        _serve(settings)


def _serve(settings: GatewaySettings) -> None:
    services = Services.open(settings)
    carrier = RunnerProcess()
    # uvicorn ends by the signal that it got, as if it had not taken it: this is what then happens.
    signal.signal(signal.SIGTERM, _exit)
    try:
        as_json = settings.log_format == "json"
        if as_json:
            set_up("json", "")
        check_address(settings.gateway_host, services.keys)
        check_same_store(services)
        audit.to_stdout()
        silence_client_errors()
        if settings.gateway_batch_runner:
            carrier.start()
        app = build(services)
        gc.freeze()  # a full collection would look at all that stays, 90,000 objects
        gc.set_threshold(YOUNG_OBJECTS)
        uvicorn.run(
            app,
            host=settings.gateway_host,
            port=settings.gateway_port,
            loop="uvloop",
            http=protocol_for(raise_descriptor_limit()),
            ws="none",
            proxy_headers=False,  # who calls is said by its key, not by its address
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=round(settings.drain_timeout_s),
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
