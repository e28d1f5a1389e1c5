"""Makes the identity of a vLLM engine: all that decides its answers apart from the bodies.

It has the releases, the model's files, and the options of WARMQ_ENGINE_ARGS. Files and folders that
an option names (a chat template, a parser's plugin, an adapter) count by their content.
"""

import logging
from pathlib import Path

from contract.known import identity_of
from worker.engine.vllm_settings import VllmSettings
from worker.machine.fingerprint import fingerprint
from worker.machine.model_folder import CONFIGS
from worker.machine.packages import installed

log = logging.getLogger(__name__)

#: Options that decide how many requests run at a time and where, and not what is answered.
NEUTRAL = frozenset((
    "max-num-seqs", "max-num-batched-tokens", "gpu-memory-utilization", "data-parallel-size",
    "data-parallel-size-local", "disable-log-stats", "enable-prefix-caching",
    "no-enable-prefix-caching", "max-num-queued-reqs", "max-num-queued-tokens",
    "enable-sleep-mode", "download-dir", "served-model-name", "lora-modules",
))  # fmt: skip


def engine_identity(settings: VllmSettings, context: int) -> str:
    """Return the identity of an engine with these settings; '' if it cannot be known.

    `context` is the model's context length.
    """
    args, versions = settings.engine_args, installed().versions
    folder = _folder_of(str(settings.model), args.options.get("revision") or None)
    if folder is None:
        text = "WARMQ_KNOWN_ANSWERS: the files of %s are not on this machine: no answer is reused"
        log.warning(text, settings.model, extra={"action": "no_identity"})
        return ""
    options = {name: value for name, value in args.options.items() if name not in NEUTRAL}
    adapters = {f"adapter {name}": path for name, path in args.adapters.items()}
    try:
        parts = [fingerprint(folder), str(context)]
        parts += [f"{name} {version}" for name, version in sorted(versions.items())]
        parts += [f"{n} {_content(value)}" for n, value in sorted((options | adapters).items())]
    except OSError as error:
        text = "WARMQ_KNOWN_ANSWERS: %s: no answer is reused"
        log.warning(text, error, extra={"action": "no_identity"})
        return ""
    return identity_of(*parts)


def _content(value: str) -> str:
    """Return an option's value, for the path of a file or folder its fingerprint."""
    path = Path(value)
    try:
        is_path = bool(value) and path.exists()
    except (OSError, ValueError):  # a value that is too long for a path
        is_path = False
    return fingerprint(path) if is_path else value


def _folder_of(model: str, revision: str | None) -> Path | None:
    """Return the folder or file of a model; None if it is neither here nor in the hub's cache."""
    path = Path(model)
    if path.exists():
        return path
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    for name in CONFIGS:
        try:
            found = try_to_load_from_cache(model, name, revision=revision)
        except ValueError:  # not a name that models have on the hub
            return None
        if isinstance(found, str):
            return Path(found).parent
    return None
