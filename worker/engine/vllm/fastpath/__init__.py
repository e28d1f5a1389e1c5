"""Plain requests past vLLM's serving classes: when that is done, and where the rest of it is.

With short prompts and short answers one Python process in front of the engine is the limit
(docs/explanation/performance.md), and most of what it does is the same for each request of a file.
The first request of a form goes the full way, and is looked at (learning.py); if it can be repeated
(texts.py, pooling.py) the others are tokenized together (tokens.py), given to EngineCore as that
one was, and their answers written as its was. What is not plain, and what vLLM would refuse, goes
the full way as ever (docs/explanation/fast-path.md). Only engine.py imports this package.
"""

from typing import Any

from starlette.datastructures import State

from worker.engine.vllm.fastpath.learning import FastPath
from worker.engine.vllm.fastpath.pooling import pooling_path
from worker.engine.vllm.fastpath.texts import texts_path
from worker.engine.vllm.names import current_platform

#: Options by which an answer says more than its text, or somebody else is told of it.
MORE = (
    "enable_log_requests", "enable_prompt_tokens_details", "enable_per_request_metrics",
    "tool_call_parser",
)  # fmt: skip
#: Options by which vLLM refuses requests for their number.
LIMITS = ("max_num_queued_reqs", "max_num_queued_tokens")
#: Parts of a configuration that make requests differ which look the same.
CONFIGURED = ("speculative_config", "kv_transfer_config", "ec_transfer_config", "lora_config")
#: What is used of vLLM's renderer.
RENDERER = (
    "_executor", "get_tokenizer", "render_messages", "render_cmpl_async", "render_chat_async",
)  # fmt: skip
#: What is used of a serving class for pooling.
POOLING = ("io_processor", "request_id_prefix", "_preprocessing")


def fast_path(engine: Any, args: Any, state: State) -> FastPath | None:
    """Return the fast path of an engine; None where plain answers may hold more than their text.

    Args:
        engine: vLLM's AsyncLLM.
        args: the server's options, as vLLM's parser has them.
        state: as vLLM's init_app_state filled it.
    """
    config, model = engine.vllm_config, engine.vllm_config.model_config
    asked = (getattr(args, name, None) for name in MORE)
    scheduled = (getattr(config.scheduler_config, name, None) for name in LIMITS)
    configured = (getattr(config, name, None) for name in CONFIGURED)
    parsed = config.structured_outputs_config.reasoning_parser or model.is_encoder_decoder
    if any((*asked, *scheduled, *configured, parsed, model.hf_config.model_type == "gpt_oss")):
        return None
    renderer = getattr(engine, "renderer", None)
    needed = (
        *((engine, name) for name in ("engine_core", "output_processor")),
        *((renderer, name) for name in RENDERER),
    )
    tested = current_platform.is_cpu() or current_platform.is_cuda_alike()
    if not tested or not all(hasattr(*one) for one in needed):
        return None
    if getattr(state, "openai_serving_chat", None):
        return texts_path(engine)
    embedding, scores = (
        getattr(state, name, None) for name in ("serving_embedding", "serving_scores")
    )
    used = (*((one, name) for one in (embedding, scores) if one is not None for name in POOLING),)
    if not used or not _pools_plainly(model) or not all(hasattr(*one) for one in used):
        return None
    return pooling_path(engine, embedding, scores)


def _pools_plainly(model: Any) -> bool:
    """Whether a text that is too long is refused, not embedded in pieces."""
    pooler = getattr(model, "pooler_config", None)
    return not getattr(pooler, "enable_chunked_processing", False)
