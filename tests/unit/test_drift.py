"""The contract against the installed vLLM: field names, and the names the adapter relies on."""

from __future__ import annotations

import pytest

from contract.openai.body import CHAT_URL, COMPLETION_URL, field_names
from contract.openai.pooling import EMBEDDINGS_URL, RERANK_URLS, SCORE_URLS
from contract.settings import SettingsError
from worker.engine.vllm.options import REMOVED, SPECULATION
from worker.engine.vllm_settings import VllmSettings

pytestmark = pytest.mark.timeout(180)  # importing vLLM takes seconds

#: Fields of vLLM's requests that a queued body may not have, and why.
LEFT_OUT = {
    "stream": "a batch has no open connection (`false` is tolerated)",
    "stream_options": "a batch has no open connection",
    "stream_interval": "a batch has no open connection",
    "request_id": "warmq derives it, so that it is the same on every delivery",
}


@pytest.mark.parametrize("url", [CHAT_URL, COMPLETION_URL])
def test_our_field_names_are_vllms(url: str) -> None:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    theirs = set(
        {CHAT_URL: ChatCompletionRequest, COMPLETION_URL: CompletionRequest}[url].model_fields
    )
    ours = field_names(url)
    assert ours - theirs == set(), "vLLM does not know these (any more)"
    assert theirs - ours == set(LEFT_OUT), "new in vLLM: add them, or say here why not"


@pytest.mark.parametrize("url", [EMBEDDINGS_URL, SCORE_URLS[0], RERANK_URLS[0]])
def test_our_field_names_for_pooling_models_are_those_of_all_vllms_forms(url: str) -> None:
    from typing import get_args

    from vllm.entrypoints.pooling.embed.protocol import EmbeddingRequest
    from vllm.entrypoints.pooling.scoring.protocol import RerankRequest, ScoreRequest

    forms = {
        EMBEDDINGS_URL: get_args(get_args(EmbeddingRequest)[0]),
        SCORE_URLS[0]: get_args(ScoreRequest),
        RERANK_URLS[0]: (RerankRequest,),
    }[url]
    theirs = {name for form in forms for name in form.model_fields}
    assert theirs - field_names(url) == {"request_id"}
    # vLLM drops what a form does not know: this one is another form's, and does nothing
    assert field_names(url) - theirs <= {"chat_template_kwargs"}


def test_what_the_adapter_relies_on_is_there() -> None:
    import inspect

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
    # What worker/engine/vllm/detokenized.py reads, by its spelling there
    state = inspect.signature(RequestState).parameters
    assert {"detokenizer", "parent_req", "request_index"} <= set(state)
    wanted = ["finished", "delta"]
    assert list(inspect.signature(Detokenizer.get_next_output_text).parameters)[1:] == wanted
    # If this is no longer 16, vLLM has given up OpenAI's old default; so may our adapter.
    assert CompletionRequest(prompt="x").max_tokens == 16


def test_options_that_we_call_gone_are_gone_and_their_successors_are_there() -> None:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    known = make_arg_parser(FlexibleArgumentParser())._option_string_actions
    assert [name for name in (*REMOVED, *SPECULATION) if f"--{name}" in known] == []
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
    from worker.engine.vllm.engine import parse_engine_args

    settings = VllmSettings(model="models/tiny", engine_args=words)
    with pytest.raises(SettingsError) as caught:
        parse_engine_args(settings)
    assert caught.value.message.startswith("WARMQ_ENGINE_ARGS: ")
    assert part in caught.value.message


def test_engine_options_are_vllms_own() -> None:
    from worker.engine.vllm.engine import parse_engine_args

    words = (
        "--max-num-seqs 7 --dtype float32 --enforce-eager --override-generation-config '{\"a\": 1}'"
    )
    settings = VllmSettings(model="models/tiny", engine_args=words, served_model_name="x")
    args = parse_engine_args(settings)
    assert (args.max_num_seqs, args.dtype, args.enforce_eager) == (7, "float32", True)
    assert args.override_generation_config == {"a": 1}
    assert (args.model, args.served_model_name) == ("models/tiny", ["x"])
    assert not args.trust_remote_code
