"""Finds the LoRA adapters of a folder by their names, and checks one before vLLM loads it."""

import json
import os
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from contract.errors import RequestRejected
from contract.naming import did_you_mean
from worker.machine.finding import Finding

#: Most names of adapters that a worker announces each second.
MOST_NAMES = 500
#: Most characters of an adapter's name, as of a model's.
NAME_CHARACTERS = 200
#: Most names of adapters in an error.
SHOWN = 20
#: Most bytes of an adapter's configuration.
CONFIG_BYTES = 2**20
#: Values that --max-lora-rank allows.
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
CONFIG = "adapter_config.json"
#: Files of which an adapter's folder has one.
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
#: The name, time of change (ns) and size (bytes) of each file of an adapter.
Stamp = tuple[tuple[str, int, int], ...]


def check_adapter(folder: Path, most_rank: int) -> Finding | None:
    """Check an adapter's files, but not its weights, which vLLM checks when it loads them."""
    save_again = "Save the adapter again with PEFT's save_pretrained()"
    file = folder / CONFIG
    if not file.is_file():
        return Finding(f"{file} does not exist", save_again)
    try:
        if file.stat().st_size > CONFIG_BYTES:
            raise ValueError(f"it has more than {CONFIG_BYTES} bytes")
        config = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        why = getattr(error, "strerror", None) or error
        return Finding(f"{file} cannot be read: {why}", save_again)
    rank = config.get("r") if isinstance(config, dict) else None
    if type(rank) is not int or rank < 1:
        return Finding(f"{file} has no rank: r must be a whole number from 1", save_again)
    if rank > most_rank:
        allowed_rank = next((allowed for allowed in RANKS if allowed >= rank), None)
        remedy = (
            f"Write --max-lora-rank {allowed_rank}"
            if allowed_rank
            else "Train an adapter of a smaller rank"
        )
        return Finding(f"it has rank {rank}, and --max-lora-rank is {most_rank}", remedy)
    if not any((folder / name).is_file() for name in WEIGHTS):
        return Finding(f"{folder} has no weights: {' or '.join(WEIGHTS)}", save_again)
    return None


class AdapterFolder:
    """A folder of LoRA adapters: each is a folder in it, whose name is the adapter's name."""

    def __init__(self, path: str) -> None:
        self.path = os.path.realpath(path)

    def names(self) -> list[str]:
        """Return the names of the adapters, sorted, at most MOST_NAMES. May raise OSError."""
        usable = (
            name for name in sorted(each.name for each in os.scandir(self.path))
            if not _broken_rule(name)
            and not self._outside(name)
            and Path(self.path, name, CONFIG).is_file()
        )  # fmt: skip
        return list(islice(usable, MOST_NAMES))

    def find(self, name: str, names: Sequence[str] = ()) -> Path:
        """Return the folder of an adapter; an error lists `names`, the known adapters.

        Raises:
            RequestRejected: no folder has this name, or it leads out of this one.
        """
        if rule := _broken_rule(name):
            raise _not_found(name, f"the name of an adapter {rule}")
        if not os.path.isdir(os.path.join(self.path, name)):  # noqa: PTH112, PTH118 - no errors
            shown = ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")
            raise _not_found(name, f"there are: {shown or 'none'}{did_you_mean(name, names)}")
        if outside := self._outside(name):
            raise _not_found(
                name, f"{outside} leads out of WARMQ_ADAPTERS; copy it there instead of a link"
            )
        return Path(self.path, name)

    def stamp(self, name: str) -> Stamp:
        """Return a value that differs after a change of the adapter's files."""
        files = []
        for file in (CONFIG, *WEIGHTS):
            try:
                status = Path(self.path, name, file).stat()
            except OSError:
                continue
            files.append((file, status.st_mtime_ns, status.st_size))
        return tuple(files)

    def _outside(self, name: str) -> str:
        """Return the adapter's folder or file that is a link out of this folder, or ''."""
        for parts in ((name,), *((name, file) for file in (CONFIG, *WEIGHTS))):
            target = os.path.realpath(os.path.join(self.path, *parts))  # noqa: PTH118
            if not target.startswith(self.path.rstrip("/") + "/"):
                return "/".join(parts)
        return ""


def _broken_rule(name: str) -> str:
    """Return the rule that an adapter's name breaks, as the end of a sentence; '' for none."""
    if not name or name.startswith("."):
        return "does not begin with a point"
    if len(name) > NAME_CHARACTERS or len(name.encode(errors="replace")) > 255:
        return f"has at most {NAME_CHARACTERS} characters"
    if "/" in name or "\\" in name or not name.isprintable():
        return "has no / or \\ and no control character"
    return ""


def _not_found(name: str, problem: str) -> RequestRejected:
    return RequestRejected(
        f"field body.model: {name[:NAME_CHARACTERS]!r} names no adapter of this worker: {problem}",
        code="model_not_found",
        field="body.model",
    )
