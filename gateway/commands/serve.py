"""Implements `producer serve`."""

from typing import Any

import click

from contract.errors import WarmqError
from contract.settings import load
from producer.cli.progress import tell


class GatewayMissing(WarmqError):
    """Raised if the packages of the gateway are not installed."""

    code = "not_installed"


@click.command("serve")
@click.option("--host", help="Address to listen on. Default: WARMQ_GATEWAY_HOST, 127.0.0.1.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    help="Port to listen on; 0 for any. Default: WARMQ_GATEWAY_PORT, 8000.",
)
def command(host: str | None, port: int | None) -> None:
    """Serve the APIs of OpenAI and Anthropic over the queue, and a page at /ui.

    docs/how-to/openai-batch-file.md has the first steps; docs/reference/gateway.md lists the routes
    and the differences from OpenAI.
    """
    try:
        from gateway.server import serve  # noqa: PLC0415 - an optional extra
        from gateway.settings import GatewaySettings  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise GatewayMissing(
            f"{error.name} is not installed; pip install 'warmq[gateway]'"
        ) from None
    options: dict[str, Any] = {"gateway_host": host, "gateway_port": port}
    options = {name: value for name, value in options.items() if value is not None}
    serve(load(GatewaySettings, **options), tell)
