"""Submit: drop a file, see what it holds and takes, start it."""

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
from gateway.page import whole_files
from gateway.page.view import View
from gateway.page.whole_files import Reading, TooLong
from producer.input.reader import Input
from producer.submit.plan import Plan, plan
from producer.submit.prompt_tokens import CharacterCounter
from producer.submit.submission import Submission
from producer.time_left import pace_of_queue

#: Bytes of lines, as they are uncompressed, of which a plan is made while somebody waits for the
#: page; and for how long, in seconds.
PLANNED_BYTES, PLANNED_S = 32 * 2**20, 10.0
#: Plans that are kept, and for how long in seconds: the workers change meanwhile.
MOST_KEPT, KEPT_S = 100, 60.0
#: The beginning of a file that says which endpoint and models it names: bytes, and lines that are
#: not blank. Lines of two bytes take a thousand times as long as lines of 2 kB, each with an error.
HEAD_BYTES, HEAD_LINES = 256 * 1024, 2000
WINDOWS = ("24h", "1h", "6h", "3d", "7d")


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan, or why there is none; `size` is how many bytes of lines there are at least."""

    plan: Plan | None = None
    problem: str = ""
    size: int = 0
    until: float = 0.0


#: By tenant and file, the oldest first.
_kept: dict[tuple[str, str], Planned] = {}


async def in_turn(handler: Callable[..., Response], view: View) -> Response:
    """Make the page at once if no file has to be read for it."""
    file_id = view.query.get("file", "")
    if not file_id or _planned_before(view.caller.tenant, file_id):
        return await run_in_threadpool(handler, view, reading=Reading())
    return await whole_files.in_turn(handler, view)


def submit(view: View, *, reading: Reading) -> Response:
    """Show where to drop a file, or the plan of one that was dropped."""
    file_id = view.query.get("file", "")
    if not file_id:
        page = Files(view.services).page(
            view.caller.tenant, "", 10, oldest_first=False, purpose="batch"
        )
        return view.page("submit.html", files=page[0] if page else [])
    record = Files(view.services).get(view.caller.tenant, file_id)
    if record is None:
        raise not_found("file", file_id)
    urls, models = _named(view.services, record)
    found = _planned_before(view.caller.tenant, file_id)
    if found is None:
        model = models.most_common(1)[0][0] if models else ""
        found = _planned(view.services, record, model, reading)
        with suppress(KeyError, StopIteration):  # another thread was quicker
            while len(_kept) >= MOST_KEPT:
                del _kept[next(iter(_kept))]
        _kept[view.caller.tenant, file_id] = found
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


def _named(services: Services, record: FileRecord) -> tuple[Counter[str], Counter[str]]:
    head = services.store.read(record.id, 0, min(record.bytes, HEAD_BYTES))
    return named_in(lines_of(head))


def named_in(lines: Iterable[bytes]) -> tuple[Counter[str], Counter[str]]:
    """Return which endpoints and models the first lines of a file name."""
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


def _planned_before(tenant: str, file_id: str) -> Planned | None:
    found = _kept.get((tenant, file_id))
    return found if found is not None and found.until > time.monotonic() else None


def _planned(services: Services, record: FileRecord, model: str, reading: Reading) -> Planned:
    """Return the plan of a file, or that it is too large or no such file."""
    until = time.monotonic() + KEPT_S
    if record.bytes > PLANNED_BYTES:
        return Planned(until=until)
    size = 0

    def watch() -> None:
        nonlocal size
        reading()
        size = source.decompressed
        if size > PLANNED_BYTES:
            raise TooLong

    reading.begin(PLANNED_S)
    try:
        with (
            services.store.local(record.id) as path,
            closing(Input(str(path), watch=watch)) as source,
        ):
            return Planned(_plan(services, source, model), until=until)
    except TooLong:
        return Planned(size=size, until=until)
    except WarmqError as error:
        return Planned(problem=error.message, until=until)


def _plan(services: Services, source: Input, model: str) -> Plan:
    """Return the plan of a file, as one for the queue of the model that most lines name."""
    served = services.batches.served_queues()
    queue = naming.queue_name(model, services.settings.queue)
    queue = queue if queue in served else services.settings.queue
    workers = [w for w in services.batches.workers(queue) if w.get("state") != "draining"]
    submission = Submission("plan", queue, DEFAULT_PRIORITY)
    pace = pace_of_queue(services.batches, queue, workers)
    return plan(services.settings, submission, source, CharacterCounter(), workers, pace)


async def upload(view: View) -> Response:
    """Take a file, and show its plan; of a form that is not this session's nothing is kept."""
    used, mine, file_id = view.services, view.caller, new_id("file-")
    context = used.store.write(file_id)
    writer = await asyncio.to_thread(context.__enter__)
    try:
        most = used.settings.gateway_max_file_bytes
        incoming = await receive(view.request, writer, "file", most)
        view.check_form(incoming.fields.get("csrf", ""))
        if not incoming.size:
            raise invalid("the file is empty; choose one with a request in each line", "file")
        now = int(await asyncio.to_thread(used.clock.now))
        record = new_record(file_id, mine, incoming, "batch", None, now)
        await asyncio.to_thread(save_file, used, mine, writer, record)
    finally:
        await asyncio.to_thread(context.__exit__, None, None, None)
    return view.to("/ui/submit", file=file_id)


def start(view: View) -> Response:
    """Start a batch of a file that was dropped."""
    asked = {
        "input_file_id": view.form.get("file", ""),
        "endpoint": view.form.get("endpoint", ""),
        "completion_window": view.form.get("window", "24h"),
        "order": view.form.get("order", "auto"),
        "once": view.form.get("once") == "on",
    }
    made = api.create(view.services, view.caller, orjson.dumps(asked), "")
    return view.to(f"/ui/batches/{made.id}", told="started")
