"""The faults of the campaign. Each returns how many requests it may have computed in vain."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import psutil

from contract import keys
from demo.stack import Worker, eventually

if TYPE_CHECKING:
    from campaign import Campaign

#: What a worker holds: 16 slots and a look-ahead of 4.
HELD = 20
Fault = Callable[["Campaign"], int]


def ended(worker: Worker, code: int) -> None:
    assert worker.process is not None
    assert worker.process.wait(90) == code, worker.log_path


def kill_worker(c: Campaign) -> int:
    victim = c.victim()
    c.on.kill(victim)
    c.replace(victim)
    return HELD


def kill_process_group(c: Campaign) -> int:
    victim = c.victim()
    c.on.kill_group(victim)
    c.replace(victim)
    return HELD


def kill_all_workers(c: Campaign) -> int:
    for victim in list(c.workers):
        c.on.kill(victim)
        c.replace(victim)
    return HELD * len(c.workers)


def stop_worker(c: Campaign) -> int:
    victim = c.victim()
    os.kill(victim.pid, signal.SIGTERM)
    ended(victim, 0)
    c.replace(victim)
    return 0


def stop_worker_twice(c: Campaign) -> int:
    victim = c.victim()
    os.kill(victim.pid, signal.SIGTERM)
    os.kill(victim.pid, signal.SIGTERM)
    ended(victim, 0)
    c.replace(victim)
    return HELD


def quit_worker(c: Campaign) -> int:
    victim = c.victim()
    os.kill(victim.pid, signal.SIGQUIT)
    ended(victim, 0)
    c.replace(victim)
    return HELD


def pause_worker(c: Campaign) -> int:
    """Stop a worker until its leases are gone to others; then it goes on, with results."""
    victim = c.victim()
    held = keys.worker_key(c.on.id_of(victim))
    c.paused.append(victim)
    os.kill(victim.pid, signal.SIGSTOP)
    try:
        eventually(lambda: not c.on.store.redis.exists(held), 20, "its leases were swept")
    finally:
        os.kill(victim.pid, signal.SIGCONT)
    return HELD


def kill_engine(c: Campaign) -> int:
    c.engine_parts(c.victim())[0].kill()
    return HELD


def kill_engine_worker(c: Campaign) -> int:
    c.engine_parts(c.victim())[-1].kill()
    return HELD


def hang_engine(c: Campaign) -> int:
    victim = c.engine_parts(c.victim())[0]
    victim.suspend()
    eventually(lambda: not psutil.pid_exists(victim.pid) or victim.status() == "zombie",
               40, "the watchdog kills it")  # fmt: skip
    return HELD


def drop_connections(c: Campaign) -> int:
    for kind in ("normal", "pubsub"):
        c.on.store.redis.client_kill_filter(_type=kind, skipme=True)
    return 0


def flush_scripts(c: Campaign) -> int:
    c.on.store.redis.script_flush()
    return 0


def pause_redis(c: Campaign) -> int:
    """Longer than the lease, at times: living workers must renew before anybody sweeps."""
    server = c.on.server.process
    assert server is not None
    until = time.monotonic() + c.random.uniform(0.2, 3.5)
    server.send_signal(signal.SIGSTOP)
    eventually(lambda: time.monotonic() > until)
    server.send_signal(signal.SIGCONT)
    return 0


def restart_redis(c: Campaign) -> int:
    c.on.server.stop()
    c.on.server.start()
    return 0


def kill_redis(c: Campaign) -> int:
    c.on.server.stop(signal.SIGKILL)
    c.on.server.start()
    return 0


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


def kinds(*, simulated: bool) -> dict[str, Fault]:
    """Return the faults that can be done, by name."""
    both = [
        kill_worker, kill_process_group, stop_worker, stop_worker_twice, quit_worker, kill_engine,
        hang_engine, drop_connections, restart_redis,
    ]  # fmt: skip
    only = [
        kill_all_workers, pause_worker, flush_scripts, pause_redis, kill_redis, kill_submit,
        two_submits_at_once,
    ] if simulated else [kill_engine_worker]  # fmt: skip
    return {fault.__name__: fault for fault in (*both, *only)}
