"""Implements `producer keys`."""

from collections.abc import Iterable
from typing import Any

import click
from msgspec.structs import asdict

from contract.errors import BatchConflict
from contract.naming import DEFAULT_TENANT
from gateway.redis.api_keys import ApiKey, ApiKeys
from producer.cli import options
from producer.cli.context import Context, pass_context
from producer.cli.progress import tell
from producer.cli.show import iso_time, print_columns, put_json, put_json_list
from producer.input.options import check_name

_COUNT = click.IntRange(1, 10**15)
_LONGEST_NAME = 128


@click.group("keys")
def command() -> None:
    """Create, list and revoke API keys for `producer serve`."""


@command.command("create")
@click.option(
    "--tenant",
    metavar="T",
    default=DEFAULT_TENANT,
    show_default=True,
    help="Tenant whose files, batches and requests the key's callers use.",
)
@click.option("--name", default="", help="Name of the key, for people.")
@click.option(
    "--requests-per-minute", type=_COUNT, metavar="N", help="Most online requests of the key."
)
@click.option(
    "--tokens-per-minute",
    type=_COUNT,
    metavar="N",
    help="Most tokens of the key's online requests: prompts and answers.",
)
@click.option(
    "--enqueued-tokens",
    type=_COUNT,
    metavar="N",
    help="Most tokens of the tenant's unfinished batches for one model, estimated.",
)
@click.option("--file-bytes", type=_COUNT, metavar="N", help="Most bytes of the tenant's files.")
@click.option("--models", metavar="A,B", help="Models that the key may use. Default: all.")
@click.option(
    "--highest-priority",
    type=click.IntRange(0, 9),
    default=0,
    show_default=True,
    help="Most urgent priority of the key's requests; 0 is the most urgent of all.",
)
@click.option(
    "--operator",
    is_flag=True,
    help="At /ui also show all tenants' load, dead letters without a batch, and why workers "
    "are not ready.",
)
@options.as_json
@pass_context
def create(
    context: Context, /, *, tenant: str, name: str, models: str | None, as_json: bool, **limits: Any
) -> None:
    """Create an API key and print it once; only its digest is stored."""
    check_name("tenant", tenant)
    if len(name) > _LONGEST_NAME or not (name.isprintable()):
        raise click.BadParameter(
            f"use at most {_LONGEST_NAME} printable characters", param_hint="--name"
        )
    keys = _keys(context)
    first = not keys.any()
    secret, key = keys.create(tenant, name=name, models=_parsed_models(models), **limits)
    if as_json:
        put_json({**_json(key), "key": secret})
    else:
        click.echo(secret)
        tell(f"{key.id}: a key of tenant {tenant}; it is not shown again")
    if first:
        tell(
            "this is the first key: within a second the page and the API of each gateway ask for a "
            "key, and show only the batches of its tenant"
        )


@command.command("list")
@options.as_json
@pass_context
def list_keys(context: Context, *, as_json: bool) -> None:
    """List all keys, the oldest first, revoked ones included."""
    keys = _keys(context).all()
    if as_json:
        put_json_list(_json(key) for key in keys)
    else:
        _table(keys)


@command.command("revoke")
@click.argument("key_id", metavar="ID")
@options.as_json
@pass_context
def revoke(context: Context, *, key_id: str, as_json: bool) -> None:
    """Revoke a key for ever. Gateways refuse it within a second; its files and batches stay."""
    key = _keys(context).revoke(key_id)
    if key is None:
        raise BatchConflict(f"there is no key {key_id[:140]!r}; see `producer keys list`")
    tell(f"{key.id}: revoked")
    if as_json:
        put_json(_json(key))


def _keys(context: Context) -> ApiKeys:
    return ApiKeys.using(context.store)


def _parsed_models(text: str | None) -> tuple[str, ...] | None:
    if text is None:
        return None
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    if not all(name and name.isprintable() for name in names):
        raise click.BadParameter("give names of models, separated by commas", param_hint="--models")
    return names


def _json(key: ApiKey) -> dict[str, Any]:
    times = {"created_at": _time(key.created_at), "revoked_at": _time(key.revoked_at)}
    return {"id": key.id, "object": "warmq.key", **asdict(key), **times}


def _time(seconds: int | None) -> str | None:
    return None if seconds is None else iso_time(str(seconds * 1000))


def _table(keys: Iterable[ApiKey]) -> None:
    rows = [("ID", "TENANT", "KEY", "STATE", "CREATED", "LIMITS", "NAME")]
    for key in keys:
        state = "in use" if key.revoked_at is None else "revoked"
        created = str(_time(key.created_at))[:19]
        rows.append((key.id, key.tenant, f"...{key.tail}", state, created, _limits(key), key.name))
    print_columns(rows)


def _limits(key: ApiKey) -> str:
    limits = {
        "requests/min": key.requests_per_minute,
        "tokens/min": key.tokens_per_minute,
        "enqueued tokens": key.enqueued_tokens,
        "file bytes": key.file_bytes,
        "models": None if key.models is None else " ".join(key.models),
        "priority from": key.highest_priority or None,
    }
    texts = [f"{name} {value}" for name, value in limits.items() if value is not None]
    return ", ".join([*texts, *(["operator"] if key.operator else [])]) or "-"
