"""The fast path: answers plain requests without vLLM's serving classes.

A request is plain if all its fields are common ones (texts.py and pooling.py list them).

With short prompts and answers, one Python process in front of the engine limits the throughput
(docs/explanation/performance.md), and most of its work is the same for all requests of a file. A
form is a url with all fields of a body except its prompt. The first requests of a form run through
vLLM's classes and are observed (learning.py). If their answers can be written without these classes
(texts.py, pooling.py), the form's other requests are tokenized many at a time (tokens.py) and sent
directly to EngineCore. Requests that vLLM would refuse still go through its classes
(docs/explanation/fast-path.md). Only engine.py imports this package.
"""

from typing import Any

from starlette.datastructures import State

from worker.engine.vllm.fastpath.learning import FastPath
from worker.engine.vllm.fastpath.pooling import pooling_path
from worker.engine.vllm.fastpath.texts import texts_path
from worker.engine.vllm.names import current_platform

#: Options that add fields to answers, or that log requests or measure each of them.
UNSUPPORTED_OPTIONS = (
    "enable_log_requests", "enable_prompt_tokens_details", "enable_per_request_metrics",
    "tool_call_parser",
)  # fmt: skip
#: Options with which vLLM refuses requests if too many are queued.
QUEUE_OPTIONS = ("max_num_queued_reqs", "max_num_queued_tokens")
#: Fields of vLLM's configuration with which requests of one form may run differently.
UNSUPPORTED_CONFIG = (
    "speculative_config",
    "kv_transfer_config",
    "ec_transfer_config",
    "lora_config",
)
#: Attributes of vLLM's engine that the fast path uses.
ENGINE = ("engine_core", "output_processor")
#: Attributes of vLLM's renderer that the fast path uses.
RENDERER = (
    "_executor", "get_tokenizer", "render_messages", "render_cmpl_async", "render_chat_async",
)  # fmt: skip
#: Attributes of vLLM's serving classes for pooling that the fast path uses.
POOLING = ("io_processor", "request_id_prefix", "_preprocessing")


def fast_path(engine: Any, args: Any, state: State) -> FastPath | None:
    """Return the fast path for vLLM's AsyncLLM; None if it does not support the configuration."""
    config, model = engine.vllm_config, engine.vllm_config.model_config
    unsupported = [getattr(args, name, None) for name in UNSUPPORTED_OPTIONS]
    unsupported += [getattr(config.scheduler_config, name, None) for name in QUEUE_OPTIONS]
    unsupported += [getattr(config, name, None) for name in UNSUPPORTED_CONFIG]
    is_parsed = config.structured_outputs_config.reasoning_parser or model.is_encoder_decoder
    if is_parsed or any(unsupported) or model.hf_config.model_type == "gpt_oss":
        return None
    is_tested = current_platform.is_cpu() or current_platform.is_cuda_alike()
    renderer = getattr(engine, "renderer", None)
    if not is_tested or not _has(engine, ENGINE) or not _has(renderer, RENDERER):
        return None
    if getattr(state, "openai_serving_chat", None):
        return texts_path(engine)
    embedding = getattr(state, "serving_embedding", None)
    scores = getattr(state, "serving_scores", None)
    serving = [one for one in (embedding, scores) if one is not None]
    # With chunked processing vLLM embeds long texts in pieces instead of refusing them.
    pooler = getattr(model, "pooler_config", None)
    chunked = getattr(pooler, "enable_chunked_processing", False)
    if not serving or chunked or not all(_has(one, POOLING) for one in serving):
        return None
    return pooling_path(engine, embedding, scores)


def _has(owner: Any, names: tuple[str, ...]) -> bool:
    return all(hasattr(owner, name) for name in names)
