"""A DAG with `@task.llm_batch`, as airflow_operators.py runs it by `airflow dags test`."""

from __future__ import annotations

import json
import os
from datetime import datetime
from typing import Any

from airflow.sdk import ObjectStoragePath, dag, task


@dag(schedule=None, start_date=datetime(2026, 1, 1))
def warmq_llm_batch() -> None:
    """Ask eight questions in one batch, and count the answers."""

    @task.llm_batch(
        llm_conn_id="warmq", model_id=f"openai:{os.environ['MODEL']}", max_tokens=16,
        result_path=f"file://{os.environ['FOLDER']}/dag", poll_interval=30, deferrable=True,
    )  # fmt: skip
    def asks() -> list[str]:
        return [f"What is {n} plus {n}?" for n in range(8)]

    @task
    def counts(manifest: dict[str, Any]) -> None:
        text = ObjectStoragePath(manifest["result_uri"]).read_text()
        rows = [json.loads(line) for line in text.splitlines()]
        answered = sum(row["status"] == "success" for row in rows)
        ObjectStoragePath(f"file://{os.environ['FOLDER']}/answered").write_text(str(answered))

    counts(asks())


warmq_llm_batch()
