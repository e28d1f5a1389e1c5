"""What a vLLM engine that has started can take."""

from collections.abc import Sequence
from typing import Any

from worker.engine import Capacity
from worker.engine.rbln.model import read_artefact
from worker.engine.vllm import serving
from worker.engine.vllm.names import current_platform


def capacity_of(
    config: Any, model: str, names: Sequence[str], urls: Sequence[str], adapters: Sequence[str]
) -> Capacity:
    """Return it.

    Args:
        config: vLLM's VllmConfig, as EngineCore has set it when it was ready.
        model: its folder or name, as the settings have it.
        names: what a request may call the model, or an adapter.
        urls: the endpoints that this model has.
        adapters: the names of its LoRA adapters.
    """
    parallel, cache = config.parallel_config, config.cache_config
    compiled = read_artefact(model)
    blocks = (cache.num_gpu_blocks or 0) * parallel.data_parallel_size
    return Capacity(
        max_num_seqs=config.scheduler_config.max_num_seqs * parallel.data_parallel_size,
        max_model_len=config.model_config.max_model_len,
        model=model,
        adapters=tuple(adapters),
        details={
            "engine": "vllm",
            "device": _device_of(config),
            **({"buckets": compiled.buckets} if compiled else {}),
            "dtype": str(config.model_config.dtype),
            "served_names": names,
            "urls": urls,
            "tensor_parallel_size": parallel.tensor_parallel_size,
            "pipeline_parallel_size": parallel.pipeline_parallel_size,
            "data_parallel_size": parallel.data_parallel_size,
        },
        kv_tokens=blocks * (cache.block_size or 0) or None,
        prefix_caching=bool(cache.enable_prefix_caching),
        parses_chats=serving.parses_chats(config),
        one_step=config.model_config.runner_type == "pooling",
    )


def _device_of(config: Any) -> str:
    """Return the card's name (NVIDIA H100 80GB HBM3) where vLLM's platform tells one, else its
    kind (cpu, cuda)."""
    kind = str(config.device_config.device_type)
    try:
        return str(current_platform.get_device_name() or kind)
    except Exception:  # a name is for people alone; a plugin's platform may have any trouble
        return kind
