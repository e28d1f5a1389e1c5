"""Implements `producer list`, `status`, `cancel`, `retry` and `delete`."""

import click
import msgspec

from contract.batch import Batch
from contract.errors import BatchConflict
from contract.failures import failures_of, wrong_count, wrong_text
from contract.redis.announced_servers import SharedServer, shared_servers
from contract.redis.announcements import is_alive, queues_of
from contract.redis.failures import FailureReads
from producer.cli import options, show
from producer.cli.context import Context, hint, pass_context
from producer.cli.progress import CANCELLED_RUN, counted, tell, waits_for_run
from producer.cli.unchanged import unchanged_texts
from producer.model_states import model_states
from producer.over_http import HttpBatches, with_http_batches
from producer.queue_workers import BatchWorkers
from producer.redis import delete_record
from producer.request_reads import RequestReads, state_at
from producer.run.again import UNANSWERED
from producer.stalls import Stall, StallReads, model_of, with_silence
from producer.submit.run_again import open_again, program_input, run_cut_again
from producer.time_left import OutlookReads
from producer.webhook_state import WebhookReads

_request = click.option(
    "--request", "custom_id", metavar="CUSTOM_ID", help="Take only this request."
)


#: Where the errors of a complete run are.
_ALL_ERRORS = (
    "All errors are in OUT, if it is a table (columns status, error_code, error_message); "
    "else in ERR."
)
#: What to do instead of a retry of a run's cut answers.
_CUT_AGAIN = "run FILE into another OUT with a higher --set max_tokens=N"


def _no_run(context: Context, batch_id: str) -> Batch:
    """Return a batch; raise BatchConflict for a run, with what to do instead of a retry."""
    batch = context.batch(batch_id)
    if not batch.is_run:
        return batch
    codes = failures_of([batch])
    counts = {name: batch.number(name) for name in UNANSWERED}
    counts["failed"] -= wrong_count(codes)
    again, texts = [name for name, count in counts.items() if count > 0], list[str]()
    wrong = wrong_text(codes)
    if again or not wrong:
        options = ",".join(again or ("failed", "cancelled"))
        when = "" if batch.complete else "when it is complete, "
        texts.append(f"{when}the same `producer run` with --retry {options} runs these lines again")
    if wrong:
        texts.append(f"{wrong}, and run the correction as a new file")
    raise BatchConflict(f"{batch_id} is a run: {'; '.join(texts)}")


@click.command("list")
@options.as_json
@pass_context
def list_batches(context: Context, *, as_json: bool) -> None:
    """List all batches, newest first.

    A run is one row; + means that it may read more lines. If workers have several models,
    the last column has the batch's model, and whether it is loaded.
    """
    batches = with_http_batches(context.store, context.store.batches())
    if as_json:
        show.put_json([show.batch_json(batch) for batch in batches])
        return
    alive = [worker for worker in context.store.announcements() if is_alive(worker)]
    states = {one.queue: f"{one.model} ({one.text})" for one in model_states(alive, {})}
    rows = [("BATCH", "STATUS", "DONE", "FAILED", "CREATED", *(["MODEL"] if states else []))]
    for one in batches:
        created = str(show.iso_time(one.created))[:19]
        done = f"{one.done}/{one.number('total')}{'+' * one.may_grow}"
        queue = one.fields.get("queue", "")
        model = [states.get(queue, model_of(queue, context.settings.queue))] if states else []
        rows.append((one.id, one.status, done, str(one.number("failed")), created, *model))
    show.print_columns(rows)
    if any(one.may_grow for one in batches):
        tell("+: the run may read more lines")
    for one in batches:
        if text := waits_for_run(one):
            tell(f"{one.id}: {text}")


@click.command("status")
@options.batch_id
@_request
@options.as_json
@pass_context
def status(context: Context, *, batch_id: str, custom_id: str | None, as_json: bool) -> None:
    """Show the progress of a batch, run or request."""
    if custom_id is not None:
        _print_request(context, batch_id, custom_id, as_json)
        return
    batch, store = context.batch(batch_id), context.store
    failures, stalls = FailureReads.using(store).first([batch]), list[Stall]()
    servers = list[SharedServer]()
    webhook = WebhookReads.using(store).state(batch)
    (shown,) = HttpBatches.using(store).shown([batch])
    if not batch.finished:
        reads = StallReads.using(store)
        stalls = reads.stalls(context.settings, batch.queues, [batch], batch.tenant)
        servers = shared_servers(
            worker for worker in store.announcements()
            if is_alive(worker) and not set(batch.queues).isdisjoint(queues_of(worker))
        )  # fmt: skip
    if as_json:
        more = {
            "failures": msgspec.to_builtins(failures),
            "stalls": list(map(show.stall_json, stalls)),
            "servers": [server._asdict() for server in servers],
            "webhook": show.webhook_json(webhook),
        }
        show.put_json(show.batch_json(shown) | more)
        return
    shown = HttpBatches.using(store).with_file_name(shown)
    if batch.finished:
        show.print_batch(shown, webhook=webhook, failures=failures)
    else:
        left_s = OutlookReads.using(store).batch_seconds_left(batch)
        workers = BatchWorkers(store).row_text(batch)
        show.print_batch(shown, workers, left_s, stalls, webhook, servers, failures)
    if batch.complete and batch.number("failed"):
        click.echo(f"\n{_ALL_ERRORS}")


def _print_request(context: Context, batch_id: str, custom_id: str, as_json: bool) -> None:
    """Print a request, with what it waits for while no worker that is well has it."""
    store, batch = context.store, context.batch_of(batch_id, custom_id)
    state, stalls = show.request_state(store, batch, custom_id), list[Stall]()
    if "running" in state:
        worker = RequestReads.using(store).holders().get(state["worker"])
        if state_at(worker) != "running":
            reads = StallReads.using(store)
            stalls = reads.stalls(context.settings, batch.queues, [batch], batch.tenant)
            stalls = with_silence(stalls, worker, context.settings)
    if not as_json:
        show.print_request(state, stalls)
        return
    if "running" in state:
        state["stalls"] = list(map(show.stall_json, stalls))
    show.put_json(state)


@click.command("cancel")
@options.batch_id
@_request
@options.as_json
@pass_context
def cancel(context: Context, *, batch_id: str, custom_id: str | None, as_json: bool) -> None:
    """Cancel a batch's or run's requests."""
    store, what, ends_run = context.store, "cancelled", False
    if custom_id is not None:
        count = store.cancel_request(context.batch_of(batch_id, custom_id), custom_id)
        if not count:
            what += f": request {custom_id} has ended already"
    else:
        batch = context.batch(batch_id)
        with hint(f"the same `producer cancel {batch_id}` completes it"):
            in_flight, count = store.in_flight(batch), store.cancel(batch)
        ends_run = batch.is_run and (batch.stopped or not batch.finished)
        if count:
            in_flight = min(in_flight, count)  # some may have ended before they were cancelled
            what += f" ({count - in_flight} queued, {in_flight} in flight)"
        elif ends_run:
            what += "; 0 requests were waiting"
        elif batch.finished:
            what += f": it has ended already ({batch.status})"
    _print_changed(batch_id, what, count, as_json, counts=bool(count) or not ends_run)
    if ends_run:
        tell(CANCELLED_RUN)


@click.command("retry")
@options.batch_id
@click.argument("file", metavar="[FILE]", required=False)
@click.option(
    "--include",
    default="",
    metavar="LIST",
    help="Retry requests with these outcomes too: cancelled,expired.",
)
@click.option(
    "--cut",
    is_flag=True,
    help="Instead, run requests again whose answers ended at max_tokens.",
)
@options.pairs
@options.mapped
@options.as_json
@pass_context
def retry(
    context: Context,
    *,
    batch_id: str,
    file: str | None,
    include: str,
    cut: bool,
    pairs: tuple[str, ...],
    mapped: tuple[str, ...],
    as_json: bool,
) -> None:
    """Run a batch's failed requests again. FILE is only for --cut. Bad lines stay as they are.

    A deadline that has passed no longer applies to retried requests.

    With --cut, run the requests again whose answers ended at max_tokens (finish_reason
    length); --set max_tokens=4096 gives them more tokens. Their lines are read again
    from the submitted file; give FILE and --map only if that file was moved.
    """
    if cut:
        if include:
            raise click.UsageError("give --cut or --include, not both")
        _retry_cut(context, batch_id, file, pairs, mapped, as_json)
        return
    if file or pairs or mapped:
        raise click.UsageError(
            "FILE, --set and --map go with --cut; corrected rows are a batch of their own: "
            "`producer submit` a file with only these (docs/how-to/label-a-table.md, step 4)"
        )
    included = [word.strip() for word in include.split(",") if word.strip()]
    if set(included) - {"cancelled", "expired"}:
        raise click.UsageError("--include takes cancelled, expired, or both with a comma")
    store, batch = context.store, _no_run(context, batch_id)
    HttpBatches.using(store).refuse_retry(batch)
    outcomes = ["failed", *included]
    with hint(f"the same `producer retry {batch_id}` goes on"):
        count = store.retry(batch, outcomes)
    _print_changed(batch_id, "queued again", count, as_json)
    for text in unchanged_texts(store, context.batch(batch_id), outcomes, count):
        tell(f"{batch_id}: {text}")


def _retry_cut(
    context: Context,
    /,
    batch_id: str,
    file: str | None,
    pairs: tuple[str, ...],
    mapped: tuple[str, ...],
    as_json: bool,
) -> None:
    """Run requests with a cut answer again, from the batch's input."""
    store, batch = context.store, context.no_run(batch_id, _CUT_AGAIN)
    HttpBatches.using(store).refuse_retry(batch)
    overrides = options.parse_overrides(pairs)
    columns = options.parse_map(mapped)
    name = file or batch.fields.get("input", "")
    if name == "-":
        raise click.UsageError(
            f"{batch_id} was submitted from standard input: name the file that has its lines"
        )
    if not file and (what := program_input(batch)):
        raise click.UsageError(
            f"{batch_id} came from {what} of a program: submit it there again with the same "
            "batch_id, then call retry_cut"
        )
    again = f"the same `producer retry {batch_id} --cut` goes on"
    fix_input = f"name the file that was submitted: `producer retry {batch_id} FILE --cut`"
    with hint(again, fix_input=fix_input):
        source = open_again(batch, name, columns)
        limit = context.settings.max_line_bytes
        count, text = run_cut_again(store, batch, source, overrides, limit)
    _print_changed(batch_id, "queued again", count, as_json)
    if text:
        tell(f"{batch_id}: {text}")
    if not count:
        tell(f"{batch_id}: no answer so far ended at max_tokens")


def _print_changed(
    batch_id: str, what: str, count: int, as_json: bool, *, counts: bool = True
) -> None:
    number = f"{counted(count, 'request')} " if counts else ""
    tell(f"{batch_id}: {number}{what}")
    if as_json:
        show.put_json({"id": batch_id, "requests": count})


@click.command("delete")
@options.batch_id
@click.option("--force", is_flag=True, help="Cancel the batch first, if it is not finished.")
@options.as_json
@pass_context
def delete(context: Context, *, batch_id: str, force: bool, as_json: bool) -> None:
    """Delete a finished batch and its results, or a record of `producer serve`.

    \b
    A record is a file (file-...), or a batch (batch_..., msgbatch_...) or response
    (resp_...) that has ended, of a gateway's tenant; `producer records -t TENANT` lists them.
    """
    store = context.store
    if delete_record(store, batch_id, force=force) is None:
        batch = context.batch(batch_id)
        if force and not batch.finished:
            store.cancel(batch)
        if not store.delete(batch.id, force=force):
            raise BatchConflict(
                f"batch {batch.id} is still {batch.status}; --force cancels it first"
            )
    tell(f"{batch_id}: deleted")
    if as_json:
        show.put_json({"id": batch_id, "object": "warmq.batch", "deleted": True})


COMMANDS = {command.name: command for command in (list_batches, status, cancel, retry, delete)}
