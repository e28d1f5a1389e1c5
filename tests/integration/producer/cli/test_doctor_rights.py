"""`producer doctor` under users of Redis who lack rights."""

from __future__ import annotations

import re

import orjson
import pytest
from kit.commands.doctor_findings import announce, doctor
from kit.commands.support import run_producer

from contract.redis.batches import BatchStore
from demo.stack import ROOT, RedisServer
from producer.redis import PRODUCER_COMMANDS, WORKER_COMMANDS


def documented(user: str) -> list[str]:
    """Return the rules of a user of docs/how-to/security.md, with a password of its own."""
    text = (ROOT / "docs/how-to/security.md").read_text()
    (rules,) = re.findall(rf"^user {user} (.*)$", text, re.MULTILINE)
    return str(rules).replace("CHANGE-ME", "pw").split()


def with_user(own: RedisServer, rules: list[str]) -> str:
    """Make the user; return its URL."""
    own.client().execute_command("ACL", "SETUSER", "someone", "reset", *rules)
    return f"redis://someone:pw@127.0.0.1:{own.port}/0"


def test_a_user_who_may_not_even_connect_is_told_which_right_is_missing(own: RedisServer) -> None:
    rules = ["on", ">pw", "~*", "&*", "+@all", "-@dangerous", "-@connection", "+auth", "+hello"]
    found = doctor(with_user(own, rules), 1)
    assert found["rights_missing"]["facts"]["missing"] == ["client"]
    assert "redis_unusable" not in found


def test_the_documented_producer_has_all_rights_that_it_needs(
    own: RedisServer, own_store: BatchStore
) -> None:
    announce(own_store)
    found = doctor(with_user(own, documented("warmq-producer")), 0)
    assert found["rights"]["level"] == "ok"
    assert "forbidden" not in found
    assert found["not_looked"]["facts"] == {
        "user": "someone",
        "what": ["keys of other programs", "lists of requests that no worker reads"],
    }
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
     ("-subscribe", "subscribe")],
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


@pytest.mark.parametrize(("rule", "what"), [("-scan", "lists of requests"), ("-type", "keys of")])
def test_what_the_default_user_may_not_look_for_is_told(
    own: RedisServer, own_store: BatchStore, rule: str, what: str
) -> None:
    announce(own_store)
    own_store.close()
    own.client().execute_command("ACL", "SETUSER", "default", rule)
    found = doctor(f"redis://127.0.0.1:{own.port}/0", 0)
    assert found["forbidden"]["facts"]["what"].startswith(what)
    assert "not_looked" not in found
    assert found["no_open_batch"]["level"] == "ok"


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
        "records",
    ]
    assert all(finding["remedy"] for finding in found)


def test_a_user_who_may_run_no_script_is_told(own: RedisServer, own_store: BatchStore) -> None:
    announce(own_store)
    found = doctor(with_user(own, [*documented("warmq-producer"), "-evalsha"]), 1)
    assert found["rights_missing"]["facts"]["missing"] == ["evalsha", "script|load"]


def test_every_documented_command_is_tried_that_a_script_can_run_and_subscribe() -> None:
    direct = {"evalsha", "script|load", "script|exists", "ping", "info", "time", "client|setname",
              "client|tracking"}  # fmt: skip
    not_in_scripts = {"brpop", "psubscribe", "unsubscribe", "punsubscribe", "multi", "exec"}

    def commands(user: str) -> set[str]:
        return {rule[1:] for rule in documented(user) if rule.startswith("+")}

    tried = {words[0] for words in PRODUCER_COMMANDS} | {"subscribe"}
    assert tried == commands("warmq-producer") - direct - not_in_scripts
    of_workers = {words[0] for words in WORKER_COMMANDS}
    assert of_workers - {"set"} == commands("warmq-worker") - direct - not_in_scripts - tried
    of_gateways = {"zcard", "expireat", "hvals", "srem",
                   "zremrangebyscore", "zrank", "zrevrank"}  # fmt: skip
    assert of_gateways == commands("warmq-gateway") - direct - not_in_scripts - tried


def refused(own: RedisServer) -> set[str]:
    """Return what Redis has refused; CLIENT SETINFO aside, see docs/how-to/security.md."""
    return {entry["object"] for entry in own.client().acl_log()} - {"client", "client|setinfo"}
