"""Implements `producer tenant`, which sets the weights and caps of tenants."""

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import click

from contract.errors import BatchConflict
from contract.redis.known import KnownAnswers
from contract.redis.tenants import Tenant, TenantLoad
from producer.cli import options
from producer.cli.context import Context, pass_context
from producer.cli.progress import counted, tell
from producer.cli.show import print_columns, put_json, put_json_list
from producer.input.options import check_name

#: Range of weights; within it the counters in Redis are precise.
_WEIGHTS = click.FloatRange(0.001, 1000)
_name = click.argument("name", metavar="TENANT")


@click.group("tenant")
def command() -> None:
    """Set how tenants share the workers: a weight, and a cap if needed."""


@command.command("set")
@_name
@click.option("--weight", type=_WEIGHTS, help="Share relative to other tenants. Default: 1.")
@click.option(
    "--max-in-flight",
    metavar="N|none",
    help="Most requests of the tenant that run at a time in a queue; `none` removes the cap.",
)
@options.as_json
@pass_context
def set_terms(
    context: Context, *, name: str, weight: float | None, max_in_flight: str | None, as_json: bool
) -> None:
    """Change a tenant's weight or cap, also for queued requests."""
    check_name("tenant", name)
    if weight is None and max_in_flight is None:
        raise click.UsageError("name what to change: --weight, --max-in-flight, or both")
    tenant = context.store.tenant(name)
    if weight is not None:
        if math.isnan(weight):  # FloatRange accepts nan
            raise click.BadParameter("nan is not a weight", param_hint="--weight")
        tenant = replace(tenant, weight=weight)
    if max_in_flight is not None:
        tenant = replace(tenant, max_in_flight=_parse_cap(max_in_flight))
    context.store.set_tenant(tenant)
    _print(context, tenant, as_json)


@command.command("show")
@_name
@options.as_json
@pass_context
def show(context: Context, *, name: str, as_json: bool) -> None:
    """Show a tenant's weight and cap, and its requests waiting and in flight."""
    check_name("tenant", name)
    _print(context, context.store.tenant(name), as_json)


@command.command("list")
@options.as_json
@pass_context
def list_tenants(context: Context, *, as_json: bool) -> None:
    """List the tenants with a weight or cap, or with requests waiting or in flight."""
    loads = context.store.tenant_loads(context.settings.queue)
    stored = {tenant.name: tenant for tenant in context.store.tenants()}
    names = sorted(stored.keys() | loads.keys())
    tenants = [(stored.get(n, Tenant(n)), loads.get(n, TenantLoad())) for n in names]
    if as_json:
        put_json_list(_json(tenant, load) for tenant, load in tenants)
    else:
        _print_table(tenants)


@command.command("delete")
@_name
@options.as_json
@pass_context
def delete(context: Context, *, name: str, as_json: bool) -> None:
    """Give a tenant weight 1 and no cap again. Its batches stay."""
    if not context.store.delete_tenant(name):
        raise BatchConflict(f"tenant {name!r} has no weight or cap")
    tell(f"{name}: weight 1, no cap")
    if as_json:
        _print(context, Tenant(name), as_json)


@command.command("forget-answers")
@_name
@options.as_json
@pass_context
def forget_answers(context: Context, *, name: str, as_json: bool) -> None:
    """Forget the known answers of a tenant, so that --reuse finds none. The results stay."""
    check_name("tenant", name)
    count = KnownAnswers.using(context.store).forget(name)
    tell(f"{name}: {counted(count, 'known answer')} forgotten")
    if as_json:
        _print(context, context.store.tenant(name), as_json)


def _print(context: Context, tenant: Tenant, as_json: bool) -> None:
    load = context.store.tenant_loads(context.settings.queue).get(tenant.name, TenantLoad())
    if as_json:
        put_json(_json(tenant, load))
    else:
        _print_table([(tenant, load)])


def _json(tenant: Tenant, load: TenantLoad) -> dict[str, Any]:
    return {
        "object": "warmq.tenant",
        "tenant": tenant.name,
        "weight": tenant.weight,
        "max_in_flight": tenant.max_in_flight,
        "waiting": load.waiting,
        "in_flight": load.in_flight,
    }


def _print_table(tenants: Iterable[tuple[Tenant, TenantLoad]]) -> None:
    rows = [("TENANT", "WEIGHT", "CAP", "WAITING", "IN FLIGHT")]
    for tenant, load in tenants:
        cap = "-" if tenant.max_in_flight is None else str(tenant.max_in_flight)
        weight = f"{tenant.weight:g}"
        rows.append((tenant.name, weight, cap, str(load.waiting), str(load.in_flight)))
    print_columns(rows)


def _parse_cap(text: str) -> int | None:
    if text == "none":
        return None
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise click.BadParameter(
            f"{text!r}: give a number of requests from 1, or `none`", param_hint="--max-in-flight"
        )
    return int(text)
