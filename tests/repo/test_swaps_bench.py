"""The benchmark of swaps: it ends at once if the worker can do nothing, and keeps the logs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from bench.gpu import swaps, workload


def announced(**unloadable: str) -> list[dict[str, Any]]:
    return [{
        "id": "w", "queue": "warmq.a", "models": {"a": "warmq.a", "b": "warmq.b"},
        "unloadable": {name: {"why": why, "tries": 1} for name, why in unloadable.items()},
    }]  # fmt: skip


def test_a_worker_that_has_ended_or_can_load_no_model_is_an_error_with_its_log() -> None:
    assert swaps.why_it_ends(None, [], "") == ""
    assert swaps.why_it_ends(None, announced(), "") == ""
    assert swaps.why_it_ends(None, announced(a="no memory"), "") == ""
    why = swaps.why_it_ends(None, announced(a="no memory", b="no folder"), "the last line")
    assert "no memory" in why and "no folder" in why and why.endswith("the last line")
    assert "status 1" in swaps.why_it_ends(1, announced(), "the last line")


def test_the_worker_starts_when_the_memory_of_the_engine_before_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reads = iter([119_000, 60_000, 900, 0])
    monkeypatch.setattr(swaps, "memory_mib", lambda: next(reads))
    swaps.wait_for_free_memory(4)
    assert list(reads) == [0]
    monkeypatch.setattr(swaps, "memory_mib", lambda: 119_000)
    monkeypatch.setattr(swaps, "FREE_S", 0.0)
    with pytest.raises(TimeoutError, match="1028 MiB"):
        swaps.wait_for_free_memory(4)


def test_the_logs_stay_next_to_the_record(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in ("worker", "vllm"):
        (folder / f"{name}.log").write_text(name)
    swaps.keep_logs(folder, tmp_path / "swaps-8b.json")
    assert (tmp_path / "swaps-8b.worker.log").read_text() == "worker"
    assert (tmp_path / "swaps-8b.vllm.log").read_text() == "vllm"


@pytest.mark.parametrize(("shape", "parameters"), [("8b", 8.03e9), ("1b", 1.236e9)])
def test_the_weights_of_a_shape_have_the_size_of_the_models(shape: str, parameters: float) -> None:
    assert workload.weights_bytes(shape) == pytest.approx(2 * parameters, rel=0.001)
