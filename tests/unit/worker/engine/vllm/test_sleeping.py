"""vLLM's sleep mode: where it is used, with which options, and with which arithmetic."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import orjson
import pytest

from worker.engine.spec import Sleep
from worker.engine.vllm import media, sleeping
from worker.engine.vllm.memory import GIB
from worker.engine.vllm_settings import EngineArgs, VllmSettings
from worker.machine.devices import Memory
from worker.machine.packages import Packages

CUDA = {"vllm": "0.30.0", "torch": "2.11.0"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(15 * GIB)
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def plan(
    monkeypatch: pytest.MonkeyPatch, model: Path | str, args: str = "", others: int = 2,
    versions: dict[str, str] = CUDA, cards: int = 1,
) -> Sleep | str:  # fmt: skip
    monkeypatch.setattr(sleeping, "installed", lambda: Packages(versions, False))
    card = Memory(80 * GIB, 79 * GIB)
    monkeypatch.setattr(sleeping, "gpu_memories", lambda: [card] * cards)
    settings = VllmSettings(model=str(model), engine_args=EngineArgs(args))
    return sleeping.plan(settings, others)


def test_on_a_gpu_the_sleeping_models_leave_a_part_of_it(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    found = plan(monkeypatch, folder, "--max-num-seqs 8", others=5)
    assert isinstance(found, Sleep) and isinstance(found.settings, VllmSettings)
    assert found.settings.engine_args.options == {
        "max-num-seqs": "8", "enable-sleep-mode": "", "gpu-memory-utilization": "0.84",
    }  # fmt: skip
    assert (found.host_bytes, found.device_bytes) == (15 * GIB, 2.5 * GIB)
    for figure in ("67.2 of 80.0 GiB", "at most 2.5", "15.0 GiB"):
        assert figure in found.why


def test_what_the_user_gave_stays(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    given = "--gpu-memory-utilization 0.6 --tensor-parallel-size 2"
    found = plan(monkeypatch, folder, given, cards=2)
    assert isinstance(found, Sleep) and isinstance(found.settings, VllmSettings)
    assert found.settings.engine_args == f"{given} --enable-sleep-mode"
    assert found.device_bytes == 5 * GIB


@pytest.mark.parametrize(("args", "versions", "cards", "others", "words"), [
    ("", {"vllm": "0.30.0+cpu"}, 0, 2, "on the CPU"),
    ("", CUDA | {"vllm-rbln": "0.12.0"}, 0, 2, "RBLN"),
    ("", CUDA, 0, 2, "NVML"),
    ("--no-enable-sleep-mode", CUDA, 1, 2, "--no-enable-sleep-mode"),
    ("--config x.yaml", CUDA, 1, 2, "--config"),
    ("--gpu-memory-utilization 0.95", CUDA, 1, 2, "at most 0.93"),
    ("--gpu-memory-utilization much", CUDA, 1, 2, "refuse"),
    ("", CUDA, 1, 20, "20 sleeping models"),
    ("--gpu-memory-utilization 0.9", CUDA, 1, 4, "at most 0.87"),
])  # fmt: skip
def test_where_models_do_not_sleep(
    monkeypatch: pytest.MonkeyPatch, folder: Path, args: str, versions: dict[str, str],
    cards: int, others: int, words: str,
) -> None:  # fmt: skip
    found = plan(monkeypatch, folder, args, others, versions, cards)
    assert isinstance(found, str) and words in found


def test_the_size_of_a_model_on_the_hub_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    found = plan(monkeypatch, "org/model")
    assert isinstance(found, str) and "org/model" in found


@pytest.mark.parametrize(("versions", "args", "free", "fits", "words"), [
    ({"vllm": "0.30.0+cpu"}, ["", ""], 64, True, "33.2 GiB of weights and processes fit into"),
    ({"vllm": "0.30.0+cpu"}, ["", ""], 50, False, "do not fit into 30.0 GiB"),
    (CUDA, ["--gpu-memory-utilization 0.6", "--gpu-memory-utilization=0.3"], 64, True, "0.6 + 0.3"),
    (CUDA, ["--gpu-memory-utilization 0.6"] * 2, 64, False, "0.6 + 0.6 of the GPU is more than"),
    (CUDA, ["--gpu-memory-utilization 0.6", ""], 64, False, "--gpu-memory-utilization"),
    (CUDA | {"vllm-rbln": "0.12.0"}, ["", ""], 64, False, "RBLN"),
])  # fmt: skip
def test_engines_of_two_models_run_at_the_same_time_where_both_fit(
    monkeypatch: pytest.MonkeyPatch, folder: Path, versions: dict[str, str], args: list[str],
    free: int, fits: bool, words: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(sleeping, "installed", lambda: Packages(versions, False))
    monkeypatch.setattr(sleeping.devices, "machine", lambda: Memory(2**40, free * GIB))
    each = [VllmSettings(model=str(folder), engine_args=EngineArgs(text)) for text in args]
    found = sleeping.together(each)
    assert found[0] is fits and words in found[1]


@pytest.mark.parametrize(("answer", "same"), [
    ({"id": "1", "created": 3, "choices": [{"text": " 7 8"}]}, " 7 8"),
    ({"data": [{"embedding": [0.12345, -2.0]}]}, "[0.123, -2.0]"),
    ({"id": "x", "data": [{"score": 0.98765}]}, "[0.988]"),
])  # fmt: skip
def test_what_answers_to_a_question_have_in_common(answer: dict[str, object], same: str) -> None:
    assert sleeping.answer_of(orjson.dumps(answer)) == same


async def test_media_stay_guarded_until_the_last_engine_has_ended() -> None:
    connection = SimpleNamespace(_async_client=None, _sync_client=None)
    media.guard(connection, RuntimeError)
    session = connection._async_client
    media.guard(connection, RuntimeError)
    media.unguard(connection)
    assert connection._async_client is session
    await session.close()
    media.unguard(connection)
    assert connection._async_client is None is connection._sync_client
