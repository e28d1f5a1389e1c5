"""Runs requests in an AsyncLLMEngine in this process, through vLLM's own OpenAI serving classes.

These classes apply chat templates, check lengths, and make sampling parameters and responses. So a
queued request gets the answer that vLLM's server would give. Everything imported from vLLM is in
names.py.
"""

import asyncio
import gc
import logging
import multiprocessing
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from starlette.datastructures import State

from contract.errors import EngineDead, RequestFailed, RequestRejected, WarmqError
from contract.openai.pooling import POOLING_TYPES
from contract.settings import SettingsError
from worker.engine import Capacity, Completion, EngineRequest, engine_log
from worker.engine.rbln.model import read_artefact
from worker.engine.shutdown import KILL_GRACE_S, children_shielded, end_children
from worker.engine.vllm import errors, limits, names, priorities, serving, stats
from worker.engine.vllm.adapters import Adapters
from worker.engine.vllm.arguments import parse_engine_args, refusals
from worker.engine.vllm.clients import EngineClients
from worker.engine.vllm.fastpath import fast_path
from worker.engine.vllm.fastpath.learning import FastPath
from worker.engine.vllm.grammars import TENANT, Grammars
from worker.engine.vllm.identity import engine_identity
from worker.engine.vllm.media import guard, unguard
from worker.engine.vllm.memory import memory_remedy
from worker.engine.vllm.processes import ABORT_CLIENT, ORDERLY_END, Warnings, quieten
from worker.engine.vllm.queue_limits import FullQueue, queue_full
from worker.engine.vllm.sleeping import QUESTIONS, answer_of
from worker.engine.vllm.turns import SequenceSlots
from worker.engine.vllm_settings import VllmSettings, statistics_every_s
from worker.machine.gpu_memory import gpu_memory

log = logging.getLogger(__name__)


class VllmEngine:
    """An AsyncLLMEngine that is built from the settings."""

    def __init__(self, settings: VllmSettings) -> None:
        self._settings = settings
        self._args = parse_engine_args(settings)
        self._progress = stats.Progress()
        self._killed = self._guarded = False
        #: Child processes that this process had before it built this engine.
        self._before: set[Any] = set()
        self._warnings = Warnings(relay=engine_log.in_file())
        self._engine: names.AsyncLLMEngine | None = None
        self._names: set[str] = set()
        self.grace_s = KILL_GRACE_S if settings.kill_grace_s is None else settings.kill_grace_s
        #: Whether a request's `model` has to be a served name; otherwise any name is accepted.
        self._fixed_name = settings.served_model_name is not None
        self._serving: dict[str, serving.Served] = {}
        self._texts = serving.RunningTexts()
        self._fast: FastPath | None = None
        self._adapters: Adapters | None = None
        self._slots = SequenceSlots(self._progress)
        self._queue = FullQueue()
        self._grammars = Grammars()
        self._context, self._identity = 0, ""
        self._folders = errors.Folders([])
        self._clients = EngineClients(settings.front_ends or 1)

    def configure(self) -> None:
        """Let vLLM check the configuration, which is also the first step of `build`.

        Raises:
            SettingsError: vLLM refuses the configuration.
        """
        with refusals(Exception):  # the libraries raise many error types
            names.AsyncEngineArgs.from_cli_args(self._args).create_engine_config()

    def build(self) -> None:
        ORDERLY_END.ending = False
        self._before = set(multiprocessing.active_children())
        try:
            with refusals(), children_shielded():
                self._engine = self._connect()
        except SettingsError:
            raise
        except Exception as error:
            raise self._died(error) from error
        quieten()
        stats.keep_no_statistics(self._engine, self._args)
        if self._settings.traces is not None:
            stats.trace_requests(self._engine)
        self._warnings.processes = self._processes()
        # The objects made so far live as long as the engine. Collecting garbage among them would
        # stop the drain's loop for 0.37 s at a time (docs/explanation/performance.md). After
        # gc.unfreeze() a rebuild also frees the objects of the dead engine.
        gc.unfreeze()
        gc.collect()
        gc.freeze()

    def _connect(self) -> names.AsyncLLMEngine:
        args = names.AsyncEngineArgs.from_cli_args(self._args)
        args._api_process_count = self._clients.count
        loggers = [lambda config, index=0: self._progress]
        with self._clients.started():
            return names.AsyncLLMEngine.from_engine_args(args, stat_loggers=loggers)

    def new_client(self) -> dict[str, Any] | None:
        return self._clients.new(self._args)

    async def abort_client(self, client: dict[str, Any]) -> int:
        if self._engine is None or self.dead():
            return 0
        return int(await self._engine.engine_core.call_utility_async(ABORT_CLIENT, client["index"]))

    async def start(self) -> Capacity:
        engine, settings, state = self._engine, self._settings, State()
        if engine is None:
            raise EngineDead("build() has not run")
        await names.init_app_state(engine, state, self._args, await engine.get_supported_tasks())
        if not settings.media_private_networks:
            refused = partial(names.VLLMValidationError, parameter="image_url")
            guard(names.global_http_connection, refused)
            self._guarded = True
        context = self._context = engine.vllm_config.model_config.max_model_len
        if settings.known_answers:
            self._identity = await asyncio.to_thread(engine_identity, settings, context)
        self._serving = serving.by_url(state, context, settings.default_max_tokens)
        limits.guard_log_probabilities(getattr(engine, "renderer", None))
        self._grammars.guard(engine)
        priorities.guard(engine)
        limits.guard_vocabulary(engine)
        self._slots.guard(engine, settings.front_ends or 1, serving.pooling(state))
        self._fast = fast_path(engine, self._args, state)
        serving.log_unknown_fields(self._serving)
        models = state.openai_serving_models
        self._names = {m.name for m in models.base_model_paths} | set(models.lora_requests)
        self._folders = errors.Folders([
            (str(self._args.model), models.base_model_paths[0].name),
            *((folder, name) for name, folder in settings.engine_args.adapters.items()),
            *([(folder, "WARMQ_ADAPTERS")] if (folder := settings.adapters) else []),
        ])  # fmt: skip
        if folder:
            self._adapters = Adapters.of(folder, engine, models, self.dead)
        # With adapters, a request's `model` chooses one.
        self._fixed_name |= bool(models.lora_requests or folder)
        if (every_s := statistics_every_s()) is not None:
            self._stats = asyncio.create_task(stats.log_stats(engine, every_s))
        return self._capacity(engine.vllm_config, sorted(models.lora_requests))

    def _capacity(self, config: Any, adapters: list[str]) -> Capacity:
        """Return the engine's capacity, from the VllmConfig that EngineCore has completed."""
        model, parallel, cache = str(self._args.model), config.parallel_config, config.cache_config
        compiled = read_artefact(model)
        blocks = (cache.num_gpu_blocks or 0) * parallel.data_parallel_size
        return Capacity(
            max_num_seqs=config.scheduler_config.max_num_seqs * parallel.data_parallel_size,
            max_model_len=self._context,
            model=model,
            adapters=tuple(adapters),
            on_demand=None if self._adapters is None else self._adapters.listed,
            details={
                "engine": "vllm",
                "device": _device_of(config),
                **({"buckets": compiled.buckets} if compiled else {}),
                "dtype": str(config.model_config.dtype),
                "served_names": sorted(self._names),
                "urls": sorted(self._serving),
                "tensor_parallel_size": parallel.tensor_parallel_size,
                "pipeline_parallel_size": parallel.pipeline_parallel_size,
                "data_parallel_size": parallel.data_parallel_size,
            },
            kv_tokens=blocks * (cache.block_size or 0) or None,
            prefix_caching=bool(cache.enable_prefix_caching),
            parses_chats=serving.parses_chats(config),
            one_step=config.model_config.runner_type == "pooling",
            identity=lambda: self._identity,
        )

    async def generate(self, request: EngineRequest, request_id: str) -> Completion:
        """Run one request. Raises only WarmqError or CancelledError."""
        try:
            if self.dead():
                raise EngineDead("the engine is dead", inside=False)
            serving.refuse_unserved(self._serving, request.url, request.body)
            # These context variables are set in the request's task.
            TENANT.set(request.tenant)
            priorities.PRIORITY.set(request.priority)
            if request.trace is not None:
                stats.TRACE.set(request.trace)
            if self._adapters is None:
                return await self._answer(request, request_id)
            async with self._adapters.using(request.body.get("model")):
                return await self._answer(request, request_id)
        except Exception as error:
            own_error = self._as_own_error(error, request)
            self._folders.hide(own_error)
            if own_error is error:
                raise
            raise own_error from error
        finally:
            self._texts.forget(request_id)

    def _as_own_error(self, error: Exception, request: EngineRequest) -> WarmqError:
        if isinstance(error, WarmqError):
            return error
        if isinstance(error, errors.Aborted):
            return self._aborted()
        if isinstance(error, errors.CLIENT_ERRORS):
            return errors.rejected(error, request.body)
        if isinstance(error, names.EngineDeadError) or self.dead():
            return self._died(error)
        is_refusal = isinstance(error, errors.REFUSALS) and not errors.is_ours(error)
        if is_refusal or errors.in_media(error):
            return errors.rejected(error, request.body)
        return errors.failed(error, request.body)

    async def _answer(self, request: EngineRequest, request_id: str) -> Completion:
        """Run one request, on the fast path if it has learned the request's form."""
        url, body = request.url, request.body
        fast = self._fast if self._slots.begin(body) else None
        key = fast.key_of(url, body) if fast is not None else None
        if fast is None or key is None:
            return await self._serve(request, request_id)
        if completion := await fast.generate(body, request_id, key):
            return completion
        with fast.observing(key) as learn:
            completion = await self._serve(request, request_id)
            if learn is not None:
                await learn(body, request_id, completion.body)
        return completion

    async def _serve(self, request: EngineRequest, request_id: str) -> Completion:
        """Run one request through vLLM's serving class for its url."""
        limits.refuse_long(request.url, request.body, self._context)
        limits.refuse_inflated(request.body)
        limits.note_log_probabilities(request.body, self._settings.default_max_tokens)
        body, model = self._body_of(request, request_id), request.body.get("model")
        served = self._serving[request.url]
        while True:
            response = None
            with suppress(*names.QUEUE_FULL):
                response = await served.call(served.read(dict(body)))
            if (task := asyncio.current_task()) is not None and task.cancelling():
                # vLLM's class for completions answers a cancellation with an error response.
                raise asyncio.CancelledError
            if response is not None and not queue_full(response):
                return self._completion_of(request.url, response, model)
            await self._queue.wait(self._engine, request.body)

    def _body_of(self, request: EngineRequest, request_id: str) -> dict[str, Any]:
        """Return the body that vLLM's request class gets."""
        body, model = dict(request.body), request.body.get("model")
        if model not in self._names and not self._fixed_name:
            body.pop("model", None)  # any name stands for the one served model
        if request.url in serving.OTHER_URLS:
            return serving.body_for(request.url, body, request_id)
        prompts = body.get("prompt")
        if isinstance(prompts, list) and not isinstance(prompts[0], int):
            self._texts.prompts[request_id] = len(prompts)
        body["request_id"] = request_id
        return body

    def text_so_far(self, request_id: str) -> list[str]:
        """Return each choice's text from the detokenizer, before any parser of vLLM."""
        if self._engine is None:
            return []
        return self._texts.read(self._engine.output_processor, request_id)

    def on_text(self, call: Callable[[], None]) -> None:
        self._progress.stepped = call  # called when a step's tokens are detokenized

    def _aborted(self) -> EngineDead:
        # EngineCore aborts requests when it gets SIGTERM. A request may have caused the engine's
        # death only if this worker sent SIGTERM because the engine made no step.
        return EngineDead("the engine was asked to end", inside=self._killed)

    def _completion_of(self, url: str, response: Any, model: str | None) -> Completion:
        if isinstance(response, names.ErrorResponse):
            raise self._refused(response)
        if url in POOLING_TYPES:
            return serving.pooled(bytes(response.body), model)
        if url in serving.OTHER_URLS:
            return serving.completion_of(url, response, model)
        if any(choice.finish_reason == "abort" for choice in response.choices):
            raise self._aborted()
        if model:
            response.model = model
        usage = response.usage
        return Completion(
            response.model_dump_json().encode(), usage.prompt_tokens, usage.completion_tokens or 0
        )

    def _refused(self, response: names.ErrorResponse) -> WarmqError:
        error = response.error
        if self.dead():
            return self._died(error.message)
        if error.code >= 500 and error.code != serving.NOT_IMPLEMENTED:
            return RequestFailed(error.message)
        if error.code != 404:
            return RequestRejected(error.message, field=error.param)
        message = f"{error.message} This worker serves {', '.join(sorted(self._names))}"
        return RequestRejected(message, code="model_not_found", field=error.param)

    def _died(self, error: object) -> EngineDead:
        text = f"{error}\n{self._warnings.read()}".strip()  # the cause may be in the log only
        return EngineDead(f"{memory_remedy(text) or ''}\n{text}".strip())

    # -- sleep, between two stays of the model -------------------------------------------

    async def sleep(self) -> None:
        if self._engine is None or self.dead():
            raise EngineDead("the engine is dead", inside=False)
        await self._engine.sleep(level=1)

    async def wake_up(self) -> None:
        if self._engine is None or self.dead():
            raise EngineDead("the engine is dead", inside=False)
        await self._engine.wake_up()
        self._progress.at = time.monotonic()

    def device_used(self) -> int | None:
        memory = gpu_memory()
        return None if memory is None else memory.total - memory.free

    async def answer_fixed_question(self) -> str:
        url = next(
            (question_url for question_url in QUESTIONS if question_url in self._serving), None
        )
        if url is None:
            raise RequestFailed(f"no fixed question is known for {', '.join(self._serving)}")
        request = EngineRequest(url, dict(QUESTIONS[url]))
        return answer_of((await self.generate(request, "fixed-question")).body)

    def cached_prompt_tokens(self) -> int:
        return self._progress.cached_tokens

    def dead(self) -> bool:
        return self._engine is None or bool(self._engine.errored)

    def last_progress(self) -> float:
        return self._progress.at

    def kill(self) -> None:
        """Send the engine's processes SIGTERM, and SIGKILL after the grace period."""
        self._killed = True
        self._grammars.end()
        quieten()  # also for a build that is interrupted
        end_children(self._warnings.processes or self._processes(), self.grace_s)

    def _processes(self) -> list[Any]:
        """Return the child processes that have started since the build began."""
        return [p for p in multiprocessing.active_children() if p not in self._before]

    def shutdown(self) -> None:
        engine, self._engine = self._engine, None
        self._serving, self._fast = {}, None
        if self._adapters is not None:
            self._adapters.close()
        self._grammars.end()
        ORDERLY_END.ending = True
        quieten()  # since 0.31 vLLM makes new log handlers for each engine
        if self._guarded:
            self._guarded = False
            unguard(names.global_http_connection)
        if engine is not None:
            engine.shutdown(timeout=self.grace_s)  # SIGTERM, then SIGKILL after the grace period
        self._warnings.remove()


def _device_of(config: Any) -> str:
    """Return the card's name (NVIDIA H100 80GB HBM3), or the device type (cpu, cuda)."""
    device_type = str(config.device_config.device_type)
    try:
        return str(names.current_platform.get_device_name() or device_type)
    except Exception:  # for display only; plugins may raise any exception
        return device_type
