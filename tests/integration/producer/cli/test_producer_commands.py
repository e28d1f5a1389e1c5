"""The commands as users and scripts meet them: output, JSON, exit statuses."""

from __future__ import annotations

import socket
import subprocess
import time
from pathlib import Path

import click
import orjson
import pytest
from kit.commands.support import (
    as_json,
    batch_file,
    finish,
    producer_command,
    producer_env,
    queued,
    run_all,
    run_producer,
)
from kit.protocol.lessee import Lessee, client_of, submit_batch

from contract import naming
from contract.errors import RequestFailed
from contract.redis import keys
from contract.redis.batches import BatchStore
from contract.redis.connect import SOCKET_TIMEOUT_S
from contract.version import version
from demo.stack import eventually, free_port
from producer.cli.main import COMMANDS, cli, commands


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


def completed(*words: str, redis_url: str = "redis://nowhere") -> list[str]:
    """Ask as bash does what the last word may become; nothing may be told on stderr."""
    asked = {"_PRODUCER_COMPLETE": "bash_complete", "COMP_WORDS": " ".join(words)}
    asked["COMP_CWORD"] = str(len(words) - 1)
    done = run_producer(redis_url=redis_url, **asked)
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize("command", ["status", "watch", "results", "cancel", "retry", "delete"])
def test_the_shell_completes_batch_ids(redis_url: str, store: BatchStore, command: str):
    for name in ("monday-1", "monday-2", "tuesday"):
        submit_batch(store, 1, batch_id=name)
    found = completed("producer", command, "mon", redis_url=redis_url)
    assert sorted(found) == ["plain,monday-1", "plain,monday-2"]


@pytest.mark.parametrize("url", ["redis://127.0.0.1:1/0", "redis://nowhere.invalid/0", "nonsense"])
def test_without_redis_the_shell_completes_no_batch_ids_and_says_nothing(url: str):
    assert completed("producer", "status", "", redis_url=url) == []


def test_a_redis_that_does_not_answer_does_not_hold_up_the_shell():
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections, never answers
        url = f"redis://127.0.0.1:{silent.getsockname()[1]}/0"
        began = time.monotonic()
        assert completed("producer", "status", "", redis_url=url) == []
        assert time.monotonic() - began < SOCKET_TIMEOUT_S / 2


def test_the_version_is_told():
    done = run_producer("--version", redis_url="redis://nowhere")
    assert (done.returncode, done.stdout) == (0, f"warmq {version()}\n")


def test_the_shell_gets_its_completion_script_and_completes_commands_and_options():
    script = run_producer(redis_url="redis://nowhere", _PRODUCER_COMPLETE="bash_source")

    assert (script.returncode, script.stderr) == (0, "")
    assert "complete -o nosort -F _producer_completion producer" in script.stdout
    assert completed("producer", "re") == ["plain,records", "plain,results", "plain,retry"]
    assert completed("producer", "dead", "sh") == ["plain,show"]
    assert completed("producer", "results", "--par") == ["plain,--partial"]


@pytest.mark.parametrize("name", list(commands()))
def test_help_says_of_a_command_what_its_own_help_begins_with(name: str):
    _, summary = commands()[name]
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    assert command.name == name
    assert (command.help or "").startswith(summary)


def test_the_gateway_brings_its_commands_and_producer_has_none_of_them():
    of_gateway = {name for name, found in commands().items() if found[0] == "gateway.commands"}
    assert of_gateway == {"keys", "serve", "webhooks"}
    assert not {"keys", "serve", "webhooks"} & set(COMMANDS)


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


@pytest.mark.parametrize(
    ("args", "meant"),
    [
        (("stauts",), "Did you mean 'status'?"),
        (("dead", "lst"), "Did you mean 'list'?"),
        (("submit", "--bath-id", "x"), "Did you mean '--batch-id'?"),
        (("status", "frist"), "; did you mean first?"),
        (("delete", "firs"), "; did you mean first?"),
        (("status", "first", "--request", "C2"), "; did you mean c2?"),
        (("watch", "first", "--stream", "--request", "c22"), "; did you mean c2?"),
    ],
)
def test_a_misspelt_name_is_told_with_the_nearest_one(
    redis_url: str, store: BatchStore, args: tuple[str, ...], meant: str
):
    submit_batch(store, 2, batch_id="first")
    submit_batch(store, 1, batch_id="other")
    done = run_producer(*args, redis_url=redis_url)
    assert done.returncode == 2
    assert meant in done.stderr


def test_a_name_that_is_near_to_none_gets_no_guess(redis_url: str, store: BatchStore):
    submit_batch(store, 2, batch_id="first")
    for args in (("xyzzy",), ("status", "nightly"), ("status", "first", "--request", "question")):
        done = run_producer(*args, redis_url=redis_url)
        assert done.returncode == 2
        assert "did you mean" not in done.stderr.lower()


@pytest.mark.parametrize("args", [("list",), ("status", "b1"), ("submit", "/dev/null")])
def test_without_redis_the_masked_url_and_the_remedy_are_told_within_seconds(args):
    url = f"redis://me:secret@127.0.0.1:{free_port()}/0"
    done = run_producer(*args, redis_url=url)
    assert done.returncode == 3
    assert url.replace("secret", "***") in done.stderr
    assert "is Redis running, and is WARMQ_REDIS_URL right?" in done.stderr
    assert "secret" not in done.stderr + done.stdout
    assert "Traceback" not in done.stderr


def test_a_database_that_redis_does_not_have_is_told_with_its_remedy(redis_url: str):
    done = run_producer("list", redis_url=f"{redis_url.rpartition('/')[0]}/99")
    assert done.returncode == 3
    assert "DB index is out of range (correct the number behind the / in WARMQ" in done.stderr


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


def test_status_json_has_the_fields_of_openais_batch_object(redis_url: str, store: BatchStore):
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
    assert (waiting["status"], waiting["attempts"], waiting["result"]) == ("in_progress", 1, None)
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


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--model", "tinny"), "workers serve: --model big, --model tiny; did you mean tiny?"),
        ((), "serves queue warmq; workers serve: --model big, --model tiny; the requests"),
        (("--model", "tiny"), None),
    ],
)
def test_a_model_that_nobody_serves_is_told_at_once_with_those_that_are(
    redis_url: str, store: BatchStore, tmp_path: Path, words: tuple[str, ...], told: str | None
):
    for queue in ("warmq.tiny", "warmq.big", "elsewhere"):
        Lessee(client_of(store), f"celery@{queue}.1.0", queue=queue).sweep()
    path = batch_file(tmp_path / "in", 2)
    done = run_producer("submit", path, *words, "--batch-id", "b1", redis_url=redis_url)
    assert done.returncode == 0
    assert len(queued(store, naming.queue_name(words[-1] if words else None))) == 2
    if told:
        assert told in done.stderr
        assert (done.stderr.index(told) < done.stderr.index("queued in")) == bool(words)
    else:
        assert "no worker" not in done.stderr


@pytest.mark.parametrize(
    ("queues", "told"),
    [
        (["warmq"], "no worker serves queue warmq.foo; workers serve: requests without --model\n"),
        (["warmq", "warmq.big"], "workers serve: --model big, requests without --model\n"),
    ],
)
def test_a_worker_of_the_default_queue_is_told_in_words(
    redis_url: str, store: BatchStore, tmp_path: Path, queues: list[str], told: str
):
    for queue in queues:
        Lessee(client_of(store), f"celery@{queue}.1.0", queue=queue).sweep()
    path = batch_file(tmp_path / "in", 2)
    done = run_producer("submit", path, "--model", "foo", redis_url=redis_url)
    assert told in done.stderr


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
