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

from worker.engine import Completion
from worker.engine.vllm.lessons import Lesson
from worker.engine.vllm.pairs import Pairs
from worker.engine.vllm.plans import FIXED, Unclear, around
from worker.engine.vllm.pooling_forms import texts_of

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


class PoolingPlan:
    """One form's; `tok_params` are vLLM's for its texts, `pairs` makes prompts of two, if it does.

    Raises:
        ValueError: vLLM's answer, or how it came to it, has something that is not known here.
        Unclear: the answer would look the same written in another way.
    """

    chat_params = None

    def __init__(self, lesson: Lesson, serving: Any, request_id: str, answer: bytes) -> None:
        found, (context,) = orjson.loads(answer), lesson.contexts
        self._processor = processor = serving.io_processor
        asked = _asked(processor, context)
        self.tok_params = asked["tok_params"]
        self.pairs = Pairs(processor, asked) if "data_1" in asked else None
        self._joins = processor.name == TWO
        runs = sorted(lesson.runs, key=lambda run: str(run.request.external_req_id))
        known = processor.name == CROSS if self.pairs else processor.name in (ONE, TWO)
        if not known or len(runs) != (2 if self._joins else 1) or found["id"] != context.request_id:
            raise ValueError("it is pooled in another way")
        self._requests = [run.request for run in runs]
        self._name_ids(context.request_id, request_id, serving.request_id_prefix)
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
        ends = [around(one.external_req_id, name) for one in self._requests]
        if any(before for before, _ in ends):
            raise ValueError("a name is made in another way")
        self._ends = [after for _, after in ends]

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
                again = self.completion(outputs, request_id, found["created"])
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
        """Return what is tokenized of a plain body: its texts, or both as one."""
        texts = texts_of(body)
        return texts if self.pairs is None else [texts]

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
        name = self._prefix + request_id
        for first, end, (tokens, more) in zip(self._requests, self._ends, inputs, strict=True):
            request = copy(first)
            request.external_req_id = name + end
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
