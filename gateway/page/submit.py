"""Pages for submitting a file: upload it, show its plan, start a batch with it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import closing, suppress
from urllib.parse import urlencode

import orjson
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from contract.openai.body import BODY_TYPES
from gateway.batches.api import batches as api
from gateway.file_store import Writer
from gateway.files.files import FileRecord, Files, new_record, save_file
from gateway.files.multipart import ReceivedForm, receive
from gateway.http.errors import ApiError, invalid, not_found
from gateway.http.json_api import new_id
from gateway.page import file_reading
from gateway.page.conversion.running import Conversion, convert
from gateway.page.file_plan import Choices, FilePlan, batch_lines, must_convert, plan_file
from gateway.page.file_reading import ReadGuard, TooLong, converted_name
from gateway.page.view import View
from gateway.served_models import ServedModels
from producer.input.reader import Input
from producer.run.trial import ROWS, Spread

#: Most cached plans, and seconds for which a plan is cached (workers change).
MAX_PLANS, PLAN_LIFE_S = 100, 60.0
#: The completion windows that the form offers, the default first.
WINDOWS = ("24h", "1h", "6h", "3d", "7d")
_TOO_LARGE = "the file is too large to convert it on this page; in a terminal: producer submit FILE"
_TOO_LARGE_TO_TRY = "the file is too large to try it on this page; in a terminal: producer try"

#: (tenant, file id, choices) -> until when it is kept, and the plan; oldest first.
_plans: dict[tuple[str, str, Choices], tuple[float, FilePlan]] = {}


async def one_at_a_time(handler: Callable[..., Response], view: View) -> Response:
    """Call the handler now if it reads no file, else one per tenant at a time."""
    file_id = view.query.get("file", "")
    if not file_id or _cached(view.caller.tenant, file_id, Choices.of(view.query)):
        return await run_in_threadpool(handler, view, guard=ReadGuard())
    return await file_reading.one_at_a_time(handler, view)


def submit(view: View, *, guard: ReadGuard) -> Response:
    """Show the form for a file, or the plan of an uploaded file."""
    services, tenant, file_id = view.services, view.caller.tenant, view.query.get("file", "")
    files = Files(services)
    if not file_id:
        page = files.page(tenant, "", 10, oldest_first=False, purpose="batch")
        return view.page("submit.html", files=page[0] if page else [])
    record = files.get(tenant, file_id)
    if record is None:
        raise not_found("file", file_id)
    choices = Choices.of(view.query)
    file_plan = _cached(tenant, file_id, choices)
    if file_plan is None:
        file_plan = plan_file(services, view.caller, record, choices, guard)
        with suppress(KeyError, StopIteration):  # another thread has removed the same plan
            while len(_plans) >= MAX_PLANS:
                del _plans[next(iter(_plans))]
        _plans[tenant, file_id, choices] = time.monotonic() + PLAN_LIFE_S, file_plan
    settings = services.settings
    served = ServedModels.of(
        services.batches.announcements(), settings.queue, settings.gateway_models
    )
    names = sorted({*served.visible(served.names), *served.visible(served.configured)})
    return view.page(
        "plan.html",
        file=record,
        file_plan=file_plan,
        plan=file_plan.plan,
        choices=choices,
        served=[name for name in names if view.caller.may_use(name)],
        urls=list(BODY_TYPES),
        windows=WINDOWS,
    )


def _cached(tenant: str, file_id: str, choices: Choices) -> FilePlan | None:
    until, file_plan = _plans.get((tenant, file_id, choices), (0.0, None))
    return file_plan if until > time.monotonic() else None


async def upload(view: View) -> Response:
    """Store a file and show its plan; a form from another session stores nothing."""
    services, caller, file_id = view.services, view.caller, new_id("file-")
    most = services.settings.gateway_max_file_bytes
    async with services.store.writing(file_id) as writer:
        incoming = await receive(view.request, writer, "file", most)
        view.check_form(incoming.fields.get("csrf", ""))
        if not incoming.size:
            raise invalid("the file is empty; choose one with a request on each line", "file")
        now = int(await asyncio.to_thread(services.clock.now))
        record = new_record(file_id, caller, incoming, "batch", None, now)
        await asyncio.to_thread(save_file, services, caller, writer, record)
    return view.redirect("/ui/submit", file=file_id)


def start(view: View, *, guard: ReadGuard) -> Response:
    """Create a batch from an uploaded file, which is converted first if it must be."""
    record, choices, to_convert = _chosen(view)
    file_id = _convert(view, record, choices, guard).id if to_convert else record.id
    body = {
        "completion_window": view.form.get("window", "24h"),
        "order": view.form.get("order", "auto"),
        "once": view.form.get("once") == "on",
    }
    return _create_batch(view, file_id, body)


def trial(view: View, *, guard: ReadGuard) -> Response:
    """Create a batch from rows that are spread over a file, before the whole file is started."""
    services, caller = view.services, view.caller
    record, choices, to_convert = _chosen(view)
    spread, lines = Spread(ROWS), list[bytes]()
    longest = services.settings.max_line_bytes
    guard.start()
    try:
        with batch_lines(services, record, choices, not to_convert, guard) as (path, conversion):
            if conversion is not None:
                _check_converted(conversion)
            with closing(Input(str(path), watch=guard)) as source:
                for _ in spread.watch(source.chunks(None, longest)):
                    pass
    except TooLong:
        raise ApiError(413, _TOO_LARGE_TO_TRY, code="file_too_large") from None
    # `size` is set for a line that is too long.
    lines = [line.rstrip(b"\r\n") + b"\n" for _, line, size in spread.chosen if size is None]
    with services.store.write(new_id("file-")) as writer:
        writer.write(b"".join(lines))
        file = _save(view, writer, converted_name(f"trial-{record.filename}"), sum(map(len, lines)))
    back = urlencode({"file": record.id} | choices.as_query())
    metadata = {"name": f"Trial of {record.filename}"[:512], "trial_of": back}
    if len(back) > 512:
        metadata["trial_of"] = urlencode({"file": record.id})
    body = {"completion_window": "1h", "priority": caller.highest_priority, "metadata": metadata}
    return _create_batch(view, file.id, body)


def _chosen(view: View) -> tuple[FileRecord, Choices, bool]:
    """Return the form's file and choices, and whether the file must be converted."""
    file_id, choices = view.form.get("file", ""), Choices.of(view.form)
    record = Files(view.services).get(view.caller.tenant, file_id)
    if record is None:
        raise not_found("file", file_id)
    if problem := choices.problem:
        raise invalid(problem, "fields")
    return record, choices, view.form.get("convert") == "on" or must_convert(record, choices)


def _create_batch(view: View, file_id: str, fields: dict[str, object]) -> Response:
    body = {"input_file_id": file_id, "endpoint": view.form.get("endpoint", "")} | fields
    batch = api.create(view.services, view.caller, orjson.dumps(body), "")
    return view.redirect(f"/ui/batches/{batch.id}", notice="started")


def _check_converted(conversion: Conversion) -> None:
    """Raise ApiError (400) for a file that could not be converted whole."""
    if conversion.error or conversion.problems:
        raise invalid("; ".join(filter(None, [conversion.error, *conversion.problems[:3]])), "file")


def _save(view: View, writer: Writer, name: str, size: int) -> FileRecord:
    """Commit a file that this page has written."""
    services, incoming = view.services, ReceivedForm(filename=name, size=size)
    now = int(services.clock.now())
    record = new_record(writer.name, view.caller, incoming, "batch", None, now)
    return save_file(services, view.caller, writer, record)


def _convert(view: View, record: FileRecord, choices: Choices, guard: ReadGuard) -> FileRecord:
    """Store a file's requests as lines of OpenAI's Batch API; return the new file."""
    settings, name = view.services.settings, record.filename
    pieces, waiting, size = list[bytes](), 0, 0
    guard.start()
    with (
        view.services.store.write(new_id("file-")) as writer,
        view.services.store.local(record.id) as path,
    ):

        def write(line: bytes) -> None:
            nonlocal waiting, size
            pieces.append(line)
            waiting += len(line)
            size += len(line)
            if size > settings.gateway_max_file_bytes:
                raise TooLong
            if waiting > 2**20:
                writer.write(b"".join(pieces))
                pieces.clear()
                waiting = 0

        longest, overrides = settings.max_line_bytes, choices.overrides
        try:
            conversion = convert(path, name, choices.pairs, overrides, longest, write, guard)
        except TooLong:
            message = f"{_TOO_LARGE}{view.tenant_option}"
            raise ApiError(413, message, code="file_too_large") from None
        _check_converted(conversion)
        writer.write(b"".join(pieces))
        return _save(view, writer, converted_name(name), size)
