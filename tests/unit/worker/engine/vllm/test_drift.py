"""The contract against the installed vLLM: field names, and the names the adapter relies on."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from contract.openai.body import (
    CHAT_URL,
    COMPLETION_URL,
    COUNT_TOKENS_URL,
    MESSAGES_URL,
    RESPONSES_URL,
    TOKENIZE_URL,
    field_names,
)
from contract.openai.fields import REFUSED
from contract.openai.pooling import EMBEDDINGS_URL, RERANK_URLS, SCORE_URLS
from contract.settings import SettingsError
from demo.stack import ROOT
from worker.engine.vllm.options import REMOVED, SPECULATION, is_back
from worker.engine.vllm.preflight import NEWEST, OLDEST, check_release, vllm_version
from worker.engine.vllm_settings import VllmSettings
from worker.machine.packages import Release, installed

pytestmark = pytest.mark.timeout(180)  # importing vLLM takes seconds

#: Fields of vLLM's requests that a queued body may not have, and why.
LEFT_OUT = {
    "stream": "a batch has no open connection (`false` is tolerated)",
    "stream_options": "a batch has no open connection",
    "stream_interval": "a batch has no open connection",
    "request_id": "warmq derives it, so that it is the same on every delivery",
}
#: The same of some releases only.
LEFT_OUT_IF_THERE = {
    "mm_payload": "since 0.32: for vLLM's render endpoints, ignored where text is generated",
    "return_mm_kwargs": "since 0.32: its older spelling",
}
#: Fields that newer releases have in other forms than chats and completions: refused as unknown.
NEWER = {
    MESSAGES_URL: {"thinking", "watermarking"},
    COUNT_TOKENS_URL: {"thinking", "output_config"},
    RESPONSES_URL: {
        "min_p", "stop_token_ids", "prompt_cache_options", "prompt_cache_retention",
        "safety_identifier", "spaces_between_special_tokens",
    },
}  # fmt: skip
#: Fields that a queued body may have and some supported releases lack: (first, last) that has one.
NOT_IN_ALL: dict[str, tuple[Release, Release]] = {
    "watermarking": ((0, 30), NEWEST),
    "return_assistant_tokens_mask": (OLDEST, (0, 30)),
    "return_weight_versions": ((0, 33), NEWEST),
}


def lacking_here() -> set[str]:
    """Return the fields that the installed release is known to lack."""
    here = installed().release_of_vllm[:2]
    return {name for name, (first, last) in NOT_IN_ALL.items() if not first <= here <= last}


@pytest.mark.parametrize("url", [CHAT_URL, COMPLETION_URL])
def test_our_field_names_are_those_of_all_supported_releases(url: str) -> None:
    from worker.engine.vllm.request_classes import make_request_classes

    form = dict(zip((CHAT_URL, COMPLETION_URL), make_request_classes(1024, 16, None), strict=True))[
        url
    ]
    ours, theirs = field_names(url), set(form.model_fields)
    assert ours - theirs == lacking_here() & ours, "vLLM does not know these (any more)"
    new = theirs - ours - LEFT_OUT_IF_THERE.keys()
    assert new == set(LEFT_OUT), "new in vLLM: add them, or say here why not"


def test_the_installed_release_is_one_of_those_that_are_said_to_be_tested() -> None:
    assert OLDEST <= installed().release_of_vllm[:2] <= NEWEST
    assert list(check_release(installed())) == []


def test_what_the_running_release_lacks_is_known_by_name() -> None:
    from worker.engine.vllm.request_classes import make_request_classes, unknown_fields

    chat, completion = make_request_classes(1024, 16, None)
    both = unknown_fields(CHAT_URL, chat) | unknown_fields(COMPLETION_URL, completion)
    assert both == lacking_here()


#: Imports argv[2] and prints what vLLM calls deprecated of what files under argv[1] import. A
#: deprecated module warns in its own name, so who imports it is looked for in the stack.
WATCHED = """
import importlib, json, sys, traceback, warnings
told = []
def show(message, category, filename, lineno, *_):
    stack = [frame.filename for frame in traceback.extract_stack()[:-1]]
    others = [name for name in stack if "importlib" not in name and "warnings.py" not in name]
    callers = [name for name in others if name != filename] or [filename]
    if category is DeprecationWarning and sys.argv[1] in (filename + callers[-1]):
        told.append(str(message))
warnings.showwarning = show
warnings.simplefilter("always", DeprecationWarning)
importlib.import_module(sys.argv[2])
print()
print(json.dumps(told))
"""


def deprecated(folder: Path, module: str, path: Path = ROOT) -> list[str]:
    """Return what vLLM says about what files of a folder import when a module is imported."""
    done = subprocess.run(
        [sys.executable, "-c", WATCHED, str(folder), module],
        capture_output=True, text=True, check=True, timeout=150,
        env={**os.environ, "PYTHONPATH": str(path)},
    )  # fmt: skip
    told: list[str] = json.loads(done.stdout.splitlines()[-1])
    return told


def test_our_imports_of_vllm_use_nothing_that_vllm_calls_deprecated() -> None:
    assert deprecated(ROOT / "worker", "worker.engine.vllm.engine") == []


def test_an_import_that_vllm_calls_deprecated_would_be_seen(tmp_path: Path) -> None:
    (tmp_path / "old.py").write_text("from vllm.entrypoints.openai.api_server import run_server\n")
    (told,) = deprecated(tmp_path, "old", tmp_path)
    assert "deprecated" in told


def test_our_field_names_for_pooling_models_are_those_of_all_vllms_forms() -> None:
    from worker.engine.vllm.names import EmbeddingRequest, RerankRequest, ScoreRequest
    from worker.engine.vllm.request_classes import fields_of, unknown_fields

    forms = (EmbeddingRequest, ScoreRequest, RerankRequest)
    for url, form in zip((EMBEDDINGS_URL, SCORE_URLS[0], RERANK_URLS[0]), forms, strict=True):
        assert fields_of(form) - field_names(url) == {"request_id"}
        assert unknown_fields(url, form) == set()


#: Fields of vLLM's that need a server which remembers, or that vLLM itself refuses.
FORGETTING = {"background", "store", "previous_response_id", "prompt"}


def test_our_field_names_for_messages_responses_and_tokens_are_vllms() -> None:
    from worker.engine.vllm.names import (
        AnthropicCountTokensRequest,
        AnthropicMessagesRequest,
        ResponsesRequest,
        TokenizeRequest,
    )
    from worker.engine.vllm.request_classes import fields_of, unknown_fields

    forms = {
        MESSAGES_URL: (AnthropicMessagesRequest, {"stream"}),
        COUNT_TOKENS_URL: (AnthropicCountTokensRequest, set()),
        RESPONSES_URL: (ResponsesRequest, {"stream", "request_id"} | FORGETTING),
        TOKENIZE_URL: (TokenizeRequest, set()),
    }
    for url, (form, left_out) in forms.items():
        new = NEWER.get(url, set()) | LEFT_OUT_IF_THERE.keys()
        assert fields_of(form) - field_names(url) - new == left_out, url
        assert unknown_fields(url, form) == lacking_here() & field_names(url), url
        for name in left_out - {"stream", "request_id"}:
            assert name in REFUSED[url]


def test_what_the_adapter_relies_on_is_there() -> None:
    from vllm import AsyncLLMEngine
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer as Detokenizer
    from vllm.v1.engine.output_processor import RequestState
    from vllm.v1.metrics.loggers import StatLoggerBase

    import worker.engine.vllm.engine  # noqa: F401 - its imports are most of what it relies on

    assert "stat_loggers" in inspect.signature(AsyncLLMEngine.from_engine_args).parameters
    assert {"record", "log_engine_initialized"} <= StatLoggerBase.__abstractmethods__
    assert inspect.iscoroutinefunction(OpenAIServingChat.create_chat_completion)
    assert inspect.iscoroutinefunction(OpenAIServingCompletion.create_completion)
    assert isinstance(AsyncLLMEngine.errored, property)
    assert callable(AsyncLLMEngine.shutdown)
    assert callable(CompletionRequest.build_tok_params)
    # What worker/engine/vllm/serving.py reads, by its spelling there
    state = inspect.signature(RequestState).parameters
    assert {"detokenizer", "parent_req", "request_index"} <= set(state)
    wanted = ["finished", "delta"]
    assert list(inspect.signature(Detokenizer.get_next_output_text).parameters)[1:] == wanted
    # What worker/engine/vllm/serving.py calls, and stands in for
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
    from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
    from vllm.entrypoints.serve.tokenize.serving import ServingTokenization

    assert issubclass(AnthropicServingMessages, OpenAIServingChat)
    for serving in (AnthropicServingMessages, OpenAIServingResponses):
        ends = list(inspect.signature(serving._raise_if_error).parameters)
        assert ends == ["self", "finish_reason", "request_id"]
    for name in ("create_messages", "count_tokens"):
        assert inspect.iscoroutinefunction(getattr(AnthropicServingMessages, name))
    assert inspect.iscoroutinefunction(OpenAIServingResponses.create_responses)
    assert inspect.iscoroutinefunction(ServingTokenization.create_tokenize)
    # What worker/engine/vllm/adapters.py calls and changes
    from vllm.entrypoints.openai.models.serving import OpenAIServingModels

    assert inspect.iscoroutinefunction(AsyncLLMEngine.add_lora)
    assert inspect.iscoroutinefunction(AsyncLLMEngine.remove_lora)
    made = inspect.getsource(OpenAIServingModels.__init__)
    assert "self.lora_requests" in made and "self.lora_id_counter" in made
    # What worker/engine/vllm/priorities.py sets and stands in for
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.core_client import AsyncMPClient

    assert {"priority", "arrival_time"} <= set(EngineCoreRequest.__struct_fields__)
    assert inspect.iscoroutinefunction(AsyncMPClient.add_request_async)
    assert list(inspect.signature(AsyncMPClient.add_request_async).parameters)[1:] == ["request"]
    # If this is no longer 16, vLLM has given up OpenAI's old default; so may our adapter.
    assert CompletionRequest(prompt="x").max_tokens == 16


def names_of(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_what_several_front_ends_rely_on_is_there() -> None:
    from vllm import AsyncEngineArgs, AsyncLLMEngine
    from vllm.v1.engine import core, core_client, utils
    from vllm.v1.engine.core_client import AsyncMPClient, BackgroundResources, MPClient

    from worker.engine.vllm.names import get_open_zmq_ipc_path

    # What worker/engine/vllm/clients.py stands in for, and adds to
    launch = ["vllm_config", "executor_class", "log_stats", "addresses"]
    assert names_of(core_client.launch_core_engines)[:4] == launch
    started = " ".join(inspect.getsource(MPClient.__init__).split())
    assert "launch_core_engines( vllm_config, executor_class, log_stats, addresses )" in started
    fields = {field.name for field in dataclasses.fields(utils.EngineZmqAddresses)}
    assert {"inputs", "outputs", "frontend_stats_publish_address"} <= fields
    assert get_open_zmq_ipc_path().startswith("ipc:")
    # EngineCore connects to all of them, greets each client, and answers the one that has asked.
    sockets = inspect.getsource(core.EngineCoreProc.process_input_sockets)
    assert "for input_address in input_addresses" in sockets and "bind=False" in sockets
    assert "for input_socket in input_sockets: # Send initial message" in " ".join(sockets.split())
    sockets = inspect.getsource(core.EngineCoreProc.process_output_sockets)
    assert "for output_path in output_paths" in sockets and "sockets[client_index]" in sockets
    # What worker/engine/vllm/attached.py gives a client, and ends
    args = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    assert {"_api_process_count", "_api_process_rank"} <= args
    given = {
        "stat_loggers",
        "disable_log_stats",
        "client_addresses",
        "client_count",
        "client_index",
    }
    assert given <= set(names_of(AsyncLLMEngine.from_vllm_config))
    for name in ("input_address", "output_address", "stats_update_address"):
        assert f'client_addresses["{name}"]' in started or f'.get("{name}")' in started
    assert "request.client_index = self.client_index" in inspect.getsource(AsyncMPClient)
    assert "engine_dead" in {field.name for field in dataclasses.fields(BackgroundResources)}
    assert callable(AsyncMPClient.shutdown)
    # What worker/engine/vllm/processes.py calls for a client that died
    assert inspect.iscoroutinefunction(AsyncMPClient.call_utility_async)
    assert "getattr(self, method_name)" in inspect.getsource(core.EngineCoreProc)
    assert names_of(core.EngineCore.abort_requests)[1:] == ["request_ids"]


def test_what_the_traces_rely_on_is_there() -> None:
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.output_processor import OutputProcessor

    from worker.engine.vllm.names import IterationStats
    from worker.engine.vllm.stats import USED

    assert IterationStats is not None and IterationStats()
    made = inspect.getsource(OutputProcessor.__init__)
    assert [n for n in USED if not hasattr(OutputProcessor, n) and f"self.{n}" not in made] == []
    assert names_of(OutputProcessor.add_request)[1] == "request"
    outputs = ["engine_core_outputs", "engine_core_timestamp", "iteration_stats"]
    assert names_of(OutputProcessor.process_outputs)[1:4] == outputs
    called = " ".join(inspect.getsource(AsyncLLM).split()).replace("( ", "(")
    assert "process_outputs(outputs_slice, outputs.timestamp, iteration_stats" in called
    traced = ["engine_core_output", "req_state", "iteration_stats"]
    assert names_of(OutputProcessor.do_tracing)[1:] == traced


def test_options_that_we_call_gone_are_gone_and_their_successors_are_there() -> None:
    from worker.engine.vllm.names import FlexibleArgumentParser, make_arg_parser

    known = make_arg_parser(FlexibleArgumentParser())._option_string_actions
    gone = [n for n in (*REMOVED, *SPECULATION) if not is_back(n, installed())]
    assert [name for name in gone if f"--{name}" in known] == []
    assert [n for n in REMOVED if n not in gone and f"--{n}" not in known] == []
    named = {word for text in REMOVED.values() for word in text.split() if word.startswith("--")}
    assert [name for name in (*named, "--speculative-config") if name not in known] == []


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ("--no-such-option", "unrecognized arguments: --no-such-option"),
        ("--max-num-seqs many", "argument --max-num-seqs"),
        ("--dtype float13", "argument --dtype: invalid choice"),
        ("--max-num-seqs", "expected one argument"),
    ],
)
def test_a_wrong_engine_option_is_a_settings_error_in_vllms_words(words: str, part: str) -> None:
    from worker.engine.vllm.arguments import parse_engine_args

    settings = VllmSettings(model="models/tiny", engine_args=words)
    with pytest.raises(SettingsError) as caught:
        parse_engine_args(settings)
    assert caught.value.message.startswith("WARMQ_ENGINE_ARGS: ")
    assert part in caught.value.message
    assert caught.value.message.endswith(f"`vllm serve` {vllm_version(installed())}")


def test_engine_options_are_vllms_own() -> None:
    from worker.engine.vllm.arguments import parse_engine_args

    words = (
        "--max-num-seqs 7 --dtype float32 --enforce-eager --override-generation-config '{\"a\": 1}'"
    )
    settings = VllmSettings(model="models/tiny", engine_args=words, served_model_name="x")
    args = parse_engine_args(settings)
    assert (args.max_num_seqs, args.dtype, args.enforce_eager) == (7, "float32", True)
    assert args.override_generation_config == {"a": 1}
    assert (args.model, args.served_model_name) == ("models/tiny", ["x"])
    assert not args.trust_remote_code


@pytest.mark.parametrize(
    ("words", "policy"),
    [("", "priority"), ("--scheduling-policy fcfs", "fcfs"), ("--scheduling_policy=fcfs", "fcfs")],
)
def test_requests_start_by_priority_unless_the_user_sets_another_policy(
    words: str, policy: str
) -> None:
    from worker.engine.vllm.arguments import parse_engine_args

    settings = VllmSettings(model="models/tiny", engine_args=words)
    assert parse_engine_args(settings).scheduling_policy == policy
