"""Makes the identity of a vLLM engine: all that decides its answers apart from the bodies.

It has the releases, the model's files, the options of WARMQ_ENGINE_ARGS, and vLLM's environment
variables. Files and folders that
an option names (a chat template, a parser's plugin, an adapter) count by their content.
"""

import logging
import os
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
#: Beginnings of vLLM's environment variables that change no answer: of logs, usage statistics,
#: caches' folders, addresses, keys, processes, and the memory and cores of a CPU.
NEUTRAL_VARIABLES = (
    "VLLM_LOG", "VLLM_CONFIGURE_LOGGING", "VLLM_DEBUG_LOG", "VLLM_DISABLE_LOG", "VLLM_TRACE_",
    "VLLM_NO_USAGE_STATS", "VLLM_DO_NOT_TRACK", "VLLM_USAGE_", "VLLM_CACHE_ROOT",
    "VLLM_CONFIG_ROOT", "VLLM_ASSETS_CACHE", "VLLM_MEDIA_CACHE", "VLLM_XLA_CACHE_PATH",
    "VLLM_HOST_IP", "VLLM_LOOPBACK_IP", "VLLM_PORT", "VLLM_RPC_", "VLLM_DP_", "VLLM_API_KEY",
    "VLLM_WORKER_MULTIPROC_METHOD", "VLLM_PROCESS_NAME_PREFIX", "VLLM_CPU_KVCACHE_SPACE",
    "VLLM_CPU_OMP_THREADS_BIND",
)  # fmt: skip


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
    options = {name: values for name, values in args.values.items() if name not in NEUTRAL}
    options |= {f"adapter {name}": [path] for name, path in args.adapters.items()}
    options |= {name: [value] for name, value in os.environ.items() if _counts(name)}
    try:
        parts = [fingerprint(folder), str(context)]
        parts += [f"{name} {version}" for name, version in sorted(versions.items())]
        parts += [f"{n} {_content(one)}" for n, values in sorted(options.items()) for one in values]
    except OSError as error:
        text = "WARMQ_KNOWN_ANSWERS: %s: no answer is reused"
        log.warning(text, error, extra={"action": "no_identity"})
        return ""
    return identity_of(*parts)


def _counts(variable: str) -> bool:
    """Return whether an environment variable may change vLLM's answers."""
    return variable.startswith("VLLM_") and not variable.startswith(NEUTRAL_VARIABLES)


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
