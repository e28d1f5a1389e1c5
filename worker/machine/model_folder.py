"""Whether WARMQ_MODEL can be a model, said before a library searches for it for half a minute."""

import json
import re
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path

from worker.machine.finding import Finding

#: One of these is in every folder of a model: transformers', Mistral's, optimum-rbln's.
CONFIGS = ("config.json", "params.json", "rbln_config.json")
#: One of these is where a tokenizer is.
TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
#: A model in one file.
SINGLE_FILE = ".gguf"
HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
#: How alike a folder's name must be to be named as what was meant (difflib's ratio).
ALIKE = 0.5
HUB_TIMEOUT_S = 10.0
REMEDY = "Name the folder of a model in WARMQ_MODEL"


def judge_model(
    model: str, *, holds: Sequence[str] = CONFIGS, ask_hub: bool = False
) -> Iterator[Finding]:
    """Name what is wrong with a model's folder, or with the name of one on the hub.

    Args:
        model: WARMQ_MODEL.
        holds: files of which the folder must have one.
        ask_hub: whether the hub is asked for a name that is no folder and not downloaded yet;
            that takes up to HUB_TIMEOUT_S.
    """
    if "://" in model:
        return  # of an object store, read by the engine's own loader
    try:
        folder = Path(model)
        if folder.is_dir():
            yield from _judge_folder(folder, holds)
        elif folder.exists():
            if folder.suffix != SINGLE_FILE:
                yield Finding(f"WARMQ_MODEL: {model} is a file, not a folder", _parent(folder))
        else:
            yield from _judge_name(model, ask_hub)
    except OSError as error:  # a name that is too long, or a folder that may not be entered
        yield Finding(f"WARMQ_MODEL: {model} cannot be read: {error.strerror}", REMEDY)


def _parent(file: Path) -> str:
    if any((file.parent / name).exists() for name in CONFIGS):
        return f"Name the folder that the file is in: WARMQ_MODEL={file.parent}"
    return REMEDY


def _judge_folder(folder: Path, holds: Sequence[str]) -> Iterator[Finding]:
    found = [folder / name for name in holds if (folder / name).exists()]
    if not found:
        adapter = (folder / "adapter_config.json").exists()
        within = sorted(one.parent for one in folder.glob(f"*/{holds[0]}"))
        remedy = "Add it with --lora-modules to the model that it adapts" if adapter else REMEDY
        yield Finding(
            f"WARMQ_MODEL: {folder} has no {holds[0]}{', only an adapter' if adapter else ''}",
            f"Name the folder inside: {within[0]}" if within and not adapter else remedy,
        )
    for file in found:
        try:
            if file.suffix == ".json" and not isinstance(json.loads(file.read_bytes()), dict):
                raise ValueError("it holds no JSON object")
        except (OSError, ValueError, RecursionError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            yield Finding(
                f"WARMQ_MODEL: {file} cannot be read: {why}", "Copy or download the model again"
            )


def _judge_name(model: str, ask_hub: bool) -> Iterator[Finding]:
    folder = Path(model)
    beside = [one.name for one in folder.parent.iterdir()] if folder.parent.is_dir() else []
    near = get_close_matches(folder.name, beside, 1, ALIKE)
    remedy = f"Name {folder.parent / near[0]}, if that was meant" if near else REMEDY
    problem = f"WARMQ_MODEL: there is no folder {model}"
    if model.startswith("~"):
        yield Finding(problem, "Write the full path: ~ stands for a home only in a shell")
    elif not HUB_NAME.fullmatch(model) or model.startswith("."):
        yield Finding(problem, remedy)
    elif told := _told_by_hub(model, ask_hub):
        yield Finding(f"{problem}{told[0]}", f"{remedy}{told[1]}")


def _told_by_hub(name: str, ask: bool) -> tuple[str, str] | None:
    """Return why no model of this name can come from the hub, and what to do; None if it may."""
    try:
        from huggingface_hub import HfApi, constants, try_to_load_from_cache
        from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
    except ImportError:
        return None  # the engine's package finding says what is missing
    if any(isinstance(try_to_load_from_cache(name, file), str) for file in CONFIGS):
        return None  # downloaded before
    if constants.HF_HUB_OFFLINE:
        why = ", and no model of that name can be downloaded while HF_HUB_OFFLINE is set"
        return why, "; for a model's name on the hub set HF_HUB_OFFLINE=0"
    if not ask:
        return None
    try:
        HfApi().model_info(name, timeout=HUB_TIMEOUT_S)
    except GatedRepoError:
        return f"; {name} on the hub needs its owner's consent", ", or set HF_TOKEN to a token"
    except RepositoryNotFoundError:
        return ", and no public model of that name on the hub", ""
    except Exception as error:  # whatever the hub's HTTP library raises
        return f", and the hub cannot be asked for a model of that name: {error}", ""
    return None
