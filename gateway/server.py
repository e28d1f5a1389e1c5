"""Runs the gateway: uvicorn in this process, and the batch runner in another."""

from __future__ import annotations

import errno
import gc
import logging
import signal
import socket
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import uvicorn
from uvicorn.config import LOGGING_CONFIG, STARTUP_FAILURE

from contract.errors import WarmqError
from contract.log_lines import set_up
from contract.redis.announcements import is_alive
from contract.traces import tracing
from gateway.app import build
from gateway.auth import check_address
from gateway.batches.runner.process import RunnerProcess
from gateway.files.files import check_same_store
from gateway.http import audit
from gateway.http.connections import protocol_for, raise_descriptor_limit, silence_client_errors
from gateway.http.services import Services
from gateway.served_models import ServedModels
from gateway.settings import GatewaySettings

#: Seconds for which idle connections stay open, longer than clients keep them (5 s, also uvicorn's
#: default): if both sides close one at the same time, a request that is being sent is lost ("Server
#: disconnected").
KEEP_ALIVE_S = 75
#: New objects after which Python collects its youngest generation, as in the worker
#: (docs/decisions/0009). Python's default of 700 means a collection every few requests.
YOUNG_OBJECTS = 10_000


log = logging.getLogger(__name__)


class AddressNotFree(WarmqError):
    """The gateway cannot listen on its address."""

    code = "address_not_free"


def check_free(host: str, port: int) -> None:
    """Raise AddressNotFree if the gateway cannot listen on an address; nothing is started."""
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        problem = error.strerror or str(error)
        raise AddressNotFree(
            f"host {host} is not an address to listen on: {problem}; name one with --host"
        ) from None
    for family, kind, protocol, _, address in addresses:
        try:
            _listen_briefly(socket.socket(family, kind, protocol), address)
        except OSError as error:
            # One address of a name may be IPv6 on a machine that has no IPv6.
            if len(addresses) == 1 or error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                raise AddressNotFree(_why_not(host, port, error)) from None


def _listen_briefly(probe: socket.socket, address: Any) -> None:
    with probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if probe.family == socket.AF_INET6:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        probe.bind(address)
        probe.listen(1)  # two sockets may be bound, but only one may listen


def _why_not(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} of {host} is in use; name another with --port, or stop what uses it"
    if error.errno == errno.EACCES:
        return f"this user lacks permission for port {port}; name one above 1023 with --port"
    return f"cannot listen on {host}, port {port}: {error.strerror}; name another with --host"


def serve(settings: GatewaySettings, tell: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT; `tell` gets the addresses once they are served.

    Raises:
        StoreUnavailable: Redis does not answer at the start.
        FileStoreFailed: The store cannot be used, or is not the store of the other gateways.
        KeyMissing: The gateway would be open to the network.
        AddressNotFree: The gateway cannot listen on its address.
    """
    check_free(settings.gateway_host, settings.gateway_port)
    with tracing(settings.traces, "warmq-gateway"):
        _serve(settings, tell)


def _serve(settings: GatewaySettings, tell: Callable[[str], None]) -> None:
    services = Services.open(settings)
    runner = RunnerProcess()
    # After its own handling uvicorn raises the signal again, which runs this handler.
    signal.signal(signal.SIGTERM, _exit)
    try:
        as_json = settings.log_format == "json"
        if as_json:
            set_up("json", "")
            tell = _tell_in_log
        check_address(settings.gateway_host, services.keys)
        check_same_store(services)
        audit.to_stdout()
        silence_client_errors()
        if settings.gateway_batch_runner:
            runner.start()
        app = build(services)
        gc.freeze()  # keeps 90,000 lasting objects out of full collections
        gc.set_threshold(YOUNG_OBJECTS)
        config = uvicorn.Config(
            app,
            host=settings.gateway_host,
            port=settings.gateway_port,
            loop="uvloop",
            http=protocol_for(raise_descriptor_limit()),
            ws="none",
            proxy_headers=False,  # callers are known by their keys, not their addresses
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=round(settings.drain_timeout_s),
            access_log=False,
            server_header=False,
            log_config=None if as_json else LOGGING_CONFIG,
            log_level="info" if as_json else "warning",
        )
        server = _Server(config, services, tell)
        with suppress(KeyboardInterrupt):
            server.run()
        if not server.started:
            raise SystemExit(STARTUP_FAILURE)
    finally:
        runner.stop()
        services.close()


class _Server(uvicorn.Server):
    """Tells where it listens, and which models are served, once it does."""

    def __init__(
        self, config: uvicorn.Config, services: Services, tell: Callable[[str], None]
    ) -> None:
        super().__init__(config)
        self._workers = _workers_text(services)
        self._tell = tell

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if not self.started:
            return
        host, port = self.config.host, self.servers[0].sockets[0].getsockname()[1]
        if host in ("0.0.0.0", "::", ""):  # noqa: S104 - compared, not listened on
            host = socket.gethostname()
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        self._tell(f"page     {url}/ui\nAPI      {url}/v1\nworkers  {self._workers}")


def _tell_in_log(text: str) -> None:
    log.info("%s", text, extra={"action": "serving"})


def _workers_text(services: Services) -> str:
    """Return a text about the workers that are alive, and the models that they serve."""
    settings, announced = services.settings, services.batches.announcements()
    alive = [one for one in announced if is_alive(one)]
    served = ServedModels.of(alive, settings.queue, settings.gateway_models)
    if not served.names:
        return "none runs; requests wait until `warmq-worker` has started one"
    states = Counter(str(one.get("state")) for one in alive)
    return f"{', '.join(f'{n} {state}' for state, n in states.items())}; {served.listing(None)}"


def _exit(*_: object) -> None:
    raise SystemExit(0)
