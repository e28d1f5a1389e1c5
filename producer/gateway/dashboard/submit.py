"""Submit: drop a file, see what it holds and takes, start it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import closing

import orjson
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from contract import naming
from contract.errors import WarmqError
from contract.openai.body import BODY_TYPES
from producer.core.plan.plan import Plan, plan
from producer.core.plan.tokens import Estimate
from producer.core.reader import Input
from producer.core.submission import Submission
from producer.gateway.batches import batches as api
from producer.gateway.batches.create import DEFAULT_PRIORITY
from producer.gateway.carrying.looking import model_of
from producer.gateway.dashboard.view import View
from producer.gateway.errors import ApiError, invalid, not_found, of_warmq
from producer.gateway.files.incoming import receive
from producer.gateway.files.keeping import keep, record_of
from producer.gateway.files.objects import FileRecord, Files
from producer.gateway.http import new_id
from producer.gateway.page_session import check_form, token_in
from producer.gateway.services import Services

#: Largest file whose plan is made while somebody waits for the page.
PLANNED_BYTES = 32 * 2**20
#: The beginning of a file that says which endpoint and models it names.
HEAD_BYTES = 256 * 1024
WINDOWS = ("24h", "1h", "6h", "3d", "7d")


def submit(view: View) -> Response:
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
    found, problem = None, ""
    if record.bytes <= PLANNED_BYTES:
        try:
            found = _plan(view.services, record, models.most_common(1)[0][0] if models else "")
        except WarmqError as error:
            problem = error.message
    return view.page(
        "plan.html",
        file=record,
        plan=found,
        problem=problem,
        models=[name for name, _ in models.most_common(10)],
        url=urls.most_common(1)[0][0] if urls else "",
        urls=list(BODY_TYPES),
        windows=WINDOWS,
    )


def _named(services: Services, record: FileRecord) -> tuple[Counter[str], Counter[str]]:
    """Return which endpoints and models the first lines of a file name."""
    urls, models = Counter[str](), Counter[str]()
    text = b"".join(services.store.read(record.id, 0, min(record.bytes, HEAD_BYTES)))
    for line in text.split(b"\n"):
        try:
            url = orjson.loads(line)["url"]
        except (orjson.JSONDecodeError, TypeError, LookupError):
            continue
        if url in BODY_TYPES:
            urls[url] += 1
        if model := model_of(line):
            models[model] += 1
    return urls, models


def _plan(services: Services, record: FileRecord, model: str) -> Plan:
    """Return the plan of a file, as one for the queue of the model that most lines name."""
    served = services.batches.served_queues()
    queue = naming.queue_name(model, services.settings.queue)
    queue = queue if queue in served else services.settings.queue
    workers = [w for w in services.batches.workers(queue) if w.get("state") != "draining"]
    with services.store.local(record.id) as path, closing(Input(str(path))) as source:
        submission = Submission("plan", queue, DEFAULT_PRIORITY)
        return plan(services.settings, submission, source, Estimate(), workers)


async def upload(request: Request) -> Response:
    """Take a file, and show its plan; of a form that is not this session's nothing is kept."""
    view = View(request)
    used, mine, file_id = view.services, view.caller, new_id("file-")
    headers = request.scope["warmq.headers"]
    try:
        context = used.store.write(file_id)
        writer = await asyncio.to_thread(context.__enter__)
        try:
            most = used.settings.gateway_max_file_bytes
            incoming = await receive(request, writer, "file", most)
            check_form(headers, token_in(headers), incoming.fields.get("csrf", ""))
            if not incoming.size:
                raise invalid("the file is empty; choose one with a request in each line", "file")
            record = record_of(
                file_id, mine, incoming, "batch", None, int(await asyncio.to_thread(used.clock.now))
            )
            await asyncio.to_thread(keep, used, mine, writer, record)
        finally:
            await asyncio.to_thread(context.__exit__, None, None, None)
    except ApiError as error:
        return await run_in_threadpool(view.failed, error)
    except WarmqError as error:
        return await run_in_threadpool(view.failed, of_warmq(error))
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


def lines_of(services: Services, file_id: str) -> Iterator[bytes]:
    """Yield the lines of a file, as they are read."""
    rest = b""
    for piece in services.store.read(file_id):
        *whole, rest = (rest + piece).split(b"\n")
        yield from whole
    if rest:
        yield rest
