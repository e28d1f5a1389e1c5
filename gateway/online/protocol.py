"""What online resources look like over the wire; answers of models are vLLM's own bytes."""

from typing import Literal

from msgspec import Struct


class Model(Struct, frozen=True):
    """One model that may be asked for; `created` is when this gateway first heard of it, in s."""

    id: str
    created: int
    object: Literal["model"] = "model"
    owned_by: str = "warmq"


class ModelList(Struct, frozen=True):
    """All models that a caller may ask for."""

    data: list[Model]
    object: Literal["list"] = "list"


class StreamOptions(Struct, frozen=True):
    """`stream_options` of a request; other fields, as OpenAI's, mean nothing here."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
