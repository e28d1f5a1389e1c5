"""Checks a Triton model repository for the vLLM backend.

The keys of `1/model.json` are arguments of vLLM's AsyncEngineArgs, which raises TypeError for
unknown names, for example those of old tutorials. config.pbtxt is in Triton's own format.
"""

import ast
import json
import re
from collections.abc import Iterator
from difflib import get_close_matches
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from contract.settings import SettingsError
from worker.engine.rbln.model import read_artefact
from worker.engine.rbln.rules import REFUSED, check_options
from worker.engine.triton.engine import LENGTH_PARAMETER as LENGTH
from worker.engine.triton.engine import SLOTS_PARAMETER as SLOTS
from worker.machine.finding import Finding

#: Names of the files in a model's folder.
ARGS_FILE, CONFIG_FILE, LORA_FILE = "model.json", "config.pbtxt", "multi_lora.json"
#: The parameter of config.pbtxt with which Triton checks that a model's vLLM is alive.
HEALTH = "ENABLE_VLLM_HEALTH_CHECK"
#: Parameters of config.pbtxt, and the arguments of model.json that they repeat for the workers.
CONFIG_PARAMETERS = {SLOTS: "max_num_seqs", LENGTH: "max_model_len"}

#: The remedy for old arguments of speculative decoding.
SPECULATION = 'Write "speculative_config": {"method": "ngram", "num_speculative_tokens": 5, ...}'
#: Engine arguments of old tutorials that vLLM no longer has, and the remedy for each.
STALE = {
    "device": "Leave it out: vLLM finds the platform itself",
    "compiled_model_dir": 'Leave it out, and write the compiled folder as "model"',
    "disable_log_requests": 'Leave it out: "enable_log_requests" is off by default',
    "use_v2_block_manager": "Leave it out: there is one block manager",
    "num_lookahead_slots": "Leave it out: it follows from speculative_config",
    "num_scheduler_steps": "Leave it out: scheduling is always asynchronous",
    "multi_step_stream_outputs": "Leave it out: scheduling is always asynchronous",
    "swap_space": 'Leave it out, or write "kv_offloading_size" (GiB)',
    "preemption_mode": "Leave it out: preempted requests are recomputed",
    "max_seq_len_to_capture": "Leave it out, or write max_cudagraph_capture_size",
    "max_context_len_to_capture": "Leave it out, or write max_cudagraph_capture_size",
    "cuda_graph_sizes": 'Write "cudagraph_capture_sizes"',
    "engine_use_ray": "Leave it out",
    "worker_use_ray": 'Write "distributed_executor_backend": "ray"',
    "tokenizer_pool_size": "Leave it out",
    "guided_decoding_backend": 'Write "structured_outputs_config": {"backend": "auto"}',
    "enable_prompt_adapter": "Leave it out: prompt adapters were removed",
    "task": 'Write "runner": "generate"',
    "max_seq_len": 'Write "max_model_len"',
    **dict.fromkeys((
        "speculative_model", "num_speculative_tokens", "speculative_max_model_len",
        "ngram_prompt_lookup_max", "ngram_prompt_lookup_min",
    ), SPECULATION),
}  # fmt: skip


@cache
def engine_arguments() -> frozenset[str]:
    """Return the argument names of the installed vLLM's AsyncEngineArgs; empty without vLLM.

    The names are read from vLLM's source code, because importing vLLM takes seconds.
    """
    package = find_spec("vllm")
    if package is None or package.origin is None:
        return frozenset()
    source = Path(package.origin).parent / "engine" / "arg_utils.py"
    classes = (n for n in ast.parse(source.read_text()).body if isinstance(n, ast.ClassDef))
    return frozenset(
        line.target.id
        for one in classes
        if one.name in ("EngineArgs", "AsyncEngineArgs")
        for line in one.body
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
    )


def check_repository(folder: Path) -> Iterator[Finding]:
    """Yield the problems of every model in a repository."""
    models = sorted(one.parent for one in folder.glob(f"*/{CONFIG_FILE}"))
    if not models:
        yield Finding(
            f"{folder} has no */{CONFIG_FILE}",
            "Name the folder that tritonserver's --model-repository names, or write one: "
            "python -m worker.triton MODEL_DIR -o REPO",
        )
    for model in models:
        yield from check_model(model)


def check_model(folder: Path) -> Iterator[Finding]:
    """Yield the problems of the model in `folder`, which is `<repository>/<name>`."""
    config = re.sub(r"#.*", "", (folder / CONFIG_FILE).read_text())
    backend = _value_of(config, "backend")
    if backend != "vllm":
        yield Finding(
            f"{folder.name}/{CONFIG_FILE}: the backend is {backend or 'none'}, not vllm",
            'Write: backend: "vllm"; only this backend has the inputs text_input and '
            "sampling_parameters",
        )
        return
    versions = [one for one in folder.iterdir() if one.is_dir() and one.name.isdecimal()]
    if not versions:
        yield Finding(f"{folder.name} has no version folder", f"Put {ARGS_FILE} into {folder}/1")
    for version in versions:
        path = version / ARGS_FILE
        where = f"{folder.name}/{version.name}/{ARGS_FILE}"
        try:
            arguments = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            yield Finding(f"{where}: {error}", "Write vLLM's engine arguments as one JSON object")
            continue
        if not isinstance(arguments, dict):
            yield Finding(f"{where} is not a JSON object", 'Write {"model": "/path/of/the/model"}')
            continue
        yield from check_arguments(arguments, where)
        yield from _check_config(config, arguments, folder.name)
        if _is_true(arguments.get("enable_lora")) and not (version / LORA_FILE).is_file():
            yield Finding(
                f"{where}: enable_lora without {LORA_FILE} in the same folder",
                f'Write {LORA_FILE}: {{"<name>": "/path/of/the/adapter"}}',
            )


def check_arguments(arguments: dict[str, Any], where: str = ARGS_FILE) -> Iterator[Finding]:
    """Yield a finding for each outdated, unknown or refused argument of a model.json."""
    model = arguments.get("model")
    if not isinstance(model, str) or not model:
        yield Finding(
            f"{where} names no model",
            'Write "model": the absolute path of a folder, or the name of a model on the hub',
        )
        model = ""
    artefact = None
    try:
        artefact = read_artefact(model) if model else None
    except SettingsError as error:
        yield Finding(f"{where}: {error}", "Recompile the model, or copy it again")
    rbln = artefact is not None or str(arguments.get("device")) == "rbln"
    if rbln:
        options = {name.replace("_", "-"): str(value) for name, value in arguments.items()}
        yield from check_options(
            options, artefact, lambda name: f'{where}: "{name.replace("-", "_")}"'
        )
    accepted = engine_arguments()
    for name in arguments:
        if rbln and name.replace("_", "-") in REFUSED:
            continue
        if name in STALE and name not in accepted:
            yield Finding(f'{where}: vLLM no longer has "{name}"', STALE[name])
        elif accepted and name not in accepted:
            near = get_close_matches(name, accepted, 1)
            yield Finding(
                f'{where}: vLLM has no engine argument "{name}"',
                f'Write "{near[0]}"' if near else "Leave it out",
            )
    if rbln and artefact is None:
        yield from _check_old_values(arguments, where)


def _check_old_values(arguments: dict[str, Any], where: str) -> Iterator[Finding]:
    """Check for values of old tutorials, if the compiled folder is not on this machine."""
    length = arguments.get("max_model_len")
    for name in ("max_num_batched_tokens", "block_size"):
        if name in arguments and arguments[name] == length:
            yield Finding(
                f'{where}: "{name}" equals max_model_len, as vllm-rbln before 0.9.3 required',
                "Leave it out: all limits are read from the compiled folder",
            )


def _check_config(config: str, arguments: dict[str, Any], name: str) -> Iterator[Finding]:
    where = f"{name}/{CONFIG_FILE}"
    named = _value_of(config, "name")
    if named is not None and named != name:
        yield Finding(f"{where}: the name {named} is not the folder's", f'Write: name: "{name}"')
    if re.search(r"decoupled\s*:\s*false", config, re.IGNORECASE):
        yield Finding(f"{where}: decoupled is false", "Leave model_transaction_policy out")
    devices = _parallel_size(arguments, "tensor_parallel_size") * _parallel_size(
        arguments, "pipeline_parallel_size"
    )
    if devices > 1 and "KIND_GPU" in config:
        yield Finding(
            f"{where}: KIND_GPU is for one GPU, but the arguments ask for {devices}",
            "Write: instance_group [ { count: 1 kind: KIND_MODEL } ]",
        )
    parameters = parameters_of(config)
    for parameter, key in CONFIG_PARAMETERS.items():
        if key in arguments and parameters.get(parameter, str(arguments[key])) != str(
            arguments[key]
        ):
            yield Finding(
                f"{where}: {parameter} is {parameters[parameter]}; model.json has {arguments[key]}",
                f"Write {arguments[key]} in both: workers read {CONFIG_FILE}, vLLM {ARGS_FILE}",
            )
    if SLOTS not in parameters:
        yield Finding(
            f"{where} has no {SLOTS}, from which workers learn how many requests run at once",
            f"Add: {parameter_line(SLOTS, '<max_num_seqs>')}",
            fatal=False,
        )
    if not _is_true(parameters.get(HEALTH)):
        yield Finding(
            f"{where}: {HEALTH} is not true, so Triton shows a model as ready after its vLLM "
            "has died",
            f"Add: {parameter_line(HEALTH, 'true')} and start tritonserver with "
            f"--model-control-mode=explicit --load-model={name}",
            fatal=False,
        )


def _value_of(config: str, key: str) -> str | None:
    match = re.search(rf'^\s*{key}\s*:\s*"([^"]*)"', config, re.MULTILINE)
    return match and match[1]


def parameter_line(key: str, value: object) -> str:
    """Return the line of config.pbtxt that sets a parameter."""
    return f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}'


def parameters_of(config: str) -> dict[str, str]:
    """Return the parameters of a config.pbtxt by name."""
    pair = r'key\s*:\s*"([^"]*)"\s*,?\s*value\s*:?\s*\{\s*string_value\s*:\s*"([^"]*)"'
    return dict(re.findall(pair, config))


def _parallel_size(arguments: dict[str, Any], name: str) -> int:
    value = arguments.get(name, 1)
    return value if isinstance(value, int) and value > 0 else 1


def _is_true(value: object) -> bool:
    return str(value).lower() == "true"
