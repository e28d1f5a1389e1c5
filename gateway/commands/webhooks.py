"""Implements `producer webhooks`: creates, lists and deletes endpoints of webhooks."""

from collections.abc import Iterable
from typing import Any

import click

from contract.errors import BatchConflict
from contract.naming import DEFAULT_TENANT
from contract.webhooks import check_url, is_private, private_text
from gateway.redis.webhooks import EVENTS, Endpoint, Webhooks
from producer.cli import options
from producer.cli.context import Context, pass_context
from producer.cli.progress import tell
from producer.cli.show import iso_time, print_columns, put_json, put_json_list
from producer.input.options import check_name
from producer.redis import NotifySecret


@click.group("webhooks")
def command() -> None:
    """Create, list and delete the endpoints of webhooks, for batches of `producer serve`.

    `secret` prints the secret that signs webhooks of `producer submit --notify`.
    """


@command.command("create")
@click.option(
    "--tenant",
    metavar="T",
    default=DEFAULT_TENANT,
    show_default=True,
    help="Tenant; the endpoint gets events about its batches.",
)
@click.option("--url", required=True, help="URL to POST to: http or https.")
@click.option(
    "--events", metavar="A,B", help=f"Events that the endpoint gets. Default: {','.join(EVENTS)}."
)
@options.as_json
@pass_context
def create(context: Context, *, tenant: str, url: str, events: str | None, as_json: bool) -> None:
    """Create an endpoint and print, once, the secret that signs its events."""
    check_name("tenant", tenant)
    endpoint = _webhooks(context).create(tenant, _checked_url(url), _parsed_events(events))
    if as_json:
        put_json({**_json(endpoint), "secret": endpoint.secret})
    else:
        click.echo(endpoint.secret)
        tell(f"{endpoint.id}: an endpoint of tenant {tenant}; the secret is not shown again")
    if is_private(url):
        tell(f"{endpoint.id}: {private_text('gateways')}")


@command.command("list")
@options.as_json
@pass_context
def list_webhooks(context: Context, *, as_json: bool) -> None:
    """List all endpoints, the oldest first."""
    endpoints = _webhooks(context).all()
    if as_json:
        put_json_list(_json(endpoint) for endpoint in endpoints)
    else:
        _table(endpoints)


@command.command("delete")
@click.argument("endpoint_id", metavar="ID")
@options.as_json
@pass_context
def delete(context: Context, *, endpoint_id: str, as_json: bool) -> None:
    """Delete an endpoint; events that were not delivered yet are dropped."""
    webhooks = _webhooks(context)
    endpoint = webhooks.get(endpoint_id)
    if endpoint is None or not webhooks.delete(endpoint_id):
        raise BatchConflict(
            f"there is no endpoint {endpoint_id[:140]!r}; see `producer webhooks list`"
        )
    tell(f"{endpoint.id}: deleted")
    if as_json:
        put_json(_json(endpoint))


@command.command("secret")
@options.as_json
@pass_context
def secret(context: Context, *, as_json: bool) -> None:
    """Print the secret that signs the webhooks of `producer submit --notify`."""
    text = NotifySecret.using(context.store).get()
    if as_json:
        put_json({"object": "warmq.webhook_secret", "secret": text})
    else:
        click.echo(text)


def _webhooks(context: Context) -> Webhooks:
    return Webhooks.using(context.store)


def _checked_url(text: str) -> str:
    try:
        return check_url(text)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--url") from None


def _parsed_events(text: str | None) -> tuple[str, ...]:
    if text is None:
        return EVENTS
    named = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    if wrong := [name for name in named if name not in EVENTS]:
        raise click.BadParameter(
            f"{wrong[0][:100]!r}: use some of {', '.join(EVENTS)}", param_hint="--events"
        )
    return named


def _json(endpoint: Endpoint) -> dict[str, Any]:
    return {
        "id": endpoint.id,
        "object": "warmq.webhook",
        "tenant": endpoint.tenant,
        "url": endpoint.url,
        "events": list(endpoint.events),
        "created_at": iso_time(str(endpoint.created_at * 1000)),
    }


def _table(endpoints: Iterable[Endpoint]) -> None:
    rows = [("ID", "TENANT", "CREATED", "EVENTS", "URL")]
    for endpoint in endpoints:
        events = "all" if set(endpoint.events) == set(EVENTS) else ",".join(endpoint.events)
        created = str(iso_time(str(endpoint.created_at * 1000)))[:19]
        rows.append((endpoint.id, endpoint.tenant, created, events, endpoint.url))
    print_columns(rows)
