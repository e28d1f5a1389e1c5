"""The model that a worker without WARMQ_MODEL prints when it starts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import SecretStr

from worker.process.program import banner


@pytest.mark.parametrize(
    ("engine", "model", "shown"),
    [("simulated", "", "none: the answers are simulated"), ("simulated", "tiny", "tiny"),
     ("openai", "", "the one its server lists")],
)  # fmt: skip
def test_a_worker_without_a_model_prints_whose_model_answers(
    engine: str, model: str, shown: str
) -> None:
    settings: Any = SimpleNamespace(
        engine=engine, model=model, queue_to_drain="warmq", see_engine_log="",
        redis_url=SecretStr("redis://127.0.0.1:1/0"),
    )  # fmt: skip
    assert f"  model   {shown}\n" in banner(settings, "w")
