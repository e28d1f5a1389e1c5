"""Answers embeddings and scores without vLLM's serving classes (the fast path).

An embedding has one text as prompt. A score has a pair of texts: a cross-encoder gets both as one
prompt, an embedding model gets two prompts.
"""

import math
import time
from base64 import b64encode
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import orjson

from contract.openai.pooling import EMBEDDINGS_URL, SCORE_URLS
from worker.engine import Completion
from worker.engine.vllm.errors import Aborted
from worker.engine.vllm.fastpath.learning import (
    FIXED,
    FastPath,
    Inconclusive,
    Observation,
    Replay,
    Tokens,
    as_key,
    is_short_text,
    observe_contexts,
    split_name,
)

#: Fields of a score request that have the same effect on all texts.
SHARED_FIELDS = frozenset(
    ("model", "user", "truncate_prompt_tokens", "truncation_side", "use_activation")
)
#: Fields of an embedding request that have the same effect on all texts.
EMBEDDING_FIELDS = SHARED_FIELDS | {"encoding_format", "dimensions", "add_special_tokens"}
#: The names under which requests give the two texts of a score.
PAIRED = (
    ("text_1", "text_2"),
    ("data_1", "data_2"),
    ("queries", "documents"),
    ("queries", "items"),
)


def pooling_path(engine: Any, embedding: Any, scores: Any) -> FastPath:
    """Return the fast path for a pooling model. A serving class that vLLM lacks is None."""
    context = engine.vllm_config.model_config.max_model_len

    def replay_of(
        observed: Observation, body: dict[str, Any], request_id: str, answer: bytes
    ) -> Replay:
        serving = embedding if "input" in body else scores
        return PoolingReplay(observed, serving, request_id, answer, context)

    for serving in (embedding, scores):
        if serving is not None:
            observe_contexts(serving)
    return FastPath(engine, key_of, replay_of)


def key_of(url: str, body: dict[str, Any]) -> bytes | None:
    """Return the key of a plain body's form (learning.py); None if the body is not plain."""
    names: tuple[str, ...] = ("input",)
    if url == EMBEDDINGS_URL:
        fields = EMBEDDING_FIELDS
    elif url in SCORE_URLS:
        names, fields = _pair_in(body), SHARED_FIELDS
    else:
        return None
    other_fields = dict(body)
    values = [other_fields.pop(name, None) for name in names]
    texts = [_single(value) for value in values]
    if not texts or not other_fields.keys() <= fields or not all(map(is_short_text, texts)):
        return None
    are_lists = [isinstance(value, list) for value in values]
    return as_key([url, names, are_lists, other_fields])


def texts_of(body: dict[str, Any]) -> tuple[str, ...]:
    """Return the text of a plain body, or the two texts of a score."""
    names = ("input",) if "input" in body else _pair_in(body)
    return tuple(_single(body[name]) for name in names)


def _pair_in(body: dict[str, Any]) -> tuple[str, ...]:
    return next((pair for pair in PAIRED if all(name in body for name in pair)), ())


def _single(value: Any) -> Any:
    """Return the text of a list of one text, which many clients send instead of the text."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


#: The names of vLLM's PoolingIOProcessors that the fast path supports.
EMBED, BI_ENCODER, CROSS_ENCODER = "embed", "bi-encoder", "cross-encoder"
#: The type of a function that writes a tensor's numbers.
WriteNumbers = Callable[[Any], Any]

#: The ways in which vLLM writes the numbers of an embedding: with the digits of their own type,
#: with the digits of 64-bit floats, or as 32-bit floats in base64.
EMBEDDING_AS: tuple[WriteNumbers, ...] = (
    lambda data: data.contiguous().numpy(),
    lambda data: data.tolist(),
    lambda data: b64encode(data.float().flatten().contiguous().numpy().tobytes()).decode(),
)
#: The way in which vLLM writes the number of a score.
SCORE_AS: tuple[WriteNumbers, ...] = (lambda data: data.squeeze().item(),)


class PoolingReplay(Replay):
    """Answers embeddings or scores of one form (learning.py) as vLLM answered the observed one.

    Raises:
        ValueError: vLLM's answer, or the way it was made, is not supported.
        Inconclusive: several ways of writing the numbers give this answer.
    """

    pools = True

    def __init__(
        self, observed: Observation, serving: Any, request_id: str, answer: bytes, context: int
    ) -> None:
        observed_answer, (pooling_context,) = orjson.loads(answer), observed.contexts
        self._processor = processor = serving.io_processor
        #: vLLM's ScoringRenderParams of the observed pair; only `tok_params` for an embedding.
        self._params = _render_params(processor, pooling_context)
        self.tok_params, self.longest = self._params["tok_params"], context
        self._pairs = "data_1" in self._params
        unsupported = ("supports_score_template", "model", "is_multimodal_model")
        #: Whether vLLM only tokenizes the two texts, as for most generative models. For other
        #: models vLLM's own method is called for each pair.
        self._only_tokenizes = self._params.get("chat_template") is None and not any(
            getattr(processor, name, True) for name in unsupported
        )
        self._is_bi_encoder = processor.name == BI_ENCODER
        runs = sorted(observed.runs, key=lambda run: str(run.request.external_req_id))
        is_supported = (
            processor.name == CROSS_ENCODER
            if self._pairs
            else processor.name in (EMBED, BI_ENCODER)
        )
        if (
            not is_supported
            or len(runs) != (2 if self._is_bi_encoder else 1)
            or observed_answer["id"] != pooling_context.request_id
        ):
            raise ValueError("vLLM pools this request in another way")
        self.requests = [run.request for run in runs]
        self._read_names(pooling_context.request_id, request_id, serving.request_id_prefix)
        outputs = [run.output for run in runs]
        #: Tokens of the separator between a score's two texts, which 0.26 adds to the usage.
        self._separators = observed_answer["usage"]["prompt_tokens"] - _length(outputs)
        self._read_answer(observed_answer)
        self._numbers = self._learn_numbers(outputs, request_id, observed_answer)

    def _read_names(self, name: str, request_id: str, prefix: str) -> None:
        """Learn how ids are made. In vLLM 0.26 they are random without an HTTP request."""
        self._prefix = f"{prefix}-"
        ends = [split_name(request.external_req_id, name) for request in self.requests]
        is_unlike = request_id in name and name != self._prefix + request_id
        if is_unlike or any(before for before, _ in ends):
            raise ValueError("vLLM makes this name in another way")
        self.names = [(self._prefix, after) for _, after in ends]

    def _read_answer(self, answer: dict[str, Any]) -> None:
        (item,) = answer["data"]
        self._name = "embedding" if "embedding" in item else "score"
        extra = [
            *(v for k, v in answer.items() if k not in ("id", "created", "data", "usage", *FIXED)),
            *(v for k, v in item.items() if k not in ("index", "object", self._name)),
            *(v for k, v in answer["usage"].items() if k not in ("prompt_tokens", "total_tokens")),
            item["index"],
        ]
        if self._separators not in (0, 1) or any(v not in (None, [], 0) for v in extra):
            raise ValueError("the answer has more than its numbers")
        self._answer, self._item = answer, item

    def _learn_numbers(
        self, outputs: Sequence[Any], request_id: str, answer: dict[str, Any]
    ) -> WriteNumbers:
        fitting: list[WriteNumbers] = []
        for numbers in EMBEDDING_AS if self._name == "embedding" else SCORE_AS:
            self._numbers = numbers
            try:
                completion = self._completion(outputs, request_id, answer["created"])
            except TypeError:  # numpy does not have this number type
                continue
            if (
                completion is not None
                and orjson.loads(completion.body) | {"id": answer["id"]} == answer
            ):
                fitting.append(numbers)
        if not fitting:
            raise ValueError("vLLM writes this answer in another way")
        if len(fitting) > 1:
            raise Inconclusive
        return fitting[0]

    def prompts_of(self, body: dict[str, Any]) -> Sequence[Any]:
        texts = texts_of(body)
        return [texts] if self._pairs else texts

    def tokens(self, renderer: Any, prompts: Sequence[Any]) -> list[Tokens | None]:
        if not self._pairs:
            return super().tokens(renderer, prompts)
        tokenizer = renderer.get_tokenizer()
        tokens: list[Tokens | None] = [None] * len(prompts)
        joined = self._joined(tokenizer, prompts) if self._only_tokenizes else None
        for place, pair in enumerate(prompts):
            with suppress(Exception):  # vLLM's serving class will report the error
                if joined is None:
                    tokens[place] = self._rendered(pair)
                else:
                    tokens[place] = self.cut(tokenizer, {"prompt_token_ids": joined[place]})
        return tokens

    def _joined(self, tokenizer: Any, pairs: Sequence[tuple[str, str]]) -> Any:
        options = self.tok_params.get_encode_kwargs()
        if self._processor.use_sep_token:
            first, second = zip(*pairs, strict=True)
            encoded = tokenizer(text=list(first), text_pair=list(second), **options)
        else:
            encoded = tokenizer([first + second for first, second in pairs], **options)
        self._only_tokenizes = "token_type_ids" not in encoded
        return encoded["input_ids"] if self._only_tokenizes else None

    def _rendered(self, pair: tuple[str, str]) -> Tokens:
        first, second = pair
        rendered = self._processor.render({**self._params, "data_1": first, "data_2": second})
        return rendered["prompts"]["prompt_token_ids"], rendered["params"].extra_kwargs

    def answer(
        self, outputs: Sequence[Any], body: dict[str, Any], request_id: str
    ) -> Completion | None:
        if any(getattr(output, "error", None) is not None for output in outputs):
            return None  # since 0.32 outputs may have an error; vLLM reports it
        if any(output.outputs.data.numel() == 0 for output in outputs):
            raise Aborted  # vLLM's output of an aborted request is empty
        return self._completion(outputs, request_id, int(time.time()))

    def _completion(
        self, outputs: Sequence[Any], request_id: str, created: int
    ) -> Completion | None:
        """Write the answer from vLLM's PoolingRequestOutputs, as its response classes do.

        Returns None for a score that is not a finite number: vLLM's class reports the error.
        """
        prompt = _length(outputs) + self._separators
        if self._is_bi_encoder:
            outputs = self._processor._post_process(outputs, 1)
        (output,) = outputs
        value = self._numbers(output.outputs.data)
        if self._name == "score" and not math.isfinite(value):
            return None
        answer = self._answer | {
            "id": self._prefix + request_id,
            "created": created,
            "data": [self._item | {self._name: value}],
            "usage": self._answer["usage"] | {"prompt_tokens": prompt, "total_tokens": prompt},
        }
        return Completion(orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY), prompt, 0)


def _render_params(processor: Any, context: Any) -> Any:
    """Return the parameters that vLLM's PoolingIOProcessor uses for a request."""
    if hasattr(processor, "get_request_factory_online"):
        return processor.get_request_factory_online(context)[0]
    return {"tok_params": context.request.build_tok_params(processor.model_config)}


def _length(outputs: Sequence[Any]) -> int:
    return sum(len(output.prompt_token_ids) for output in outputs)
