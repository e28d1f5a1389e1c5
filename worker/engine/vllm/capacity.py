"""What a vLLM engine that has started can take."""

from collections.abc import Sequence
from typing import Any

from worker.engine import Capacity
from worker.engine.vllm import serving


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
    blocks = (cache.num_gpu_blocks or 0) * parallel.data_parallel_size
    return Capacity(
        max_num_seqs=config.scheduler_config.max_num_seqs * parallel.data_parallel_size,
        max_model_len=config.model_config.max_model_len,
        model=model,
        adapters=tuple(adapters),
        details={
            "engine": "vllm",
            "device": str(config.device_config.device_type),
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
