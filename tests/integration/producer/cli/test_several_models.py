"""What the command says of workers with several models."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from kit.commands.doctor_findings import announce, doctor, levels
from kit.commands.support import as_json, batch_file, chat_line, run_producer, write_lines
from kit.protocol.lessee import client_of, submit_batch

from contract.redis.batches import BatchStore
from demo.stack import RedisServer


def test_a_model_that_cannot_be_loaded_is_a_problem_of_its_queue_alone(
    own: RedisServer, own_store: BatchStore
) -> None:
    models = {"good": "warmq.good", "bad": "warmq.bad"}
    why = {"bad": {"why": "/models/bad is no folder", "tries": 3, "again_at": 0}}
    announce(own_store, queue="warmq.good", models=models, unloadable=why)
    for name in models:
        submit_batch(own_store, 3, batch_id=name, queue=f"warmq.{name}")
    found = doctor(own.url, 1)
    assert levels(found, "problem") == {"model_unloadable"}
    facts = found["model_unloadable"]["facts"]
    assert (facts["model"], facts["queue"], facts["waiting"]) == ("bad", "warmq.bad", 3)
    assert "/models/bad is no folder" in found["model_unloadable"]["text"]
    assert found["worker_unloadable"]["facts"]["tries"] == 3
    announce(own_store, "celery@b.1.0", queue="warmq.good", models=models)  # it has not tried yet
    found = doctor(own.url, 0)
    assert found["worker_unloadable"]["facts"]["id"] == "celery@a.12.0a1b2c3d"


@pytest.mark.parametrize("junk", [{"bad": 1}, {"bad": {}}, [1], {"other": {"why": "x"}}], ids=str)
def test_announced_failures_that_cannot_be_read_are_passed_over(
    own: RedisServer, own_store: BatchStore, junk: object
) -> None:
    announce(own_store, models={"bad": "warmq.bad"}, unloadable=junk)
    submit_batch(own_store, 3, queue="warmq.bad")
    doctor(own.url, 1 if junk == {"bad": {}} else 0)


MODELS = {"chat": "warmq.chat", "judge": "warmq.judge"}


def worker(**more: Any) -> dict[str, Any]:
    """Return what a worker announces that has swapped from `judge` to `chat` two minutes ago."""
    at = int(time.time() * 1000) - 120_000
    why = "an online request waits 31 s"
    swap = {"from": "judge", "to": "chat", "why": why, "at": at, "seconds": 12.5}
    return {"queue": "warmq.chat", "model": "chat", "models": MODELS, "swaps": [swap]} | more


def test_a_batch_of_a_model_that_is_not_loaded_says_what_it_waits_for(
    own: RedisServer, own_store: BatchStore
) -> None:
    announce(own_store, **worker())
    submit_batch(own_store, 3, batch_id="b1", queue="warmq.judge")
    shown = as_json(run_producer("status", "b1", "--json", redis_url=own.url))
    (stall,) = shown["stalls"]
    assert (stall["code"], stall["passing"]) == ("model_not_loaded", True)
    assert "loaded models: chat" in stall["message"]
    assert "max_wait" in stall["remedy"]
    text = run_producer("status", "b1", redis_url=own.url).stdout
    assert "ready (with model chat loaded" in text
    assert levels(doctor(own.url, 0), "problem") == set()
    swap = {"state": "swapping", "why": "swapping to judge: 3 requests wait"}
    announce(own_store, **worker(**swap))
    text = run_producer("status", "b1", redis_url=own.url).stdout
    assert "swapping to judge: 3 requests wait" in text
    announce(own_store, **worker(queue="warmq.judge", model="judge"))
    assert as_json(run_producer("status", "b1", "--json", redis_url=own.url))["stalls"] == []


def test_doctor_names_the_loaded_model_and_the_last_swap(
    own: RedisServer, own_store: BatchStore
) -> None:
    announce(own_store, **worker(sleep_failed={"judge": "it was not awake after 60 s"}))
    submit_batch(own_store, 3, queue="warmq.judge")
    found = doctor(own.url, 0)
    facts = found["worker_models"]["facts"]
    assert (facts["loaded"], facts["models"]) == ("chat", ["chat", "judge"])
    failed = found["worker_sleep_failed"]["facts"]
    assert (failed["model"], failed["why"]) == ("judge", "it was not awake after 60 s")
    (swap,) = facts["swaps"]
    assert (swap["before"], swap["model"], swap["seconds"]) == ("judge", "chat", 12.5)
    text = found["worker_models"]["text"]
    assert "from judge to chat, 0:02:0" in text
    assert "an online request waits 31 s" in text
    assert found["model_not_loaded"]["level"] == "remark"
    assert found["model_not_loaded"]["facts"]["waiting"] == 3


def test_list_says_whether_the_model_of_each_batch_is_loaded(
    own: RedisServer, own_store: BatchStore
) -> None:
    for name in ("chat", "judge", "other"):
        submit_batch(own_store, 1, batch_id=name, queue=f"warmq.{name}")

    def rows() -> dict[str, str]:
        lines = run_producer("list", redis_url=own.url).stdout.splitlines()
        return {line.split()[0]: line for line in lines}

    announce(own_store)
    assert "MODEL" not in rows()["BATCH"]
    announce(own_store, **worker())
    assert rows()["BATCH"].endswith("MODEL")
    assert rows()["chat"].endswith("chat (loaded)")
    assert rows()["judge"].endswith("judge (not loaded)")
    assert rows()["other"].endswith("  other")
    announce(own_store, **worker(unloadable={"judge": {"why": "no memory", "tries": 1}}))
    assert rows()["judge"].endswith("judge (cannot be loaded)")


@pytest.mark.parametrize(
    ("announced", "models", "seconds", "unloadable"),
    [
        ({}, ["judge"], 12.0, []),
        ({"loads": {}}, ["judge"], None, []),
        ({"queue": "warmq.judge", "model": "judge"}, ["chat"], None, []),
        ({"state": "swapping"}, ["chat", "judge"], None, []),
        ({"unloadable": {"judge": {"why": "no memory", "tries": 1}}}, [], 0, ["judge"]),
    ],
)
def test_a_plan_counts_the_swaps(
    own: RedisServer, own_store: BatchStore, tmp_path: Path, announced: dict[str, Any],
    models: list[str], seconds: float | None, unloadable: list[str],
) -> None:  # fmt: skip
    file = batch_file(tmp_path / "in.jsonl", 3)
    loads = {"judge": {"loaded": 2, "seconds": 24.0, "failed": 0}}
    announced = worker(loads=loads) | announced
    announce(own_store, **announced)
    submit_batch(own_store, 3, queue="warmq.chat")
    args = ("plan", file, "--model", "judge")
    swaps = as_json(run_producer(*args, "--json", redis_url=own.url))["swaps"]
    assert swaps == {"count": len(models), "seconds": seconds, "models": models,
                     "unloadable": unloadable}  # fmt: skip
    announce(own_store, **announced)  # on a busy machine the first may have grown old
    text = run_producer(*args, redis_url=own.url).stdout
    (row,) = [line for line in text.splitlines() if line.startswith("swaps")]
    assert all(name in row for name in (*models, *unloadable))
    assert ("0:00:12" in row) == (seconds == 12)


def test_a_plan_counts_the_models_that_lines_name(
    own: RedisServer, own_store: BatchStore, tmp_path: Path
) -> None:
    file = write_lines(tmp_path / "in.jsonl", [
        chat_line(name, "Hello", model=name, max_tokens=4) for name in ("chat", "judge", "third")
    ])  # fmt: skip
    announce(own_store, **worker(models=MODELS | {"third": "warmq.third"}))
    shown = as_json(run_producer("plan", file, "--json", redis_url=own.url))
    assert shown["swaps"]["models"] == ["judge", "third"]
    announce(own_store)
    assert "swaps" not in as_json(run_producer("plan", file, "--json", redis_url=own.url))


def test_the_time_of_lines_for_several_models_is_that_of_their_workers_and_loads(
    own: RedisServer, own_store: BatchStore, tmp_path: Path
) -> None:
    file = write_lines(tmp_path / "in.jsonl", [
        chat_line(f"{name}{n}", "Hello", model=name, max_tokens=10, ignore_eos=True)
        for name in ("chat", "judge") for n in range(20)
    ])  # fmt: skip
    loads = {"judge": {"loaded": 2, "seconds": 24.0, "failed": 0}}
    announce(own_store, **worker(slots=2, loads=loads, mean_answer=10))
    minute = own_store.now_ms() // 60_000 - 1  # two slots, a token a second each
    for name in ("chat", "judge"):
        client_of(own_store).hset(
            f"warmq:ring:warmq.{name}", str(minute % 1440), f"{minute} 6 0 30 30 0 60 120"
        )
    plan = as_json(run_producer("plan", file, "--estimate", "--json", redis_url=own.url))
    tokens = plan["prompt_tokens"]["total"] + plan["completion_tokens"]["expected"]
    assert (plan["workers"], plan["completion_tokens"]["expected"]) == (1, 400)
    assert plan["duration"]["seconds"] == pytest.approx(tokens / 2)
    assert plan["swaps"]["seconds"] == 12.0
    run_producer("submit", file, "--batch-id", "b1", redis_url=own.url)
    shown = as_json(run_producer("status", "b1", "--json", redis_url=own.url))
    assert shown["expected"]["seconds"] == pytest.approx(tokens / 2 + 12, rel=0.05)


def test_top_shows_models_what_waits_for_each_and_the_last_swaps(
    own: RedisServer, own_store: BatchStore
) -> None:
    announce(own_store, **worker(slots=4))
    submit_batch(own_store, 7, queue="warmq.judge")
    shown = run_producer("top", "--once", redis_url=own.url, COLUMNS="150").stdout
    rows = [line.split() for line in shown.splitlines() if line.split()]
    assert "7 requests wait" in shown
    assert ["judge", "not", "loaded", "7", "0", "1"] in rows
    assert ["chat", "loaded", "0", "1", "0"] in rows
    (swap,) = [row for row in rows if row[:3] == ["judge", ">", "chat"]]
    assert swap[4] == "12.5"
    assert swap[6:] == "an online request waits 31 s".split()
    announce(own_store, slots=4)
    assert "LOADED IN" not in run_producer("top", "--once", redis_url=own.url).stdout


@pytest.mark.parametrize(
    ("queues", "told"),
    [
        ([], "no worker serves queue warmq.tine; workers serve: tiny (leave out --model)\n"),
        (["warmq.big"], "workers serve: --model big, tiny (leave out --model)\n"),
    ],
)
def test_an_unserved_model_is_answered_with_the_served_ones(
    redis_url: str, store: BatchStore, tmp_path: Path, queues: list[str], told: str
):
    announce(store)
    for queue in queues:
        announce(store, f"celery@{queue}.1.0", queue=queue)
    path = batch_file(tmp_path / "in", 2)
    done = run_producer("submit", path, "--model", "tine", redis_url=redis_url)
    assert told in done.stderr


@pytest.mark.parametrize(
    ("queue", "told"),
    [
        ("warmq", "french is an adapter: submit without --model lines that have"),
        ("warmq.base", "french is an adapter: submit with --model base lines that have"),
    ],
)
def test_the_model_of_an_adapter_is_told_with_how_to_choose_it(
    redis_url: str, store: BatchStore, tmp_path: Path, queue: str, told: str
):
    announce(store, queue=queue, adapters=["french"])
    path = batch_file(tmp_path / "in", 1)
    done = run_producer("submit", path, "--model", "french", redis_url=redis_url)
    assert f'no worker serves queue warmq.french; {told} "model": "french"' in done.stderr
    done = run_producer("submit", path, "--model", "frensh", redis_url=redis_url)
    assert "is an adapter" not in done.stderr and "no worker serves" in done.stderr


def test_lines_that_name_an_adapter_go_to_its_model_loaded_or_not(
    own: RedisServer, own_store: BatchStore, tmp_path: Path
) -> None:
    announce(own_store, **worker(model_adapters={"judge": ["strict"]}))
    file = write_lines(tmp_path / "in.jsonl", [chat_line("c1", "Hello", model="strict")])
    done = run_producer("submit", file, "--batch-id", "b1", redis_url=own.url)
    assert done.returncode == 0, done.stderr
    batch = own_store.batch("b1")
    assert batch is not None and batch.queues == ["warmq.judge"]
    done = run_producer("submit", file, "--model", "strict", redis_url=own.url)
    assert "strict is an adapter: submit with --model judge" in done.stderr
