"""What is run in a full Redis, by script: the protocol of workers and producers.

The cases of gateways' scripts are in full_redis_gateway.py.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import orjson
from kit.protocol.lessee import QUEUE, Lessee, Submitted, bury_alive, celery_message, submit_batch

from contract.redis import keys
from contract.redis.batches import BatchStore
from contract.redis.runs import Runs
from contract.redis.tenants import Tenant, Tenants
from gateway.redis.api_keys import ApiKeys

Act = Callable[[], None]
Case = Callable[[BatchStore, Lessee, str], Act]
#: By script: what is prepared while there is room, and what is then done without any. The text is
#: Redis' URL.
CASES: dict[str, Case] = {}


def of(*scripts: str) -> Callable[[Case], Case]:
    """Note a case under the scripts that it runs."""

    def note(case: Case) -> Case:
        CASES.update(dict.fromkeys(scripts, case))
        return case

    return note


def answers(expected: object, act: Callable[[], object]) -> Act:
    """Return what does something and holds the answer."""

    def run() -> None:
        found = act()
        assert found == expected, found

    return run


@of("pop")
def _pop(store: BatchStore, worker: Lessee, _: str) -> Act:
    submit_batch(store, 3)
    return answers(3, lambda: len(worker.pop()))


@of("done")
def _done(store: BatchStore, worker: Lessee, _: str) -> Act:
    submit_batch(store, 3)
    leases = worker.pop()

    def act() -> None:
        assert worker.done(*leases[:2]) == 2
        assert worker.done(leases[2], outcome="failed", keep=True) == 1
        assert store.batch("b1").status == "completed"  # type: ignore[union-attr]

    return act


@of("release")
def _release(store: BatchStore, worker: Lessee, _: str) -> Act:
    submit_batch(store, 4)
    leases = worker.pop()
    return answers(4, lambda: worker.release(*leases, died=leases[:2], max_deaths=1))


@of("renew")
def _renew(store: BatchStore, worker: Lessee, _: str) -> Act:
    submit_batch(store, 2)
    names = [lease.id for lease in worker.pop()]
    return answers(([], []), lambda: worker.renew(*names))


@of("sweep")
def _sweep(store: BatchStore, worker: Lessee, _: str) -> Act:
    submit_batch(store, 2)
    worker.expire_leases(*worker.pop())

    def act() -> None:
        assert worker.sweep() == 2
        assert len(worker.pop()) == 2

    return act


@of("bury")
def _bury(store: BatchStore, worker: Lessee, _: str) -> Act:
    submit_batch(store, 1)
    (lease,) = worker.pop()
    return answers(1, lambda: worker.bury(lease, "not JSON"))


@of("ring")
def _ring(store: BatchStore, worker: Lessee, _: str) -> Act:
    return answers(True, lambda: worker.run("ring", QUEUE, "w1", 1, 0, 1, 1, 0, 1, 1) > 0)


@of("suspects_lock")
def _suspects_lock(store: BatchStore, worker: Lessee, _: str) -> Act:
    suspects = keys.suspects_list(QUEUE)
    return answers(
        [1, 1], lambda: [worker.run("suspects_lock", suspects, "w1", ttl) for ttl in (1000, 0)]
    )


@of("swap_claim")
def _swap_claim(store: BatchStore, worker: Lessee, _: str) -> Act:
    return answers(1, lambda: worker.run("swap_claim", QUEUE, "w1", 16, 60_000, 0))


@of("server_share")
def _server_share(store: BatchStore, worker: Lessee, _: str) -> Act:
    args = ("host:8000", "w1", 5000, 1, 0, 0, 2, 50, 7, "{}", "m", "0.02 0.01")
    reply = [1, 7, 7, 0, 0, 2, 50, b"{}", b"0.02 0.01"]
    return answers(reply, lambda: worker.run("server_share", *args))


@of("cancel")
def _cancel(store: BatchStore, worker: Lessee, _: str) -> Act:
    batch = submit_batch(store, 3).batch
    return answers(3, lambda: store.cancel(batch))


@of("seal")
def _seal(store: BatchStore, worker: Lessee, _: str) -> Act:
    submitted = submit_batch(store, 1, seal=False)
    return answers("ok", lambda: store.seal(submitted.batch, submitted.end).answer)


@of("delete", "delete_chunk")
def _delete(store: BatchStore, worker: Lessee, _: str) -> Act:
    submit_batch(store, 3)

    def act() -> None:
        assert store.delete("b1", force=True)
        assert store.batch("b1") is None
        assert worker.pop() == []

    return act


def _failed(store: BatchStore, worker: Lessee) -> Submitted:
    submitted = submit_batch(store, 2)
    worker.done(*worker.pop(), outcome="failed", keep=True)
    return submitted


@of("retry", "hold")
def _retry(store: BatchStore, worker: Lessee, _: str) -> Act:
    batch = _failed(store, worker).batch
    return answers(2, lambda: store.retry(batch, ["failed"]))


@of("retry_cut")
def _retry_cut(store: BatchStore, worker: Lessee, _: str) -> Act:
    submitted = submit_batch(store, 1)
    (lease,) = worker.pop()
    worker.done(lease)
    (result,) = store.results(submitted.ids)
    digest = hashlib.sha1(result or b"", usedforsecurity=False).hexdigest()
    given = [(submitted.ids[0], digest, QUEUE, lease.message)]
    return answers(1, lambda: store.retry_cut(submitted.batch, given))


@of("retire")
def _retire(store: BatchStore, worker: Lessee, _: str) -> Act:
    submitted = _failed(store, worker)
    args = ("b1", submitted.batch.life, 60_000, 1, *submitted.ids)
    return answers(1, lambda: worker.run("retire", *args))


@of("notified")
def _notified(store: BatchStore, worker: Lessee, _: str) -> Act:
    batch = submit_batch(store).batch
    worker.client.hset(keys.batch_key("b1"), "notify", "https://example.org")
    store.cancel(batch)
    _, batch_id, token = worker.run("due_claim", "notify", 60_000, 1, "")
    ended = worker.client.hget(keys.batch_key("b1"), "finished_at")
    return answers(1, lambda: worker.run("notified", batch_id, token, ended, 1000, "no answer"))


@of("limit_failures")
def _limit_failures(store: BatchStore, worker: Lessee, _: str) -> Act:
    batch = submit_batch(store, 1).batch
    return answers(1, lambda: worker.run("limit_failures", batch.id, batch.life, "5"))


@of("run_note", "run_state")
def _run(store: BatchStore, _worker: Lessee, _: str) -> Act:
    runs = Runs.using(store)
    record = runs.begin("run_1", "seed", {"windows": 0})

    def act() -> None:
        found = store.batch("run_1")
        assert found is not None
        runs.note(record, {"windows": 1}, ends=True)
        ended = store.batch("run_1")
        assert ended is not None
        assert (found.is_run, found.finished, ended.finished) == (True, False, True)

    return act


@of("collected")
def _collected(store: BatchStore, worker: Lessee, _: str) -> Act:
    batch = _failed(store, worker).batch
    args = [("b1", batch.life), ("b1", batch.life, "mark")]
    return answers([1, 1], lambda: [worker.run("collected", *each) for each in args])


@of("dead_retry")
def _dead_retry(store: BatchStore, worker: Lessee, _: str) -> Act:
    bury_alive(worker.client, celery_message("a"))
    return answers(1, store.retry_dead)


@of("dead_delete")
def _dead_delete(store: BatchStore, worker: Lessee, _: str) -> Act:
    bury_alive(worker.client, celery_message("a"))
    return answers(1, store.delete_dead)


@of("list")
def _list_batches(store: BatchStore, worker: Lessee, _: str) -> Act:
    submit_batch(store, 1)
    return answers(["b1"], lambda: [batch.id for batch in store.batches()])


@of("permissions")
def _rights(store: BatchStore, worker: Lessee, _: str) -> Act:
    return answers(
        True, lambda: worker.run("permissions", orjson.dumps([["GET", "x"]])) is not None
    )


@of("terms_put")
def _terms(store: BatchStore, worker: Lessee, _: str) -> Act:
    _, key = ApiKeys.using(store).create("t")
    tenants = Tenants.using(store)

    def act() -> None:
        tenants.set_tenant(Tenant("t", 2, 0))
        assert tenants.tenant("t") == Tenant("t", 2, 0)
        revoked = ApiKeys.using(store).revoke(key.id)
        assert revoked is not None
        assert revoked.revoked_at is not None

    return act
