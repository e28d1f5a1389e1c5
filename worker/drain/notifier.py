"""Posts the webhooks of submitted batches, when the batches have ended.

The script that ends a batch with a webhook makes the webhook due, and a worker that claims it posts
it. Until the receiver answers 2xx or 410, or three days are over, the webhook becomes due again,
for any worker.
"""

import asyncio
import hashlib
import logging
import threading
import time
from functools import partial

from contract import webhooks
from contract.batch import Batch
from worker.drain.drain import Drain
from worker.drain.scripts import ERRORS

log = logging.getLogger(__name__)

#: The name of this work in DUE_CLAIM (contract/lua/due_claim.lua).
WORK = "notify"
#: Seconds between two claims, seconds of a claim's lease, and most webhooks of one claim.
EVERY_S, LEASE_S, AT_ONCE = 2.0, 30, 8
#: Seconds after a batch's end in which its webhook is tried.
TRIED_S = 3 * 86400
#: The least and the most seconds between two tries; between them, as many as since the batch's end.
FIRST_S, LONGEST_S = 5, 8 * 3600


async def notify(drain: Drain) -> None:
    """Post due webhooks until cancelled; a further front end leaves them to its worker."""
    while not drain.leases.part_of:
        await asyncio.sleep(EVERY_S)
        try:
            longest_ms = 1000 * (LONGEST_S + LEASE_S)
            claimed = await drain.leases.scripts.run(
                "due_claim", WORK, 1000 * LEASE_S, AT_ONCE, longest_ms
            )
            pairs = zip(claimed[1::2], claimed[2::2], strict=True)  # after Redis's time
            await asyncio.gather(*(
                _deliver(drain, batch_id.decode(), token.decode()) for batch_id, token in pairs
            ))  # fmt: skip
        except ERRORS as error:
            drain.outage.lost(error)


async def _deliver(drain: Drain, batch_id: str, token: str) -> None:
    """Try one webhook; finish it, or make it due again."""
    leases = drain.leases
    batch = Batch(batch_id, await leases.batch_fields(batch_id))
    url, secret = batch.fields.get("notify"), await leases.webhook_secret()
    problem, again_ms = "", ""
    if url and batch.finished and batch.status != "deleting":
        private = drain.settings.gateway_private_webhooks
        problem = await _in_thread(partial(_try, batch, url, secret, private=private))
        age_s = max(0, int(time.time()) - batch.number("finished_at") // 1000)
        again_s = min(LONGEST_S, max(FIRST_S, age_s)) if problem and age_s < TRIED_S else None
        again_ms = "" if again_s is None else str(1000 * again_s)
        _log(batch_id, problem, again_s)
    ended = batch.fields.get("finished_at", "")
    await leases.scripts.run("notified", batch_id, token, ended, again_ms, problem)


def _try(batch: Batch, url: str, secret: str, *, private: bool) -> str:
    """Post the event of a batch's end; return '' if it was delivered, else the reason."""
    if not secret:
        return "Redis has no warmq:notify_secret; the next submit with a webhook makes one"
    ended_ms = batch.fields["finished_at"]
    name = hashlib.sha256(f"{batch.id}\0{batch.life}\0{ended_ms}".encode()).hexdigest()[:32]
    body = webhooks.body_of(batch.id, f"batch.{batch.status}", int(ended_ms) // 1000, ended_ms)
    headers = webhooks.headers_of(f"wh_{name}", body, secret, int(time.time()))
    try:
        status = webhooks.post(url, body, headers, private=private)
    except webhooks.NotDelivered as error:
        return str(error)
    return "" if 200 <= status < 300 or status == 410 else f"the receiver answered {status}"


def _log(batch_id: str, problem: str, again_s: int | None) -> None:
    if not problem:
        log.info("webhook of batch %s: delivered", batch_id, extra={"action": "webhook"})
        return
    later = "given up" if again_s is None else f"again in {again_s} s"
    text, extra = "webhook of batch %s: %s; %s", {"action": "webhook_again"}
    log.warning(text, batch_id, problem, later, extra=extra)


def _set_result(future: asyncio.Future[str], problem: str) -> None:
    if not future.done():  # the worker may be stopping
        future.set_result(problem)


async def _in_thread(call: partial[str]) -> str:
    """Run a call in a daemon thread; return its result, or the name of its error's type."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[str] = loop.create_future()

    def run() -> None:
        try:
            problem = call()
        except Exception as error:  # the webhook is tried again
            problem = type(error).__name__
        if not loop.is_closed():
            loop.call_soon_threadsafe(_set_result, future, problem)

    threading.Thread(target=run, name="webhook", daemon=True).start()
    return await future
