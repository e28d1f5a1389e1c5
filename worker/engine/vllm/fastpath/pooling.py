"""Embeddings and scores past vLLM's serving classes, as texts.py does it with what is written.

An embedding is of one text; a score is of a pair, of which a cross-encoder gets one prompt (vLLM's
own class makes it, template and types of tokens included), and an embedding model two. A plan is
used only if it makes of its first request what vLLM has made, the numbers of its answer included.
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
    Lesson,
    Made,
    Plan,
    Unclear,
    around,
    as_key,
    is_text,
    note_contexts,
)

#: Fields of bodies that a plan may have: what they do is the same for all texts.
SHARED = frozenset(("model", "user", "truncate_prompt_tokens", "truncation_side", "use_activation"))
EMBEDDED = SHARED | {"encoding_format", "dimensions", "add_special_tokens"}
#: The spellings of the two sides of a score.
PAIRED = (
    ("text_1", "text_2"),
    ("data_1", "data_2"),
    ("queries", "documents"),
    ("queries", "items"),
)


def pooling_path(engine: Any, embedding: Any, scores: Any) -> FastPath:
    """Return the fast path of an AsyncLLM that pools, with its serving classes; None for none."""
    context = engine.vllm_config.model_config.max_model_len

    def plan_of(lesson: Lesson, body: dict[str, Any], request_id: str, answer: bytes) -> Plan:
        serving = embedding if "input" in body else scores
        return PoolingPlan(lesson, serving, request_id, answer, context)

    for serving in (embedding, scores):
        if serving is not None:
            note_contexts(serving)
    return FastPath(engine, key_of, plan_of)


def key_of(url: str, body: dict[str, Any]) -> bytes | None:
    """Return what is the same for all requests of a plain body's form; None if it is not plain."""
    names: tuple[str, ...]
    if url == EMBEDDINGS_URL:
        names, fields = ("input",), EMBEDDED
    elif url in SCORE_URLS:
        names = next((pair for pair in PAIRED if all(name in body for name in pair)), ())
        fields = SHARED
    else:
        return None
    rest = dict(body)
    given = [rest.pop(name, None) for name in names]
    texts = [_alone(value) for value in given]
    if not texts or not rest.keys() <= fields or not all(map(is_text, texts)):
        return None
    listed = [isinstance(value, list) for value in given]
    return as_key([url, names, listed, rest])


def _alone(value: Any) -> Any:
    """Return the one text of a list, as many clients send it."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def texts_of(body: dict[str, Any]) -> tuple[str, ...]:
    """Return the text, or the two, of a plain body."""
    if "input" in body:
        return (_alone(body["input"]),)
    first, second = next(pair for pair in PAIRED if all(name in body for name in pair))
    return _alone(body[first]), _alone(body[second])


#: The names of vLLM's PoolingIOProcessors that are known here.
ONE, TWO, CROSS = "embed", "bi-encoder", "cross-encoder"
Numbers = Callable[[Any], Any]


def as_array(data: Any) -> Any:
    """Return a tensor's numbers with as many digits as they have themselves."""
    return data.contiguous().numpy()


def as_list(data: Any) -> Any:
    """Return a tensor's numbers, each with the digits of a 64-bit one."""
    return data.tolist()


def as_base64(data: Any) -> Any:
    """Return a tensor's numbers as 32-bit floats in base64."""
    return b64encode(data.float().flatten().contiguous().numpy().tobytes()).decode()


def as_score(data: Any) -> Any:
    """Return the one number of a tensor."""
    return data.squeeze().item()


#: How an answer may have its numbers.
EMBEDDING_AS: tuple[Numbers, ...] = as_array, as_list, as_base64
SCORE_AS: tuple[Numbers, ...] = (as_score,)


class PoolingPlan(Plan):
    """One form's; of a pair a cross-encoder gets one prompt.

    Raises:
        ValueError: vLLM's answer, or how it came to it, has something that is not known here.
        Unclear: the answer would look the same written in another way.
    """

    pools = True

    def __init__(
        self, lesson: Lesson, serving: Any, request_id: str, answer: bytes, context: int
    ) -> None:
        found, (served,) = orjson.loads(answer), lesson.contexts
        self._processor = processor = serving.io_processor
        #: vLLM's ScoringRenderParams of the form's first pair, or what there is of them.
        self._asked = _asked(processor, served)
        self.tok_params, self.longest = self._asked["tok_params"], context
        self._pairs = "data_1" in self._asked
        more = ("supports_score_template", "model", "is_multimodal_model")
        #: vLLM does no more than to tokenize both texts. That is what it does with most models that
        #: write; for others its own method is called for each pair.
        self._plain = self._asked.get("chat_template") is None and not any(
            getattr(processor, name, True) for name in more
        )
        self._joins = processor.name == TWO
        runs = sorted(lesson.runs, key=lambda run: str(run.request.external_req_id))
        known = processor.name == CROSS if self._pairs else processor.name in (ONE, TWO)
        if not known or len(runs) != (2 if self._joins else 1) or found["id"] != served.request_id:
            raise ValueError("it is pooled in another way")
        self.requests = [run.request for run in runs]
        self._name_ids(served.request_id, request_id, serving.request_id_prefix)
        outputs = [run.output for run in runs]
        #: In 0.26 what stands between the two texts of a score is counted, too.
        self._between = found["usage"]["prompt_tokens"] - _length(outputs)
        self._read(found)
        self._learn(outputs, request_id, found)

    def _name_ids(self, name: str, request_id: str, prefix: str) -> None:
        """Learn how ids are made; in 0.26 they are random where no HTTP request had one."""
        self._prefix = f"{prefix}-"
        if request_id in name and name != self._prefix + request_id:
            raise ValueError("a name is made in another way")
        ends = [around(one.external_req_id, name) for one in self.requests]
        if any(before for before, _ in ends):
            raise ValueError("a name is made in another way")
        self.names = [(self._prefix, after) for _, after in ends]

    def _read(self, found: dict[str, Any]) -> None:
        (item,) = found["data"]
        self._name = "embedding" if "embedding" in item else "score"
        told = [
            *(v for k, v in found.items() if k not in ("id", "created", "data", "usage", *FIXED)),
            *(v for k, v in item.items() if k not in ("index", "object", self._name)),
            *(v for k, v in found["usage"].items() if k not in ("prompt_tokens", "total_tokens")),
        ]
        if (
            item["index"]
            or self._between not in (0, 1)
            or any(v not in (None, [], 0) for v in told)
        ):
            raise ValueError("the answer says more than its numbers")
        self._answer, self._item = found, item

    def _learn(self, outputs: Sequence[Any], request_id: str, found: dict[str, Any]) -> None:
        fitting: list[Numbers] = []
        for numbers in EMBEDDING_AS if self._name == "embedding" else SCORE_AS:
            self._numbers = numbers
            try:
                again = self._completion(outputs, request_id, found["created"])
            except TypeError:  # numbers that numpy does not have
                continue
            if again is not None and orjson.loads(again.body) | {"id": found["id"]} == found:
                fitting.append(numbers)
        if not fitting:
            raise ValueError("the answer is written in another way")
        if len(fitting) > 1:
            raise Unclear
        (self._numbers,) = fitting

    def prompts_of(self, body: dict[str, Any]) -> Sequence[Any]:
        texts = texts_of(body)
        return [texts] if self._pairs else texts

    def tokens(self, renderer: Any, prompts: Sequence[Any]) -> list[Made | None]:
        if not self._pairs:
            return super().tokens(renderer, prompts)
        tokenizer = renderer.get_tokenizer()
        made: list[Made | None] = [None] * len(prompts)
        joined = self._joined(tokenizer, prompts) if self._plain else None
        for place, pair in enumerate(prompts):
            with suppress(Exception):  # the full way tells its author
                if joined is None:
                    made[place] = self._rendered(pair)
                else:
                    made[place] = self._cut(tokenizer, {"prompt_token_ids": joined[place]})
        return made

    def _joined(self, tokenizer: Any, pairs: Sequence[tuple[str, str]]) -> Any:
        options = self.tok_params.get_encode_kwargs()
        if self._processor.use_sep_token:
            one, other = zip(*pairs, strict=True)
            made = tokenizer(text=list(one), text_pair=list(other), **options)
        else:
            made = tokenizer([one + other for one, other in pairs], **options)
        self._plain = "token_type_ids" not in made
        return made["input_ids"] if self._plain else None

    def _rendered(self, pair: tuple[str, str]) -> Made:
        first, second = pair
        made = self._processor.render({**self._asked, "data_1": first, "data_2": second})
        return made["prompts"]["prompt_token_ids"], made["params"].extra_kwargs

    def answer(
        self, outputs: Sequence[Any], body: dict[str, Any], request_id: str
    ) -> Completion | None:
        if any(getattr(output, "error", None) is not None for output in outputs):
            return None  # since 0.32 one says what went wrong; vLLM's class tells it as its server
        if any(output.outputs.data.numel() == 0 for output in outputs):
            raise Aborted  # vLLM makes such of what it was told to give up
        return self._completion(outputs, request_id, int(time.time()))

    def _completion(
        self, outputs: Sequence[Any], request_id: str, created: int
    ) -> Completion | None:
        """Write the answer from vLLM's PoolingRequestOutputs as its response classes would.

        None for a score that is no number: vLLM's class says so.
        """
        prompt = _length(outputs) + self._between
        if self._joins:
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


def _asked(processor: Any, context: Any) -> Any:
    """Return what vLLM's PoolingIOProcessor wants rendered of a request; the first, if several."""
    if hasattr(processor, "get_request_factory_online"):
        return processor.get_request_factory_online(context)[0]
    return {"tok_params": context.request.build_tok_params(processor.model_config)}


def _length(outputs: Sequence[Any]) -> int:
    return sum(len(output.prompt_token_ids) for output in outputs)
