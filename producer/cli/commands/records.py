"""`producer records`."""

import click

from producer.cli import options
from producer.cli.context import Context, pass_context
from producer.cli.show import columns, put_json_list, size_text
from producer.redis import tenant_records, tenant_usage


@click.command("records")
@click.option("-t", "--tenant", metavar="T", help="List the records of this tenant, one by one.")
@options.as_json
@pass_context
def command(context: Context, *, tenant: str | None, as_json: bool) -> None:
    """Say what tenants of `producer serve` keep in Redis: files, uploads, batches.

    `producer delete ID` removes a file, or a batch that has ended.
    """
    if tenant is not None:
        _list(context, tenant, as_json)
        return
    found = list(tenant_usage(context.store))
    if as_json:
        put_json_list(
            {
                "object": "warmq.records", "tenant": each.tenant, "bytes": each.bytes,
                "kinds": each.kinds, "sampled": each.sampled,
            } for each in found
        )  # fmt: skip
        return
    rows = [("TENANT", "BYTES", "KINDS")]
    for each in found:
        kinds = ", ".join(f"{kind} {count}" for kind, count in each.kinds.items())
        more = " (of the first records alone)" if each.sampled else ""
        rows.append((each.tenant, size_text(each.bytes), kinds + more))
    columns(rows)


def _list(context: Context, tenant: str, as_json: bool) -> None:
    found = tenant_records(context.store, tenant)
    if as_json:
        put_json_list(
            {"object": "warmq.record", "id": each.id, "kind": each.kind, "bytes": each.bytes}
            for each in found
        )
        return
    columns([("ID", "KIND", "BYTES"), *((r.id, r.kind, size_text(r.bytes)) for r in found)])
