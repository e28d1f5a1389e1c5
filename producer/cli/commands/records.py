"""Implements `producer records`, which lists what tenants of gateways keep in Redis."""

import click

from producer.cli import options
from producer.cli.context import Context, pass_context
from producer.cli.show import print_columns, put_json_list, size_text
from producer.redis import SAMPLED, tenant_records, tenant_usage


@click.command("records")
@click.option("-t", "--tenant", metavar="T", help="List each record of this tenant.")
@options.as_json
@pass_context
def command(context: Context, *, tenant: str | None, as_json: bool) -> None:
    """List what tenants of `producer serve` keep in Redis, such as files and batches.

    `producer delete ID` removes a file, or a batch or response that has ended.
    """
    if tenant is not None:
        _print_records(context, tenant, as_json)
        return
    tenants = list(tenant_usage(context.store))
    if as_json:
        put_json_list(
            {
                "object": "warmq.records", "tenant": usage.tenant, "bytes": usage.bytes,
                "kinds": usage.kinds, "sampled": usage.sampled,
            } for usage in tenants
        )  # fmt: skip
        return
    rows = [("TENANT", "BYTES", "KINDS")]
    for usage in tenants:
        kinds = ", ".join(f"{kind} {count}" for kind, count in usage.kinds.items())
        sampled = f" (only the first {SAMPLED:,} are counted)" if usage.sampled else ""
        rows.append((usage.tenant, size_text(usage.bytes), kinds + sampled))
    print_columns(rows)


def _print_records(context: Context, tenant: str, as_json: bool) -> None:
    records = tenant_records(context.store, tenant)
    if as_json:
        put_json_list(
            {"object": "warmq.record", "id": record.id, "kind": record.kind, "bytes": record.bytes}
            for record in records
        )
        return
    rows = ((record.id, record.kind, size_text(record.bytes)) for record in records)
    print_columns([("ID", "KIND", "BYTES"), *rows])
