"""Imports all names from vLLM, after setting environment variables that vLLM reads.

vLLM moves modules in its minor releases. Each name that has had several places has its own `try`,
with the newest place first. Older places are those of vLLM 0.26 to 0.28, which some GPU images
still have.
"""

import logging
import os
import shutil

from worker.engine.vllm.media import MAX_DOWNLOAD_MB, MAX_IMAGE_PIXELS

# vLLM reads these variables when it is imported. With "spawn", engine processes do not inherit
# locks that Celery's threads hold, as forked processes would.
os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
# Many short prompts are tokenized in one call, in one thread. Several threads would use twice the
# processor time, which the engine needs.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if shutil.which("g++") is None:
    # vLLM compiles its CPU sampler at the first request, even with --enforce-eager. Without a
    # compiler this kills the engine.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB", str(MAX_DOWNLOAD_MB))
os.environ.setdefault("VLLM_MAX_IMAGE_PIXELS", str(MAX_IMAGE_PIXELS))
# A package that vLLM imports sets the root logger's level to this variable, and otherwise to ERROR,
# with which the worker's INFO and WARNING lines would not be logged.
os.environ.setdefault("SAGEMAKER_CONTAINER_LOG_LEVEL", str(logging.root.level))

from vllm import AsyncEngineArgs, AsyncLLMEngine
from vllm.connections import global_http_connection
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.pooling.embed.protocol import EmbeddingRequest
from vllm.entrypoints.pooling.scoring.protocol import RerankRequest, ScoreRequest
from vllm.exceptions import VLLMValidationError
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.utils.network_utils import get_open_zmq_ipc_path
from vllm.v1.engine import core_client
from vllm.v1.engine import logprobs as engine_logprobs
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics.loggers import StatLoggerBase

try:
    from vllm.entrypoints.anthropic.protocol import (
        AnthropicCountTokensRequest,
        AnthropicMessagesRequest,
    )
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
    from vllm.entrypoints.serve.tokenize.protocol import TokenizeRequest
except ImportError:  # without one of these, none of their urls is served
    AnthropicCountTokensRequest = AnthropicMessagesRequest = None
    ResponsesRequest = TokenizeRequest = None

try:
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
except ImportError:
    from vllm.entrypoints.openai.api_server import init_app_state

try:
    from vllm.entrypoints.common.cli_args import make_arg_parser
except ImportError:
    try:
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
    except ImportError:
        from vllm.entrypoints.openai.cli_args import make_arg_parser

try:
    from vllm.entrypoints.serve.engine.protocol import ErrorResponse
except ImportError:
    from vllm.entrypoints.openai.engine.protocol import ErrorResponse

try:
    from vllm.exceptions import VLLMClientError
except ImportError:  # 0.26 has no common class; all its other errors are ValueErrors
    from vllm.exceptions import VLLMNotFoundError as VLLMClientError

try:
    from vllm.exceptions import MaxQueuedTokensError, QueueOverflowError
except ImportError:  # 0.26 queues without limit
    QUEUE_FULL: tuple[type[Exception], ...] = ()
else:
    QUEUE_FULL = (QueueOverflowError, MaxQueuedTokensError)

try:
    from vllm.v1.metrics.stats import IterationStats
except ImportError:
    IterationStats = None

__all__ = [
    "QUEUE_FULL", "AnthropicCountTokensRequest", "AnthropicMessagesRequest", "AsyncEngineArgs",
    "AsyncLLMEngine", "ChatCompletionRequest", "CompletionRequest", "EmbeddingRequest",
    "EngineDeadError", "ErrorResponse", "FlexibleArgumentParser", "IterationStats", "LoRARequest",
    "RerankRequest", "ResponsesRequest", "ScoreRequest", "StatLoggerBase", "TokenizeRequest",
    "VLLMClientError", "VLLMValidationError", "core_client", "current_platform", "engine_logprobs",
    "get_open_zmq_ipc_path", "global_http_connection", "init_app_state", "make_arg_parser",
]  # fmt: skip
