"""Checks WARMQ_MODEL before a library searches half a minute for the model.

The hub is Hugging Face's (huggingface.co).
"""

import json
import re
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from contract.naming import nearest
from worker.machine.finding import Finding

#: Files of which a model's folder has one: transformers', Mistral's, or optimum-rbln's.
CONFIGS = ("config.json", "params.json", "rbln_config.json")
#: Files of which a tokenizer's folder has one.
TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
#: The suffix of a file that contains a whole model.
SINGLE_FILE = ".gguf"
#: Matches the names that models can have on the hub.
HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
#: Similarity (0 to 1) from which on another folder's name is suggested.
ALIKE = 0.5
#: Seconds in which the hub has to answer.
HUB_TIMEOUT_S = 10.0
#: The remedy if no other folder can be suggested.
REMEDY = "Name the folder of a model in WARMQ_MODEL"


def check_model(
    model: str, *, holds: Sequence[str] = CONFIGS, ask_hub: bool = False
) -> Iterator[Finding]:
    """Check a model's folder, or its name on the hub.

    Args:
        model: WARMQ_MODEL.
        holds: files of which the folder must have one.
        ask_hub: whether to ask the hub, for up to HUB_TIMEOUT_S seconds, about a name that is not
            a folder and has not been downloaded.
    """
    if "://" in model:
        return  # the engine's own loader reads it from an object store
    folder = Path(model)
    try:
        mode = _mode(folder)
        if stat.S_ISDIR(mode):
            yield from _check_folder(folder, holds)
        elif not mode:
            yield from _check_name(model, ask_hub)
        elif folder.suffix != SINGLE_FILE:
            is_model = any(_mode(folder.parent / name) for name in CONFIGS)
            inside = f"Name the folder that the file is in: WARMQ_MODEL={folder.parent}"
            problem = f"WARMQ_MODEL: {model} is a file, not a folder"
            yield Finding(problem, inside if is_model else REMEDY)
    except OSError as error:  # a name that is too long, or a folder without permission
        yield Finding(f"WARMQ_MODEL: {model} cannot be read: {error.strerror}", REMEDY)


def _mode(path: Path) -> int:
    """Return a path's st_mode; 0 if nothing is there.

    Path.exists hides all other errors since Python 3.14.
    """
    try:
        return path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return 0


def _check_folder(folder: Path, holds: Sequence[str]) -> Iterator[Finding]:
    files = [folder / name for name in holds if _mode(folder / name)]
    if not files:
        adapter = bool(_mode(folder / "adapter_config.json"))
        inner_folders = sorted(one.parent for one in folder.glob(f"*/{holds[0]}"))
        remedy = f"Name the folder inside: {inner_folders[0]}" if inner_folders else REMEDY
        if adapter:
            remedy = "Add it with --lora-modules to the model that it adapts"
        yield Finding(
            f"WARMQ_MODEL: {folder} has no {holds[0]}{', only an adapter' if adapter else ''}",
            remedy,
        )
    for file in files:
        try:
            if file.suffix == ".json" and not isinstance(json.loads(file.read_bytes()), dict):
                raise ValueError("it does not contain a JSON object")
        except (OSError, ValueError, RecursionError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            yield Finding(
                f"WARMQ_MODEL: {file} cannot be read: {why}", "Copy or download the model again"
            )


def _check_name(model: str, ask_hub: bool) -> Iterator[Finding]:
    folder = Path(model)
    peers = [one.name for one in folder.parent.iterdir()] if folder.parent.is_dir() else []
    near = nearest(folder.name, peers, ALIKE)
    remedy = f"Name {folder.parent / near}, if that was meant" if near else REMEDY
    problem = f"WARMQ_MODEL: there is no folder {model}"
    if model.startswith("~"):
        yield Finding(problem, "Write the full path: ~ stands for a home only in a shell")
    elif not HUB_NAME.fullmatch(model) or model.startswith("."):
        yield Finding(problem, remedy)
    elif refusal := _hub_refusal(model, ask_hub):
        yield Finding(f"{problem}{refusal[0]}", f"{remedy}{refusal[1]}")


def _hub_refusal(name: str, ask_hub: bool) -> tuple[str, str] | None:
    """Return the problem and the remedy if the hub cannot give the model, else None."""
    try:
        from huggingface_hub import HfApi, constants, try_to_load_from_cache
        from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
    except ImportError:
        return None  # reported with the engine's packages
    if any(isinstance(try_to_load_from_cache(name, file), str) for file in CONFIGS):
        return None  # the model has been downloaded before
    if constants.HF_HUB_OFFLINE:
        why = ", and no model of that name can be downloaded while HF_HUB_OFFLINE is set"
        return why, "; for a model's name on the hub set HF_HUB_OFFLINE=0"
    if not ask_hub:
        return None
    try:
        HfApi().model_info(name, timeout=HUB_TIMEOUT_S)
    except GatedRepoError:
        return f"; {name} on the hub needs its owner's consent", ", or set HF_TOKEN to a token"
    except RepositoryNotFoundError:
        return ", and no public model of that name on the hub", ""
    except Exception as error:  # the hub's HTTP library may raise any exception
        return f", and the hub cannot be asked for a model of that name: {error}", ""
    return None
