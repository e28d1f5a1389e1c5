"""Whether the vLLM that is installed can run on this machine."""

import os
import platform
import re
from collections.abc import Iterator
from importlib.util import find_spec

from worker.machine import devices
from worker.machine.finding import Finding
from worker.machine.packages import Packages

#: CUDA release -> the oldest driver of its minor releases, as NVIDIA's CUDA Compatibility guide
#: says (docs.nvidia.com/deploy/cuda-compatibility, table 1).
OLDEST_DRIVER = {12: 525, 13: 580}
#: vLLM's switch for FlashInfer's top-k and top-p sampler, which is on by default.
SAMPLER = "VLLM_USE_FLASHINFER_SAMPLER"


def cuda_of(packages: Packages) -> int | None:
    """Return which CUDA the installed vLLM is built for; None if it is for another device.

    A version without a suffix is PyPI's, built for CUDA 13 since 0.20.
    """
    if packages.rbln or packages.on_cpu or "vllm" not in packages.versions:
        return None
    suffix = packages.versions["vllm"].partition("+")[2]
    if not suffix:
        return 13
    found = re.search(r"\bcu(1\d)\d\b", suffix)
    return int(found[1]) if found else None


def judge_device(packages: Packages) -> Iterator[Finding]:
    """Say what this build of vLLM lacks here; nothing of CUDA is initialised for it."""
    yield from _judge_torchvision(packages)
    cuda = cuda_of(packages)
    if cuda is None:
        return
    driver, oldest = devices.nvidia_driver(), OLDEST_DRIVER.get(cuda, 0)
    if driver is None:
        yield Finding(
            f"no NVIDIA driver is found (libcuda.so.1), and this vLLM is built for CUDA {cuda}",
            f"Install the driver, {oldest} or newer, in a container with NVIDIA's Container "
            "Toolkit, or use the CPU: make setup DEVICE=cpu (docs/install.md)",
        )
    elif 0 < driver < oldest:
        yield Finding(
            f"NVIDIA's driver is {driver}, and CUDA {cuda}, which this vLLM is built for, needs "
            f"{oldest} or newer, or its forward compatibility package",
            "Update the driver, or install vLLM's build for CUDA 12 (docs/install.md)",
            fatal=False,
        )
    if driver is not None and _samples_without_flashinfer():
        yield Finding(
            "FlashInfer's sampler would be compiled when the engine starts, and there is no nvcc: "
            "vLLM's own samples instead",
            f"Install the CUDA {cuda} toolkit, or flashinfer-jit-cache, for faster top-k and top-p",
            fatal=False,
        )


def _judge_torchvision(packages: Packages) -> Iterator[Finding]:
    torch, vision = (packages.versions.get(name, "") for name in ("torch", "torchvision"))
    if packages.emulated or platform.machine() != "x86_64":  # the stand-in mends it by itself
        return
    if vision and "+cpu" in torch and "+cpu" not in vision:
        yield Finding(
            f"torchvision {vision} is a CUDA build beside torch's CPU build: vLLM's import ends "
            "with `operator torchvision::nms does not exist`",
            "pip uninstall torchvision torchaudio torchcodec, or take all from PyTorch's CPU index "
            "(docs/install.md)",
        )


def choose_sampler(packages: Packages) -> None:
    """Take vLLM's own sampler where FlashInfer's would kill the engine at its start.

    Before vLLM is imported: it reads the environment then.
    """
    if cuda_of(packages) is not None and _samples_without_flashinfer():
        os.environ.setdefault(SAMPLER, "0")


def _samples_without_flashinfer() -> bool:
    if find_spec("flashinfer") is None:
        return True
    return find_spec("flashinfer_jit_cache") is None and devices.cuda_compiler() is None
