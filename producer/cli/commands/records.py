"""`producer records`."""

import click

from producer.cli import options
from producer.cli.context import Context, pass_context
from producer.cli.show import columns, put_json_list, size_text
from producer.redis import tenant_records, tenant_usage


@click.command("records")
@click.option("-t", "--tenant", metavar="T", help="List each record of this tenant.")
@options.as_json
@pass_context
def command(context: Context, *, tenant: str | None, as_json: bool) -> None:
    """List what tenants of `producer serve` keep in Redis: files, uploads, batches.

    `producer delete ID` removes a file, or a batch that has ended.
    """
    if tenant is not None:
        _list(context, tenant, as_json)
        return
    tenants = list(tenant_usage(context.store))
    if as_json:
        put_json_list(
            {
                "object": "warmq.records", "tenant": held.tenant, "bytes": held.bytes,
                "kinds": held.kinds, "sampled": held.sampled,
            } for held in tenants
        )  # fmt: skip
        return
    rows = [("TENANT", "BYTES", "KINDS")]
    for held in tenants:
        kinds = ", ".join(f"{kind} {count}" for kind, count in held.kinds.items())
        sampled = " (of the first records only)" if held.sampled else ""
        rows.append((held.tenant, size_text(held.bytes), kinds + sampled))
    columns(rows)


def _list(context: Context, tenant: str, as_json: bool) -> None:
    records = tenant_records(context.store, tenant)
    if as_json:
        put_json_list(
            {"object": "warmq.record", "id": record.id, "kind": record.kind, "bytes": record.bytes}
            for record in records
        )
        return
    columns([("ID", "KIND", "BYTES"), *((r.id, r.kind, size_text(r.bytes)) for r in records)])
