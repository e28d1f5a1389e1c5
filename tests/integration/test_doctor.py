"""`producer doctor`: each problem is made real in a Redis, or given to what judges it."""

from __future__ import annotations

import os
import re
import subprocess
import typing
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
import redis
from lessee import Lessee, celery_message, client_of, submit_batch
from support import producer_command, producer_env, run_producer

from contract.naming import DEFAULT_QUEUE
from contract.redis import keys, rights
from contract.redis.batches import BatchStore
from contract.version import PROTOCOL, version
from demo.stack import ROOT, RedisServer, eventually, free_port, redis_binary
from producer.cli.findings import WORDS, text_and_remedy
from producer.core.doctor import here, server, workers
from producer.core.doctor.finding import Code, Finding

GIB = 2**30
#: INFO of a Redis that is as it should be, as far as it is judged.
GOOD: dict[str, Any] = {
    "redis_version": "7.2.4", "redis_mode": "standalone", "role": "master", "aof_enabled": 1,
    "maxmemory": GIB, "maxmemory_policy": "noeviction", "used_memory": GIB // 10,
    "aof_last_write_status": "ok", "aof_last_bgrewrite_status": "ok",
    "rdb_last_bgsave_status": "ok",
}  # fmt: skip

Found = dict[str, dict[str, Any]]


def doctor(redis_url: str, status: int, **env: str) -> Found:
    """Run it both ways; return the findings by code."""
    done = run_producer("doctor", "--json", redis_url=redis_url, **env)
    assert done.returncode == status, done.stdout + done.stderr
    document = orjson.loads(done.stdout)
    assert document["healthy"] == (status == 0)
    told = run_producer("doctor", redis_url=redis_url, **env)
    assert told.returncode == status
    lines = told.stdout.splitlines()
    assert len(lines) == len(document["findings"])
    for line, finding in zip(lines, document["findings"], strict=True):
        assert line[:2] == {"ok": "ok", "remark": "--", "problem": "!!"}[finding["level"]]
        assert (finding["remedy"] is not None) == (finding["level"] != "ok"), finding
        assert line.endswith(finding["remedy"] or "")
    return {finding["code"]: finding for finding in document["findings"]}


def levels(found: Found, level: str) -> set[str]:
    return {code for code, finding in found.items() if finding["level"] == level}


def announce(store: BatchStore, name: str = "celery@a.12.0a1b2c3d", **more: Any) -> None:
    """Leave what a worker says of itself; `silent_s` ago."""
    said = {"state": "ready", "queue": DEFAULT_QUEUE, "model": "tiny", "in_flight": 3, "limit": 40,
            "version": version(), "protocol": PROTOCOL} | more  # fmt: skip
    seconds, _ = client_of(store).time()
    record = b"%d\0" % ((seconds - said.pop("silent_s", 0)) * 1000)
    client_of(store).hset(keys.WORKERS, name, record + orjson.dumps(said))


@pytest.fixture
def own(tmp_path: Path) -> Iterator[RedisServer]:
    """Return a Redis whose settings a test may change: append-only file, 1 GiB, no eviction."""
    with RedisServer(tmp_path / "redis", "--appendonly", "yes", "--maxmemory", "1gb") as redis:
        yield redis


@pytest.fixture
def own_store(own: RedisServer) -> BatchStore:
    return BatchStore(own.client(), ttl_ms=60_000)


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


def test_a_user_who_may_not_even_connect_is_told_which_right_is_missing(own: RedisServer) -> None:
    rules = ["on", ">pw", "~*", "&*", "+@all", "-@dangerous", "-@connection", "+auth", "+hello"]
    found = doctor(with_user(own, rules), 1)
    assert found["rights_missing"]["facts"]["missing"] == ["client"]
    assert "redis_unusable" not in found


def test_a_replica_is_a_problem(own: RedisServer, own_store: BatchStore) -> None:
    announce(own_store)
    port = free_port()
    own.client().replicaof("127.0.0.1", port)
    found = doctor(own.url, 1)
    assert found["replica"]["level"] == "problem"
    assert f"127.0.0.1:{port}" in found["replica"]["remedy"]


def test_cluster_mode_is_a_problem(tmp_path: Path) -> None:
    with RedisServer(tmp_path / "redis", "--cluster-enabled", "yes") as cluster:
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


# -- rights --------------------------------------------------------------------


def documented(user: str) -> list[str]:
    """Return the rules of a user of docs/security.md, with a password of its own."""
    text = (ROOT / "docs" / "security.md").read_text()
    (rules,) = re.findall(rf"^user {user} (.*)$", text, re.MULTILINE)
    return str(rules).replace("CHANGE-ME", "pw").split()


def with_user(own: RedisServer, rules: list[str]) -> str:
    """Make the user; return its URL."""
    own.client().execute_command("ACL", "SETUSER", "someone", "reset", *rules)
    return f"redis://someone:pw@127.0.0.1:{own.port}/0"


def test_the_documented_producer_has_all_rights_that_it_needs(
    own: RedisServer, own_store: BatchStore
) -> None:
    announce(own_store)
    found = doctor(with_user(own, documented("warmq-producer")), 0)
    assert found["rights"]["level"] == "ok"
    assert "forbidden" not in found
    assert refused(own) == set()


def test_a_workers_rights_are_tried_where_they_are_asked_for(
    own: RedisServer, own_store: BatchStore
) -> None:
    announce(own_store)
    rules = documented("warmq-worker")
    also = [rule for rule in documented("warmq-producer") if rule.startswith("+")]
    url = with_user(own, [*rules, *also])
    done = run_producer("doctor", "--worker", redis_url=url)
    assert done.returncode == 0
    assert "this user has all rights of a producer and a worker" in done.stdout
    assert refused(own) == set()

    url = with_user(own, documented("warmq-producer"))
    done = run_producer("doctor", "--worker", "--json", redis_url=url)
    assert done.returncode == 1
    found = {finding["code"]: finding for finding in orjson.loads(done.stdout)["findings"]}
    lacks = found["rights_missing"]["facts"]["missing"]
    assert {"srem", "hrandfield", "~_kombu.binding.scratch"} <= set(lacks)


@pytest.mark.parametrize(
    ("rule", "lacking"),
    [("-hset", "hset"), ("-rpush", "rpush"), ("-publish", "publish"), ("-mget", "mget"),
     ("-xread", "xread")],
)  # fmt: skip
def test_a_right_that_is_missing_is_named(
    own: RedisServer, own_store: BatchStore, rule: str, lacking: str
) -> None:
    announce(own_store)
    found = doctor(with_user(own, [*documented("warmq-producer"), rule]), 1)
    assert found["rights_missing"]["facts"]["missing"] == [lacking]
    assert lacking in found["rights_missing"]["text"]


def test_a_queue_whose_keys_are_not_the_users_is_told(own: RedisServer) -> None:
    url = with_user(own, documented("warmq-producer"))
    found = doctor(url, 1, WARMQ_QUEUE="other")
    assert found["rights_missing"]["facts"]["missing"] == ["~other"]


def test_what_the_user_may_not_look_at_is_a_line(own: RedisServer, own_store: BatchStore) -> None:
    announce(own_store)
    url = with_user(own, [*documented("warmq-producer"), "-info", "-time"])
    done = run_producer("doctor", "--json", redis_url=url)
    found = [f for f in orjson.loads(done.stdout)["findings"] if f["code"] == "forbidden"]
    assert done.returncode == 0
    assert [finding["facts"]["what"].split()[0] for finding in found] == [
        "INFO",
        "TIME",
        "workers,",
    ]
    assert all(finding["remedy"] for finding in found)


def test_a_user_who_may_run_no_script_is_told(own: RedisServer, own_store: BatchStore) -> None:
    announce(own_store)
    found = doctor(with_user(own, [*documented("warmq-producer"), "-evalsha"]), 1)
    assert found["rights_missing"]["facts"]["missing"] == ["evalsha", "script|load"]


def test_every_documented_command_is_tried_that_a_script_can_run() -> None:
    direct = {"evalsha", "script|load", "script|exists", "ping", "info", "time", "client|setname",
              "client|tracking"}  # fmt: skip
    not_in_scripts = {"brpop", "subscribe", "psubscribe", "unsubscribe", "punsubscribe",
                      "multi", "exec"}  # fmt: skip

    def commands(user: str) -> set[str]:
        return {rule[1:] for rule in documented(user) if rule.startswith("+")}

    tried = {words[0] for words in rights.OF_PRODUCERS}
    assert tried == commands("warmq-producer") - direct
    of_workers = {words[0] for words in rights.OF_WORKERS}
    assert of_workers - {"set"} == commands("warmq-worker") - direct - not_in_scripts - tried


def refused(own: RedisServer) -> set[str]:
    """Return what Redis has refused; CLIENT SETINFO aside, see docs/security.md."""
    return {entry["object"] for entry in own.client().acl_log()} - {"client", "client|setinfo"}


# -- workers and queues --------------------------------------------------------


def test_without_a_worker_nothing_runs(own: RedisServer) -> None:
    assert levels(doctor(own.url, 1), "problem") == {"no_worker"}


def test_workers_that_do_not_run_requests_are_told(own: RedisServer, own_store: BatchStore) -> None:
    announce(own_store, "celery@a.1.0", state="starting", why="waits for http://10.0.0.9/v1")
    announce(own_store, "celery@b.2.0", state="degraded")
    announce(own_store, "celery@c.3.0", state="draining")
    announce(own_store, "celery@d.4.0", silent_s=40)
    announce(own_store, "celery@e.5.0", version="0.0.9")
    announce(own_store, "celery@f.6.0", state="stopped", why="no such folder")
    found = doctor(own.url, 0)
    assert levels(found, "remark") >= {
        "worker_starting", "worker_degraded", "worker_draining", "worker_silent",
        "worker_other_version", "worker_stopped",
    }  # fmt: skip
    assert "starting (waits for http://10.0.0.9/v1)" in found["worker_starting"]["text"]
    assert re.match(r"celery@d.4.0 was last heard 0:00:[45]\d ago", found["worker_silent"]["text"])
    assert "has failed and stopped (no such folder)" in found["worker_stopped"]["text"]
    said = f"celery@e.5.0 runs warmq 0.0.9, this producer {version()}"
    assert found["worker_other_version"]["text"] == said


def test_a_worker_that_announces_less_is_told_all_the_same(
    own: RedisServer, own_store: BatchStore
) -> None:
    seconds, _ = client_of(own_store).time()
    said = orjson.dumps({"state": "ready", "queue": DEFAULT_QUEUE})
    client_of(own_store).hset(keys.WORKERS, "celery@a.1.0", b"%d\0" % (seconds * 1000) + said)
    found = doctor(own.url, 1)
    assert found["worker"]["text"] == "celery@a.1.0: ready, 0 in flight, queue warmq"
    assert found["worker_older"]["text"].startswith("celery@a.1.0 speaks protocol 1, ")


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
    assert found["queue_unserved"]["facts"]["waiting"] == 3
    assert "no worker serves it; served are: warmq" in found["queue_unserved"]["text"]


def test_the_own_queue_without_a_worker_and_a_request_is_a_remark(
    own: RedisServer, own_store: BatchStore
) -> None:
    announce(own_store, queue="warmq.tiny")
    found = doctor(own.url, 0)
    assert found["queue_unused"]["level"] == "remark"
    assert "served are: warmq.tiny" in found["queue_unused"]["text"]


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
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, free: int, code: str, level: str
) -> None:
    monkeypatch.setattr(here.shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    (finding,) = here.judge_disk(tmp_path)
    assert (finding.code, finding.level, finding.facts["free_bytes"]) == (code, level, free)


def test_a_folder_that_takes_no_files_is_a_remark(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    (finding,) = here.judge_disk(gone)
    assert (finding.code, finding.level) == ("folder_unwritable", "remark")
    assert not os.access(gone, os.W_OK)


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
    assert "no file can be written in this folder, which was deleted: change to" in done.stdout


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
    finding = server.version(told, "redis://host")
    assert finding.code == code
    assert finding.facts["version"] == told.get("valkey_version", told["redis_version"])


@pytest.mark.parametrize("field", ["aof_last_write_status", "rdb_last_bgsave_status"])
def test_a_write_of_redis_that_failed_is_a_problem(field: str) -> None:
    assert not list(server.last_writes(GOOD))
    (finding,) = server.last_writes(GOOD | {field: "err"})
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
    finding = server.clocks(before, redis_s, after)
    assert finding.code == code
    assert finding.level == ("ok" if code == "clock" else "remark")


def test_a_clock_that_is_off_says_in_which_direction() -> None:
    assert server.clocks(100, 160, 100).facts == {"apart_s": 60, "direction": "ahead of"}
    assert server.clocks(100, 40, 100).facts == {"apart_s": 60, "direction": "behind"}


def test_dead_letters_are_counted_to_a_bound(
    store: BatchStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "DEAD_COUNTED", 2)
    client_of(store).lpush(DEFAULT_QUEUE, b"junk", b"junk 2", b"junk 3")
    Lessee(client_of(store)).pop()
    finding = workers.judge_letters(store)
    assert finding.facts == {"count": 2, "more": True}


def test_one_waiting_request_is_told_as_one() -> None:
    facts = {"queue": "warmq", "waiting": 1, "in_flight": 0, "workers": 0, "others": []}
    text, _ = text_and_remedy(Finding("queue", "queue_unserved", "problem", facts))
    assert text == "queue warmq has 1 request waiting, and no worker serves it"


def test_every_code_has_words() -> None:
    assert set(WORDS) == set(typing.get_args(Code))
