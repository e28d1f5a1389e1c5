"""`producer doctor` on a server, its settings and a disk."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
import redis
from kit.commands.doctor_findings import announce, doctor, levels
from kit.commands.support import producer_command, producer_env, run_producer
from kit.protocol.lessee import Lessee, celery_message, client_of, submit_batch

from contract.naming import DEFAULT_QUEUE
from contract.redis import keys
from contract.redis.batches import BatchStore
from contract.version import version
from demo.stack import RedisServer, eventually, free_port, redis_binary
from producer.cli.commands import doctor as doctor_command
from producer.cli.doctor import server, work

GIB = 2**30
#: INFO of a Redis that is as it should be, as far as it is judged.
GOOD: dict[str, Any] = {
    "redis_version": "7.2.4", "redis_mode": "standalone", "role": "master", "aof_enabled": 1,
    "maxmemory": GIB, "maxmemory_policy": "noeviction", "used_memory": GIB // 10,
    "aof_last_write_status": "ok", "aof_last_bgrewrite_status": "ok",
    "rdb_last_bgsave_status": "ok",
}  # fmt: skip


def test_all_is_well(own: RedisServer, own_store: BatchStore) -> None:
    announce(own_store)
    found = doctor(own.url, 0)
    assert levels(found, "ok") == set(found) - levels(found, "remark")
    assert levels(found, "remark") <= {"disk_low"}
    for code in ("version", "settings", "server", "aof_on", "evicts_nothing", "memory", "clock",
                 "rights", "worker", "queue", "no_open_batch", "no_dead_letters"):  # fmt: skip
        assert code in found
    info = own.client().info()
    shown = info.get("valkey_version", info["redis_version"])
    assert found["server"]["facts"]["version"] == shown
    assert found["rights"]["text"] == "this user has all rights of a producer"
    assert found["worker"]["text"] == (
        "celery@a.12.0a1b2c3d: ready, 3 of 40 in flight, queue warmq, model tiny, "
        f"warmq {version()}"
    )
    assert own.client().keys() == [b"warmq:workers"]  # it leaves nothing behind


def test_an_append_only_file_that_is_off_is_a_remark(
    own: RedisServer, own_store: BatchStore
) -> None:
    announce(own_store)
    own.client().config_set("appendonly", "no")
    assert "aof_off" in levels(doctor(own.url, 0), "remark")


def test_eviction_is_a_problem_where_it_can_happen(own: RedisServer, own_store: BatchStore) -> None:
    announce(own_store)
    own.client().config_set("maxmemory-policy", "allkeys-lru")
    found = doctor(own.url, 1)
    assert levels(found, "problem") == {"evicts"}
    assert "allkeys-lru" in found["evicts"]["text"]
    own.client().config_set("maxmemory", 0)
    found = doctor(own.url, 0)
    assert {"other_policy", "memory_unlimited"} <= levels(found, "remark")


def test_a_redis_that_fills_is_a_remark_and_a_full_one_a_problem(
    own: RedisServer, own_store: BatchStore
) -> None:
    announce(own_store)
    client = own.client()
    client.setrange("much", 50_000_000, "x")  # else what each client takes would count
    used = client.info()["used_memory"]
    client.config_set("maxmemory", int(used * 1.25))
    assert "memory_high" in levels(doctor(own.url, 0), "remark")
    client.config_set("maxmemory", used // 2)
    found = doctor(own.url, 1)
    assert levels(found, "problem") == {"memory_full"}
    assert found["rights"]["level"] == "ok"  # what is full is not forbidden


def test_a_redis_that_is_not_there_ends_with_3_and_the_rest_is_told() -> None:
    url = f"redis://me:secret@127.0.0.1:{free_port()}/0"
    found = doctor(url, 3)
    assert levels(found, "problem") == {"redis_unusable"}
    assert "secret" not in str(found)
    assert {"version", "settings"} <= set(found)


def test_a_wrong_password_ends_with_3(own: RedisServer) -> None:
    own.client().config_set("requirepass", "right")
    found = doctor(f"redis://:wrong@127.0.0.1:{own.port}/0", 3)
    assert "check user, password and ACL" in found["redis_unusable"]["text"]


def test_a_replica_is_a_problem(own: RedisServer, own_store: BatchStore) -> None:
    announce(own_store)
    port = free_port()
    own.client().replicaof("127.0.0.1", port)
    found = doctor(own.url, 1)
    assert found["replica"]["level"] == "problem"
    assert f"127.0.0.1:{port}" in found["replica"]["remedy"]


def test_cluster_mode_is_a_problem(tmp_path: Path) -> None:
    # A cluster's nodes talk on a port 10,000 higher, so Redis starts on none above 55,535.
    port = next(port for port in iter(free_port, None) if port <= 55_535)
    with RedisServer(tmp_path / "redis", "--cluster-enabled", "yes", port=port) as cluster:
        done = run_producer("doctor", "--json", redis_url=cluster.url)
    found = {finding["code"] for finding in orjson.loads(done.stdout)["findings"]}
    assert done.returncode in (1, 3)
    assert "cluster" in found


def test_a_sentinel_is_told_from_a_redis(tmp_path: Path) -> None:
    config = tmp_path / "sentinel.conf"
    config.write_text("")
    port = free_port()
    with RedisServer(tmp_path / "redis") as primary:
        config.write_text(f"sentinel monitor mymaster 127.0.0.1 {primary.port} 1\n")
        words = [redis_binary(), str(config), "--sentinel", "--port", str(port)]
        with subprocess.Popen(words, stdout=subprocess.DEVNULL, cwd=tmp_path) as sentinel:
            try:
                eventually(lambda: _answers(port), 10, "the sentinel answers")
                found = doctor(f"redis://127.0.0.1:{port}/0", 1)
            finally:
                sentinel.terminate()
    assert levels(found, "problem") == {"sentinel"}


def _answers(port: int) -> bool:
    try:
        return bool(redis.Redis(port=port).ping())
    except redis.RedisError:
        return False


# -- settings and disk ---------------------------------------------------------


def test_each_setting_is_told_with_its_place(
    own: RedisServer, own_store: BatchStore, tmp_path: Path
) -> None:
    announce(own_store)
    (tmp_path / ".env").write_text("WARMQ_HIGH_WATER=0.5\nWARMQ_RESULT_TTL_S=60\n")
    (tmp_path / "warmq.toml").write_text('high_water = 0.4\nqueue = "warmq"\n')
    env = producer_env(own.url, WARMQ_RESULT_TTL_S="90")
    done = subprocess.run(
        producer_command("doctor", "--json"), cwd=tmp_path, env=env, capture_output=True,
        check=True,
    )  # fmt: skip
    (finding,) = [f for f in orjson.loads(done.stdout)["findings"] if f["code"] == "settings"]
    assert finding["facts"]["origins"] == {
        "redis_url": "environment", "result_ttl_s": "environment", "high_water": ".env",
        "queue": "warmq.toml",
    }  # fmt: skip
    assert "WARMQ_HIGH_WATER=0.5 (.env)" in finding["text"]


def test_a_wrong_setting_is_a_problem_and_a_password_is_not_shown() -> None:
    found = doctor("redis://:secret@nowhere/0", 1, WARMQ_HIGH_WATER="2")
    assert levels(found, "problem") == {"settings_wrong"}
    assert "WARMQ_HIGH_WATER" in found["settings_wrong"]["text"]
    assert "secret" not in str(found)


@pytest.mark.parametrize(
    ("free", "code", "level"),
    [(10 * GIB, "disk", "ok"), (GIB - 1, "disk_low", "remark"), (1000, "disk_full", "problem")],
)
def test_free_space_is_judged(
    monkeypatch: pytest.MonkeyPatch, free: int, code: str, level: str
) -> None:
    monkeypatch.setattr(doctor_command.shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    finding = doctor_command.check_disk()
    assert (finding.code, finding.level, finding.facts["free_bytes"]) == (code, level, free)


def test_a_folder_that_takes_no_files_is_a_remark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_command.os, "access", lambda *_: False)
    finding = doctor_command.check_disk()
    assert (finding.code, finding.level) == ("folder_unwritable", "remark")


def test_a_folder_that_was_deleted_is_a_remark(
    own: RedisServer, own_store: BatchStore, tmp_path: Path
) -> None:
    announce(own_store)
    gone = tmp_path / "gone"
    gone.mkdir()
    words = ["sh", "-c", 'cd "$1" && rmdir "$1" && shift && exec "$@"', "sh", str(gone)]
    done = subprocess.run(
        [*words, *producer_command("doctor")], env=producer_env(own.url), capture_output=True,
        check=False, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "0 problems\n")
    assert (
        "no file can be written in this folder, which was deleted or cannot be read: change to"
        in done.stdout
    )


# -- judged with given values --------------------------------------------------


@pytest.mark.parametrize(
    ("told", "code"),
    [
        ({"redis_version": "6.2.14"}, "server"),
        ({"redis_version": "10.0"}, "server"),
        ({"redis_version": "6.0.16"}, "server_too_old"),
        ({"redis_version": "5.0.7"}, "server_too_old"),
        ({"redis_version": "7.2.4", "valkey_version": "8.1.1"}, "server"),
    ],
)
def test_a_server_that_is_too_old_is_a_problem(told: dict[str, str], code: str) -> None:
    finding = server.check_version(told, "redis://host")
    assert finding.code == code
    assert finding.facts["version"] == told.get("valkey_version", told["redis_version"])


@pytest.mark.parametrize("field", ["aof_last_write_status", "rdb_last_bgsave_status"])
def test_a_write_of_redis_that_failed_is_a_problem(field: str) -> None:
    assert not list(server.check_last_writes(GOOD))
    (finding,) = server.check_last_writes(GOOD | {field: "err"})
    assert (finding.code, finding.level) == ("redis_writes_fail", "problem")


@pytest.mark.parametrize(
    ("before", "redis_s", "after", "code"),
    [
        (100.0, 100.1, 100.2, "clock"),
        (100.0, 104.9, 100.0, "clock"),
        (100.0, 106.0, 100.0, "clock_differs"),
        (100.0, 90.0, 100.0, "clock_differs"),
        (100.0, 110.0, 120.0, "clock"),  # the reply took 20 s: nothing is known
        (100.0, 130.0, 120.0, "clock_differs"),
    ],
)
def test_clocks_are_compared_as_far_as_the_round_trip_lets_them(
    before: float, redis_s: float, after: float, code: str
) -> None:
    finding = server.check_clocks(before, redis_s, after)
    assert finding.code == code
    assert finding.level == ("ok" if code == "clock" else "remark")


def test_a_clock_that_is_off_says_in_which_direction() -> None:
    assert server.check_clocks(100, 160, 100).facts == {"apart_s": 60, "direction": "ahead of"}
    assert server.check_clocks(100, 40, 100).facts == {"apart_s": 60, "direction": "behind"}


def test_dead_letters_are_counted_to_a_bound(
    store: BatchStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work, "DEAD_COUNTED", 2)
    client_of(store).lpush(DEFAULT_QUEUE, b"junk", b"junk 2", b"junk 3")
    Lessee(client_of(store)).pop()
    finding = work.check_dead_letters(store)
    assert finding.facts == {"count": 2, "more": True}


def test_without_a_worker_nothing_runs(own: RedisServer) -> None:
    assert levels(doctor(own.url, 1), "problem") == {"no_worker"}


def test_workers_that_do_not_run_requests_are_told(own: RedisServer, own_store: BatchStore) -> None:
    announce(own_store, "celery@a.1.0", state="starting", why="waits for http://10.0.0.9/v1")
    announce(own_store, "celery@b.2.0", state="degraded")
    announce(own_store, "celery@c.3.0", state="draining")
    announce(own_store, "celery@d.4.0", silent_s=40)
    announce(own_store, "celery@e.5.0", version="0.0.9")
    announce(own_store, "celery@f.6.0", state="stopped", why="no such folder")
    announce(own_store, "celery@g.7.0", state="ready", why="waits for a:1: 502 Bad Gateway")
    found = doctor(own.url, 0)
    assert levels(found, "remark") >= {
        "worker_starting", "worker_degraded", "worker_draining", "worker_silent",
        "worker_other_version", "worker_stopped", "worker_waits",
    }  # fmt: skip
    assert "ready (waits for a:1: 502 Bad Gateway)" in found["worker_waits"]["text"]
    assert "starting (waits for http://10.0.0.9/v1)" in found["worker_starting"]["text"]
    assert re.match(
        r"celery@d.4.0 last announced itself 0:00:[45]\d ago", found["worker_silent"]["text"]
    )
    assert "has failed and stopped (no such folder)" in found["worker_stopped"]["text"]
    said = f"celery@e.5.0 runs warmq 0.0.9, this producer {version()}"
    assert found["worker_other_version"]["text"] == said


def test_a_worker_that_announces_less_is_told_all_the_same(
    own: RedisServer, own_store: BatchStore
) -> None:
    seconds, _ = client_of(own_store).time()
    said = orjson.dumps({"state": "ready", "queue": DEFAULT_QUEUE})
    later = b"%d\0" % ((seconds + 14) * 1000)
    client_of(own_store).hset(keys.WORKERS, "celery@a.1.0", later + said)
    found = doctor(own.url, 1)
    assert found["worker"]["text"] == "celery@a.1.0: ready, 0 in flight, queue warmq"
    assert found["worker_older"]["text"].startswith("celery@a.1.0 has protocol 1, ")


@pytest.mark.parametrize(
    "junk", [b"x", b"\0{}", b"1\0", b"1\0[]", b"1\0{}", b'1\0{"queue":[]}'], ids=repr
)
def test_an_announcement_that_cannot_be_read_is_passed_over(
    own: RedisServer, own_store: BatchStore, junk: bytes
) -> None:
    announce(own_store)
    client_of(own_store).hset(keys.WORKERS, "junk", junk)
    found = doctor(own.url, 0)
    assert "junk" not in str(found)
    assert found["worker"]["facts"]["id"] == "celery@a.12.0a1b2c3d"


def test_requests_in_a_queue_without_a_worker_are_a_problem(
    own: RedisServer, own_store: BatchStore
) -> None:
    announce(own_store)
    submit_batch(own_store, 3, queue="warmq.tinny")
    found = doctor(own.url, 1)
    assert levels(found, "problem") == {"queue_unserved"}
    facts = found["queue_unserved"]["facts"]
    assert (facts["waiting"], facts["model"], facts["others"]) == (3, "tinny", ["warmq"])
    assert "workers serve: tiny (leave out --model)" in found["queue_unserved"]["text"]


@pytest.mark.parametrize(
    ("announced", "code"),
    [
        ({"state": "degraded", "why": "waits for 127.0.0.1:8000: refused"}, "servers_unreachable"),
        ({"state": "starting", "why": "waits for 127.0.0.1:8000: refused"}, "servers_unreachable"),
        ({"state": "degraded", "why": "the engine died"}, "workers_degraded"),
        ({"state": "draining"}, "workers_draining"),
    ],
)
def test_an_only_worker_that_cannot_run_requests_is_a_problem(
    own: RedisServer, own_store: BatchStore, announced: dict[str, str], code: str
) -> None:
    announce(own_store, **announced)
    submit_batch(own_store, 3)
    found = doctor(own.url, 1)
    assert levels(found, "problem") == {code}
    assert found[code]["facts"]["waiting"] == 3
    assert announced.get("why", "") in found[code]["text"]
    announce(own_store, **announced)
    announce(own_store, "celery@b.1.0")  # another one runs them
    assert levels(doctor(own.url, 0), "problem") == set()


def test_a_server_that_is_away_is_not_called_an_engine_that_died(
    own: RedisServer, own_store: BatchStore
) -> None:
    announce(own_store, state="degraded", why="waits for 127.0.0.1:8000: connection refused")
    found = doctor(own.url, 1)
    assert levels(found, "problem") == {"servers_unreachable"}
    assert "died" not in found["worker_degraded"]["remedy"] + found["servers_unreachable"]["text"]


def test_the_own_queue_without_a_worker_and_a_request_is_a_remark(
    own: RedisServer, own_store: BatchStore
) -> None:
    announce(own_store, queue="warmq.tiny")
    found = doctor(own.url, 0)
    assert found["queue_unused"]["level"] == "remark"
    assert "workers serve: tiny" in found["queue_unused"]["text"]


def test_open_batches_suspects_and_dead_letters_are_counted(
    own: RedisServer, own_store: BatchStore
) -> None:
    announce(own_store)
    client = client_of(own_store)
    submit_batch(own_store, 2, batch_id="first")
    client.zincrby(keys.BATCHES, -5000, "first")
    submit_batch(own_store, 1, batch_id="second")
    client.lpush(DEFAULT_QUEUE, b"junk")
    Lessee(client).pop(1)  # the junk becomes a dead letter
    client.lpush(keys.suspects_list(DEFAULT_QUEUE), celery_message("t1"))
    found = doctor(own.url, 0)
    assert found["open_batch"]["facts"]["id"] == "first"
    assert found["open_batch"]["facts"]["unfinished"] == 2
    assert found["suspects"]["facts"] == {"queue": DEFAULT_QUEUE, "count": 1}
    assert found["dead_letters"]["facts"]["count"] == 1
    # One is told as one
    assert found["dead_letters"]["text"] == "1 dead letter"
    assert found["suspects"]["text"].startswith("queue warmq has 1 request suspected of")
    assert found["open_batch"]["text"].startswith("unfinished batches: 2; the oldest is first")
