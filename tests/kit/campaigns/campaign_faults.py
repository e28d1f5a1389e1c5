"""The faults of the campaign. Each returns how many requests it may have computed in vain."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import psutil
from kit.campaigns.campaign_redis import (
    delay_replies,
    drop_connections,
    flush_scripts,
    kill_redis,
    lose_replies,
    pause_redis,
    restart_redis,
    step_clock,
)
from kit.protocol import script_keys
from kit.protocol.lessee import client_of
from kit.protocol.snapshot import suspects_leased

from contract.redis import keys
from contract.redis.tenants import Tenant
from demo.stack import Worker, eventually

if TYPE_CHECKING:
    from kit.campaigns.campaign import Campaign

#: What a worker holds: 16 slots and a look-ahead of 4.
HELD = 20
Fault = Callable[["Campaign"], int]


def ended(c: Campaign, worker: Worker, code: int) -> None:
    assert worker.process is not None
    assert worker.process.wait(c.hang_s) == code, worker.log_path


@contextmanager
def frozen(c: Campaign, *, every: bool = False, engine: bool = False) -> Iterator[list[Worker]]:
    """Yield a worker, or every one, that is stopped and may be struck; with its engine if need be.

    A request that was alone in an engine that was killed must not meet that again: nothing
    tells it from a poison. While a worker is stopped, what it holds stays what it is.
    """

    def stop() -> list[Worker]:
        victims = list(c.workers) if every else [c.victim()]
        for worker in victims:
            os.kill(worker.pid, signal.SIGSTOP)
        blames = any(_would_blame(c, worker) for worker in victims)
        if not blames and (not engine or all(c.engine_parts_now(w) for w in victims)):
            return victims
        _go_on(victims)
        return []

    victims = eventually(stop, c.hang_s, "a worker whose end blames nobody")
    try:
        yield victims
    finally:
        _go_on(victims)


def _go_on(workers: list[Worker]) -> None:
    for worker in workers:
        with suppress(ProcessLookupError):
            os.kill(worker.pid, signal.SIGCONT)


def _would_blame(c: Campaign, worker: Worker) -> bool:
    """Whether an innocent is alone in this worker's engine that was alone in a dead one before."""
    redis = client_of(c.on.store)
    redis.ping()  # what the worker had sent before it was stopped comes first
    alone = suspects_leased(redis, c.on.id_of(worker))
    if len(alone) != 1 or alone[0] in c.poisons:
        return False
    return bool(redis.hexists(keys.DEATHS, f"{alone[0]}\0alone"))


def kill_worker(c: Campaign) -> int:
    with frozen(c) as (victim,):
        c.on.kill(victim)
    c.replace(victim)
    return HELD


def kill_process_group(c: Campaign) -> int:
    with frozen(c) as (victim,):
        c.on.kill_group(victim)
    c.replace(victim)
    return HELD


def kill_all_workers(c: Campaign) -> int:
    with frozen(c, every=True) as victims:
        for victim in victims:
            c.on.kill(victim)
    for victim in victims:
        c.replace(victim)
    return HELD * len(victims)


def stop_worker(c: Campaign) -> int:
    victim = c.victim()
    os.kill(victim.pid, signal.SIGTERM)
    ended(c, victim, 0)
    c.replace(victim)
    return 0


def stop_worker_twice(c: Campaign) -> int:
    victim = c.victim()
    os.kill(victim.pid, signal.SIGTERM)
    os.kill(victim.pid, signal.SIGTERM)
    ended(c, victim, 0)
    c.replace(victim)
    return HELD


def quit_worker(c: Campaign) -> int:
    victim = c.victim()
    os.kill(victim.pid, signal.SIGQUIT)
    ended(c, victim, 0)
    c.replace(victim)
    return HELD


def pause_worker(c: Campaign) -> int:
    """Stop a worker until its leases are gone to others; then it goes on, with results."""
    with frozen(c) as (victim,):
        held = script_keys.worker_key(c.on.id_of(victim))
        c.paused.append(victim)
        eventually(lambda: not client_of(c.on.store).exists(held), 20, "its leases were swept")
    return HELD


def kill_engine(c: Campaign) -> int:
    with frozen(c, engine=True) as (victim,):
        c.engine_parts_now(victim)[0].kill()
    return HELD


def kill_engine_worker(c: Campaign) -> int:
    with frozen(c, engine=True) as (victim,):
        c.engine_parts_now(victim)[-1].kill()
    return HELD


def hang_engine(c: Campaign) -> int:
    with frozen(c, engine=True) as (victim,):
        engine = c.engine_parts_now(victim)[0]
        engine.suspend()

    def killed() -> bool:
        c.feed()  # it may have been at its last request: an engine with nothing in it does not hang
        try:
            return engine.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    eventually(killed, c.hang_s, "the watchdog kills it", 0.1)
    return HELD


def kill_submit(c: Campaign) -> int:
    """SIGKILL of `producer submit` after a random number of bytes; then it is resumed."""
    batch_id, bodies = c.new_batch()
    command, env = c.submit_command(batch_id, bodies)
    text = (c.on.folder / f"{batch_id}.jsonl").read_bytes()
    from_stdin = [word if not word.endswith(".jsonl") else "-" for word in command]
    first = subprocess.Popen(from_stdin, env=env, stdin=subprocess.PIPE,
                             stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
    assert first.stdin is not None
    first.stdin.write(text[: c.random.randrange(len(text))])
    first.stdin.flush()
    if c.random.random() < 0.5:
        eventually(lambda: c.on.store.batch(batch_id), 30, "the batch was created")
    first.kill()
    first.wait()
    first.stdin.close()
    subprocess.run(command, env=env, check=True, capture_output=True, timeout=60)
    return 0


def two_submits_at_once(c: Campaign) -> int:
    batch_id, bodies = c.new_batch()
    command, env = c.submit_command(batch_id, bodies)
    command += ["--order", c.random.choice(("input", "prefix"))]
    codes: list[int] = []

    def submit() -> None:
        codes.append(subprocess.run(command, env=env, capture_output=True, timeout=60,
                                    check=False).returncode)  # fmt: skip

    threads = [threading.Thread(target=submit) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert codes == [0, 0]
    return 0


def change_terms(c: Campaign) -> int:
    """No fault, but the queue's order changes under way."""
    tenant, cap = c.random.choice(c.tenants), c.random.choice((None, 1, 5, 20))
    c.on.store.set_tenant(Tenant(tenant, c.random.choice((0.1, 0.5, 1, 2, 10)), cap))
    return 0


def kinds(*, simulated: bool, clock: bool) -> dict[str, Fault]:
    """Return the faults that can be done, by name; `clock`: Redis's can be set wrong."""
    both = [
        kill_worker, kill_process_group, stop_worker, stop_worker_twice, quit_worker, kill_engine,
        hang_engine, drop_connections, restart_redis, lose_replies, delay_replies,
    ]  # fmt: skip
    only = [
        kill_all_workers, pause_worker, flush_scripts, pause_redis, kill_redis, kill_submit,
        two_submits_at_once, change_terms,
    ] if simulated else [kill_engine_worker]  # fmt: skip
    with_clock = [step_clock] if clock else []
    return {fault.__name__: fault for fault in (*both, *only, *with_clock)}
