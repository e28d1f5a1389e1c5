"""How embeddings and scores of one form are run and answered without vLLM's serving classes.

As with texts (plans.py): a plan is made from what vLLM did with the first request of a form, and is
used only if it makes of that request what vLLM has made, the numbers of its answer included.
"""

import math
from base64 import b64encode
from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

import orjson

from contract.openai.pooling import EMBEDDINGS_URL, SCORE_URLS
from worker.engine import Completion
from worker.engine.vllm.lessons import Lesson
from worker.engine.vllm.plans import FIXED, LONGEST, LONGEST_KEY, Unclear, around

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
#: vLLM's PoolingIOProcessors for scores that are known here.
CROSS, TWO = "cross-encoder", "bi-encoder"
Numbers = Callable[[Any], Any]


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
    texts = [rest.pop(name, None) for name in names]
    if not texts or not rest.keys() <= fields or not all(map(_is_text, texts)):
        return None
    try:
        key = orjson.dumps([url, names, rest], option=orjson.OPT_SORT_KEYS)
    except TypeError:  # a number or a text that JSON has and orjson does not write
        return None
    return key if len(key) <= LONGEST_KEY else None


def _is_text(text: Any) -> bool:
    return isinstance(text, str) and 0 < len(text) <= LONGEST


def prompts_of(pairs: bool, body: dict[str, Any]) -> list[Any]:
    """Return what is tokenized of a plain body: its texts, or with `pairs` both as one."""
    if "input" in body:
        return [body["input"]]
    first, second = next(pair for pair in PAIRED if all(name in body for name in pair))
    texts = body[first], body[second]
    return [texts] if pairs else list(texts)


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


class PoolingPlan:
    """One form's; `tok_params` are vLLM's for its texts, `pairs` if it renders two as one.

    Raises:
        ValueError: vLLM's answer, or how it came to it, has something that is not known here.
        Unclear: the answer would look the same written in another way.
    """

    chat_params = None

    def __init__(self, lesson: Lesson, processor: Any, request_id: str, answer: bytes) -> None:
        found, asked = orjson.loads(answer), lesson.asked
        runs = sorted(lesson.runs, key=lambda run: str(run.request.external_req_id))
        self._processor, self._asked = processor, asked[0]
        self.tok_params = self._asked["tok_params"]
        self.pairs = "data_1" in self._asked
        self._joins = processor.name == TWO
        known = processor.name == CROSS if self.pairs else processor.name in ("embed", TWO)
        if not known or not len(runs) == len(asked) == (2 if self._joins else 1):
            raise ValueError("it is pooled in another way")
        self._requests = [run.request for run in runs]
        self._engine_ids = [around(one.external_req_id, request_id) for one in self._requests]
        self._answer_id = around(found["id"], request_id)
        self._read(found)
        self._learn([run.output for run in runs], request_id, found)

    def _read(self, found: dict[str, Any]) -> None:
        (item,) = found["data"]
        self._name = "embedding" if "embedding" in item else "score"
        told = [
            *(v for k, v in found.items() if k not in ("id", "created", "data", "usage", *FIXED)),
            *(v for k, v in item.items() if k not in ("index", "object", self._name)),
            *(v for k, v in found["usage"].items() if k not in ("prompt_tokens", "total_tokens")),
        ]
        if item["index"] or any(value not in (None, [], 0) for value in told):
            raise ValueError("the answer says more than its numbers")
        self._answer, self._item = found, item

    def _learn(self, outputs: Sequence[Any], request_id: str, found: dict[str, Any]) -> None:
        fitting: list[Numbers] = []
        for numbers in EMBEDDING_AS if self._name == "embedding" else SCORE_AS:
            self._numbers = numbers
            try:
                again = self.completion(outputs, request_id, found["created"])
            except TypeError:  # numbers that numpy does not have
                continue
            if again is not None and orjson.loads(again.body) == found:
                fitting.append(numbers)
        if not fitting:
            raise ValueError("the answer is written in another way")
        if len(fitting) > 1:
            raise Unclear
        (self._numbers,) = fitting

    def rendered(self, pair: tuple[str, str]) -> tuple[list[int], Any]:
        """Return a pair's tokens and what its pooling parameters say more; in vLLM's thread."""
        first, second = pair
        made = self._processor.render({**self._asked, "data_1": first, "data_2": second})
        return made["prompts"]["prompt_token_ids"], made["params"].extra_kwargs

    def check(self, inputs: Sequence[tuple[list[int], Any] | None]) -> None:
        """Compare what was made of the first request's texts with what vLLM has made.

        Raises:
            ValueError: it is something else.
        """
        for made, request in zip(inputs, self._requests, strict=True):
            more = request.pooling_params.extra_kwargs or {}
            if made is None or made[0] != request.prompt_token_ids or (made[1] or {}) != more:
                raise ValueError("its text is made into another prompt")

    def engine_requests(
        self, request_id: str, number: int, inputs: Sequence[tuple[list[int], Any]], now: float
    ) -> list[Any]:
        """Return the requests as EngineCore gets them; `number` makes their inner ids unique."""
        made = []
        for first, name, (tokens, more) in zip(
            self._requests, self._engine_ids, inputs, strict=True
        ):
            request = copy(first)
            request.external_req_id = request_id.join(name)
            request.request_id = f"{request.external_req_id}-{number:08x}"
            request.prompt_token_ids = tokens
            request.arrival_time = now
            if more or request.pooling_params.extra_kwargs:
                request.pooling_params = copy(first.pooling_params)
                request.pooling_params.extra_kwargs = more
            made.append(request)
        return made

    def completion(
        self, outputs: Sequence[Any], request_id: str, created: int
    ) -> Completion | None:
        """Write the answer from vLLM's PoolingRequestOutputs as its response classes would.

        None for a score that is no number: vLLM's class says so.
        """
        prompt = sum(len(output.prompt_token_ids) for output in outputs)
        if self._joins:
            outputs = self._processor._post_process(outputs, 1)
        (output,) = outputs
        value = self._numbers(output.outputs.data)
        if self._name == "score" and not math.isfinite(value):
            return None
        answer = self._answer | {
            "id": request_id.join(self._answer_id),
            "created": created,
            "data": [self._item | {self._name: value}],
            "usage": self._answer["usage"] | {"prompt_tokens": prompt, "total_tokens": prompt},
        }
        return Completion(orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY), prompt, 0)
