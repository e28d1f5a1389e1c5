"""Runs Airflow's batch operators, unchanged and without a scheduler, against a gateway.

The interpreter is that of an environment with the packages that ../airflow.md names. Its arguments:
the gateway's address, the served model, an empty folder for results, names of cases (none: all).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

GATEWAY, MODEL, FOLDER = sys.argv[1].rstrip("/"), sys.argv[2], Path(sys.argv[3]).resolve()
FOLDER.mkdir(parents=True, exist_ok=True)


def connection(kind: str, host: str) -> str:
    """Return a connection as the variable AIRFLOW_CONN_<ID> gives it."""
    return json.dumps({"conn_type": kind, "host": host, "password": "not-checked"})


os.environ |= {
    "AIRFLOW_HOME": str(FOLDER / "airflow"),
    "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
    "AIRFLOW__LOGGING__LOGGING_LEVEL": "WARNING",
    # OpenAI's SDK adds /chat/completions to the host, Anthropic's /v1/messages.
    "AIRFLOW_CONN_WARMQ": connection("pydanticai", f"{GATEWAY}/v1"),
    "AIRFLOW_CONN_WARMQ_MESSAGES": connection("pydanticai", GATEWAY),
    "AIRFLOW_CONN_OPENAI_DEFAULT": connection("openai", f"{GATEWAY}/v1"),
}

import openai  # noqa: E402
from airflow.providers.common.ai.batch import state  # noqa: E402
from airflow.providers.common.ai.exceptions import (  # noqa: E402
    LLMBatchCancelledError,
    LLMBatchPartialFailureError,
    LLMBatchTimeoutError,
)
from airflow.providers.common.ai.operators.llm_batch import LLMBatchOperator  # noqa: E402
from airflow.providers.common.ai.triggers.llm_batch import LLMBatchTrigger  # noqa: E402
from airflow.providers.openai.hooks.openai import OpenAIHook  # noqa: E402
from airflow.providers.openai.operators.openai import OpenAITriggerBatchOperator  # noqa: E402
from airflow.providers.openai.triggers.openai import OpenAIBatchTrigger  # noqa: E402
from airflow.sdk import DAG, ObjectStoragePath, task  # noqa: E402
from airflow.sdk.exceptions import TaskDeferred  # noqa: E402
from pydantic import BaseModel  # noqa: E402

#: The DAG of airflow_dag.py.
DAG_ID = "warmq_llm_batch"
PROMPTS = [f"What is {n} plus {n}?" for n in range(8)]
client = openai.OpenAI(base_url=f"{GATEWAY}/v1", api_key="none")


class Sentiment(BaseModel):
    """What structured output is asked for."""

    label: str
    confidence: float


def context_of(name: str) -> Any:
    """Return a task's context with what the operators read of it."""
    pushed: dict[str, Any] = {}
    instance = SimpleNamespace(
        dag_id="warmq", task_id=name, run_id="by-hand", map_index=-1, pushed=pushed,
        xcom_push=lambda key, value: pushed.update({key: value}),
    )  # fmt: skip
    return {"ti": instance, "task_instance": instance}


def operator(name: str, **fields: Any) -> LLMBatchOperator:
    """Return the operator; results lie in the folder under its name."""
    given: dict[str, Any] = {
        "requests": PROMPTS, "result_path": f"file://{FOLDER}/{name}", "llm_conn_id": "warmq",
        "model_id": f"openai:{MODEL}", "max_tokens": 16, "poll_interval": 30, "deferrable": False,
    }  # fmt: skip
    return LLMBatchOperator(task_id=name, **(given | fields))


def rows_of(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows that a task wrote."""
    text = ObjectStoragePath(manifest["result_uri"]).read_text()
    rows = [json.loads(line) for line in text.splitlines() if line]
    return sorted(rows, key=lambda row: row["index"])  # the manifest calls them unordered


def batches() -> int:
    """Return how many batches of OpenAI's form the gateway lists."""
    return len(list(client.batches.list(limit=100)))


def counted(manifest: dict[str, Any]) -> dict[str, int]:
    """Return the counts that are not 0."""
    return {name: n for name, n in manifest["counts"].items() if n}


@contextlib.contextmanager
def raising(kind: type[Exception]) -> Iterator[list[str]]:
    """Expect this error of the operator; its text is put in the list."""
    texts: list[str] = []
    try:
        yield texts
    except kind as error:
        texts.append(str(error))
    else:
        raise AssertionError(f"{kind.__name__} was not raised")


def show(case: str, **facts: Any) -> None:
    """Print one case's facts."""
    print(json.dumps({"case": case} | facts), flush=True)


def waits_in_the_task() -> None:
    """Run the operator to the end; a second attempt of the task makes no second batch."""
    before = batches()
    manifest = operator("waits").execute(context_of("waits"))
    rows = rows_of(manifest)
    assert counted(manifest) == {"succeeded": 8}, manifest
    assert [row["index"] for row in rows] == list(range(8))
    assert all(row["output"] and row["usage"]["output_tokens"] for row in rows)
    again = operator("waits").execute(context_of("waits"))
    assert again["batch_id"] == manifest["batch_id"] and batches() == before + 1
    show("execute", counts=counted(manifest), first=rows[0], again="the same batch")


def is_found_after_a_crash() -> None:
    """A task that ended between submit and the note of its batch finds the batch by metadata."""
    before = batches()
    manifest = operator("orphan").execute(context_of("orphan"))
    path = ObjectStoragePath(f"file://{FOLDER}/orphan")
    key = state.compute_identity_key(
        dag_id="warmq", task_id="orphan", run_id="by-hand", map_index=-1
    )
    record = state.read_state(path, key)
    assert record is not None
    state.write_intent(
        path, key=key, input_fingerprint=record.input_fingerprint,
        output_schema_digest=record.output_schema_digest, intent_at=record.intent_at,
    )  # fmt: skip
    found = operator("orphan").execute(context_of("orphan"))
    assert found["batch_id"] == manifest["batch_id"] and batches() == before + 1
    show("orphaned intent", found_by="batches.list and metadata", counts=counted(found))


def has_rows_that_failed() -> None:
    """Lines that fail are rows; the task fails only where it was asked to."""
    broken = {"prompt": "This one fails.", "params": {"user": "simulate:fail"}}
    fields = {"requests": [*PROMPTS[:3], broken]}
    manifest = operator("partial", **fields).execute(context_of("partial"))
    assert counted(manifest) == {"succeeded": 3, "errored": 1}, manifest
    with raising(LLMBatchPartialFailureError):
        operator("partial", fail_on_partial_error=True, **fields).execute(context_of("partial"))
    show("a line fails", counts=counted(manifest), error=rows_of(manifest)[3]["error"])


def asks_for_structured_output() -> None:
    """The schema reaches the gateway; the simulated engine's text does not match it."""
    manifest = operator("structured", output_type=Sentiment).execute(context_of("structured"))
    assert counted(manifest) == {"invalid_output": 8}, manifest
    show("output_type", counts=counted(manifest), note="the simulated engine writes no JSON")


def is_cancelled_at_its_timeout() -> None:
    """`timeout` cancels the batch; the next attempt reads it as cancelled."""
    slow = {"request_params": {"user": "simulate:sleep=300"}, "timeout": 20}
    with raising(LLMBatchTimeoutError):
        operator("slow", **slow).execute(context_of("slow"))
    deadline = time.monotonic() + 60
    newest = next(iter(client.batches.list(limit=1)))
    while client.batches.retrieve(newest.id).status != "cancelled":
        assert time.monotonic() < deadline
        time.sleep(0.5)
    with raising(LLMBatchCancelledError) as texts:
        operator("slow", **slow).execute(context_of("slow"))
    show("timeout", batch="cancelled", next_attempt=texts[0][-80:])


def is_the_decorator() -> None:
    """`@task.llm_batch` in a DAG, deferred to its trigger, and resumed."""

    @task.llm_batch(
        llm_conn_id="warmq", model_id=f"openai:{MODEL}", result_path=f"file://{FOLDER}/decorated",
        max_tokens=16, poll_interval=30, deferrable=True,
    )  # fmt: skip
    def decorated() -> list[str]:
        return PROMPTS

    with DAG("warmq", schedule=None):
        made = decorated()
    context = context_of("decorated")
    try:
        made.operator.execute(context)
    except TaskDeferred as deferred:
        trigger, resumes = deferred.trigger, deferred.method_name
    assert isinstance(trigger, LLMBatchTrigger)
    event = asyncio.run(first_of(trigger))
    manifest = getattr(made.operator, resumes)(context, event.payload)
    assert counted(manifest) == {"succeeded": 8}, manifest
    show("@task.llm_batch, deferred", event=event.payload["status"], counts=counted(manifest))


async def first_of(trigger: Any) -> Any:
    """Return a trigger's event."""
    return await anext(trigger.run())


def runs_as_a_dag() -> None:
    """airflow_dag.py by Airflow's own runner: the task is deferred, and the next one reads it."""
    airflow = Path(sys.executable).with_name("airflow")
    env = os.environ | {
        "MODEL": MODEL, "FOLDER": str(FOLDER),
        "AIRFLOW__CORE__DAGS_FOLDER": str(FOLDER / "dags"),
    }  # fmt: skip
    (FOLDER / "dags").mkdir()
    source = Path(__file__).with_name("airflow_dag.py")
    (FOLDER / "dags" / source.name).write_text(source.read_text())
    for command in (["db", "migrate"], ["dags", "reserialize"], ["dags", "test", DAG_ID]):
        with (FOLDER / "airflow.log").open("ab") as log:
            done = subprocess.run([airflow, *command], env=env, stdout=log, stderr=log, check=False)
        assert done.returncode == 0, (FOLDER / "airflow.log").read_text()[-3000:]
    show("airflow dags test", answered=int((FOLDER / "answered").read_text()))


def is_anthropics() -> None:
    """The same operator by message batches."""
    manifest = operator(
        "messages", llm_conn_id="warmq_messages", model_id=f"anthropic:{MODEL}"
    ).execute(context_of("messages"))
    assert counted(manifest) == {"succeeded": 8}, manifest
    show("anthropic:", counts=counted(manifest), first=rows_of(manifest)[0]["output"])


def is_openais_own_operator() -> None:
    """OpenAIHook uploads a file; OpenAITriggerBatchOperator runs it, waiting and deferred."""
    lines = [
        {"custom_id": str(n), "method": "POST", "url": "/v1/chat/completions",
         "body": {"model": MODEL, "messages": [{"role": "user", "content": prompt}]}}
        for n, prompt in enumerate(PROMPTS)
    ]  # fmt: skip
    source = FOLDER / "lines.jsonl"
    source.write_text("\n".join(map(json.dumps, lines)))
    hook = OpenAIHook()
    file = hook.upload_file(str(source), purpose="batch")
    fields: dict[str, Any] = {"file_id": file.id, "endpoint": "/v1/chat/completions"}
    waited = OpenAITriggerBatchOperator(
        task_id="waits", wait_seconds=1, deferrable=False, metadata={"by": "airflow"}, **fields
    ).execute(context_of("openai"))
    assert waited is not None
    batch = hook.get_batch(waited)
    assert batch.output_file_id is not None
    answers = client.files.content(batch.output_file_id).text.splitlines()
    assert batch.status == "completed" and len(answers) == 8
    deferring = OpenAITriggerBatchOperator(
        task_id="defers", deferrable=True, poll_interval=1, **fields
    )
    try:
        deferring.execute(context_of("openai"))
    except TaskDeferred as deferred:
        trigger = deferred.trigger
    assert isinstance(trigger, OpenAIBatchTrigger)
    event = asyncio.run(first_of(trigger))
    assert deferring.execute_complete(context_of("openai"), event.payload) == deferring.batch_id
    show("OpenAITriggerBatchOperator", waited=batch.status, deferred=event.payload["status"],
         metadata=batch.metadata)  # fmt: skip


def main() -> None:
    """Run every case; end with 1 at the first that differs."""
    names = ("apache-airflow", "apache-airflow-providers-common-ai",
             "apache-airflow-providers-openai", "openai", "anthropic")  # fmt: skip
    show("versions", python=sys.version.split()[0], **{name: version(name) for name in names})
    cases = (
        waits_in_the_task, is_found_after_a_crash, has_rows_that_failed,
        asks_for_structured_output, is_cancelled_at_its_timeout, is_the_decorator, is_anthropics,
        is_openais_own_operator, runs_as_a_dag,
    )  # fmt: skip
    for case in cases:
        if not sys.argv[4:] or case.__name__ in sys.argv[4:]:
            case()


if __name__ == "__main__":
    main()
