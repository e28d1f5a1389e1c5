"""The vLLM adapter; it and serving.py are the only files that know vLLM.

An AsyncLLMEngine in this process, with the serving classes of vLLM's own
OpenAI server over it: they template chats, check lengths, build sampling
parameters and responses, so a queued request gets what the server would give.
Written for vLLM 0.30 (CPU, RBLN); 0.26 (CUDA, run on an H200) differs in three import paths.
"""

import asyncio
import gc
import logging
import multiprocessing
import os
import shutil
import time
from argparse import Namespace
from functools import partial
from typing import Any

from contract.errors import EngineDead, RequestFailed, RequestRejected
from contract.openai.body import COMPLETION_URL
from contract.openai.pooling import POOLING_TYPES
from contract.settings import SettingsError
from worker.engine import Capacity, Completion, EngineRequest
from worker.engine.end import KILL_GRACE_S, end_children
from worker.engine.vllm.cpu_memory import fill_in
from worker.engine.vllm.detokenized import Detokenized
from worker.engine.vllm.kv_cache import explain
from worker.engine.vllm.media import MAX_DOWNLOAD_MB, guard, unguard
from worker.engine.vllm.root_cause import RootCause
from worker.engine.vllm_settings import VllmSettings
from worker.machine.packages import installed

# vLLM reads these when it is imported. Spawned engine processes inherit no locks
# from Celery's threads; forked ones do.
os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
if shutil.which("g++") is None:
    # vLLM compiles its CPU sampler on the first request, even with --enforce-eager;
    # without a compiler that kills the engine.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB", str(MAX_DOWNLOAD_MB))
# A package that vLLM imports sets the root logger to this, else to ERROR: our own
# INFO and WARNING lines were gone once the engine had been imported.
os.environ.setdefault("SAGEMAKER_CONTAINER_LOG_LEVEL", str(logging.root.level))

import pydantic
from starlette.datastructures import State
from vllm import AsyncEngineArgs, AsyncLLMEngine
from vllm.connections import global_http_connection
from vllm.entrypoints.openai.api_server import init_app_state
from vllm.exceptions import VLLMValidationError
from vllm.platforms import current_platform
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics.loggers import StatLoggerBase

try:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.entrypoints.serve.engine.protocol import ErrorResponse
except ImportError:  # vLLM 0.26, the newest for the PyTorch of some GPU images
    from vllm.entrypoints.openai.cli_args import make_arg_parser
    from vllm.entrypoints.openai.engine.protocol import ErrorResponse

from worker.engine.vllm import serving

log = logging.getLogger(__name__)


class _Parser(FlexibleArgumentParser):
    def error(self, message: str) -> None:
        raise SettingsError(f"WARMQ_ENGINE_ARGS: {message}; options are those of `vllm serve`")


class _Progress(StatLoggerBase):
    """Stamps every engine step: with final-only output nothing else shows progress.

    vLLM calls these classes unstable, so only the call itself is used.
    """

    def __init__(self) -> None:
        self.at = time.monotonic()

    def record(self, *_: Any, **__: Any) -> None:
        self.at = time.monotonic()

    log_engine_initialized = record


def parse_engine_args(settings: VllmSettings) -> Namespace:
    """Return WARMQ_ENGINE_ARGS as vLLM's own parser does, with what is chosen for a CPU.

    Raises:
        SettingsError: in the words of vLLM's parser.
    """
    words = [*settings.engine_args.words, "--model", str(settings.model)]
    if not settings.engine_stats_s:
        words.insert(0, "--disable-log-stats")
    if settings.served_model_name:
        words += ["--served-model-name", settings.served_model_name]
    parser = make_arg_parser(_Parser(add_help=False))
    default = parser.get_default("gpu_memory_utilization")
    parser.set_defaults(gpu_memory_utilization=None)  # to tell one that was given from this
    try:
        args: Namespace = parser.parse_args(words)
    except SettingsError:
        raise
    except Exception as error:  # a --config file may be missing, or be no YAML
        raise SettingsError(f"WARMQ_ENGINE_ARGS: {error}") from None
    if current_platform.is_cpu():
        fill_in(args, installed())
    if args.gpu_memory_utilization is None:
        args.gpu_memory_utilization = default
    return args


class VllmEngine:
    """One AsyncLLMEngine, built from the settings."""

    def __init__(self, settings: VllmSettings) -> None:
        self._settings = settings
        self._args = parse_engine_args(settings)
        self._progress = _Progress()
        self._killed = False
        self._cause = RootCause()
        self._engine: AsyncLLMEngine | None = None
        self._names: set[str] = set()
        grace_s = settings.kill_grace_s
        self.grace_s = KILL_GRACE_S if grace_s is None else grace_s
        self._fixed_name = settings.served_model_name is not None
        #: What serves each url of the model: vLLM's class of its requests, and the call.
        self._serving: dict[str, tuple[Any, Any]] = {}
        self._detokenized = Detokenized()

    def build(self) -> None:
        """Load the model and start the engine's processes; seconds to minutes."""
        try:
            self._engine = AsyncLLMEngine.from_engine_args(
                AsyncEngineArgs.from_cli_args(self._args),
                stat_loggers=[lambda config, index=0: self._progress],
            )
        except pydantic.ValidationError as error:
            raise SettingsError(
                f"WARMQ_MODEL, WARMQ_ENGINE_ARGS: vLLM refuses them: {error.errors()[0]['msg']}"
            ) from None
        except Exception as error:
            raise self._died(error) from error
        self._cause.processes = multiprocessing.active_children()
        # What vLLM and torch have made stays until the end: left to the collector, walking it
        # stops the drain's loop for 0.37 s at a time (docs/performance.md). Thawed first, so
        # that a rebuild frees the dead engine.
        gc.unfreeze()
        gc.collect()
        gc.freeze()

    async def start(self) -> Capacity:
        """Put vLLM's serving classes over the engine and read back what it can take."""
        engine, settings, state = self._engine, self._settings, State()
        if engine is None:
            raise EngineDead("build() has not run")
        await init_app_state(engine, state, self._args, await engine.get_supported_tasks())
        if not settings.media_private_networks:
            guard(global_http_connection, partial(VLLMValidationError, parameter="image_url"))
        self._serving = serving.by_url(state, settings.default_max_tokens)
        models = state.openai_serving_models
        self._names = {m.name for m in models.base_model_paths} | set(models.lora_requests)
        self._fixed_name |= bool(models.lora_requests)  # with adapters the name chooses
        if settings.engine_stats_s is not None:
            self._stats = asyncio.create_task(_log_stats(engine, settings.engine_stats_s))
        config, parallel = engine.vllm_config, engine.vllm_config.parallel_config
        return Capacity(
            max_num_seqs=config.scheduler_config.max_num_seqs * parallel.data_parallel_size,
            max_model_len=config.model_config.max_model_len,
            model=str(self._args.model),
            adapters=tuple(sorted(models.lora_requests)),
            details={
                "engine": "vllm",
                "device": str(config.device_config.device_type),
                "dtype": str(config.model_config.dtype),
                "served_names": sorted(self._names),
                "urls": sorted(self._serving),
                "tensor_parallel_size": parallel.tensor_parallel_size,
                "pipeline_parallel_size": parallel.pipeline_parallel_size,
                "data_parallel_size": parallel.data_parallel_size,
            },
        )

    async def generate(self, request: EngineRequest, request_id: str) -> Completion:
        """Run one request through vLLM's serving class for its url."""
        body, model = dict(request.body), request.body.get("model")
        if model not in self._names and not self._fixed_name:
            body.pop("model", None)  # one model is served, whatever the line calls it
        body["request_id"] = request_id
        self._check(request.url)
        try:
            response = await self._respond(request.url, body)
        except EngineDeadError as error:
            raise self._died(error) from error
        except serving.CLIENT_ERRORS as error:
            raise serving.rejected(error) from error
        except Exception as error:
            if self.dead():
                raise self._died(error) from error
            raise RequestFailed(f"{type(error).__name__}: {error}") from error
        finally:
            self._detokenized.found.pop(request_id, None)
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            # The completion class answers a cancellation with an error response.
            raise asyncio.CancelledError
        if request.url in POOLING_TYPES and not isinstance(response, ErrorResponse):
            return serving.pooled(bytes(response.body), model)
        return self._completion_of(response, model)

    def _check(self, url: str) -> None:
        if self.dead():
            raise EngineDead("the engine is dead", inside=False)
        if url not in self._serving:
            raise RequestRejected(
                f"field url: this worker's model serves {', '.join(self._serving)}, not {url}; "
                "send the request to the queue of a model that does",
                code="unknown_url",
                field="url",
            )

    def text_so_far(self, request_id: str) -> list[str]:
        """Return each choice's text as the detokenizer has it, before any parser of vLLM's."""
        if self._engine is None:
            return []
        return self._detokenized.texts(self._engine.output_processor, request_id)

    def _completion_of(self, response: Any, model: str | None) -> Completion:
        if isinstance(response, ErrorResponse):
            raise self._refused(response)
        if any(choice.finish_reason == "abort" for choice in response.choices):
            # EngineCore was told to end and gave up what it had. Only if we told it, for it
            # made no step, may a request be the cause.
            raise EngineDead("the engine was told to end", inside=self._killed)
        if model:
            response.model = model
        usage = response.usage
        return Completion(
            response.model_dump_json().encode(), usage.prompt_tokens, usage.completion_tokens or 0
        )

    async def _respond(self, url: str, body: dict[str, Any]) -> Any:
        form, serve = self._serving[url]
        if url == COMPLETION_URL and body.get("max_tokens") is None:
            # vLLM would fill in OpenAI's old 16; chat has no such default.
            body["max_tokens"] = serve.__self__.default_sampling_params["max_tokens"]
            return await serve(serving.AsLongAsItFits(**body))
        return await serve(form.validate_python(body))

    def _refused(self, response: ErrorResponse) -> Exception:
        error = response.error
        if self.dead():
            return self._died(error.message)
        if error.code >= 500:
            return RequestFailed(error.message)
        if error.code != 404:
            return RequestRejected(error.message, field=error.param)
        told = f"{error.message} This worker serves {', '.join(sorted(self._names))}"
        return RequestRejected(told, code="model_not_found", field=error.param)

    def _died(self, error: object) -> EngineDead:
        # vLLM's own text says "see root cause above", and that may be in another log.
        text = f"{error}\n{self._cause.tell()}".strip()
        return EngineDead(f"{explain(text) or ''}\n{text}".strip())

    def dead(self) -> bool:
        """Whether the engine's processes are gone."""
        return self._engine is None or bool(self._engine.errored)

    def last_progress(self) -> float:
        """Return time.monotonic() of the latest engine step."""
        return self._progress.at

    def kill(self) -> None:
        """Ask the engine's processes to end, and kill what has not ended after a grace."""
        self._killed = True
        end_children(self.grace_s)

    def shutdown(self) -> None:
        """Stop the engine's processes; blocks for seconds."""
        engine, self._engine = self._engine, None
        self._serving = {}
        unguard(global_http_connection)
        if engine is not None:
            engine.shutdown(timeout=self.grace_s)  # SIGTERM first, and SIGKILL after so long
        self._cause.forget()


async def _log_stats(engine: AsyncLLMEngine, every_s: float) -> None:
    while not engine.errored:
        await asyncio.sleep(every_s)
        await engine.do_log_stats()
