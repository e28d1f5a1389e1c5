"""Pages for submitting a file: upload it, show its plan, start a batch with it."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import islice

import orjson
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from contract import naming
from contract.errors import WarmqError
from contract.openai.body import BODY_TYPES
from gateway.batches.api import batches as api
from gateway.batches.api.batches import DEFAULT_PRIORITY
from gateway.batches.runner.input_file import model_of
from gateway.file_store import lines_of
from gateway.files.files import FileRecord, Files, new_record, save_file
from gateway.files.multipart import receive
from gateway.http.errors import invalid, not_found
from gateway.http.json_api import new_id
from gateway.http.services import Services
from gateway.page import file_reading
from gateway.page.file_reading import ReadGuard, TooLong
from gateway.page.view import View
from producer.input.reader import Input
from producer.submit.plan import Plan, plan
from producer.submit.prompt_tokens import CharacterCounter
from producer.submit.submission import Submission
from producer.time_left import pace_of_queue

#: Most uncompressed bytes of a file that is planned while the browser waits, and most seconds.
PLANNED_BYTES, PLANNED_S = 32 * 2**20, 10.0
#: Most cached plans, and seconds for which a plan is cached (workers change).
MAX_PLANS, PLAN_LIFE_S = 100, 60.0
#: Most bytes and lines at the start of a file that are searched for endpoints and models. The lines
#: are bounded because each malformed one costs an exception.
HEAD_BYTES, HEAD_LINES = 256 * 1024, 2000
WINDOWS = ("24h", "1h", "6h", "3d", "7d")


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan, or the problem that prevents one; `size`: bytes read, unpacked."""

    until: float
    plan: Plan | None = None
    problem: str = ""
    size: int = 0


#: (tenant, file id) -> its plan, oldest first.
_plans: dict[tuple[str, str], Planned] = {}


async def in_turn(handler: Callable[..., Response], view: View) -> Response:
    """Call the handler now if it reads no file, else in its tenant's turn."""
    file_id = view.query.get("file", "")
    if not file_id or _cached(view.caller.tenant, file_id):
        return await run_in_threadpool(handler, view, guard=ReadGuard())
    return await file_reading.in_turn(handler, view)


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
    head = services.store.read(record.id, 0, min(record.bytes, HEAD_BYTES))
    urls, models = named_in(lines_of(head))
    found = _cached(tenant, file_id)
    if found is None:
        found = _planned(services, record, models.most_common(1)[0][0] if models else "", guard)
        with suppress(KeyError, StopIteration):  # another thread was faster
            while len(_plans) >= MAX_PLANS:
                del _plans[next(iter(_plans))]
        _plans[tenant, file_id] = found
    return view.page(
        "plan.html",
        file=record,
        plan=found.plan,
        problem=found.problem,
        size=max(record.bytes, found.size),
        models=[name for name, _ in models.most_common(10)],
        url=urls.most_common(1)[0][0] if urls else "",
        urls=list(BODY_TYPES),
        windows=WINDOWS,
    )


def named_in(lines: Iterable[bytes]) -> tuple[Counter[str], Counter[str]]:
    """Count the endpoints and models that the first lines of a file name."""
    urls, models = Counter[str](), Counter[str]()
    for line in islice(lines, HEAD_LINES):
        try:
            url = orjson.loads(line)["url"]
        except (orjson.JSONDecodeError, TypeError, LookupError):
            continue
        if isinstance(url, str) and url in BODY_TYPES:
            urls[url] += 1
        if model := model_of(line):
            models[model] += 1
    return urls, models


def _cached(tenant: str, file_id: str) -> Planned | None:
    found = _plans.get((tenant, file_id))
    return found if found is not None and found.until > time.monotonic() else None


def _planned(services: Services, record: FileRecord, model: str, guard: ReadGuard) -> Planned:
    """Plan a file for the queue of the model that most of its lines name."""
    until = time.monotonic() + PLAN_LIFE_S
    if record.bytes > PLANNED_BYTES:
        return Planned(until)
    size = 0

    def watch() -> None:
        nonlocal size
        guard()
        size = source.decompressed
        if size > PLANNED_BYTES:
            raise TooLong

    guard.start(PLANNED_S)
    try:
        with (
            services.store.local(record.id) as path,
            closing(Input(str(path), watch=watch)) as source,
        ):
            return Planned(until, _plan(services, source, model))
    except TooLong:
        return Planned(until, size=size)
    except WarmqError as error:
        return Planned(until, problem=error.message)


def _plan(services: Services, source: Input, model: str) -> Plan:
    batches, settings = services.batches, services.settings
    queue = naming.queue_name(model, settings.queue)
    queue = queue if queue in batches.served_queues() else settings.queue
    workers = [w for w in batches.workers(queue) if w.get("state") != "draining"]
    submission = Submission("plan", queue, DEFAULT_PRIORITY)
    pace = pace_of_queue(batches, queue, workers)
    return plan(settings, submission, source, CharacterCounter(), workers, pace)


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
    return view.to("/ui/submit", file=file_id)


def start(view: View) -> Response:
    """Create a batch from an uploaded file."""
    body = {
        "input_file_id": view.form.get("file", ""),
        "endpoint": view.form.get("endpoint", ""),
        "completion_window": view.form.get("window", "24h"),
        "order": view.form.get("order", "auto"),
        "once": view.form.get("once") == "on",
    }
    made = api.create(view.services, view.caller, orjson.dumps(body), "")
    return view.to(f"/ui/batches/{made.id}", notice="started")
