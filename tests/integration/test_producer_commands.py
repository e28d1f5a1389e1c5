"""The commands as users and scripts meet them: output, JSON, exit statuses."""

from __future__ import annotations

import importlib
import subprocess
import time
from pathlib import Path

import orjson
import pytest
from lessee import Lessee, client_of, submit_batch
from support import (
    as_json,
    batch_file,
    finish,
    producer_command,
    producer_env,
    queued,
    run_all,
    run_producer,
)

from contract import naming
from contract.errors import RequestFailed
from contract.redis import keys
from contract.redis.batches import BatchStore
from demo.stack import eventually, free_port
from producer.cli.main import COMMANDS, cli


def test_help_answers_quickly_and_names_every_command():
    took = []
    for _ in range(5):
        began = time.monotonic()
        done = run_producer("--help", redis_url="redis://nowhere")
        took.append(time.monotonic() - began)
    assert done.returncode == 0
    for name in ("submit", "status", "watch", "list", "results", "cancel", "retry", "delete"):
        assert f"\n  {name} " in done.stdout
    assert "130  interrupted" in done.stdout
    assert min(took) < 0.4


def test_the_shell_gets_its_completion_script_and_completes_commands_and_options():
    def completed(*words: str) -> list[str]:
        asked = {"_PRODUCER_COMPLETE": "bash_complete", "COMP_WORDS": " ".join(words)}
        asked["COMP_CWORD"] = str(len(words) - 1)
        return run_producer(redis_url="redis://nowhere", **asked).stdout.split()

    script = run_producer(redis_url="redis://nowhere", _PRODUCER_COMPLETE="bash_source")

    assert (script.returncode, script.stderr) == (0, "")
    assert "complete -o nosort -F _producer_completion producer" in script.stdout
    assert completed("producer", "re") == ["plain,results", "plain,retry"]
    assert completed("producer", "dead", "sh") == ["plain,show"]
    assert completed("producer", "results", "--par") == ["plain,--partial"]


@pytest.mark.parametrize("name", list(COMMANDS))
def test_help_says_of_a_command_what_its_own_help_begins_with(name: str):
    command = importlib.import_module(f"producer.cli.commands.{name}").command
    assert command.name == name
    assert command.help.startswith(COMMANDS[name])


@pytest.mark.parametrize(
    "command",
    [("submit",), ("status",), ("watch",), ("list",), ("results",), ("cancel",), ("retry",),
     ("delete",), ("dead",), ("dead", "list"), ("dead", "show"), ("dead", "retry")],
)  # fmt: skip
def test_every_command_has_help(command: tuple[str, ...]):
    from click.testing import CliRunner

    done = CliRunner().invoke(cli, [*command, "--help"])
    assert done.exit_code == 0
    assert len(done.output) > 100


@pytest.mark.parametrize(
    "args",
    [("submit",), ("submit", "x", "--priority", "10"), ("nonsense",),
     ("status", "b1", "--nonsense"), ("retry", "b1", "--include", "completed"), ("dead", "retry")],
)  # fmt: skip
def test_wrong_usage_ends_with_2(redis_url: str, args: tuple[str, ...]):
    done = run_producer(*args, redis_url=redis_url)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "args",
    [("status", "b9"), ("watch", "b9"), ("results", "b9"), ("cancel", "b9"), ("retry", "b9"),
     ("delete", "b9"), ("dead", "show", "9"), ("dead", "retry", "9")],
)  # fmt: skip
def test_what_is_not_there_is_told_and_ends_with_2(redis_url: str, args: tuple[str, ...]):
    done = run_producer(*args, redis_url=redis_url)
    assert done.returncode == 2
    assert "there is no" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("args", [("list",), ("status", "b1"), ("submit", "/dev/null")])
def test_without_redis_the_masked_url_and_the_remedy_are_told_within_seconds(args):
    url = f"redis://me:secret@127.0.0.1:{free_port()}/0"
    done = run_producer(*args, redis_url=url)
    assert done.returncode == 3
    assert url.replace("secret", "***") in done.stderr
    assert "is Redis running, and is WARMQ_REDIS_URL right?" in done.stderr
    assert "secret" not in done.stderr + done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "url",
    ["redis://:sec/ret@127.0.0.1:1/0", "redis://:sec?ret@127.0.0.1:1/0",
     "redis://:sec@ret@127.0.0.1:1/0", "redis://:sec#ret@127.0.0.1:1/0"],
)  # fmt: skip
def test_a_password_with_unescaped_characters_is_not_shown(url: str):
    done = run_producer("list", redis_url=url)
    assert done.returncode in (2, 3)
    assert "sec" not in done.stderr
    assert "ret@" not in done.stderr
    assert "Traceback" not in done.stderr


def test_a_wrong_setting_is_told_with_its_name_and_ends_with_2(redis_url: str):
    done = run_producer("list", redis_url=redis_url, WARMQ_HIGH_WATER="2")
    assert done.returncode == 2
    assert "WARMQ_HIGH_WATER" in done.stderr


def test_status_json_is_openais_batch_object(redis_url: str, store: BatchStore):
    submit_batch(store, 3)
    lessee = Lessee(client_of(store))
    one, two, _ = lessee.pop()
    finish(lessee, [one])
    finish(lessee, [two], RequestFailed("no"))

    shown = as_json(run_producer("status", "b1", "--json", redis_url=redis_url))

    assert shown["id"] == "b1"
    assert shown["status"] == "in_progress"
    assert shown["request_counts"] == {
        "total": 3, "completed": 1, "failed": 1, "cancelled": 0, "expired": 0, "in_progress": 1,
    }  # fmt: skip
    assert shown["usage"] == {"prompt_tokens": 6, "completion_tokens": 4, "total_tokens": 10}
    assert shown["created_at"]
    assert shown["finished_at"] is None


def test_status_for_people_tells_the_same(redis_url: str, store: BatchStore):
    submit_batch(store, 3)
    done = run_producer("status", "b1", redis_url=redis_url)
    assert done.returncode == 0
    assert "status    in_progress" in done.stdout
    assert "3 total, 3 in_progress" in done.stdout


def test_an_unsealed_batch_says_how_it_is_resumed(redis_url: str, store: BatchStore):
    submit_batch(store, 3, seal=False)
    done = run_producer("status", "b1", redis_url=redis_url)
    assert "validating" in done.stdout
    assert "--batch-id b1 goes on where it stopped" in done.stdout.replace("\n", " ")


def test_status_of_one_request_names_its_key_and_shows_its_result(
    redis_url: str, store: BatchStore
):
    submit_batch(store, 2)
    lessee = Lessee(client_of(store))
    one, two = lessee.pop()
    finish(lessee, [one])
    lessee.release(two)

    ended = as_json(run_producer("status", "b1", "--request", "c1", "--json", redis_url=redis_url))
    waiting = as_json(
        run_producer("status", "b1", "--request", "c2", "--json", redis_url=redis_url)
    )

    request_id = naming.request_id("b1", "c1")
    assert ended["status"] == "completed"
    assert ended["request_id"] == request_id
    assert ended["result_key"] == f"celery-task-meta-{request_id}"
    assert ended["timing"] == {"queued_ms": 1, "engine_ms": 2}
    assert ended["result"]["custom_id"] == "c1"
    assert ended["line"] == 1
    assert (waiting["status"], waiting["attempts"], waiting["result"]) == ("in_progress", 2, None)
    shown = run_producer("status", "b1", "--request", "c1", redis_url=redis_url)
    assert f"result_key  celery-task-meta-{request_id}" in shown.stdout
    unknown = run_producer("status", "b1", "--request", "c9", redis_url=redis_url)
    assert unknown.returncode == 2
    assert "has no request 'c9'" in unknown.stderr


def test_list_shows_the_newest_first(redis_url: str, store: BatchStore):
    submit_batch(store, 1, batch_id="first")
    client_of(store).zincrby(keys.BATCHES, -1000, "first")  # a second earlier
    submit_batch(store, 2, batch_id="second")

    shown = as_json(run_producer("list", "--json", redis_url=redis_url))
    table = run_producer("list", redis_url=redis_url).stdout.splitlines()

    assert [batch["id"] for batch in shown] == ["second", "first"]
    assert [row.split()[0] for row in table] == ["BATCH", "second", "first"]


def test_submit_json_gives_the_id_at_once_and_the_state_at_the_end(
    redis_url: str, tmp_path: Path, store: BatchStore
):
    path = batch_file(tmp_path / "in", 3)
    done = run_producer("submit", path, "--batch-id", "b1", "--json", redis_url=redis_url)
    first, last = map(orjson.loads, done.stdout.splitlines())
    assert first == {"id": "b1"}
    assert last["id"] == "b1"
    assert last["request_counts"]["total"] == 3


def test_the_model_chooses_the_queue(redis_url: str, tmp_path: Path, store: BatchStore):
    path = batch_file(tmp_path / "in", 2)
    assert run_producer("submit", path, "--model", "tiny", redis_url=redis_url).returncode == 0
    assert len(queued(store, "warmq.tiny")) == 2
    assert queued(store, "warmq") == []


def test_waiting_for_a_batch_with_failures_ends_with_1(
    redis_url: str, tmp_path: Path, store: BatchStore
):
    path = batch_file(tmp_path / "in", 3)
    with subprocess.Popen(
        producer_command("submit", path, "--batch-id", "b1", "--wait"),
        env=producer_env(redis_url), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        lessee = Lessee(client_of(store))
        one, two, three = eventually(lambda: (found := lessee.pop()) and found, 30)
        finish(lessee, [one, three])
        finish(lessee, [two], RequestFailed("no"))
        printed, told = process.communicate()
    assert process.returncode == 1
    assert printed == "b1\n"
    assert "completed, 3 total, 2 completed, 1 failed" in told
    assert run_producer("watch", "b1", redis_url=redis_url).returncode == 1


def test_watching_a_completed_batch_ends_with_0_and_its_state(redis_url: str, store: BatchStore):
    submit_batch(store, 2)
    run_all(store)
    done = run_producer("watch", "b1", "--json", redis_url=redis_url)
    assert done.returncode == 0
    assert as_json(done)["status"] == "completed"


def test_a_batch_that_nobody_serves_says_so(redis_url: str, store: BatchStore, tmp_path: Path):
    path = batch_file(tmp_path / "in", 2)
    alone = run_producer("submit", path, "--model", "tiny", redis_url=redis_url)
    assert "no worker serves queue warmq.tiny; the requests wait there" in alone.stderr

    Lessee(client_of(store), queue="warmq.tiny").sweep()  # a worker announces itself
    served = run_producer("submit", path, "--model", "tiny", redis_url=redis_url)
    assert "no worker" not in served.stderr


def test_an_interrupted_watch_says_that_the_batch_goes_on(redis_url: str, store: BatchStore):
    submit_batch(store, 2)
    process = subprocess.Popen(
        producer_command("watch", "b1"), env=producer_env(redis_url),
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    with process:
        eventually(lambda: _polls(store), 30)
        process.send_signal(2)
        told = process.communicate()[1]
    assert process.returncode == 130
    assert "the batch goes on; `producer watch b1` follows it again" in told
    assert "Traceback" not in told
    assert len(queued(store)) == 2


def _polls(store: BatchStore) -> bool:
    # Only a watch that sees nothing move asks Redis for its time (who is alive?).
    clients = client_of(store).client_list()
    return any(c["name"] == "warmq-producer" and c["cmd"] == "time" for c in clients)
